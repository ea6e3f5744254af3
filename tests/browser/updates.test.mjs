// Pages that follow the server: the run list, branches of a run, and experiments. Responses are delayed by the tests.
import test from 'node:test';
import assert from 'node:assert/strict';
import { open, eventually } from './browser.mjs';
import { URL_, post, json, stored, ingest } from './server.mjs';
import { document as sample } from './document.mjs';

/** Starts a run that `end()` ends. It is in the run list when this returns. */
async function startRun(prompt) {
  const stop = new AbortController();
  const response = await post('/v1/completions', { prompt, max_tokens: 4000, ignore_eos: true, stream: true }, { signal: stop.signal });
  const id = response.headers.get('x-thunder-run-id');
  await eventually.equal(async () => (await json(`/api/v1/runs?q=${prompt}`)).runs.length, 1);
  return { id, end: () => { stop.abort(); return stored(id); } };
}

/** Delays the first response to requests that match: `{isReady, send}`, with a promise that ends when the page waits for the response. */
async function holdFirst(page, matches) {
  let isHeld = false;
  const held = {};
  held.isReady = new Promise((resolve) => { held.ready = resolve; });
  const sent = new Promise((resolve) => { held.send = resolve; });
  await page.route(() => true, async (route) => {
    if (isHeld || !matches(route.request())) return route.fallback();
    isHeld = true;
    const response = await route.fetch();
    held.ready();
    await sent;
    return route.fulfill({ response });
  });
  return held;
}

const isFragment = (name) => (request) => request.headers()['x-fragment'] === name;
/** Waits until the page has received a list of runs. */
const listed = async (page) => (await page.waitForResponse((response) => isFragment('list')(response.request()))).finished();
/** Generates a run with one token, and waits until it is stored. */
async function complete(prompt) {
  const { thunder } = await (await post('/v1/completions', { prompt, max_tokens: 1 })).json();
  await stored(thunder.run_id);
}
const status = (page, id) => page.textContent(`[data-run="${id}"] .run-status`);

test('run that ends before the list is connected is shown as ended', async () => {
  const prompt = `connect-${Date.now()}`;
  const run = await startRun(prompt);
  const page = await open('/docs');
  let connect;
  const connected = new Promise((resolve) => { connect = resolve; });
  await page.route('**/api/v1/runs/live', async (route) => { await connected; await route.continue(); });
  await page.goto(`${URL_}/runs?q=${prompt}`);
  assert.equal(await status(page, run.id), 'running');
  await run.end();
  connect();
  await eventually.notEqual(() => status(page, run.id), 'running');
});

test('changes while the list is loaded are not lost', async () => {
  const prompt = `load-${Date.now()}`;
  const run = await startRun(prompt);
  const page = await open('/docs');
  // The list is loaded again after the connection.
  await Promise.all([listed(page), page.goto(`${URL_}/runs?q=${prompt}`)]);
  // Another filter for the same runs, so that its request differs from those that update the list.
  const held = await holdFirst(page, (request) => isFragment('list')(request) && request.url().split(prompt).length === 3);
  await page.fill('#q', `${prompt} ${prompt}`);
  await held.isReady;
  await run.end();
  const { thunder } = await (await post('/v1/completions', { prompt, max_tokens: 1 })).json();
  await eventually.notEqual(() => status(page, run.id), 'running');
  await eventually.match(() => page.textContent('[data-new-runs]'), /^\d+ new run/);
  // Observed before the response is sent, because a busy page may handle the response first.
  await page.evaluate(() => { globalThis.replaced = new Promise((resolve) => { new MutationObserver(() => resolve()).observe(document.querySelector('#results'), { childList: true }); }); });
  held.send();
  await page.evaluate(() => globalThis.replaced);
  await eventually.notEqual(() => status(page, run.id), 'running', 'the response is older than the change');
  await eventually.ok(() => page.isVisible('[data-new-runs]'), 'the new run is still announced');
  await page.click('[data-new-runs]');
  await page.waitForSelector(`[data-run="${thunder.run_id}"]`);
});

test('new runs that the filter excludes are not announced', async () => {
  const prompt = `match-${Date.now()}`;
  await complete(prompt);
  const page = await open('/docs');
  // The list is requested because of the connection, and then because of the change.
  await Promise.all([listed(page), page.goto(`${URL_}/runs?q=${prompt}`)]);
  await Promise.all([listed(page), complete(`other-${Date.now()}`)]);
  await page.evaluate(() => new Promise((resolve) => { setTimeout(resolve); }));
  assert.equal(await page.isVisible('[data-new-runs]'), false);
  await complete(prompt);
  await page.waitForSelector('[data-new-runs]:not([hidden])');
  assert.match(await page.textContent('[data-new-runs]'), /^1 new run /);
});

