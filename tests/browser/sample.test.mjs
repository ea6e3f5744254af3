// The bundled sample run, on a server without runs and without a model.
import test from 'node:test';
import assert from 'node:assert/strict';
import { open, eventually, expectAccessible, ready } from './browser.mjs';
import { json } from './server.mjs';

const server = process.env.EMPTY_URL;

test('sample run is opened on an empty server', { skip: server ? false : 'EMPTY_URL names no server' }, async () => {
  const playground = await open('/playground', { server, width: 375 });
  await playground.getByRole('button', { name: 'Open a sample run' }).waitFor();
  await playground.context().close();

  const page = await open('/runs', { server });
  const button = page.getByRole('button', { name: 'Open a sample run' });
  await expectAccessible(page);
  await button.focus();
  await page.keyboard.press('Enter');
  await page.waitForURL(/\/runs\/sample-/);
  await ready(page);
  const { runs: [run] } = await json(`/api/v1/runs`, { server });
  assert.ok(run.backtracked > 0 || run.forced > 0, JSON.stringify(run));
  assert.ok(Date.now() - Date.parse(run.created_at) < 120_000, run.created_at);
  // The replay has the candidates of its steps.
  await page.keyboard.press('b');
  await page.waitForSelector('[data-panel] table');
  await page.goto(`${server}/playground`);
  await eventually.equal(() => page.getByRole('button', { name: 'Open a sample run' }).count(), 0);
});
