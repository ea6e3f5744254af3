// The handbook in a browser: THUNDER_URL is the address of the server, CHROMIUM the path of the browser.
import test from 'node:test';
import assert from 'node:assert/strict';
import { COLOR_RULES, open, eventually, expectAccessiblePage } from './browser.mjs';
import { URL_ } from './server.mjs';

test('search finds a section by keyboard and opens it', async () => {
  const page = await open('/docs/getting-started');
  await page.keyboard.press('/');
  await page.keyboard.type('filter language');
  await page.waitForFunction(() => /Filter language/.test(document.querySelector('[data-docs-found] [aria-selected=true]')?.textContent));
  const first = await page.getAttribute('[data-docs-search]', 'aria-activedescendant');
  await page.keyboard.press('ArrowDown');
  await eventually.notEqual(() => page.getAttribute('[data-docs-search]', 'aria-activedescendant'), first);
  await page.keyboard.press('ArrowUp');
  await page.keyboard.press('Enter');
  await page.waitForURL('**/docs/dashboard#filter-language');
  await eventually.ok(() => page.evaluate(() => {
    const { top } = document.getElementById('filter-language').getBoundingClientRect();
    return top >= 0 && top < 400;
  }), 'the section is in view');
});

test('search finds text, reports no results, and closes with Escape', async () => {
  const page = await open('/docs/getting-started');
  await page.fill('[data-docs-search]', 'weighted_layers');
  await page.waitForSelector('[data-docs-found] mark');
  await eventually.match(() => page.textContent('[data-docs-found]'), /Attention/);
  await page.fill('[data-docs-search]', 'xyzzyxyzzy');
  await page.waitForFunction(() => /Nothing found/.test(document.querySelector('[data-docs-found]').textContent));
  await page.keyboard.press('Escape');
  await eventually.ok(() => page.locator('[data-docs-found]').isHidden());
});

test('headings have anchors, and code blocks can be copied', async () => {
  const page = await open('/docs/writing-mods');
  const withoutAnchor = await page.evaluate(() => [...document.querySelectorAll('.docs-text :is(h2, h3)')].filter((h) => h.querySelector('.anchor')?.hash !== `#${h.id}`).length);
  assert.equal(withoutAnchor, 0);
  const blocks = await page.locator('.docs-text pre').count();
  await eventually.equal(() => page.locator('.docs-text pre .copy').count(), blocks);
  await page.context().grantPermissions(['clipboard-read', 'clipboard-write']);
  await page.locator('.docs-text pre .copy').first().click();
  await eventually.match(() => page.evaluate(() => navigator.clipboard.readText()), /^thunder mods new quiet$/);
});

test('API link opens the reference with all protocols', async () => {
  const page = await open('/runs');
  await page.click('.bar nav a:has-text("API")');
  await page.waitForURL('**/docs/reference');
  const headings = await page.locator('.docs-text h2').allTextContents();
  for (const protocol of ['OpenAI', 'Anthropic', 'Ollama', 'llama-server', 'KoboldCPP', 'Attention', 'Ingest', 'Runs', 'Experiments', 'Mods', 'Health', 'Types']) {
    assert.ok(headings.some((heading) => heading.startsWith(protocol)), `${protocol} in ${headings}`);
  }
  await eventually.ok(() => page.locator('h3:has-text("POST /v1/chat/completions")').count());
});

test('pages link to the next page and to their Markdown', async () => {
  const page = await open('/docs');
  await page.waitForURL('**/docs/getting-started');
  const next = await page.getAttribute('[rel=next]', 'href');
  await page.click('[rel=next]');
  await page.waitForURL(`**/docs/${next}`);
  await page.click('[rel=prev]');
  await page.waitForURL('**/docs/getting-started');
  const markdown = await fetch(`${URL_}/docs/getting-started.md`);
  assert.match(markdown.headers.get('content-type'), /^text\/markdown/);
  assert.match(await markdown.text(), /^# Getting started\n/);
});

test('a button opens the contents on a phone', async () => {
  const page = await open('/docs/reference', { width: 375, height: 700 });
  await eventually.equal(() => page.evaluate(() => document.documentElement.scrollWidth - innerWidth), 0);
  await eventually.ok(() => page.locator('.docs-contents').isHidden());
  await page.click('.docs-menu');
  await eventually.ok(() => page.locator('.docs-contents').isVisible());
  await page.keyboard.press('Escape');
  await eventually.ok(() => page.locator('.docs-contents').isHidden());
});

test('all links of the top bar are visible on a phone', async () => {
  const page = await open('/docs/flags', { width: 375 });
  const hidden = await page.locator('.bar nav').evaluate((nav) => {
    const { left, right } = nav.getBoundingClientRect();
    return [...nav.children].filter((link) => link.getBoundingClientRect().left < left || link.getBoundingClientRect().right > right).map((link) => link.textContent);
  });
  assert.deepEqual(hidden, []);
});

test('handbook has no accessibility violations, and fits into a width of 320 pixels', async () => {
  // The pages have the same structure, so one is checked with all rules.
  for (const [path, rules] of [['/docs/getting-started'], ['/docs/writing-mods', COLOR_RULES], ['/docs/flags', COLOR_RULES]]) {
    const page = await open(path);
    await expectAccessiblePage(page, rules);
    await page.context().close();
  }
});
