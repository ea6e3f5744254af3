// The run list: export, import, and deletion with undo of several runs at once, and saved filters.
import test from 'node:test';
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { open, eventually, expectAccessible } from './browser.mjs';
import { URL_, ingest, once, json } from './server.mjs';
import { document as trace } from './document.mjs';

const mark = `b${Date.now()}`;
const list = `/runs?q=${encodeURIComponent(`request:${mark}`)}`;
/** Returns the ids of three runs, which all tests use. */
const storedRuns = once(async () => {
  const ids = [];
  for (const number of [1, 2, 3]) ids.push(await ingest(trace(`${mark}-${number}`)));
  return ids;
});

/** Selects runs with the keyboard, the newest first. */
async function select(page, count) {
  for (let row = 0; row < count; row += 1) {
    await page.keyboard.press('j');
    await page.keyboard.press('x');
  }
  await page.waitForSelector('[data-bulk]:not([hidden])');
}

test('selected runs are exported in both formats', async () => {
  const runs = await storedRuns();
  const page = await open(list);
  await page.waitForSelector('.run');
  await select(page, 2);
  await page.focus('[data-bulk] summary');
  await page.keyboard.press('Enter');
  await page.waitForSelector('[data-bulk-export=html]');
  await expectAccessible(page);
  let [download] = await Promise.all([page.waitForEvent('download'), page.click('[data-bulk-export=json]')]);
  assert.equal(download.suggestedFilename(), 'runs.jsonl');
  const lines = readFileSync(await download.path(), 'utf8').trimEnd().split('\n').map((line) => JSON.parse(line));
  assert.deepEqual(lines.map((line) => line.run.run_id), runs.slice(1));
  assert.deepEqual(lines.map((line) => line.request.request_id), [`${mark}-2`, `${mark}-3`]);

  const files = [];
  page.on('download', (file) => files.push(file));
  await page.keyboard.press('Escape');
  await select(page, 2);
  await page.click('[data-bulk] summary');
  await Promise.all([page.waitForEvent('download', { predicate: () => files.length === 2 }), page.click('[data-bulk-export=html]')]);
  assert.deepEqual(files.map((file) => file.suggestedFilename()).sort(), runs.slice(1).map((id) => `${id}.html`));
  for (const file of files) assert.match(readFileSync(await file.path(), 'utf8'), /data-items/);

  // Without a selection, the key exports the focused run.
  await page.keyboard.press('Escape');
  await page.keyboard.press('Home');
  [download] = await Promise.all([page.waitForEvent('download'), page.keyboard.press('e')]);
  assert.equal(download.suggestedFilename(), `${runs[2]}.json`);
});

test('runs are selected by touch on a phone', async () => {
  await storedRuns();
  const page = await open(list, { width: 375, height: 640 });
  await page.waitForSelector('.run');
  for (const row of [0, 1]) await page.locator('.row-select').nth(row).click();
  await eventually.equal(() => page.textContent('[data-bulk-text]'), '2 runs selected');
  const box = await page.locator('.row-select').first().boundingBox();
  assert.ok(box.width >= 24 && box.height >= 24, `${box.width} ${box.height}`);
  await expectAccessible(page);
  await page.click('[data-bulk-compare]');
  await page.waitForURL(/\/compare/);
  // Another run may be in the place of a selected one, so no run is selected after Back.
  await page.goBack();
  await page.waitForSelector('.dot.on');
  assert.equal(await page.locator('[data-select]:checked').count(), 0);
  assert.equal(await page.isVisible('[data-bulk]'), false);
});

test('exported file of several runs is imported', async () => {
  await storedRuns();
  const page = await open(list);
  await page.waitForSelector('.run');
  const text = [4, 5].map((number) => `${JSON.stringify(trace(`${mark}-import-${number}`))}\n`).join('');
  await page.setInputFiles('input[type=file]', { name: 'runs.jsonl', mimeType: 'application/jsonl', buffer: Buffer.from(text) });
  await page.waitForFunction(() => document.querySelector('[data-imported]').textContent === 'runs.jsonl: 2 runs imported');
  await page.waitForFunction(() => document.querySelectorAll('.run').length === 5);
});

