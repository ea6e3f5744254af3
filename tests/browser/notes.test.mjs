// Notes on a run and on a token, by keyboard.
import test from 'node:test';
import assert from 'node:assert/strict';
import { open, eventually, expectAccessible, ready } from './browser.mjs';
import { URL_, ingest } from './server.mjs';
import { document as trace } from './document.mjs';

const BOX = '[data-note-dialog] textarea:focus';

test('notes are written, marked and removed, on a phone', async () => {
  const id = `notes-${Date.now()}`;
  await ingest(trace(id));
  const page = await open(`/runs/${id}?at=40`, { width: 375 });
  await ready(page);
  const write = async (text, place) => {
    await page.keyboard.press('n');
    await page.waitForSelector(BOX);
    if (place !== undefined) await page.selectOption('[name=place]', place);
    await page.fill('[data-note-dialog] textarea', text);
    await page.focus('[data-note-dialog] textarea');
    await page.keyboard.press('Control+Enter');
    await page.waitForSelector('[data-note-dialog]', { state: 'detached' });
  };
  await write('an odd <b>word</b>');
  await page.waitForSelector('.token.note.remark');
  const current = await page.locator('.token.current').textContent();
  await eventually.equal(() => page.locator('.token.note.remark').textContent(), current);
  await write('the whole run\nin two lines', '');
  await eventually.deepEqual(() => page.locator('[data-notes] .note-text').allTextContents(), ['the whole run\nin two lines', 'an odd <b>word</b>']);
  await expectAccessible(page);
  // After a reload the server renders the same; the link selects the token.
  await page.goto(`${URL_}/runs/${id}`);
  await ready(page);
  await page.locator('[data-notes] button').click();
  await eventually.equal(() => page.locator('.token.current').textContent(), current);
  const [token] = /^token \d+/.exec(await page.textContent('[data-where]'));
  assert.equal(await page.textContent('[data-notes] [data-place]'), `at ${token}`);
  await write('');
  await page.waitForFunction(() => !document.querySelector('.token.note'));
  await page.keyboard.press('n');
  await page.waitForSelector(BOX);
  await page.selectOption('[name=place]', '');
  await eventually.equal(() => page.inputValue('[data-note-dialog] textarea'), 'the whole run\nin two lines');
  await page.keyboard.press('Escape');
  await page.waitForSelector('[data-note-dialog]', { state: 'detached' });
});

test('note on a run that could not be loaded is saved', async () => {
  const id = `unloaded-${Date.now()}`;
  await ingest(trace(id));
  const page = await open('/docs', { expected: (what) => what.includes('503') });
  await page.route('**/columns', (route) => route.fulfill({ status: 503, body: '' }));
  await page.goto(`${URL_}/runs/${id}`);
  await page.waitForSelector('[data-problem]:not([hidden])');
  await page.keyboard.press('n');
  await page.waitForSelector(BOX);
  await page.keyboard.type('a note');
  await page.keyboard.press('Control+Enter');
  await page.waitForSelector('[data-note-dialog]', { state: 'detached' });
  assert.deepEqual(await page.locator('[data-notes] .note-text').allTextContents(), ['a note']);
});