test('change on the page without runs does not cancel the request of a filter', async () => {
  const prompt = `empty-${Date.now()}`;
  await complete(prompt);
  const html = (await (await fetch(`${URL_}/runs`)).text()).replace(/<ol class="runs">[^]*<\/ol>/, '');
  const page = await open('/docs');
  const isUnfiltered = (request) => isFragment('list')(request) && request.url() === `${URL_}/runs`;
  await page.route(`${URL_}/runs`, (route) => route.fulfill({ contentType: 'text/html', body: isUnfiltered(route.request()) ? '<div id="filter-error" hidden></div>' : html }));
  await Promise.all([listed(page), page.goto(`${URL_}/runs`)]);
  const held = await holdFirst(page, (request) => request.url().includes(prompt));
  await page.fill('#q', prompt);
  await held.isReady;
  await Promise.all([page.waitForRequest(isUnfiltered), complete('other')]);
  held.send();
  await eventually.equal(() => page.locator('[data-run]').count(), 1);
  assert.equal(new URL(page.url()).search, `?q=${prompt}`);
});

test('list is requested again after an error, and the number of new runs has a plus if there may be more', async () => {
  const prompt = `retry-${Date.now()}`;
  await complete(prompt);
  const list = `${URL_}/runs?q=${prompt}`;
  const html = await (await fetch(list)).text();
  const page = await open('/docs', { expected: (what) => what.startsWith('503') });
  const answers = [];
  let answer = { body: html };
  await page.route(list, (route) => {
    if (isFragment('list')(route.request())) answer = answers.shift() ?? answer;
    return route.fulfill({ contentType: 'text/html', ...answer });
  });
  await Promise.all([listed(page), page.goto(list)]);
  // A full page of new runs, first without older ones.
  const newest = '<ol class="runs"><li data-run="ffffffff-0000-7000-8000-000000000001"></li><li data-run="ffffffff-0000-7000-8000-000000000002"></li></ol>';
  answers.push({ status: 503, body: '' }, { body: newest });
  await complete(prompt);
  await eventually.match(() => page.textContent('[data-new-runs]'), /^2 new runs /);
  assert.equal(answers.length, 0);
  answers.push({ body: `${newest}<a href="/runs?before=x" data-older>Older</a>` });
  await complete(prompt);
  await eventually.match(() => page.textContent('[data-new-runs]'), /^2\+ new runs /);
});

test('update of the list is not applied to that of another filter', async () => {
  const time = Date.now();
  for (const prompt of [`first${time}`, `first${time} second${time}`]) await post('/v1/completions', { prompt, max_tokens: 1 });
  await eventually.equal(async () => (await json(`/api/v1/runs?q=first${time}`)).runs.length, 2);
  const page = await open('/docs');
  const requests = [];
  page.on('request', (request) => { if (isFragment('list')(request)) requests.push(request); });
  // The list is updated after the connection.
  const held = await holdFirst(page, isFragment('list'));
  await page.goto(`${URL_}/runs?q=first${time}`);
  await held.isReady;
  await page.fill('#q', `second${time}`);
  await eventually.equal(() => page.locator('[data-run]').count(), 1);
  const finished = requests[0].response();
  held.send();
  await (await finished).finished();
  await page.evaluate(() => new Promise((resolve) => { setTimeout(resolve); }));
  assert.equal(await page.isVisible('[data-new-runs]'), false);
  assert.equal(await page.locator('[data-run]').count(), 1);
});

test('older response does not replace the state of an experiment', async () => {
  const definition = { name: `older-${Date.now()}`, prompts: ['Hello'], seeds: [1, 2, 3], parameters: [{ max_tokens: 4000, ignore_eos: true }] };
  const { experiment_id: id } = await (await post('/api/v1/experiments', definition)).json();
  const page = await open('/docs');
  await page.clock.install();
  const requests = [];
  page.on('request', (request) => { if (isFragment('grid')(request)) requests.push(request); });
  const held = await holdFirst(page, isFragment('grid'));
  await page.goto(`${URL_}/experiments/${id}`);
  await eventually.ok(async () => { await page.clock.runFor(1000); return requests.length; });
  await held.isReady;
  await page.clock.runFor(10_000);
  assert.equal(requests.length, 1, 'the next request waits for the response');
  const state = () => page.getAttribute('[data-part=progress]', 'data-state');
  await page.click('[data-action=cancel]');
  await eventually.equal(state, 'cancelled');
  const finished = requests[0].response();
  held.send();
  await (await finished).finished();
  assert.equal(await state(), 'cancelled');
});

test('page of an experiment says that it is not updated, and does not ask again after a refusal', async () => {
  const definition = { name: `refused-${Date.now()}`, prompts: ['Hello'], seeds: [1, 2, 3], parameters: [{ max_tokens: 4000, ignore_eos: true }] };
  const { experiment_id: id } = await (await post('/api/v1/experiments', definition)).json();
  const page = await open('/docs', { expected: (what) => /40\d|503/.test(what) });
  await page.clock.install();
  const statuses = [503, 404];
  let requests = 0;
  await page.route((url) => url.pathname === `/experiments/${id}`, (route) => {
    if (!isFragment('grid')(route.request())) return route.continue();
    requests += 1;
    return route.fulfill({ status: statuses.shift(), body: '' });
  });
  await page.goto(`${URL_}/experiments/${id}`);
  const notice = () => page.textContent('.banner.warn');
  const shows = (text) => eventually.match(async () => { await page.clock.runFor(500); return notice(); }, text);
  await shows(/^The page could not be updated: 503/);
  await shows(/^This page is no longer updated: 404/);
  for (let i = 0; i < 5; i += 1) await page.clock.runFor(60_000);
  assert.equal(requests, 2);
  await post(`/api/v1/experiments/${id}/cancel`, {});
});

