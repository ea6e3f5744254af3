// Chromium for the tests: pages that record errors of the console and the network.
import assert from 'node:assert/strict';
import { chromium } from 'playwright-core';

export const URL_ = process.env.THUNDER_URL;
if (!URL_) throw new Error('THUNDER_URL must name a running server, e.g. http://127.0.0.1:6767');

const TIMEOUT_MS = 90_000;

let browser;
const problems = [];

export async function launch() {
  browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
  });
  return browser;
}

/** Opens a page that records errors, except those for which `expected` returns true. `key` is sent with each request. */
export async function open(path, { width = 1280, height = 860, scheme = 'light', expected = () => false, server = URL_, key = null } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: scheme, reducedMotion: 'reduce', ...(key && { extraHTTPHeaders: { authorization: `Bearer ${key}` } }) });
  // The browser shares the processor with other tests.
  context.setDefaultTimeout(TIMEOUT_MS);
  const page = await context.newPage();
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

export const ready = (page) => page.waitForFunction(() => document.querySelectorAll('.text .token').length > 3);
