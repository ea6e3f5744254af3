// Experiments by keyboard: the form and its errors, live progress, cancel and resume, cells, comparison, export.
import test from 'node:test';
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { open, eventually, expectAccessible } from './browser.mjs';
import { URL_, post, json, generate, ingest } from './server.mjs';
import { document as sample } from './document.mjs';

const mark = `e${Date.now()}`;

const progress = (page, text) => page.waitForFunction((wanted) => document.querySelector('[data-part=progress]')?.textContent.replace(/\s+/g, ' ').includes(wanted), text);

async function create(definition) {
  const response = await post('/api/v1/experiments', { name: `${mark} <b>`, prompts: ['Hello'], seeds: [1, 2], ...definition });
  return (await response.json()).experiment_id;
}

test('experiment is started by keyboard and its cells are compared', async () => {
  const page = await open('/experiments');
  await page.keyboard.press('n');
  await page.waitForURL((url) => url.pathname === '/experiments/-new');
  await page.waitForSelector('#name:focus');
  const fields = [`${mark} keyboard`, 'Hello\nThe sky', null, '1, 2', 'none\nforce-prefix {"text": "{} "}', 'max_tokens=6 temperature=1'];
  await expectAccessible(page);
  await page.keyboard.type(fields[0]);
  for (const [name, text] of [['prompts', fields[1]], ['seeds', fields[3]], ['mods', fields[4]], ['parameters', fields[5]]]) {
    await page.focus(`#${name}`);
    await page.keyboard.press('Control+a');
    await page.keyboard.insertText(text);
  }
  await page.focus('#regex');
  await page.keyboard.insertText('^\\{\\}');
  await eventually.equal(() => page.isChecked('[value=regex]'), true);
  await eventually.equal(() => page.textContent('[data-cells]'), '8 runs');
  await page.keyboard.press('Control+Enter');
  await page.waitForURL(/\/experiments\/[0-9a-f-]{36}$/);
  await progress(page, '8 of 8 cells');
  await page.waitForSelector('[data-part=progress][data-state=done]');
  await eventually.equal(() => page.textContent('h1'), fields[0]);
  const scores = await page.locator('.variants [data-name=Score]').allTextContents();
  assert.deepEqual(scores, ['0.00', '1.00']);
  await eventually.equal(() => page.locator('.cells tbody tr').count(), 8);
  const columns = (row) => page.locator(`.cells ${row} > *`).evaluateAll((all) => all.map((el) => el.getBoundingClientRect().left));
  assert.deepEqual(await columns('thead tr'), await columns('tbody tr:first-child'), 'each heading is above its column');
  await expectAccessible(page);

  // A score is changed by hand.
  await page.keyboard.press('j');
  await page.keyboard.press('s');
  await page.keyboard.type('0.6');
  await page.keyboard.press('Enter');
  await page.waitForFunction(() => document.querySelector('.variants [data-name=Score]').textContent === '0.15');
  await page.evaluate(() => document.activeElement.blur());

  // The keys j and x select two cells. Without a selection, c compares the focused cell with the one without mods.
  for (let row = 0; row < 2; row += 1) {
    await page.keyboard.press('j');
    await page.keyboard.press('x');
  }
  await page.waitForSelector('[data-bulk]:not([hidden]) [data-bulk-compare]:not([hidden])');
  await expectAccessible(page, '[data-bulk]');
  // After Back, the browser checks the boxes again.
  await page.keyboard.press('c');
  await page.waitForURL(/\/compare\?a=.*&b=/);
  await page.goBack();
  await page.waitForSelector('.cells');
  await eventually.equal(() => page.textContent('[data-bulk-text]'), '2 cells selected');
  await eventually.ok(() => page.isVisible('[data-bulk]'));
  await page.keyboard.press('Escape');
  await eventually.ok(() => page.isHidden('[data-bulk]'));
  // The first two cells are those without mods.
  for (let row = 0; row < 3; row += 1) await page.keyboard.press('j');
  await page.keyboard.press('c');
  await page.waitForURL(/\/compare\?a=.*&b=/);
  await page.goBack();
  await page.waitForSelector('.cells');
  const [download] = await Promise.all([page.waitForEvent('download'), page.click('a[download]')]);
  const csv = readFileSync(await download.path(), 'utf8');
  assert.equal(csv.trimEnd().split('\r\n').length, 9);
  await page.locator('.cells [data-row]').first().click();
  await page.waitForURL(/\/runs\//);
  await page.goto(`${URL_}/experiments`);
  await page.waitForSelector('tbody tr');
  await expectAccessible(page);
});

test('errors are shown at their fields', async () => {
  const page = await open('/experiments/-new', { width: 375, expected: (what) => what.startsWith('400') });
  const error = async (field, pattern) => {
    await page.waitForFunction(([name, source]) => new RegExp(source).test(document.querySelector(`#${name}-error`).textContent), [field, pattern.source]);
    await eventually.equal(() => page.locator('.field-error:not(:empty)').count(), 1);
  };
  const send = () => page.keyboard.press('Control+Enter');
  await page.focus('#name');
  await send();
  await error('prompts', /at least one prompt/);
  await page.keyboard.type('Hello');
  await send();
  await error('name', /1 to 64 characters/);
  await page.keyboard.type(mark);
  await page.fill('#seeds', '5-1');
  await send();
  await error('seeds', /5-1/);
  await page.fill('#seeds', '1');
  await page.fill('#mods', 'none\nunknown-mod');
  await send();
  await error('mods', /prompts\[0\], mods\[1\], parameters\[0\]: .*unknown-mod/);
  await eventually.equal(() => page.evaluate(() => document.activeElement.id), 'mods');
  await expectAccessible(page);
  await page.fill('#mods', '');
  await page.fill('#parameters', 'max_tokens=4\ntemperature=-3');
  await send();
  await error('parameters', /parameters\[1\]: `temperature`/);
  await page.fill('#parameters', 'max_tokens=4');
  await page.fill('#regex', '(');
  await send();
  await error('score', /regular expression/);
  // After Back, the browser restores the page with the button disabled.
  const canStart = await page.evaluate(() => {
    const button = document.querySelector('[data-form] [type=submit]');
    button.disabled = true;
    dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }));
    return !button.disabled;
  });
  assert.equal(canStart, true);
});

