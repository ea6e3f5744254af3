// The playground of a server with several models. IMAGES_URL is a server with the demo model and the model `other`.
import test from 'node:test';
import assert from 'node:assert/strict';
import { open, eventually } from './browser.mjs';
import { document as sample } from './document.mjs';

const server = process.env.IMAGES_URL;

const post = (path, body) => fetch(server + path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) });

/** Returns the body of the next request of the page for a path. */
const sent = async (page, path) => (await page.waitForRequest((request) => request.method() === 'POST' && request.url().endsWith(path))).postDataJSON();

test('playground continues a run with its model, until another one is selected', async () => {
  const response = await post('/v1/completions', { model: 'other', prompt: 'Once', max_tokens: 3 });
  const { thunder: { run_id: id } } = await response.json();
  // A run is found once it is stored.
  await eventually.equal(async () => (await (await fetch(`${server}/api/v1/runs/${id}`)).json()).run?.status, 'done');
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

test('playground says that the server does not have the model of a run', async () => {
  const id = `models-${process.pid}-${Date.now()}`;
  assert.equal((await post('/ingest', sample(id, 5))).status, 201);
  const page = await open(`/playground?from=${id}`, { server });
  await eventually.equal(() => page.textContent('[data-problem]'), 'This server does not have the model “sample-model” of the run; requests use demo.');
  await eventually.match(() => page.textContent('[data-changed-fields]'), /model sample-model → demo/);
});
