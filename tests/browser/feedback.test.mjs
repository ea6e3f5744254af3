// Feedback on tokens: its marks in the text, and links to the tokens.
import test from 'node:test';
import assert from 'node:assert/strict';
import { open, eventually, expectAccessible, ready } from './browser.mjs';
import { post, ingest } from './server.mjs';
import { document as trace } from './document.mjs';

/** Stores a run with feedback. */
async function storeRated(id) {
  await ingest(trace(id));
  for (const feedback of [{ rating: 1, position: 2, text: 'a <b>good</b> word' }, { rating: -0.5, position: 7 }, { rating: 0.5, position: 4000 }, { rating: 1 }]) {
    assert.equal((await post(`/api/v1/runs/${id}/feedback`, feedback)).status, 201);
  }
}

test('feedback marks its token and links to it', async () => {
  const id = `feedback-${Date.now()}`;
  await storeRated(id);
  const page = await open(`/runs/${id}`);
  await ready(page);
  await page.waitForSelector('.token.note');
  // The tokens of the answer: those that belong neither to the prompt nor to a removed part.
  const answer = await page.locator('.token:not(.prompt, .removed)').allTextContents();
  const marked = page.locator('.token.note');
  await eventually.equal(() => marked.count(), 2, 'one entry names a token beyond the answer, one names none');
  await eventually.equal(() => page.locator('.token.note.good').textContent(), answer[2]);
  await eventually.equal(() => page.locator('.token.note.bad').textContent(), answer[7]);
  await eventually.match(() => page.locator('.token.note.good').getAttribute('title'), /^\+1 a <b>good<\/b> word at token 3 /);
  const place = page.locator('[data-feedback] button', { hasText: 'at token 8' });
  await place.focus();
  await page.keyboard.press('Enter');
  await eventually.equal(() => page.locator('.token.current').textContent(), answer[7]);
  await expectAccessible(page);
  // The form names the selected token, and the new entry marks it at once.
  await page.keyboard.press('ArrowRight');
  const next = await page.locator('.token.current').textContent();
  assert.equal(next, answer[8]);
  await page.click('[data-action=feedback]');
  await page.waitForSelector('[data-feedback-dialog][open]');
  await eventually.equal(() => page.inputValue('[name=position]'), '9');
  // The token of a cancelled attempt is not kept.
  await page.keyboard.press('Escape');
  await page.keyboard.press('End');
  await page.click('[data-action=feedback]');
  await eventually.equal(() => page.inputValue('[name=position]'), '');
  await page.keyboard.press('Escape');
  await place.click();
  await page.keyboard.press('ArrowRight');
  await page.click('[data-action=feedback]');
  await page.locator('[data-feedback-dialog] [value="1"]').check({ force: true });
  await page.click('[data-feedback-dialog] [value=send]');
  await page.waitForFunction(() => document.querySelectorAll('.token.note').length === 3);
  await eventually.ok(async () => (await page.locator('.token.note.good').allTextContents()).includes(next));
});
