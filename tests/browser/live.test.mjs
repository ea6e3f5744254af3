// The replay of a run that grows: a stored run, whose items the test sends to the page one after the other.
import test from 'node:test';
import assert from 'node:assert/strict';
import { open, eventually } from './browser.mjs';
import { URL_, post, ingest } from './server.mjs';
import { document as sample } from './document.mjs';

/** Runs in the page before its scripts: `send(event, ...data)` sends events of the run. */
function replaceStream() {
  const { fetch } = globalThis;
  const stream = new TransformStream();
  const writer = stream.writable.getWriter();
  globalThis.fetch = (url, options) => (String(url).endsWith('/events') ? Promise.resolve(new Response(stream.readable)) : fetch(url, options));
  globalThis.send = (event, ...all) => all.forEach((data) => writer.write(new TextEncoder().encode(`event: ${event}\ndata: ${data}\n\n`)));
}

/**
 * Stores a run with notes, and opens its page as if the run were active, after `prepare(page, trace)`. `sendUntil(event)` sends the next items,
 * up to an event without its calls, and `end()` the end. The URL of the page ends with `query`.
 */
async function openLive(name, steps, prepare = () => {}, notes = [], query = '') {
  const id = `live-${name}-${process.pid}-${Date.now()}`;
  const page = await open('/docs');
  await page.addInitScript(replaceStream);
  const trace = sample(id, steps);
  await prepare(page, trace);
  const run = await ingest(trace);
  await post('/api/v1/runs/tags', { runs: [run], add: ['watched'], remove: [] });
  for (const note of notes) await post(`/api/v1/runs/${id}/notes`, note, { method: 'PUT' });
  const stored = await fetch(`${URL_}/api/v1/runs/${id}/events?from=0&to=9999`, { headers: { accept: 'application/x-ndjson' } });
  const lines = (await stored.text()).split('\n').filter(Boolean);
  await page.route((url) => url.pathname === `/runs/${id}`, async (route) => {
    const original = await route.fetch();
    const html = (await original.text()).replaceAll(/<link rel="preload" as="fetch"[^>]*>/g, '');
    await route.fulfill({ response: original, body: html.replace('data-status="done"', 'data-status="running"') });
  });
  await page.goto(`${URL_}/runs/${id}${query}`);
  await page.waitForSelector('.text[data-idle^=Waiting]');
  let sent = 0;
  const sendUntil = async (event = Infinity) => {
    const last = lines.findIndex((line) => JSON.parse(line).sequence_order === event);
    const next = lines.slice(sent, last < 0 ? lines.length : last + 1);
    sent += next.length;
    await page.evaluate((all) => globalThis.send('item', ...all), next);
    const count = Math.max(...lines.slice(0, sent).map((line) => JSON.parse(line).sequence_order ?? 0)) + 1;
    await page.waitForFunction((n) => document.querySelector('[data-where]').textContent.includes(`/ ${n}`), count);
  };
  const end = async () => {
    await page.evaluate(() => globalThis.send('end', JSON.stringify({ status: 'done', completion_tokens: 1 })));
    await page.waitForSelector('[data-run-status].status-done');
  };
  return { page, sendUntil, end, where: () => page.textContent('[data-where]') };
}

/** Returns the distance of the text from its end, in pixels. */
const restOf = (page) => page.evaluate(() => {
  const { scrollTop, scrollHeight, clientHeight } = document.querySelector('.text');
  return Math.floor(scrollHeight - clientHeight - scrollTop);
});

/** Scrolls the text by a number of pixels, and waits until the page knows. */
const scrollText = (page, pixels) => page.evaluate((by) => new Promise((done) => {
  const text = document.querySelector('.text');
  text.addEventListener('scroll', () => requestAnimationFrame(done), { once: true });
  text.scrollTop += by;
}), pixels);
const later = (page) => page.locator('.token.later').allTextContents();

