// Tags of runs, by keyboard: of one run on its page, of several in the list.
import test from 'node:test';
import assert from 'node:assert/strict';
import { open, eventually, expectAccessible, ready } from './browser.mjs';
import { json, ingest, once } from './server.mjs';
import { document as trace } from './document.mjs';

// The text box of the dialog once it accepts keys.
const TAGS_BOX = '[data-tags-dialog] input[type=text]:focus';
const mark = `t${Date.now()}`;
/** Returns the ids of two runs, which all tests use. */
const storedRuns = once(async () => [await ingest(trace(`${mark}-1`)), await ingest(trace(`${mark}-2`))]);

const tags = async (id) => (await json(`/api/v1/runs/${id}`)).run.tags ?? [];

test('run is tagged on its page', async () => {
  const runs = await storedRuns();
  const page = await open(`/runs/${runs[0]}`, { expected: (what) => what.startsWith('404') && what.includes('/runs/tags') });
  await ready(page);
  await page.keyboard.press('t');
  await page.waitForSelector(TAGS_BOX);
  await expectAccessible(page, '[data-tags-dialog]');
  await page.keyboard.type(`${mark}one, to  check <b>`);
  await page.keyboard.press('Enter');
  await page.waitForSelector('[data-tags-dialog]', { state: 'detached' });
  const list = () => page.locator('.facts .tag').allTextContents();
  await eventually.deepEqual(async () => (await list()).slice(-2), [`${mark}one`, 'to  check <b>']);
  const shown = await list();
  await eventually.deepEqual(() => tags(runs[0]), shown);
  // The same dialog removes a tag.
  await page.keyboard.press('t');
  await page.getByLabel('to  check <b>').press('Space');
  await page.keyboard.press('Enter');
  await page.waitForSelector('[data-tags-dialog]', { state: 'detached' });
  await eventually.deepEqual(() => tags(runs[0]), shown.slice(0, -1));
});

test('several runs are tagged in the list, and a tag filters it', async () => {
  const runs = await storedRuns();
  const page = await open(`/runs?q=${mark}`.replace(mark, encodeURIComponent(`request:${mark}`)));
  await page.waitForSelector('.run');
  for (const id of runs) await page.check(`[data-select][value="${id}"]`);
  await page.keyboard.press('t');
  // A tag that only one of the runs has is left as it is.
  await page.waitForSelector(TAGS_BOX);
  await eventually.ok(() => page.evaluate(() => document.querySelector('[data-tags-dialog] [type=checkbox]').indeterminate));
  await page.keyboard.type(`${mark}both`);
  await page.keyboard.press('Enter');
  await page.waitForSelector('[data-tags-dialog]', { state: 'detached' });
  await eventually.deepEqual(() => tags(runs[1]), [`${mark}both`]);
  await eventually.equal(async () => (await tags(runs[0])).length, 2);
  await page.locator('.tag', { hasText: `${mark}one` }).click();
  await page.waitForFunction(() => document.querySelectorAll('.run').length === 1);
  await eventually.equal(() => page.inputValue('#q'), `tag:${mark}one`);
  await eventually.equal(() => page.getAttribute('.run', 'data-run'), runs[0]);
});

test('invalid tag is explained in the dialog', async () => {
  const runs = await storedRuns();
  const page = await open(`/runs/${runs[1]}`, { expected: (what) => what.includes('/runs/tags') });
  await ready(page);
  await page.click('[data-action=tags]');
  await page.waitForSelector(TAGS_BOX);
  await page.keyboard.type('x'.repeat(65));
  await page.keyboard.press('Enter');
  await page.waitForFunction(() => /1 to 64 characters/.test(document.querySelector('[data-tags-dialog] .form-error')?.textContent));
  await page.keyboard.press('Escape');
  await page.waitForSelector('[data-tags-dialog]', { state: 'detached' });
  await eventually.deepEqual(() => tags(runs[1]), [`${mark}both`]);
});
