// Measures how fast the replay and the comparison show runs, in headless Chromium:
//
//   (cd tests/browser && npm install); THUNDER_URL=http://127.0.0.1:6767 node tests/benches/replay.mjs [ROUNDS [TOKENS,…]]
//
// With BASELINE_URL, an earlier version on a second server is measured in alternating rounds. With SLOWDOWNS=1, the
// rounds with a slower processor are omitted; PARTS names the parts to measure (replay,comparison,attention). With
// VISITED=1, the tab has shown the same page of other runs before; otherwise the browser knows no file of the page. All
// runs are stored by the script: traces of 2,000, 10,000 and 100,000 tokens, and if the server has a model, an answer of
// 2,000 tokens with attention.
//
// Columns, in milliseconds, medians:
// requested, response: request and end of the response with the columns, after the navigation;
// text: first frame with tokens, after the navigation; after: the same, after the response with the columns;
// visible: first frame in which tokens fill the box and the details are shown;
// built: all tokens of one run are in the document; longest: longest task; step: one token back until the next frame;
// cpu: processor time of the page's main thread until `visible`, which depends less on other programs.
import { gzipSync } from 'node:zlib';
import { readdirSync } from 'node:fs';
import { document as trace } from '../browser/document.mjs';
import { URL_, launch } from '../browser/browser.mjs';

const rounds = Number(process.argv[2] ?? 7);
const sizes = (process.argv[3] ?? '2000,10000,100000').split(',').filter(Number).map(Number);
const slowdowns = (process.env.SLOWDOWNS ?? '1,4').split(',').map(Number);
const parts = (process.env.PARTS ?? 'replay,comparison,attention').split(',');
const servers = [['', URL_], ...(process.env.BASELINE_URL ? [['before', process.env.BASELINE_URL]] : [])];
const HTTP = { 'content-type': 'application/json' };
const browser = await launch();

/** Runs in the page before its scripts. */
function watch() {
  globalThis.measured = { longest: 0 };
  new PerformanceObserver((list) => {
    for (const { duration } of list.getEntries()) measured.longest = Math.max(measured.longest, duration);
  }).observe({ type: 'longtask', buffered: true });
  /** Calls `done` after the next frame was painted. */
  globalThis.afterPaint = (done) => requestAnimationFrame(() => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = done;
    port2.postMessage(null);
  });
  const checkFrame = () => afterPaint(() => {
    const text = document.querySelector('.text');
    const now = performance.now();
    if (text?.querySelector('.token')) {
      measured.text ??= now;
      const details = document.querySelector('[data-panel] section:not([hidden])')?.children.length;
      if (details && (text.scrollHeight > text.clientHeight || text.getBoundingClientRect().bottom > innerHeight)) measured.visible ??= now;
    }
    if (!measured.visible) checkFrame();
  });
  checkFrame();
}

/** Opens a tab. With VISITED, it has shown `visited`. */
async function open(server, visited, slowdown) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 860 }, reducedMotion: 'reduce' });
  const page = await context.newPage();
  const session = await context.newCDPSession(page);
  await page.goto(`${server}/docs`); // connection and process are warm
  if (process.env.VISITED) {
    await page.goto(server + visited);
    await page.waitForSelector('.text .token', { state: 'attached' });
    await page.waitForTimeout(1000);
  }
  await page.addInitScript(watch);
  await session.send('Performance.enable', { timeDomain: 'threadTicks' });
  await session.send('Emulation.setCPUThrottlingRate', { rate: slowdown });
  const cpu = async () => (await session.send('Performance.getMetrics')).metrics.find(({ name }) => name === 'TaskDuration').value * 1000;
  return { context, page, cpu };
}

async function replay(server, path, slowdown) {
  const { context, page, cpu } = await open(server, `/runs/${others[0]}`, slowdown);
  await page.goto(server + path, { waitUntil: 'commit' });
  await page.waitForFunction(() => measured.visible, null, { timeout: 120000, polling: 50 });
  const used = await cpu();
  const rows = await page.evaluate(async () => {
    const { Run } = await import(document.querySelector('link[href$="/replay/run.js"], link[href*="/replay/"]').href.replace(/[^/]*$/, 'run.js'));
    const response = await fetch(document.querySelector('link[as=fetch]').href);
    return Run.stored(await response.arrayBuffer()).count;
  });
  const built = await (await page.waitForFunction((count) => document.querySelectorAll('.text .token').length >= count && performance.now(), rows, { timeout: 120000, polling: 50 })).jsonValue();
  await page.waitForTimeout(300 * slowdown);
  const seen = await page.evaluate(async () => {
    const columns = performance.getEntriesByType('resource').find((entry) => entry.name.endsWith('/columns'));
    const steps = [];
    for (let i = 0; i < 9; i += 1) {
      const began = performance.now();
      document.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowLeft', bubbles: true }));
      await new Promise(afterPaint);
      steps.push(performance.now() - began);
    }
    return {
      requested: columns.startTime, response: columns.responseEnd, text: measured.text, after: measured.text - columns.responseEnd,
      visible: measured.visible, longest: measured.longest, step: steps.sort((a, b) => a - b)[4],
    };
  });
  await context.close();
  return { ...seen, built, cpu: used };
}