test('running experiment is cancelled, resumed, changed and removed', async () => {
  // Enough cells that some are left when the browser cancels, also on a loaded machine.
  const seeds = Array.from({ length: 24 }, (_, index) => index + 1);
  const id = await create({ seeds, parameters: [{ max_tokens: 400, ignore_eos: true }] });
  const page = await open(`/experiments/${id}`, { expected: (what) => what.startsWith('409') });
  await eventually.equal(() => page.textContent('h1'), `${mark} <b>`);
  await page.waitForSelector('[data-state=running] [data-action=cancel]');
  await page.waitForFunction(() => Number(document.querySelector('progress').value) > 0);
  await page.focus('[data-action=cancel]');
  await page.keyboard.press('Enter');
  await page.waitForSelector('[data-action=resume]');
  await expectAccessible(page);
  // The execution may still be ending.
  for (;;) {
    await page.focus('[data-action=resume]');
    await page.keyboard.press('Enter');
    await page.waitForFunction(() => document.querySelector('[data-part=progress]').dataset.state !== 'cancelled' || !document.querySelector('[data-problem]').hidden);
    if (await page.isHidden('[data-problem]')) break;
  }
  await progress(page, '24 of 24 cells');
  await page.waitForSelector('[data-part=progress][data-state=done]');
  await eventually.deepEqual(async () => [...new Set(await page.locator('.cells [data-name=State]').allTextContents())], ['done']);

  await page.getByText('Change and start').click();
  await page.waitForFunction(() => document.querySelector('#name').value !== '');
  await eventually.equal(() => page.inputValue('#seeds'), '1-24');
  await eventually.equal(() => page.inputValue('#parameters'), 'max_tokens=400 ignore_eos=true');
  await page.goBack();
  await page.click('[data-action=remove]');
  await page.click('[data-remove-dialog] [value=remove]');
  await page.waitForURL((url) => url.pathname === '/experiments');
  await eventually.equal(async () => (await fetch(`${URL_}/api/v1/experiments/${id}`)).status, 404);
  await eventually.ok(async () => (await json(`/api/v1/runs?q=experiment:${id}`)).runs.length >= 24, 'the runs remain, those of cancelled cells included');
});

