// The focus in the replay and in the run list: what keys and buttons do to it, and what screen readers hear.
import test from 'node:test';
import assert from 'node:assert/strict';
import { open, eventually, ready } from './browser.mjs';
import { URL_, post, json, ingest } from './server.mjs';
import { document as sample } from './document.mjs';

const mark = `focus${Date.now()}`;

/** Stores the trace of `document.mjs`, after `change(trace)`. Returns its id. */
async function store(name, change = () => {}) {
  const trace = sample(`${mark}-${name}`, 30);
  change(trace);
  return ingest(trace);
}

const focusedText = (page) => page.evaluate(() => document.activeElement.textContent);
const where = (page) => page.textContent('[data-where]');

test('panel keeps the focus when one of its buttons replaces its content', async () => {
  const id = await store('panel', (trace) => {
    const { details } = trace.events.find(({ event_type: type }) => type === 'ForwardPass');
    details.model = Array.from({ length: 40 }, (_, token) => ({ token, text: ` t${token}`, prob: 0.02 }));
    trace.mod_calls.push({ event_sequence_order: 1, mod_name: 'watcher', event_type: 'ForwardPass', step: 1, exception_occurred: false });
    for (let line = 0; line < 80; line += 1) trace.mod_logs.push({ mod_call_sequence: trace.mod_calls.length - 1, mod_name: 'watcher', log_message: `line ${line}` });
  });
  const page = await open(`/runs/${id}?at=1`);
  await page.waitForSelector('.panel .candidates');
  await page.focus('.panel [data-key=toggle]');
  await page.keyboard.press('Enter');
  await eventually.equal(() => focusedText(page), 'Fewer');
  await page.keyboard.press('Enter');
  await eventually.match(() => focusedText(page), /^All \d+$/);
  await page.focus('.panel button:has-text("All 80 lines")');
  await page.keyboard.press('Enter');
  await eventually.equal(() => page.locator('.panel .log').count(), 80);
  assert.match(await focusedText(page), /^info line 0/);
  await page.focus('.steps button:has-text("Added")');
  await page.keyboard.press('Enter');
  await eventually.match(() => where(page), /event 3 /);
  assert.equal(await focusedText(page), 'Added');
  await page.keyboard.press('ArrowRight');
  await eventually.match(() => where(page), /event 6 /);
  assert.equal(await focusedText(page), 'Added');
});

test('focus in the candidates stays on its control, or moves to the section if the control is gone', async () => {
  const id = await store('candidates', (trace) => {
    // The steps have different numbers of candidates, and only step 1 has token 9.
    trace.events.filter(({ event_type: type }) => type === 'ForwardPass').forEach(({ step, details }) => {
      details.model = details.model.slice(0, 1 + step % 3);
      if (step === 1) details.model.push({ token: 9, text: ' rare', prob: 0.01 });
    });
  });
  const page = await open(`/runs/${id}?at=1`);
  await page.waitForSelector('.panel .candidates');
  const focused = () => page.evaluate(() => [document.activeElement.dataset.key, document.activeElement.tagName]);
  const move = async (event) => {
    await page.keyboard.press('Shift+ArrowRight');
    await eventually.match(() => where(page), new RegExp(`event ${event} `));
    await page.waitForSelector('.panel section:has(.candidates):not([aria-busy])');
  };
  const forward = async () => { for (const event of [2, 3, 4]) await move(event); };
  for (const [key, after] of [['regenerate', ['regenerate', 'BUTTON']], ['fork 7', ['fork 7', 'BUTTON']], ['try 9', [undefined, 'SECTION']]]) {
    await page.goto(`${URL_}/runs/${id}?at=1`);
    await page.focus(`.panel [data-key="${key}"]`);
    await forward();
    assert.deepEqual(await focused(), after);
  }
});

