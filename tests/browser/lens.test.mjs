// The logit lens in the replay and in the playground. THUNDER_URL is a server with the demo model and --attention on.
import test from 'node:test';
import assert from 'node:assert/strict';
import { mkdtemp, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { open, newContext, eventually, expectAccessible, ready } from './browser.mjs';
import { URL_, ingest, json } from './server.mjs';
import { document as trace } from './document.mjs';

const OTHERS = [' one', '\n', ' <b>bold</b>', '\u202eevil', ' extraordinarily', '!', ' 日本', ' two', ' three', ' four'];

/** Returns the lens of a step: the model's logarithms of probabilities in the last layer, and before it more and more of other numbers. */
function lensOf(model, step, layerCount) {
  const logits = Array.from({ length: layerCount }, (_, layer) => model.map(({ prob }, i) => {
    const depth = (layer + 1) / layerCount;
    return Number((depth ** 2 * Math.log(prob) + (1 - depth) * 4 * Math.sin(step + 3 * i)).toFixed(3));
  }));
  return { layers: logits.map((_, layer) => layer), logits };
}

/** Ingests a run with 13 candidates per step and returns its id. `lens(model, step)` returns the `lens` of a step. */
async function ingestWithLens(lens) {
  const id = `lens-${Date.now()}-${Math.random()}`;
  const document = trace(id, 12);
  for (const { details, step } of document.events.filter((event) => event.event_type === 'ForwardPass')) {
    details.model.push(...OTHERS.map((text, i) => ({ token: 900 + i, text, prob: 0.002 / (i + 1) })));
    details.lens = lens(details.model, step);
  }
  await ingest(document);
  return { id, document };
}

/** Returns a token of this file as the replay shows it. */
const displayed = (text) => text.replace(/^ | $/g, '␣').replace('\n', '↵').replace('\u202e', 'U+202E');

const section = (page) => page.locator('.panel section', { has: page.locator('h2:text-is("Layers")') });
const facts = (page) => page.textContent('.lens + .hint');
const cell = (page, row, layer) => page.locator('.lens [role=row]:has(span)').nth(row).locator('[role=gridcell]').nth(layer);

/** Returns the expected description of a cell. */
function description({ model, lens: { logits } }, index, layer, name) {
  const row = logits[layer];
  const share = Math.exp(row[index]) / row.reduce((sum, logit) => sum + Math.exp(logit), 0);
  const percent = share >= 0.1 ? (share * 100).toFixed(1) : share >= 0.0001 ? (share * 100).toFixed(2) : '< 0.01';
  return `${name} · layer ${layer}: logit ${row[index].toFixed(2)}, share ${percent}%, rank ${1 + row.filter((logit) => logit > row[index]).length} of ${model.length}`;
}

for (const [width, layerCount] of [[1280, 12], [375, 100]]) {
  test(`lens is a grid of candidates and layers (${width} px, ${layerCount} layers)`, async () => {
    const { id, document } = await ingestWithLens((model, step) => lensOf(model, step, layerCount));
    const page = await open(`/runs/${id}?at=4`, { width });
    await ready(page);
    await section(page).waitFor();
    const names = await page.locator('.panel .candidates tbody th').allTextContents();
    const headers = await page.locator('.lens [role=rowheader]').allTextContents();
    assert.deepEqual(headers.map((text) => text.replace(' ✓', '')), names);
    assert.deepEqual(headers.map((text) => text.endsWith(' ✓')), names.map((_, i) => i === 0));
    await eventually.equal(() => page.locator('.lens [role=gridcell]').count(), names.length * layerCount);
    const { details } = document.events[4];
    // The highest candidates of each layer have a frame.
    const classes = await page.locator('.lens [role=row]:has(span)').evaluateAll((rows) => rows.map((row) => [...row.querySelectorAll('span')].map((span) => span.className)));
    const order = names.map((name) => details.model.findIndex(({ text }) => displayed(text) === name));
    for (let layer = 0; layer < layerCount; layer += 1) {
      const framed = classes.map((row) => row[layer]).flatMap((value, i) => (value.endsWith(' framed') ? [i] : []));
      const logits = details.lens.logits[layer];
      const highest = order.flatMap((index, i) => (logits[index] === Math.max(...logits) ? [i] : []));
      assert.deepEqual(framed, highest, `layer ${layer}`);
    }
    assert.equal(classes[0].at(-1), 'b7 framed', 'the drawn token is by far the highest in the last layer');
    await eventually.match(() => section(page).locator('p').first().textContent(), /^␣sky is the highest candidate from layer \d+ on\.$/);
    await cell(page, 0, 7).hover();
    await eventually.equal(() => facts(page), description(details, 0, 7, '␣sky ✓'));
    // The grid scrolls in its own box, and headers stay in it.
    const { scrolls, page: pageScrolls, panel } = await page.evaluate(() => {
      const excess = (el) => el.scrollWidth - el.clientWidth;
      return { scrolls: excess(document.querySelector('.lens')) > 0, page: excess(document.documentElement), panel: excess(document.querySelector('.panel')) };
    });
    assert.deepEqual([scrolls, pageScrolls, panel], [layerCount === 100, 0, 0]);
    await cell(page, 3, layerCount - 1).scrollIntoViewIfNeeded();
    const header = await page.locator('.lens [role=rowheader]').nth(3).boundingBox();
    const box = await page.locator('.lens').boundingBox();
    assert.ok(Math.abs(header.x - box.x) < 4, `the header is at ${header.x}, the grid at ${box.x}`);
    await expectAccessible(page, '.panel');
  });
}

test('keys move in the grid, and the numbers follow the step', async () => {
  const { id, document } = await ingestWithLens((model, step) => lensOf(model, step, 6));
  const page = await open(`/runs/${id}?at=4`);
  await ready(page);
  await cell(page, 0, 0).focus();
  for (const key of ['End', 'ArrowLeft', 'ArrowDown']) await page.keyboard.press(key);
  const step = document.events[4].details;
  await eventually.equal(() => facts(page), description(step, 1, 4, '␣sea'));
  await eventually.equal(() => page.evaluate(() => document.activeElement.ariaLabel), description(step, 1, 4, '␣sea'));
  await page.keyboard.press('PageUp');
  await eventually.match(() => facts(page), /^␣sky ✓ · layer 4: /);
  await eventually.match(() => page.textContent('[data-where]'), /event 4 /, 'the cursor of the replay stays');
  await eventually.equal(() => page.locator('.lens [tabindex="0"]').count(), 1);
  // All rows of the table are rows of the grid, too.
  const rows = page.locator('.lens [role=row]:has(span)');
  await eventually.equal(() => rows.count(), 12);
  await page.click('.panel button:text-is("All 13")');
  await eventually.equal(() => rows.count(), 13);
  // A later step, in which the drawn token is not the most probable one.
  await page.goto(`${URL_}/runs/${id}?at=7`);
  await ready(page);
  await section(page).waitFor();
  const next = document.events[7].details;
  assert.equal(next.model.findIndex(({ text }) => text === ' is') > 0, true);
  await eventually.match(() => section(page).locator('p').first().textContent(), /^␣is has rank \d+ in the last layer, and is the highest candidate in (none|\d) of the layers before it\.$/);
});

test('lens of another form is not shown, and hostile numbers do no harm', async () => {
  const forms = [
    () => undefined, () => null, () => 'lens', () => [], () => ({ layers: [0, 1] }),
    (model) => ({ layers: [0], logits: [model.map(() => '5')] }), (model) => ({ layers: [0, 1], logits: [model.map(() => 1)] }),
    (model) => ({ layers: [0], logits: [[...model, model[0]].map(() => 1)] }),
    (model) => ({ layers: [0, 1], logits: [model.map(() => 1e308), model.map((_, i) => -1e308 * (i % 2))] }),
  ];
  const { id, document } = await ingestWithLens((model, step) => (forms[step - 1] ?? forms[0])(model));
  const page = await open(`/runs/${id}?at=1`);
  await ready(page);
  for (const { step, sequence_order: event } of document.events.filter(({ event_type: type }) => type === 'ForwardPass').slice(0, forms.length)) {
    await page.keyboard.press('Control+k');
    await page.keyboard.type(`event ${event}`);
    await page.keyboard.press('Enter');
    await page.waitForFunction((n) => document.querySelector('[data-where]').textContent.includes(`event ${n} `) && !document.querySelector('.panel > [aria-busy]'), event);
    await page.waitForFunction((n) => document.querySelectorAll('.panel .candidates tbody tr').length > n, 3);
    await eventually.equal(() => section(page).isVisible(), step === forms.length, `step ${step}`);
  }
  await eventually.match(() => facts(page), /layer 0: logit 1e\+308, share \d+\.\d+%, rank 1 of/);
});

test('exported page shows the lens', async () => {
  const { id, document } = await ingestWithLens((model, step) => lensOf(model, step, 12));
  const file = join(await mkdtemp(join(tmpdir(), 'thunder-lens-')), 'run.html');
  await writeFile(file, await (await fetch(`${URL_}/runs/${id}/export.html`)).text());
  const page = await (await newContext()).newPage();
  const problems = [];
  page.on('console', (message) => problems.push(message.text()));
  page.on('pageerror', (error) => problems.push(error.stack));
  await page.goto(pathToFileURL(file).href);
  await ready(page);
  await page.keyboard.press('Home');
  await page.keyboard.press('ArrowRight');
  await page.keyboard.press('Shift+ArrowRight');
  await cell(page, 0, 11).focus();
  await eventually.equal(() => facts(page), description(document.events[4].details, 0, 11, '␣sky ✓'));
  assert.deepEqual(problems, []);
});

test('playground requests the lens, and shows it in the live run', async () => {
  const page = await open('/playground');
  await page.click('summary:text-is("More")');
  await page.check('input[name=lens]');
  await page.fill('[aria-label="Message 1"]', 'Tell me a story.');
  await page.fill('input[name=max_tokens]', '4');
  const sent = page.waitForRequest((request) => request.method() === 'POST' && request.url().endsWith('/v1/chat/completions'));
  await page.keyboard.press('Control+Enter');
  assert.equal((await sent).postDataJSON().lens, true);
  await section(page).waitFor();
  await page.waitForFunction(() => /tokens/.test(document.querySelector('[data-state]').textContent));
  const id = await page.textContent('[data-run-line] a');
  let last;
  while (!last) last = (await json(`/api/v1/runs/${id}/alternatives`)).alternatives?.at(-1);
  await cell(page, 1, last.lens.layers.length - 1).hover();
  await eventually.equal(() => facts(page), description(last, 1, last.lens.layers.length - 1, await page.locator('.lens [role=rowheader]').nth(1).textContent()));
  await page.reload();
  await eventually.equal(() => page.isChecked('input[name=lens]'), true, 'the form is kept');
});
