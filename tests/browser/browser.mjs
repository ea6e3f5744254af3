// Chromium for the tests: pages that record errors of the console and the network.
import assert from 'node:assert/strict';
import { chromium } from 'playwright-core';

export const URL_ = process.env.THUNDER_URL;
if (!URL_) throw new Error('THUNDER_URL must name a running server, e.g. http://127.0.0.1:6767');

const TIMEOUT_MS = 90_000;
const EVENTUALLY_MS = 30_000;
const SLOWDOWN = Number(process.env.BROWSER_SLOWDOWN ?? 1);

let browser;
const problems = [];

export async function launch() {
  browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
  });
  return browser;
}

/** Slows the scripts of a page down by the factor BROWSER_SLOWDOWN, which shows tests that depend on fast scripts. */
export async function slowDown(page) {
  if (SLOWDOWN > 1) await (await page.context().newCDPSession(page)).send('Emulation.setCPUThrottlingRate', { rate: SLOWDOWN });
}

/** Opens a page that records errors, except those for which `expected` returns true. `key` is sent with each request. */
export async function open(path, { width = 1280, height = 860, scheme = 'light', expected = () => false, server = URL_, key = null } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: scheme, reducedMotion: 'reduce', ...(key && { extraHTTPHeaders: { authorization: `Bearer ${key}` } }) });
  // The browser shares the processor with other tests.
  context.setDefaultTimeout(TIMEOUT_MS);
  const page = await context.newPage();
  await slowDown(page);
  const note = (what) => { if (!expected(what)) problems.push(`${path}: ${what}`); };
  page.on('console', (message) => { if (['error', 'warning'].includes(message.type()) && !message.text().startsWith('Failed to load resource')) note(message.text()); });
  page.on('response', (response) => { if (response.status() >= 400) note(`${response.status()} ${response.url()}`); });
  page.on('pageerror', (error) => note(error.stack ?? error.message));
  await page.goto(server + path);
  return page;
}

export async function expectNoErrors() {
  assert.deepEqual(problems.splice(0), []);
}

/**
 * Assertions on what a page or the server shows some time after an action: `await eventually.equal(() => page.textContent('h1'), 'Runs')`
 * reads again until the assertion holds.
 */
export const eventually = Object.fromEntries(['equal', 'notEqual', 'deepEqual', 'match', 'doesNotMatch', 'ok'].map((name) => [name, async (read, ...rest) => {
  const limit = Date.now() + EVENTUALLY_MS;
  for (;;) {
    try {
      return assert[name](await read(), ...rest);
    } catch (error) {
      // Reading fails while the page is replaced by another one.
      if (Date.now() > limit) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}]));

export const ready = (page) => page.waitForFunction(() => document.querySelectorAll('.text .token').length > 3);