test('keys scroll a region that has the focus, if it has more content on that axis, and do not move the cursor', async () => {
  const id = await store('scroll');
  const response = await post(`/api/v1/runs/${id}/notes`, { text: 'a note' }, { method: 'PUT' });
  assert.equal(response.status, 200);
  const page = await open(`/runs/${id}?at=40`);
  await ready(page);
  await page.click('.panel summary:has-text("As recorded")');
  await page.click('.lanes summary');
  /** Focuses a region after setting its size. */
  const focus = async (region, width, height) => {
    await page.$eval(region, (el, size) => Object.assign(el.style, { whiteSpace: 'pre', overflowWrap: 'normal', maxHeight: 'none', ...size }), { width, height });
    await page.focus(region);
  };
  for (const region of ['[data-notes] ul', '.panel pre.trace', '.lanes .scroll']) {
    await focus(region, '20px', '10px');
    for (const key of ['ArrowRight', 'ArrowDown', 'Home', 'End', ' ']) await page.keyboard.press(key);
    assert.match(await where(page), /event 40 /, region);
    assert.equal(await page.getAttribute('[data-action=play]', 'aria-pressed'), 'false', region);
  }
  await focus('[data-notes] ul', '20px', '900px');
  await page.keyboard.press('ArrowLeft');
  assert.match(await where(page), /event 40 /);
  await page.keyboard.press('Home');
  await eventually.match(() => where(page), /event 0 /);
  await focus('[data-notes] ul', '900px', '10px');
  await page.keyboard.press('End');
  assert.match(await where(page), /event 0 /);
  await page.keyboard.press('ArrowRight');
  await eventually.doesNotMatch(() => where(page), /event 0 /);
  await page.focus('.text');
  await page.keyboard.press('End');
  await eventually.match(() => where(page), /event end/);
});

test('Space selects the focused color, and plays if that is selected', async () => {
  const page = await open(`/runs/${await store('colors')}?at=1`);
  await ready(page);
  const isPlaying = () => page.getAttribute('[data-action=play]', 'aria-pressed');
  const rank = '[data-colors] input[value=rank]';
  await page.focus(rank);
  await page.keyboard.press(' ');
  await eventually.equal(() => page.isChecked(rank), true);
  assert.equal(await isPlaying(), 'false');
  assert.match(await where(page), /event 1 /);
  await page.keyboard.press(' ');
  await eventually.doesNotMatch(() => where(page), /event 1 /);
  assert.equal(await page.isChecked(rank), true);
});

test('branches are visible at all widths', async () => {
  const id = await store('branches');
  for (const width of [1280, 1000, 700]) {
    const page = await open(`/runs/${id}`, { width, height: 640 });
    await eventually.match(() => page.textContent('.branch-list'), /cannot be forked/);
    const [tree, list] = await Promise.all(['.branch-tree', '.branch-list'].map((selector) => page.locator(selector).boundingBox()));
    assert.ok(list.height > 10 && list.y + list.height <= tree.y + tree.height + 1, `${width}: ${JSON.stringify([tree, list])}`);
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), width);
    await page.context().close();
  }
});

test('dialogs are opened once, however often their key is pressed', async () => {
  const page = await open(`/runs/${await store('dialogs')}`);
  await ready(page);
  for (const [key, dialog] of [['n', '[data-note-dialog]'], ['t', '[data-tags-dialog]']]) {
    await page.evaluate((name) => {
      for (let i = 0; i < 3; i += 1) document.body.dispatchEvent(new KeyboardEvent('keydown', { key: name, bubbles: true }));
    }, key);
    await page.waitForSelector(`${dialog}[open]`);
    await page.keyboard.press('Escape');
    await page.waitForSelector(dialog, { state: 'detached' });
  }
});

test('menu of a run fits on a phone', async () => {
  for (const width of [320, 375, 640]) {
    const page = await open(`/runs/${await store(`menu-${width}`)}`, { width, height: 700 });
    await ready(page);
    await page.click('.run-actions .more > summary');
    const box = await page.locator('.run-actions .menu').boundingBox();
    assert.ok(box.x >= 0 && box.x + box.width <= width, `${width}: ${box.x} ${box.width}`);
    await page.locator('.menu [data-action=delete]').click({ trial: true });
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth - innerWidth), 0);
    await page.context().close();
  }
});