test('run that is loaded late does not replace the one that the playground shows', async () => {
  const { thunder } = await (await post('/v1/completions', { prompt: 'Once upon a time', max_tokens: 3 })).json();
  await stored(thunder.run_id);
  const page = await open('/docs');
  const isColumns = (request) => request.url().endsWith('/columns');
  let isSettled = false;
  for (const event of ['requestfinished', 'requestfailed']) page.on(event, (request) => { isSettled ||= isColumns(request); });
  const held = await holdFirst(page, isColumns);
  await page.goto(`${URL_}/playground?from=${thunder.run_id}`);
  await held.isReady;
  await page.fill('input[name=max_tokens]', '7');
  await page.keyboard.press('Control+Enter');
  await eventually.match(() => page.textContent('[data-where]'), /^token 7 \/ 7 · event end/);
  held.send();
  await eventually.ok(() => isSettled);
  await page.evaluate(() => new Promise((resolve) => { setTimeout(resolve, 50); }));
  assert.match(await page.textContent('[data-where]'), /^token 7 /);
});

/** Opens a run whose family the test answers: `answer(original)` returns the response. `requests()` is the number of requests. */
async function openFamily(answer) {
  const id = `family-${Math.random()}`;
  await ingest(sample(id, 15));
  const page = await open('/docs', { expected: (what) => /40\d|503/.test(what) });
  await page.clock.install();
  await page.addInitScript(() => {
    const { fetch } = globalThis;
    globalThis.families = [];
    globalThis.fetch = (url, options) => {
      if (String(url).includes('/family')) globalThis.families.push(String(url));
      return fetch(url, options);
    };
  });
  await page.route(/\/family(\?|$)/, async (route) => route.fulfill(answer(await (await route.fetch()).json())));
  await page.goto(`${URL_}/runs/${id}`);
  await page.waitForSelector('.branch-list > *');
  return { page, requests: () => page.evaluate(() => globalThis.families) };
}

test('active run without branches is not polled once it can be forked', async () => {
  const { page, requests } = await openFamily((family) => {
    family.runs[0].status = 'running';
    return { json: { ...family, not_forkable: null } };
  });
  await eventually.match(() => page.textContent('.branch-list'), /None yet/);
  for (let i = 0; i < 5; i += 1) await page.clock.runFor(10_000);
  assert.equal((await requests()).length, 1);
});

test('active branches are polled less often after errors, and not after a refusal', async () => {
  const statuses = [200, 200, 503, 404];
  const { page, requests } = await openFamily((family) => {
    const [run] = family.runs;
    const fork = { ...run, run_id: '0192f0c4-0000-7000-8000-000000000001', status: 'running', mean_logprob: -1, completion_tokens: 5000, parent: { run_id: run.run_id, step: 3, sequence_order: 7, change: {} } };
    const code = statuses.shift() ?? 200;
    return { status: code, json: code === 200 ? { ...family, runs: [run, fork], not_forkable: null } : { title: 'x' } };
  });
  const count = async () => (await requests()).length;
  const until = (expected) => eventually.equal(async () => { await page.clock.runFor(500); return count(); }, expected);
  // The time only passes in this test, not by itself.
  await page.clock.pauseAt(await page.evaluate(() => Date.now() + 60_000));
  await until(2);
  const [, poll] = await requests();
  assert.ok(poll.endsWith('/family?mean_of=0192f0c4-0000-7000-8000-000000000001'), 'a mean is read if the tokens are not loaded');
  await until(3);
  // The response is an error, so the next request follows after 3 s. In steps, so that the page can read the response.
  for (let i = 0; i < 28; i += 1) await page.clock.runFor(100);
  assert.equal(await count(), 3);
  await until(4);
  // The last response refuses the request.
  await eventually.equal(() => statuses.length, 0);
  for (let i = 0; i < 5; i += 1) await page.clock.runFor(60_000);
  assert.equal(await count(), 4);
});

test('tree of branches is updated after an error while a new branch is loaded', async () => {
  const statuses = [200, 200, 503];
  let answers = 0;
  const { page } = await openFamily((family) => {
    const [run] = family.runs;
    const fork = (number) => ({ ...run, run_id: `0192f0c4-0000-7000-8000-00000000000${number}`, status: 'running', mean_logprob: -1, completion_tokens: 5000, parent: { run_id: run.run_id, step: 3, sequence_order: 7, change: {} } });
    const code = statuses.shift() ?? 200;
    answers += 1;
    return { status: code, json: code === 200 ? { ...family, runs: [run, fork(1), ...(answers > 1 ? [fork(2)] : [])], not_forkable: null } : { title: 'x' } };
  });
  await page.clock.pauseAt(await page.evaluate(() => Date.now() + 60_000));
  await eventually.equal(async () => { await page.clock.runFor(500); return page.locator('[data-branch]').count(); }, 3);
});
