// Control vectors in the form of forks and in the playground. EDITOR_URL is a server with the control vectors calm, joy and
// calm-2 and the key MOD_KEY; the one at THUNDER_URL has none.
import test from 'node:test';
import assert from 'node:assert/strict';
import { open, eventually, expectAccessible, ready, overflow } from './browser.mjs';
import { URL_, json, post, stored } from './server.mjs';

const { EDITOR_URL: server, MOD_KEY: key } = process.env;
const skip = server && key ? false : 'set EDITOR_URL and MOD_KEY to a server with control vectors';

/** Options of requests with the key. */
const withKey = (base = server) => ({ server: base, headers: { authorization: `Bearer ${key}` } });

/** Generates a run and returns it as recorded. */
async function generate(fields, base) {
  const body = { prompt: 'Once there was a small red fox.', seed: 3, temperature: 0.7, max_tokens: 16, ignore_eos: true, ...fields };
  const answer = await (await post('/v1/completions', body, withKey(base))).json();
  return stored(answer.thunder.run_id, withKey(base));
}

const sampledAt = ({ events }, step) => events.find((event) => event.event_type === 'Sampled' && event.step === step).sequence_order;
const recorded = ({ events }) => events[0].details.prompt.parameters.steering.map(({ name, scale, layers }) => ({ name, scale, layers }));

test('run is forked with other control vectors by keyboard', { skip }, async () => {
  const original = await generate({});
  const { run_id: id } = original.run;
  const page = await open(`/runs/${id}?at=${sampledAt(original, 6)}`, { server, key });
  await ready(page);
  await page.fill('.regenerate [aria-label="Number of branches"]', '1');
  await eventually.equal(() => page.isVisible('.steering fieldset'), false);
  await page.getByLabel('Change steering').focus();
  await page.keyboard.press('Space');
  const row = page.locator('.steering [role=group]');
  await eventually.equal(() => row.count(), 1, 'the first control vector is offered');
  for (const [pressed, event] of [['Shift+ArrowRight', 1], ['Shift+ArrowLeft', 0]]) {
    await page.keyboard.press(pressed);
    await eventually.match(() => page.textContent('[data-where]'), new RegExp(`event ${sampledAt(original, 6) + event} `));
  }
  await page.waitForSelector('.panel section:has(.candidates):not([aria-busy])');
  assert.equal(await page.evaluate(() => document.activeElement.closest('label')?.textContent), 'Change steering');
  await eventually.equal(() => page.getAttribute('.regenerate [placeholder=continue]', 'type'), 'number');
  await page.keyboard.press('Tab');
  await page.keyboard.type('joy');
  await page.keyboard.press('Tab');
  await page.keyboard.type('6');
  await eventually.equal(() => row.getAttribute('aria-label'), 'joy');
  await eventually.deepEqual(() => row.locator('input').evaluateAll((inputs) => inputs.map((input) => input.value)), ['6', '1', '3']);
  await expectAccessible(page, '.regenerate');
  await eventually.equal(() => overflow(page, '.panel'), 0);
  await page.keyboard.press('Enter');
  await page.waitForSelector('.branches [data-branch]:not([aria-current])[data-status=done]');
  await eventually.match(() => page.textContent('.branches [data-branch]:not([aria-current]) .branch-change'), /^steering joy 6 at step 6$/);
  const branch = await stored(await page.getAttribute('.branches [data-branch]:not([aria-current])', 'data-branch'), withKey());
  const steering = [{ name: 'joy', scale: 6, layers: [1, 3] }];
  assert.deepEqual([branch.run.parent.change, recorded(branch), branch.run.seed], [{ steering }, steering, 3]);
  assert.notEqual(branch.run.output_preview, original.run.output_preview);

  // A fork with another candidate takes the control vectors of the form, too.
  await page.getByRole('button', { name: /^Fork this run with/ }).nth(1).click();
  await page.waitForFunction(() => document.querySelectorAll('.branches [data-status=done]').length === 3);
  const family = () => json(`/api/v1/runs/${id}/family`, withKey());
  const withToken = (await family()).runs.map((run) => run.parent?.change).filter((change) => change?.token !== undefined);
  assert.deepEqual(withToken.map((change) => change.steering), [steering]);

  // The form of the fork begins with its control vectors, and turns steering off.
  await page.goto(`${server}/runs/${branch.run.run_id}?at=${sampledAt(branch, 6)}`);
  await ready(page);
  await eventually.match(() => page.textContent('.facts [data-steering]'), /steering joy 6/);
  await page.fill('.regenerate [aria-label="Number of branches"]', '1');
  await page.getByLabel('Change steering').check();
  await eventually.deepEqual(() => row.locator('select, input').evaluateAll((fields) => fields.map((field) => field.value)), ['joy', '6', '1', '3']);
  await row.getByRole('button', { name: 'Remove control vector' }).click();
  assert.equal(await page.evaluate(() => document.activeElement.textContent), 'Add control vector');
  await page.click('.regenerate button:has-text("Regenerate")');
  await page.waitForFunction(() => document.querySelectorAll('.branches [data-status=done]').length === 4);
  await eventually.match(() => page.textContent('.branch-list'), /no steering at step 6/);
  const { runs } = await family();
  const restored = runs.find((run) => run.parent?.change.steering?.length === 0);
  assert.equal(restored.output_preview, original.run.output_preview);
});