test('comparison announces its position', async () => {
  const ids = [await store('compare-a'), await store('compare-b', (trace) => {
    const changed = trace.events.find(({ event_type: type, step }) => type === 'Added' && step === 2);
    changed.added_tokens = [999];
    changed.details.tokens[0] = { ...changed.details.tokens[0], token: 999, text: ' sea' };
  })];
  const page = await open(`/compare?a=${ids[0]}&b=${ids[1]}`);
  const announced = () => page.textContent('[role=status].visually-hidden');
  await eventually.match(announced, /^Difference 1 of 1, token 2 of A, 2 of B/);
  await page.keyboard.press('ArrowRight');
  await eventually.match(announced, /^Equal tokens, token 3 of A, 3 of B/);
});

test('run list announces its length, and keys move from the row of a clicked checkbox', async () => {
  const ids = [];
  for (const name of ['list1', 'list2', 'list3']) ids.unshift(await store(name));
  const page = await open('/runs');
  await page.waitForSelector('.run');
  const announced = () => page.textContent('[data-announce]');
  await page.fill('#q', `request:${mark}-list`);
  await eventually.equal(announced, '3 runs');
  const focusedRun = () => page.evaluate(() => document.activeElement.closest('[data-run]')?.dataset.run);
  await page.locator('[data-select]').nth(1).click();
  await page.keyboard.press('j');
  await eventually.equal(focusedRun, ids[2]);
  await page.locator('[data-select]').nth(1).click();
  await page.keyboard.press('k');
  await eventually.equal(focusedRun, ids[0]);
  await page.fill('#q', `request:${mark}-nothing`);
  await eventually.equal(announced, 'No run matches');
});

test('focus moves to the list when the button of a line above it disappears', async () => {
  const ids = [];
  for (const name of ['undo1', 'undo2']) ids.unshift(await store(name));
  const page = await open(`/runs?q=request:${mark}-undo`);
  await page.waitForSelector('.dot.on');
  const focusedRun = () => page.evaluate(() => document.activeElement.closest('[data-run]')?.dataset.run);
  await page.locator('.run-text a').first().focus();
  await page.keyboard.press('Delete');
  await eventually.equal(() => page.locator('.run').count(), 1);
  await page.focus('[data-deletions] button');
  await page.keyboard.press('Enter');
  await eventually.equal(() => page.locator('.run').count(), 2);
  await eventually.ok(async () => ids.includes(await focusedRun()));
  const complete = async () => (await (await post('/v1/completions', { prompt: `${mark}-new`, max_tokens: 1 })).json()).thunder.run_id;
  await complete();
  await eventually.equal(async () => (await json(`/api/v1/runs?q=${mark}-new`)).runs.length, 1);
  await page.goto(`${URL_}/runs?q=${mark}-new`);
  await page.waitForSelector('.dot.on');
  const newest = await complete();
  await page.waitForSelector('[data-new-runs]:not([hidden])');
  await page.focus('[data-new-runs]');
  await page.keyboard.press('Enter');
  await eventually.equal(focusedRun, newest);
});

test('ended run of a page with older runs is not announced as new', async () => {
  const last = await store('page-1');
  await store('page-2');
  const between = last.replace(/.{12}$/, 'ffffffffffff');
  const ids = ['00000000-0000-7000-8000-000000000001', between, 'ffffffff-0000-7000-8000-000000000003'];
  const body = ids.map((id) => `event: change\ndata: ${JSON.stringify({ run_id: id, status: 'done' })}\n\n`).join('');
  const list = `${URL_}/runs?q=request:${mark}-page-`;
  const html = await (await fetch(list)).text();
  const rows = ids.map((id) => `<li data-run="${id}"></li>`).join('');
  for (const [end, announced] of [['<span class="hint">This is the oldest run.</span>', /^3 new runs/], ['<a href="/runs?before=x" data-older>Older</a>', /^2 new runs/]]) {
    const page = await open('/docs');
    await page.route('**/api/v1/runs/live', (route) => route.fulfill({ contentType: 'text/event-stream', body }));
    await page.route(list, (route) => route.fulfill({ contentType: 'text/html', body: html.replace('<span class="hint">This is the oldest run.</span>', end).replace('<ol class="runs">', (start) => start + (route.request().headers()['x-fragment'] ? rows : '')) }));
    await page.goto(list);
    await eventually.match(() => page.textContent('[data-new-runs]'), announced);
    assert.equal(await page.locator('.run').count(), 2);
    await page.context().close();
  }
});
