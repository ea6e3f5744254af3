// The playground of a server with several models. IMAGES_URL is a server with the demo model and the model `other`.
import test from 'node:test';
import assert from 'node:assert/strict';
import { open, eventually } from './browser.mjs';
import { post, stored, ingest } from './server.mjs';
import { document as sample } from './document.mjs';

const server = process.env.IMAGES_URL;
const skip = server ? false : 'set IMAGES_URL to a server with several models';

/** Returns the body of the next request of the page for a path. */
const sent = async (page, path) => (await page.waitForRequest((request) => request.method() === 'POST' && request.url().endsWith(path))).postDataJSON();

test('playground continues a run with its model, until another one is selected', { skip }, async () => {
  const response = await post('/v1/completions', { model: 'other', prompt: 'Once', max_tokens: 3 }, { server });
  const { thunder: { run_id: id } } = await response.json();
  // A run is found once it is stored.
  await stored(id, { server });
  const page = await open(`/playground?from=${id}`, { server });
  const select = page.locator('select[name=model]');
  await eventually.equal(() => select.inputValue(), 'other');
  assert.equal(await page.isVisible('[data-changed-fields]'), false);
  const [{ model }] = await Promise.all([sent(page, '/v1/completions'), page.click('[data-action=generate]')]);
  assert.equal(model, 'other');
  await page.waitForFunction(() => /tokens/.test(document.querySelector('[data-state]').textContent));

  // The same text has other tokens in another model.
  const tokenizedFor = async () => (await Promise.all([sent(page, '/tokenize'), page.click('[data-action=computeNext]')]))[0].model;
  assert.equal(await tokenizedFor(), 'other');
  await page.waitForSelector('[data-next] tr.chosen');
  await select.selectOption('demo');
  await eventually.equal(() => page.locator('[data-next] table').count(), 0);
  await eventually.match(() => page.textContent('[data-changed-fields]'), /1 field differs from the run\s*model other → demo/);
  assert.equal(await tokenizedFor(), 'demo');
  await page.waitForSelector('[data-next] tr.chosen');
  await page.click('#tab-chat');
  await page.fill('[aria-label="Message 1"]', 'Hello');
  const [chat] = await Promise.all([sent(page, '/apply-template'), page.click('[data-action=computeNext]')]);
  assert.equal(chat.model, 'demo');
  await page.waitForSelector('[data-next] tr.chosen');
});

test('playground has the settings of a run, and says that the server does not have its model', { skip }, async () => {
  const id = `models-${process.pid}-${Date.now()}`;
  await ingest(sample(id, 5), { server });
  const page = await open('/docs', { server });
  // The form of an earlier visit.
  await page.evaluate(() => localStorage.setItem('thunder.playground', JSON.stringify({ stop: 'x', numbers: { temperature: '1.5', top_k: '7' } })));
  await page.goto(`${server}/playground?from=${id}`);
  await eventually.equal(() => page.textContent('[data-problem]'), 'This server does not have the model “sample-model” of the run; requests use demo.');
  await eventually.match(() => page.textContent('[data-changed-fields]'), /^1 field differs from the run\s*model sample-model → demo/);
  const values = ['[name=temperature]', '[name=max_tokens]', '[name=top_k]', '[name=stop]'].map((name) => page.inputValue(name));
  assert.deepEqual(await Promise.all(values), ['0.7', '99', '40', '']);
});