test('playground sends control vectors and keeps those of a run, on a phone', { skip }, async () => {
  const steering = [{ name: 'joy', scale: -2.5, layers: [2, 3] }];
  const { run } = await generate({ steering });
  const page = await open(`/playground?from=${run.run_id}`, { server, key, width: 375 });
  await page.waitForSelector('.steering [role=group]');
  await eventually.doesNotMatch(() => page.inputValue('[name=extra]'), /steering/);
  await page.getByRole('button', { name: 'Add control vector' }).focus();
  await page.keyboard.press('Enter');
  await eventually.match(() => page.textContent('[data-changed-fields] ul'), /steering joy -2.5, layers 2–3 → joy -2.5, layers 2–3; calm 1, layers 1–3/);
  await expectAccessible(page, '.steering');
  // A number that is missing is shown before the request is sent, even in a closed group.
  await page.locator('.request-form').getByLabel('Scale').last().fill('');
  await page.click('summary:has-text("More")');
  await page.keyboard.press('Control+Enter');
  await eventually.equal(() => page.evaluate(() => document.activeElement.ariaLabel), 'Scale');
  await page.keyboard.type('1');
  const response = page.waitForResponse((answer) => answer.url().endsWith('/v1/completions'));
  await page.click('[data-action=generate]');
  const again = await stored((await response).headers()['x-thunder-run-id'], withKey());
  assert.deepEqual(recorded(again), [{ name: 'calm', scale: 1, layers: [1, 3] }, ...steering], 'in the order of the server');
  await page.getByLabel('Select control vectors').uncheck();
  await eventually.match(() => page.textContent('[data-changed-fields] ul'), /steering joy -2.5, layers 2–3 → not set/);
  await eventually.match(() => page.getAttribute('[data-replay]', 'data-vectors'), /calm/);

  // Another model has no control vectors.
  const model = page.getByLabel('Model', { exact: true });
  const first = await model.inputValue();
  await model.evaluate((select) => {
    const other = new Option('other');
    Object.assign(other.dataset, { names: '["other"]', vectors: '' });
    select.append(other);
    select.disabled = false;
  });
  await model.selectOption('other');
  await eventually.equal(() => page.isVisible('.request-form .steering'), false);
  await model.selectOption(first);
  await eventually.equal(() => page.isVisible('.request-form .steering'), true);
});

test('server without control vectors offers none', { skip }, async () => {
  const run = await generate({}, URL_);
  const page = await open(`/runs/${run.run.run_id}?at=${sampledAt(run, 6)}`);
  await page.waitForSelector('.regenerate');
  await eventually.equal(() => page.locator('.steering').count(), 0);
  await page.goto(`${URL_}/playground`);
  await page.waitForSelector('[data-messages] textarea');
  await eventually.equal(() => page.locator('.steering:not([hidden])').count(), 0);
});
