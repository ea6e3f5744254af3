// Measures how fast the replay page shows a run, in headless Chromium:
//
//   (cd tests/browser && npm install); THUNDER_URL=http://127.0.0.1:6767 node tests/benches/replay.mjs [ROUNDS]
//
// Stores traces of 2,000, 10,000 and 50,000 tokens, then opens each several times. Prints medians in milliseconds. Painted: from the
// navigation to the first frame with tokens. Columns requested: from the navigation to the request for the columns. After columns: from
// their response to the first frame with tokens. Longest task: of the main thread. Step: from a key that moves one token back to the
// next frame.
import { document as trace } from '../browser/document.mjs';
import { URL_, launch } from '../browser/browser.mjs';

const rounds = Number(process.argv[2] ?? 7);
const median = (values) => values.sort((a, b) => a - b)[values.length >> 1];
const browser = await launch();

/** Runs in the page before its scripts. */
function watch() {
  globalThis.measured = { longest: 0, painted: 0 };
  new PerformanceObserver((list) => {
    for (const { duration } of list.getEntries()) measured.longest = Math.max(measured.longest, duration);
  }).observe({ type: 'longtask', buffered: true });
  const look = () => {
    if (document.querySelector('.text .t')) requestAnimationFrame(() => { measured.painted = performance.now(); });
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}

async function visit(path, slowdown) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 860 }, reducedMotion: 'reduce' });
  const page = await context.newPage();
  const session = await context.newCDPSession(page);
  await page.goto(`${URL_}/docs`); // connection and process are warm
  await session.send('Emulation.setCPUThrottlingRate', { rate: slowdown });
  await page.addInitScript(watch);
  await page.goto(URL_ + path);
  await page.waitForFunction(() => measured.painted > 0, null, { timeout: 120000 });
  await page.waitForTimeout(400 * slowdown);
  const seen = await page.evaluate(async () => {
    const columns = performance.getEntriesByType('resource').find((entry) => entry.name.endsWith('/columns'));
    const steps = [];
    for (let i = 0; i < 9; i += 1) {
      const began = performance.now();
      document.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowLeft', bubbles: true }));
      await new Promise(requestAnimationFrame);
      steps.push(performance.now() - began);
    }
    return {
      painted: measured.painted, after: measured.painted - columns.responseEnd, requested: columns.startTime,
      longest: measured.longest, step: steps.sort((a, b) => a - b)[4],
    };
  });
  await context.close();
  return seen;
}

console.log(' tokens  CPU   painted  columns requested  after columns  longest task   step');
for (const tokens of [2000, 10000, 50000]) {
  const id = `bench-${tokens}-${Date.now()}`;
  const response = await fetch(`${URL_}/ingest`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(trace(id, tokens)) });
  if (response.status !== 201) throw new Error(`${response.status} ${await response.text()}`);
  for (const slowdown of tokens > 10000 ? [1] : [1, 4]) {
    await visit(`/runs/${id}`, slowdown);
    const seen = [];
    for (let round = 0; round < rounds; round += 1) seen.push(await visit(`/runs/${id}`, slowdown));
    const of = (name) => Math.round(median(seen.map((one) => one[name]))).toString();
    console.log(`${String(tokens).padStart(7)}  1/${slowdown}  ${of('painted').padStart(8)}  ${of('requested').padStart(17)}  ${of('after').padStart(13)}  ${of('longest').padStart(12)}  ${of('step').padStart(5)}`);
  }
}
await browser.close();