test('run that has ended is navigated like a stored one', async () => {
  const { page, sendUntil, end, where } = await openLive('end', 15, undefined, [{ text: 'a note', position: 1 }]);
  // The call at event 27 fails, after its token was shown.
  await sendUntil(27);
  await eventually.equal(() => page.locator('.token.error').count(), 0);
  await page.evaluate(() => { document.querySelector('.text').style.maxHeight = '40px'; });
  // The text is not scrolled to its end after the user has scrolled back.
  const scrollTop = () => page.evaluate(() => document.querySelector('.text').scrollTop);
  await page.focus('.text');
  await page.keyboard.press('End');
  await eventually.ok(async () => (await scrollTop()) > 0);
  await scrollText(page, -9999);
  await sendUntil(39);
  await eventually.deepEqual(() => page.locator('.token.error').allTextContents(), [' src=x']);
  assert.equal(await scrollTop(), 0);
  await page.keyboard.press('End');
  await eventually.ok(async () => (await scrollTop()) > 0);
  await sendUntil();
  await eventually.match(() => where(), /event live/);
  await eventually.equal(() => restOf(page), 0);
  await page.locator('.token.prompt').nth(1).click();
  // The page is older than the end of the run.
  await page.evaluate(() => {
    document.querySelector('[data-run-facts] time').remove();
    document.querySelector('[data-banners]').textContent = 'an earlier notice';
  });
  await page.focus('[data-run-facts] .tag');
  await end();
  await eventually.match(() => where(), /event end/);
  await page.waitForSelector('[data-run-facts] time');
  assert.equal(await page.evaluate(() => document.activeElement.textContent), 'watched');
  assert.match(await page.textContent('[data-banners]'), /^watcher: KeyError/);
  await eventually.equal(() => page.locator('.token.selected').textContent(), ' is', 'the selected token is kept');
  await page.locator('[data-notes] button', { hasText: 'at token 2' }).click();
  await eventually.match(() => where(), /^token 2 /);
  await page.focus('.text');
  await page.keyboard.press('Home');
  await page.keyboard.press('Shift+ArrowRight');
  await page.keyboard.press('Shift+ArrowRight');
  await eventually.equal(() => page.locator('.panel .steps [aria-pressed=true]').textContent(), 'Sampled', 'the panel shows the event at the cursor');
  await eventually.ok(async () => (await later(page)).length > 5);
  await page.keyboard.press('v');
  await eventually.deepEqual(() => later(page), []);
  await page.waitForFunction(() => document.querySelector('[data-announce]').textContent.startsWith('token '));
});

for (const [width, first] of [[1280, 0], [375, 600]]) {
  test(`live text with many messages stays at its end until the user scrolls back (${width} px, from event ${first})`, async () => {
    const { page, sendUntil } = await openLive(`scroll-${width}-${first}`, 400, async (newPage, trace) => {
      await newPage.setViewportSize({ width, height: 600 });
      // 40 messages like the one of the sample.
      const { prompt } = trace.events[0].details;
      const { length } = prompt.texts;
      const messages = Array.from({ length: 40 }, (_, i) => i);
      prompt.spans = messages.map((i) => ({ role: i % 2 ? 'assistant' : 'user', start: length * i, end: length * (i + 1) }));
      prompt.tokens = messages.flatMap(() => prompt.tokens);
      prompt.texts = messages.flatMap(() => prompt.texts);
      const added = prompt.texts.length - length;
      trace.events[0].prompt_length += added;
      for (const { details } of trace.events.slice(1)) details.position += added;
    });
    for (const event of [first, first + 10, first + 20, 700, 720, 740]) {
      await sendUntil(event);
      // The browser determines the actual heights of the blocks.
      await page.waitForTimeout(100);
    }
    await sendUntil(750);
    await eventually.equal(() => restOf(page), 0);
    await scrollText(page, -20);
    await sendUntil(1000);
    assert.ok(await restOf(page) >= 20, 'a short distance is enough');
    await scrollText(page, 9999);
    await sendUntil();
    await eventually.equal(() => restOf(page), 0);
  });
}

