// Attention by head, exported pages and imports. THUNDER_URL is a server with the demo model and --attention on.
import test from 'node:test';
import assert from 'node:assert/strict';
import { mkdtemp, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { open, newContext, eventually, ready } from './browser.mjs';
import { URL_, json, generate, ingest } from './server.mjs';
import { document as trace } from './document.mjs';

const SHORT = { max_tokens: 20, ignore_eos: true };
const folder = await mkdtemp(join(tmpdir(), 'thunder-export-'));

const attention = async (id, query) => (await json(`/api/v1/runs/${id}/attention?${query}`)).attention;
const facts = (page) => page.textContent('.heads + .hint');
const cell = (page, layer, head) => page.locator(`.heads [role=row] >> nth=${layer}`).locator('[role=gridcell]').nth(head);

test('grid of heads has the numbers of the step, by pointer and by keyboard', async () => {
  const id = await generate({ attention: { heads: [[1, 2], [0, 0]] }, ...SHORT });
  const page = await open(`/runs/${id}?at=10&attention=mean`);
  await ready(page);
  await page.waitForSelector('.heads [role=gridcell]');
  const { layer_ids: layers, heads, stats, row_len: length } = await attention(id, 'at=10');
  await eventually.equal(() => page.locator('.heads [role=gridcell]').count(), layers.length * heads);
  const expected = stats.find((s) => s.layer === 1 && s.head === 3);
  await cell(page, 1, 3).hover();
  await eventually.match(() => facts(page), new RegExp(`^layer 1, head 3 · entropy ${expected.entropy.toFixed(2)} bit .* ${length - 1 - expected.peak_position} positions? at .* its attention is not stored$`));
  await page.mouse.move(0, 0);
  await cell(page, 0, 0).focus();
  for (const key of ['ArrowDown', 'ArrowRight', 'ArrowRight']) await page.keyboard.press(key);
  await eventually.match(() => facts(page), /^layer 1, head 2 · .* click to shade/);
  await eventually.match(() => page.evaluate(() => document.activeElement.ariaLabel), /^layer 1, head 2 · entropy/);
  // The arrow keys moved within the grid, not through the run.
  await eventually.match(() => page.textContent('[data-where]'), /event 10 /);
  await page.keyboard.press('Enter');
  await page.waitForFunction(() => document.querySelector('select[aria-label="Attention view"]').value === 'head:1:2');
  const { values, quality } = await attention(id, 'at=10&view=head&layer=1&head=2');
  assert.equal(quality, 'f16');
  const top = String(values.indexOf(Math.max(...values)));
  await page.waitForFunction((position) => document.querySelector('.top-positions li').firstChild.textContent === position, top);
  // A link opens the same head.
  await page.waitForFunction(() => location.search.includes('attention=head%3A1%3A2'));
  const link = await open(new URL(page.url()).pathname + new URL(page.url()).search);
  await link.waitForFunction(() => document.querySelector('.heads [aria-selected=true]'));
  await eventually.equal(() => link.evaluate(() => document.querySelector('.heads [aria-selected=true]').ariaLabel.split(' · ')[0]), 'layer 1, head 2');
});

test('later steps are shaded by one head, and a head without rows says how to store them', async () => {
  const id = await generate({ attention: { heads: 'all' }, ...SHORT });
  const { rows } = await attention(id, 'from=0&position=3&view=head&layer=2&head=1');
  assert.equal(rows.length, 20);
  const page = await open(`/runs/${id}?at=3&attention=head:2:1&later=1`);
  await ready(page);
  await page.click('.text .token >> nth=3');
  await page.waitForFunction(() => /^20 later steps at .*layer 2, head 1$/.test([...document.querySelectorAll('.panel .hint')].find((p) => /later step/.test(p.textContent))?.textContent ?? ''));
  const best = rows.reduce((a, b) => (b.value > a.value ? b : a));
  const { row_len: position } = await attention(id, `at=${best.sequence_order}`);
  await eventually.equal(() => page.evaluate(() => Number(document.querySelector('.top-positions li').firstChild.textContent)), position);
  await page.context().close();
  const bare = await generate({ attention: true, ...SHORT });
  const other = await open(`/runs/${bare}?at=3&attention=head:2:1`, { expected: (what) => /^404 .*view=head/.test(what) });
  await other.waitForFunction(() => /\[\[2, 1\]\]/.test(document.querySelector('.panel').textContent));
  await eventually.ok(() => other.locator('.heads').isVisible(), 'the grid is shown without rows');
});

test('exported page shows the run from disk without a network, and hostile text does nothing', async () => {
  const id = `export-${Date.now()}`;
  await ingest(trace(id, 300));
  const html = await (await fetch(`${URL_}/runs/${id}/export.html`)).text();
  const file = join(folder, 'run.html');
  await writeFile(file, html);
  const page = await (await newContext()).newPage();
  const problems = [];
  page.on('request', (request) => { if (!request.url().startsWith('file:')) problems.push(request.url()); });
  page.on('console', (message) => problems.push(message.text()));
  page.on('pageerror', (error) => problems.push(error.stack));
  await page.goto(pathToFileURL(file).href);
  await ready(page);
  const original = await open(`/runs/${id}`);
  await ready(original);
  const tokens = (of) => of.evaluate(() => [...document.querySelectorAll('.token')].map((t) => `${t.className} ${t.textContent}`));
  assert.deepEqual(await tokens(page), await tokens(original));
  await eventually.equal(() => page.locator('.text img').count(), 0);
  await page.keyboard.press('Home');
  for (let i = 0; i < 3; i += 1) await page.keyboard.press('ArrowRight');
  await eventually.ok(async () => (await page.locator('.candidates tbody tr').count()) > 1, 'candidates are shown');
  await eventually.equal(() => page.locator('[data-key^=fork], .regenerate').count(), 0);
  await page.keyboard.press('.');
  await eventually.ok(async () => (await page.locator('.call').count()) >= 1, 'actions of mods are shown');
  assert.deepEqual(problems, []);
});

test('documents are imported by the file chooser, and others are named with the reason', async () => {
  const id = `import-${Date.now()}`;
  const [good, bad, partial] = ['good.json', 'bad.json', 'partial.jsonl'].map((name) => join(folder, name));
  await writeFile(good, JSON.stringify(trace(id)));
  await writeFile(bad, '{"events": []}');
  await writeFile(partial, `${JSON.stringify(trace(`${id}-first`))}\n{"events": []}\n`);
  const page = await open('/runs');
  await page.setInputFiles('input[type=file]', [good, bad, partial]);
  await page.waitForFunction(() => document.querySelector('[data-imported]').getAttribute('aria-busy') === 'false');
  const problem = 'it is not an exported run: the field "request" is missing';
  await eventually.deepEqual(() => page.locator('[data-imported] div').allTextContents(), [
    'good.json: imported',
    `bad.json was not imported: ${problem}`,
    `partial.jsonl: only 1 of 2 runs imported: line 2: ${problem}`,
  ]);
  for (const stored of [id, `${id}-first`]) await eventually.equal(async () => (await fetch(`${URL_}/api/v1/runs/${stored}`)).status, 200);
});
