// The bundled sample run, on a server without runs and without a model.
import test, { after, before } from 'node:test';
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { launch, open, eventually, expectNoErrors, ready } from './browser.mjs';

const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const server = process.env.EMPTY_URL;
let browser;

before(async () => { browser = await launch(); });
after(() => browser?.close());

test('sample run is opened on an empty server', { skip: server ? false : 'EMPTY_URL names no server' }, async () => {
  const playground = await open('/playground', { server, scheme: 'dark', width: 375 });
  await playground.getByRole('button', { name: 'Open a sample run' }).waitFor();
  await playground.context().close();

  const page = await open('/runs', { server });
  const button = page.getByRole('button', { name: 'Open a sample run' });
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa'] }));
  assert.deepEqual(violations.map((v) => v.id), []);
  if (process.env.SHOTS) await page.screenshot({ path: `${process.env.SHOTS}/empty.png` });
  await button.focus();
  await page.keyboard.press('Enter');
  await page.waitForURL(/\/runs\/sample-/);
  await ready(page);
  const { runs: [run] } = await (await fetch(`${server}/api/v1/runs`)).json();
  assert.ok(run.backtracked > 0 || run.forced > 0, JSON.stringify(run));
  assert.ok(Date.now() - Date.parse(run.created_at) < 120_000, run.created_at);
  // The replay has the candidates of its steps.
  await page.keyboard.press('b');
  await page.waitForSelector('[data-panel] table');
  if (process.env.SHOTS) await page.screenshot({ path: `${process.env.SHOTS}/sample.png` });
  await page.goto(`${server}/playground`);
  await eventually.equal(() => page.getByRole('button', { name: 'Open a sample run' }).count(), 0);
  await page.context().close();
  await expectNoErrors();
});