test('prompts are read from a CSV file', async () => {
  const page = await open('/experiments/-new');
  await page.fill('#name', mark);
  await page.setInputFiles('input[type=file]', { name: 'prompts.csv', mimeType: 'text/csv', buffer: Buffer.from('id,prompt\r\n1,"Hello, ""you"""\r\n2,"two\nlines"\r\n') });
  await page.fill('#seeds', '1');
  await page.fill('#parameters', 'max_tokens=2');
  await eventually.equal(() => page.textContent('[data-cells]'), '2 runs');
  await page.keyboard.press('Control+Enter');
  await page.waitForURL(/\/experiments\/[0-9a-f-]{36}$/);
  const id = page.url().split('/').at(-1);
  await eventually.deepEqual(async () => (await json(`/api/v1/experiments/${id}`)).definition.prompts, ['Hello, "you"', 'two\nlines']);
});

const { EDITOR_URL, MOD_KEY } = process.env;
const skip = EDITOR_URL && MOD_KEY ? false : 'set EDITOR_URL and MOD_KEY to a server where mods can be saved';

test('Python scores answers, and its errors are shown at the field and at the cells, on a phone', { skip }, async () => {
  const page = await open('/experiments', { width: 375, server: EDITOR_URL, key: MOD_KEY, expected: (what) => what.startsWith('400') });
  await page.goto(`${EDITOR_URL}/experiments/-new`);
  await page.fill('#name', mark);
  await page.fill('#prompts', 'Hello');
  await page.fill('#seeds', '1, 2');
  await page.fill('#parameters', 'max_tokens=4 ignore_eos=true');
  await page.fill('#python', 'def score(text)');
  await eventually.equal(() => page.isChecked('[value=python]'), true);
  await page.keyboard.press('Control+Enter');
  await page.waitForFunction(() => /SyntaxError.*line 1/.test(document.querySelector('#score-error').textContent));
  await eventually.equal(() => page.evaluate(() => document.activeElement.id), 'python');
  await page.fill('#python', 'def score(text, cell):\n    return 0.25 / (2 - cell["seed"])\n');
  await page.keyboard.press('Control+Enter');
  await page.waitForURL(/\/experiments\/[0-9a-f-]{36}$/);
  await page.waitForSelector('[data-part=progress][data-state=done]');
  await page.waitForFunction(() => document.querySelector('[data-score="1"]').value === '0.25');
  const [first, second] = await page.locator('.cells [data-name=Answer]').allTextContents();
  assert.ok(!first.includes('Not scored') && second.includes('Not scored: ZeroDivisionError: float division by zero (line 2)'), second);
  // Not by a click: Chromium sends no key with a download.
  const file = await fetch(EDITOR_URL + await page.getAttribute('a[download]:has-text("Parquet")', 'href'), { headers: { authorization: `Bearer ${MOD_KEY}` } });
  assert.equal(Buffer.from(await file.arrayBuffer()).subarray(0, 4).toString(), 'PAR1');
  await page.getByText('Change and start').click();
  await page.waitForFunction(() => document.querySelector('#python').value.includes('0.25'));
  await eventually.equal(() => page.isChecked('[value=python]'), true);
});

test('statistics link the call time of a mod to its runs', async () => {
  const run = await generate({ max_tokens: 4, ignore_eos: true, mods: ['log-top'] });
  const page = await open('/stats?days=1&mod=log-top');
  const chart = page.locator('.charts.calls figure');
  await eventually.deepEqual(() => chart.locator('b').allTextContents(), ['log-top']);
  await expectAccessible(page);
  await eventually.match(() => chart.locator('a').last().getAttribute('aria-label'), /: total .*, calls \d+, mean .*, slowest /);
  await page.goto(URL_ + await chart.locator('a').last().getAttribute('href'));
  await page.waitForSelector(`[data-run="${run}"]`);
});

test('statistics of a mod with a long name fit on a phone', async () => {
  const name = mark.padEnd(64, 'm');
  const trace = sample(`${mark}-long-name`);
  for (const call of [...trace.mod_calls, ...trace.mod_logs]) call.mod_name = name;
  await ingest(trace);
  const width = 375;
  const page = await open(`/stats?days=1&mod=${name}`, { width, height: 740 });
  await eventually.deepEqual(() => page.locator('.charts.calls figure b').allTextContents(), [name]);
  assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), width);
  const runs = await page.locator('[aria-label="Mods"] tr', { has: page.getByRole('link', { name }) }).locator('td').first().boundingBox();
  assert.ok(runs.x + runs.width <= width, `the number of runs is beside the name: ${runs.x} ${runs.width}`);
});
