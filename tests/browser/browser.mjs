// One Chromium for all tests. Each test has its own contexts, whose pages record errors of the console and the network.
import { after, afterEach } from 'node:test';
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { chromium } from 'playwright-core';
import { URL_ } from './server.mjs';

const TIMEOUT_MS = 45_000;
const EVENTUALLY_MS = 30_000;
const SLOWDOWN = Number(process.env.BROWSER_SLOWDOWN ?? 1);
const ALL_RULES = ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa'];
export const COLOR_RULES = ['color-contrast', 'link-in-text-block', 'target-size'];
/** The rules that depend on the width: those about colors and sizes, names, which CSS may hide, tables and scrolling. */
const LAYOUT_RULES = [
  ...COLOR_RULES,
  'aria-command-name', 'aria-hidden-focus', 'aria-input-field-name', 'aria-progressbar-name', 'aria-toggle-field-name', 'button-name',
  'input-button-name', 'label', 'link-name', 'select-name', 'summary-name', 'td-headers-attr', 'th-has-data-cells',
  'scrollable-region-focusable',
];
const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');

/** Promise of the browser, or null before the first test and after a crash. */
let browser = null;
/** Problems on the pages of the current test. */
let problems = [];

afterEach(async () => {
  const found = problems;
  const contexts = (await browser?.catch(() => null))?.contexts() ?? [];
  await Promise.all(contexts.map((context) => context.close()));
  // What a page reports while it is closed belongs to this test, and not to the next one.
  problems = [];
  assert.deepEqual(found, []);
});
after(async () => (await browser)?.close());

/** Starts the browser. After a crash, the next test starts another one. */
async function launch() {
  const launched = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
  });
  launched.on('disconnected', () => { browser = null; });
  return launched;
}

/** Returns a new context. It is closed after the test. */
export async function newContext(options) {
  browser ??= launch();
  const context = await (await browser).newContext(options);
  // The browser shares the processor with other tests.
  context.setDefaultTimeout(TIMEOUT_MS);
  return context;
}

/** Opens a page that records errors, except those for which `expected` returns true. `key` is sent with each request. */
export async function open(path, { width = 1280, height = 860, expected = () => false, server = URL_, key, storageState } = {}) {
  const context = await newContext({ viewport: { width, height }, colorScheme: 'light', reducedMotion: 'reduce', storageState, ...(key && { extraHTTPHeaders: { authorization: `Bearer ${key}` } }) });
  const page = await context.newPage();
  // Slower scripts show tests that depend on fast ones.
  if (SLOWDOWN > 1) await (await context.newCDPSession(page)).send('Emulation.setCPUThrottlingRate', { rate: SLOWDOWN });
  const found = problems;
  const note = (what) => { if (!expected(what)) found.push(`${path}: ${what}`); };
  page.on('console', (message) => { if (['error', 'warning'].includes(message.type()) && !message.text().startsWith('Failed to load resource')) note(message.text()); });
  page.on('response', (response) => { if (response.status() >= 400) note(`${response.status()} ${response.url()}`); });
  page.on('pageerror', (error) => note(error.stack ?? error.message));
  await page.goto(server + path);
  return page;
}

/** Asserts that the page does not scroll sideways, and that a part of it has no accessibility violations. */
async function checkLayout(page, selector, rules) {
  await eventually.equal(() => page.evaluate(() => Math.max(0, document.documentElement.scrollWidth - innerWidth)), 0);
  // Playwright evaluates outside of the page's content security policy, so the policy stays strict.
  if (!await page.evaluate(() => 'axe' in window)) await page.evaluate(axe);
  const violations = await page.evaluate(async ([context, runOnly]) => {
    const results = await window.axe.run(context, { runOnly, resultTypes: ['violations'] });
    return results.violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => `${node.target} ${node.failureSummary}`).slice(0, 3).join(' | ')}`);
  }, [selector, rules]);
  const { width } = page.viewportSize();
  if (process.env.SHOTS) await page.screenshot({ path: `${process.env.SHOTS}/${Date.now()}-${width}.png`, fullPage: true });
  assert.deepEqual(violations, [], `${page.url()}, ${width} px`);
}

/**
 * Asserts that the page does not scroll sideways, and that a part of it has no accessibility violations: in light colors as it is, and in
 * dark ones on a phone, or, if it is shown on a phone, on a desktop. In the second layout, only `LAYOUT_RULES` are checked, because
 * the others do not depend on it.
 */
export async function expectAccessible(page, selector = 'html') {
  const size = page.viewportSize();
  await checkLayout(page, selector, ALL_RULES);
  await page.emulateMedia({ colorScheme: 'dark' });
  await page.setViewportSize({ ...size, width: size.width > 375 ? 375 : 1280 });
  await checkLayout(page, selector, LAYOUT_RULES);
  await page.setViewportSize(size);
  await page.emulateMedia({ colorScheme: 'light' });
}

/** Like `expectAccessible` for a page of which nothing else is tested, with a width of 320 pixels. `rules` are those in light colors. */
export async function expectAccessiblePage(page, rules = ALL_RULES) {
  await checkLayout(page, 'html', rules);
  await page.emulateMedia({ colorScheme: 'dark' });
  await page.setViewportSize({ width: 320, height: 640 });
  await checkLayout(page, 'html', LAYOUT_RULES);
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

/** Returns the number of pixels by which the content of an element is wider than the element. */
export const overflow = (page, selector) => page.evaluate((s) => { const { scrollWidth, clientWidth } = document.querySelector(s); return scrollWidth - clientWidth; }, selector);