async function compare(server, path, tokens, slowdown) {
  const { context, page, cpu } = await open(server, `/compare?${new URLSearchParams({ a: others[0], b: others[1] })}`, slowdown);
  await page.goto(server + path, { waitUntil: 'commit' });
  await page.waitForFunction(() => measured.visible && document.querySelector('.difference[aria-current] .token'), null, { timeout: 120000, polling: 50 });
  const used = await cpu();
  const built = await (await page.waitForFunction((count) => document.querySelectorAll('.text .token').length >= count && performance.now(), tokens, { timeout: 120000, polling: 50 })).jsonValue();
  await page.waitForTimeout(300 * slowdown);
  const seen = await page.evaluate(() => {
    const ends = performance.getEntriesByType('resource').filter((entry) => entry.name.endsWith('/columns')).map((entry) => entry.responseEnd);
    return { response: Math.max(...ends), text: measured.text, after: measured.text - Math.max(...ends), visible: measured.visible, longest: measured.longest };
  });
  await context.close();
  return { ...seen, built, cpu: used };
}

/** Returns the time from the choice of each view until the text is shaded by it. */
async function attention(server, path, slowdown) {
  const { context, page } = await open(server, `/runs/${others[0]}`, slowdown);
  await page.goto(`${server}${path}?at=5000`, { waitUntil: 'commit' });
  await page.waitForFunction(() => measured.visible, null, { timeout: 120000, polling: 50 });
  await page.waitForTimeout(1500 * slowdown);
  const seen = await page.evaluate(async () => {
    const out = {};
    const shaded = () => Array.from(document.querySelectorAll('.text .token'), (el) => el.className).join();
    const time = async (name, act) => {
      const old = shaded();
      const began = performance.now();
      act();
      while (shaded() === old && performance.now() - began < 5000) await new Promise(afterPaint);
      out[name] = performance.now() - began;
      await new Promise((resolve) => setTimeout(resolve, 600));
    };
    const choose = (label, value) => {
      const select = document.querySelector(`select[aria-label="${label}"]`);
      if (![...select.options].some((option) => option.value === value)) throw new Error(`${value} is not offered`);
      select.value = value;
      select.dispatchEvent(new Event('change', { bubbles: true }));
    };
    await time('on', () => document.querySelector('[data-action=attention]').click());
    for (const view of ['max', 'layer:0', 'last', 'mean']) await time(view, () => choose('Attention view', view));
    await time('head', () => document.querySelectorAll('.heads .kept')[1].click());
    await time('later', () => choose('Direction', 'later'));
    return { ...out, longest: measured.longest };
  });
  await context.close();
  return seen;
}

const median = (values) => values.sort((a, b) => a - b)[values.length >> 1];

/** Measures all servers in alternating rounds and prints a line of medians for each, and one of the ratios. */
async function measure(name, columns, work) {
  for (const slowdown of slowdowns) {
    const seen = servers.map(() => []);
    for (let round = -1; round < rounds; round += 1) {
      const order = round % 2 ? [...servers.keys()] : [...servers.keys()].reverse();
      for (const i of order) {
        const one = await work(servers[i][1], slowdown, i);
        if (round >= 0) seen[i].push(one);
      }
    }
    console.log(`${name}, CPU 1/${slowdown}`.padEnd(34), columns.map((column) => column.padStart(9)).join(''));
    const print = (label, valueOf) => console.log(label.padEnd(34), columns.map((column) => valueOf(column).padStart(9)).join(''));
    servers.forEach(([label], i) => print(`  ${label || 'now'}`, (column) => Math.round(median(seen[i].map((one) => one[column]))).toString()));
    if (servers.length > 1) print('  now / before', (column) => median(seen[0].map((one, k) => one[column] / seen[1][k][column])).toFixed(2));
  }
}

async function post(server, path, body) {
  const response = await fetch(server + path, { method: 'POST', headers: HTTP, body: JSON.stringify(body) });
  if (!response.ok) throw new Error(`${path}: ${response.status} ${await response.text()}`);
  return response;
}