test('deletion is undone after a reload, on a phone', async () => {
  await storedRuns();
  const page = await open(list, { width: 375 });
  await page.waitForSelector('.run');
  const before = await page.locator('.run').count();
  await select(page, 2);
  await expectAccessible(page);
  await page.keyboard.press('Delete');
  await page.waitForFunction((count) => document.querySelectorAll('.run').length === count, before - 2);
  await page.reload();
  await page.waitForSelector('[data-deletions] button');
  await eventually.match(() => page.textContent('[data-deletions]'), /^2 runs deleted\. Undo \d+ s$/);
  await eventually.equal(() => page.locator('.run').count(), before - 2);
  await page.keyboard.press('z');
  await page.waitForFunction((count) => document.querySelectorAll('.run').length === count, before);
  await expectAccessible(page);
  await eventually.ok(() => page.isHidden('[data-deletions]'));
  // The focus moves to the row below the deleted one, and z twice undoes two deletions.
  const rows = () => page.locator('[data-run]').evaluateAll((all) => all.map((row) => row.dataset.run));
  const all = await rows();
  await page.keyboard.press('j');
  for (let count = before - 1; count > before - 3; count -= 1) {
    await page.keyboard.press('Delete');
    await page.waitForFunction((left) => document.querySelectorAll('.run').length === left, count);
    await eventually.equal(() => page.evaluate(() => document.activeElement.closest('[data-run]')?.dataset.run), all[before - count]);
  }
  await page.keyboard.press('z');
  await page.keyboard.press('z');
  await eventually.match(() => page.textContent('[data-toast]'), /^1 run restored$/);
  await eventually.deepEqual(rows, all);
});

test('run deleted on its page is restored from the list', async () => {
  const [run] = await storedRuns();
  const gone = (what) => what.startsWith('404') && what.includes(run);
  const page = await open(`/runs/${run}?q=${encodeURIComponent(`request:${mark}`)}`, { expected: gone });
  await page.waitForSelector('[data-action=delete]', { state: 'attached' });
  await page.click('details.more summary');
  await page.click('[data-action=delete]');
  await page.click('[data-delete-dialog] [value=cancel]');
  assert.match(page.url(), /\/runs\/./, 'the run is kept');
  await page.click('[data-action=delete]');
  await page.click('[data-delete-dialog] [value=delete]');
  await page.waitForURL((url) => url.pathname === '/runs');
  await page.waitForSelector('[data-deletions] button');
  await eventually.equal(async () => (await fetch(`${URL_}/api/v1/runs/${run}`)).status, 404);
  await page.click('[data-deletions] button');
  await page.waitForSelector(`[data-run="${run}"]`);
  await eventually.equal(async () => (await fetch(`${URL_}/api/v1/runs/${run}`)).status, 200);
});

test('filter is saved, used and removed by keyboard', async () => {
  await storedRuns();
  const name = `${mark} <i>`;
  const page = await open(list);
  await page.waitForSelector('.run');
  await page.keyboard.press('s');
  await page.waitForSelector('[data-filter-dialog] input:focus');
  await page.keyboard.type(name);
  await expectAccessible(page);
  await page.keyboard.press('Enter');
  await page.waitForSelector('[data-filter-dialog]', { state: 'detached' });
  await page.goto(`${URL_}/runs`);
  const link = page.locator('[data-saved] a', { hasText: name });
  await eventually.equal(() => page.isHidden('[data-save-filter]'), true);
  await expectAccessible(page);
  await link.focus();
  await page.keyboard.press('Enter');
  await page.waitForFunction((q) => document.querySelector('[data-saved] a[aria-current]')?.dataset.q === q, `request:${mark}`);
  await eventually.equal(() => page.inputValue('#q'), `request:${mark}`);
  await page.keyboard.press('Tab');
  await page.keyboard.press('Enter');
  await link.waitFor({ state: 'detached' });
  const { filters } = await json(`/api/v1/filters`);
  assert.ok(!filters.some((filter) => filter.name === name));
});
