// Tags of runs, by keyboard: of one run on its page, of several in the list.
import test, { after, before } from 'node:test';
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { URL_, launch, open, eventually, expectNoErrors, ready } from './browser.mjs';
import { document as trace } from './document.mjs';

const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
// The text box of the dialog once it accepts keys.
const TAGS_BOX = '[data-tags-dialog] input[type=text]:focus';
const mark = `t${Date.now()}`;
let browser;
const runs = [];

before(async () => {
  browser = await launch();
  for (const number of [1, 2]) {
    const response = await fetch(`${URL_}/ingest`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(trace(`${mark}-${number}`)) });
    assert.equal(response.status, 201);
    runs.push((await (await fetch(`${URL_}/api/v1/runs/${mark}-${number}`)).json()).run.run_id);
  }
});
after(() => browser?.close());

const tags = async (id) => (await (await fetch(`${URL_}/api/v1/runs/${id}`)).json()).run.tags ?? [];

for (const [scheme, width] of [['light', 1280], ['dark', 375]]) {
  test(`run is tagged on its page (${scheme}, ${width} px)`, async () => {
    const page = await open(`/runs/${runs[0]}`, { scheme, width, expected: (what) => what.startsWith('404') && what.includes('/runs/tags') });
    await ready(page);
    await page.keyboard.press('t');
    await page.waitForSelector(TAGS_BOX);
    await page.evaluate(axe);
    const { violations } = await page.evaluate(() => window.axe.run('[data-tags-dialog]', { runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa'] }));
    assert.deepEqual(violations.map((v) => v.id), []);
    await eventually.ok(() => page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
    await page.keyboard.type(`${mark}${width}, to  check <b>`);
    await page.keyboard.press('Enter');
    await page.waitForSelector('[data-tags-dialog]', { state: 'detached' });
    const list = () => page.locator('.facts .tag').allTextContents();
    await eventually.deepEqual(async () => (await list()).slice(-2), [`${mark}${width}`, 'to  check <b>']);
    const shown = await list();
    await eventually.deepEqual(() => tags(runs[0]), shown);
    // The same dialog removes a tag.
    await page.keyboard.press('t');
    await page.getByLabel('to  check <b>').press('Space');
    await page.keyboard.press('Enter');
    await page.waitForSelector('[data-tags-dialog]', { state: 'detached' });
    await eventually.deepEqual(() => tags(runs[0]), shown.slice(0, -1));
    await page.context().close();
    await expectNoErrors();
  });
}

test('several runs are tagged in the list, and a tag filters it', async () => {
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
  await eventually.equal(async () => (await tags(runs[0])).length, 3);
  await page.locator('.tag', { hasText: `${mark}1280` }).click();
  await page.waitForFunction(() => document.querySelectorAll('.run').length === 1);
  await eventually.equal(() => page.inputValue('#q'), `tag:${mark}1280`);
  await eventually.equal(() => page.getAttribute('.run', 'data-run'), runs[0]);
  await page.context().close();
  await expectNoErrors();
});

test('invalid tag is explained in the dialog', async () => {
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
  await page.context().close();
  await expectNoErrors();
});