test('panel at a fixed cursor keeps the focus while the run grows, and removed tokens disappear', async () => {
  const { page, sendUntil, where } = await openLive('fixed', 15);
  // The calls at event 15 remove the newest two tokens.
  await sendUntil(15);
  await page.keyboard.press('Home');
  await page.keyboard.press('ArrowRight');
  await eventually.deepEqual(async () => (await later(page)).slice(-2), [' the', ' ocean']);
  const field = page.locator('.regenerate [aria-label="Number of branches"]');
  await field.fill('12');
  await sendUntil(16);
  await eventually.match(() => where(), /token 1 .*event 3 /);
  await eventually.deepEqual(() => later(page), [' sky', ' is']);
  await sendUntil();
  await page.keyboard.type('3');
  await eventually.equal(() => field.inputValue(), '123', 'the field keeps its text and the focus');
});

test('event in the URL is not reported as missing before the run has ended', async () => {
  for (const [at, expected] of [[8, ''], [9999, /^Event 9999 does not exist; the run has \d\d events$/]]) {
    const { page, sendUntil, end, where } = await openLive(`at-${at}`, 15, undefined, [], `?at=${at}`);
    const shown = () => page.textContent('[data-toast]');
    await sendUntil(5);
    assert.equal(await shown(), '');
    await sendUntil();
    await eventually.match(() => where(), at === 8 ? /event 8 / : /event live|event end/);
    assert.equal(await shown(), '');
    // The page reloads its facts at the end.
    const reloaded = page.waitForResponse((response) => response.url().includes('/runs/live-at-'));
    await end();
    await reloaded;
    if (expected) await eventually.match(shown, expected);
    else assert.equal(await shown(), '');
  }
});

test('list of marks keeps the focus while the run grows', async () => {
  const { page, sendUntil } = await openLive('marks', 60);
  await sendUntil(20);
  await page.click('.lanes summary');
  await page.focus('.lanes tbody button');
  const row = await page.locator('.lanes tbody tr').first().elementHandle();
  const count = await page.locator('.lanes tbody tr').count();
  await sendUntil();
  await eventually.ok(async () => (await page.locator('.lanes tbody tr').count()) > count);
  assert.ok(await row.evaluate((el) => el.isConnected && el.contains(document.activeElement)));
});

test('playback of a growing run is not moved back by new events', async () => {
  const { page, sendUntil } = await openLive('play', 60);
  await sendUntil(60);
  await page.keyboard.press('Home');
  await page.selectOption('[data-speed]', '20');
  await page.focus('.text');
  await page.evaluate(() => {
    globalThis.positions = [];
    new MutationObserver(() => globalThis.positions.push(Number(document.querySelector('[data-slider]').value))).observe(document.querySelector('[data-where]'), { childList: true });
  });
  await page.keyboard.press(' ');
  for (let event = 70; event <= 120; event += 10) {
    await sendUntil(event);
    await page.waitForTimeout(100);
  }
  await page.waitForFunction(() => document.querySelector('[data-slider]').value > 40);
  const positions = await page.evaluate(() => globalThis.positions);
  assert.deepEqual(positions, positions.toSorted((a, b) => a - b));
});

test('reason why a run cannot be forked is removed when it no longer applies', async () => {
  let reason = 'it has not started';
  const { page, sendUntil } = await openLive('reason', 15, (newPage) => newPage.route('**/family', async (route) => {
    const response = await route.fetch();
    const family = await response.json();
    family.runs[0].status = reason ? 'running' : 'done';
    family.not_forkable = reason;
    await route.fulfill({ response, json: family });
  }));
  await sendUntil();
  await page.waitForFunction(() => document.querySelector('.branch-list')?.textContent === 'This run cannot be forked: it has not started.');
  await page.waitForSelector('.regenerate button[aria-disabled=true]');
  reason = null;
  await page.waitForFunction(() => document.querySelector('.branch-list').textContent.startsWith('None yet'));
  await page.waitForSelector('.regenerate button:not([aria-disabled])');
});