/** Stores a trace on every server. Long ones only have measurements at Added, because a document is limited to 64 MiB. */
async function store(document) {
  if (document.events.length > 100000) {
    for (const event of document.events.filter(({ event_type: type }) => type === 'ForwardPass' || type === 'Sampled')) {
      delete event.top_tokens;
      delete event.details;
    }
  }
  for (const [, server] of servers) await post(server, '/ingest', document);
}

const stamp = Date.now();
/** Runs that are shown before the measured ones. */
const others = ['a', 'b'].map((name) => `bench-other-${name}-${stamp}`);
await store(trace(others[0], 300));
await store(changed(others[1], 300, 100, words(3)));
for (const tokens of sizes) {
  const id = `bench-${tokens}-${stamp}`;
  await store(trace(id, tokens));
  if (parts.includes('replay')) await measure(`${tokens} tokens`, ['requested', 'response', 'text', 'after', 'visible', 'built', 'longest', 'step', 'cpu'], (server, slowdown) => replay(server, `/runs/${id}`, slowdown));
}

/** Returns a trace whose tokens after step `from` are replaced by those of `replace(step)`, `{token, text}`, or kept if it returns null. */
function changed(id, tokens, from, replace) {
  const document = trace(id, tokens);
  for (const event of document.events.filter(({ event_type: type, step }) => type === 'Added' && step > from)) {
    const other = replace(event.step);
    if (!other) continue;
    event.added_tokens = [other.token];
    event.details.tokens[0] = { ...event.details.tokens[0], ...other };
  }
  return document;
}

/** Returns a function that draws words; frequent ones are equal by chance, as in two answers to one prompt. */
function words(seed) {
  const next = (n) => {
    seed = (Math.imul(seed, 1103515245) + 12345) & 0x7fffffff;
    return (seed >> 8) % n;
  };
  return () => {
    const token = next(3) ? 1000 + next(2000) : 900 + next(12);
    return { token, text: ` word${token}` };
  };
}

if (parts.includes('comparison') && sizes.includes(10000)) {
  const columns = ['response', 'text', 'after', 'visible', 'built', 'longest', 'cpu'];
  await store(changed(`bench-other-${stamp}`, 10000, 0, (step) => (step % 50 ? null : { token: 99, text: ' other' })));
  for (const seed of [1, 2]) await store(changed(`bench-words-${seed}-${stamp}`, 10000, 100, words(seed)));
  const shown = Number((await (await fetch(`${URL_}/api/v1/runs/bench-10000-${stamp}`)).json()).run.completion_tokens);
  const pairs = [['comparison, 10000 tokens', `bench-10000-${stamp}`, `bench-other-${stamp}`], ['comparison, other answers', `bench-words-1-${stamp}`, `bench-words-2-${stamp}`]];
  for (const [name, a, b] of pairs) {
    await measure(name, columns, (server, slowdown) => compare(server, `/compare?${new URLSearchParams({ a, b })}`, shown, slowdown));
  }
}

const ids = [];
for (const [, server] of parts.includes('attention') ? servers : []) {
  const model = (await (await fetch(`${server}/v1/models`)).json()).data?.[0];
  if (!model) continue;
  const body = { prompt: 'Once upon a time', n_predict: 2000, ignore_eos: true, attention: { heads: [[0, 0], [0, 1]] }, seed: 1 };
  await post(server, '/completion', body);
  const { runs } = await (await fetch(`${server}/api/v1/runs?limit=1`)).json();
  ids.push(runs[0].run_id);
}
if (ids.length && ids.length === servers.length) {
  await measure('attention, 2000 tokens', ['on', 'max', 'layer:0', 'last', 'mean', 'head', 'later', 'longest'], (server, slowdown, i) => attention(server, `/runs/${ids[i]}`, slowdown));
}
await browser.close();

const names = readdirSync(new URL('../../src/ui/assets/replay/', import.meta.url));
const scripts = await Promise.all(names.map(async (name) => (await fetch(`${URL_}/assets/-/replay/${name}`)).text()));
const gzippedSize = (text) => gzipSync(text, { level: 9 }).length;
const moduleSizes = names.map((name, i) => [name, gzippedSize(scripts[i])]).sort((a, b) => b[1] - a[1]);
console.log(`\nModules of the replay, bytes gzipped: ${moduleSizes.map((entry) => entry.join(' ')).join(', ')}`);
console.log(`Sum ${moduleSizes.reduce((sum, [, size]) => sum + size, 0)}, as one file ${gzippedSize(scripts.join(''))}`);
