// Attention after a context shift. IMAGES_URL is a server with the demo model, --attention on and a context of 512 tokens.
import test from 'node:test';
import assert from 'node:assert/strict';
import { open, eventually, ready } from './browser.mjs';
import { post, json } from './server.mjs';

const server = process.env.IMAGES_URL;
const skip = server ? false : 'set IMAGES_URL to a server with a context of 512 tokens';
const [PROMPT, ANSWER, KEEP, EVICTED] = [500, 24, 8, 60];

const api = (path) => json(`/api/v1/runs/${path}`, { server });

/** Returns a run whose context is full in the middle of its answer: `{id, start, shift, last}` with the first evicted position, the event of the context shift, and the last ForwardPass. */
async function shiftedRun(answerLength = ANSWER, evicted = EVICTED) {
  const words = Array.from({ length: PROMPT }, (_, i) => ['girl', 'cat', 'sun', 'tree', 'ball'][(i * i) % 5]).join(' ');
  const { token_ids: tokens } = await (await post('/api/v1/tokenize', { text: words }, { server })).json();
  const response = await post('/v1/completions', {
    prompt: tokens.slice(0, PROMPT), seed: 1, max_tokens: answerLength, ignore_eos: true, attention: true, record: 'required', context_policy: 'shift', n_keep: KEEP, n_discard: evicted,
  }, { server });
  const answer = await response.json();
  assert.equal(response.status, 200, JSON.stringify(answer));
  const id = answer.thunder.run_id;
  const { events } = await api(id);
  const steps = events.filter((event) => event.event_type === 'ForwardPass');
  const shift = steps.find((event) => event.details.evicted);
  const [[start, end]] = shift.details.evicted.ranges;
  assert.equal(end - start, evicted);
  return { id, start, shift: shift.sequence_order, last: steps.at(-1).sequence_order };
}

test('attention after a context shift is shown at the tokens that the model attended to', { skip }, async () => {
  const { id, start, shift, last } = await shiftedRun();
  /** Index of a token in the text by its position in the context after the shift. */
  const inText = (position) => (position < start ? position : position + EVICTED);
  const end = (await api(id)).run.events;
  const { attention: { values, row_len: length } } = await api(`${id}/attention?at=${last}`);
  assert.equal(length, PROMPT + ANSWER - 1 - EVICTED);
  const page = await open(`/runs/${id}?at=${last}&attention=mean`, { server });
  await ready(page);
  const listed = page.locator('.top-positions li span:first-child');
  await eventually.equal(() => listed.count(), 8);
  const best = values.map((value, position) => [value, inText(position)]).sort((a, b) => b[0] - a[0]).map(([, token]) => token);
  const shown = (await listed.allTextContents()).map(Number);
  assert.deepEqual(shown, best.slice(0, 8));
  const shades = () => page.evaluate(() => [...document.querySelectorAll('.text .token')].map((token) => [...token.classList].find((name) => /^b\d$/.test(name)) ?? ''));
  await eventually.ok(async () => (await shades())[shown[0]] > 'b3', 'the token with the most attention is shaded');
  assert.deepEqual((await shades()).slice(start, start + EVICTED).filter(Boolean), [], 'evicted tokens are not shaded');
  // A click on the strip selects the token at that position. A position can be less than a pixel wide.
  const strip = page.locator('.strip:visible');
  const { width, height } = await strip.boundingBox();
  await strip.click({ position: { x: width / 2, y: height / 2 } });
  await eventually.ok(async () => {
    const facts = await page.locator('.token-facts:has-text("token id")').textContent();
    return Math.abs(Number(facts.match(/position(\d+)token id/)[1]) - inText(length / 2)) < 3;
  }, 'the strip selects the token in the middle of the context');

  // The attention of later steps to a token before and after the shift, and to an evicted one.
  const requests = [];
  page.on('request', (request) => {
    const query = new URL(request.url()).searchParams;
    if (query.has('position')) requests.push(['from', 'to', 'position'].map((name) => Number(query.get(name))));
  });
  const loaded = (position) => page.waitForFunction((p) => [...document.querySelectorAll('.panel .hint')].some(({ textContent }) => new RegExp(`^\\d+ later steps at .*, position ${p} · mean$`).test(textContent)), position);
  const requestsAfterClick = async (token) => {
    requests.splice(0);
    await page.click(`.text .token >> nth=${token}`);
    await loaded(token);
    return requests;
  };
  await page.selectOption('select[aria-label=Direction]', 'later');
  await loaded('\\d+');
  const kept = start + EVICTED + 5;
  assert.deepEqual(await requestsAfterClick(kept), [[0, shift, kept], [shift, end, kept - EVICTED]]);
  assert.deepEqual(await requestsAfterClick(start + 5), [[0, shift, start + 5]]);
});

test('attention of later steps is loaded up to the 50th eviction', { skip }, async () => {
  const { id, last } = await shiftedRun(90, 1);
  const evictions = (await api(id)).events.filter((event) => event.details?.evicted).map((event) => event.sequence_order);
  assert.ok(evictions.length > 60, `${evictions.length} evictions`);
  const page = await open(`/runs/${id}?at=${last}&attention=mean`, { server });
  await ready(page);
  let requests = 0;
  page.on('request', (request) => { if (new URL(request.url()).searchParams.has('position')) requests += 1; });
  await page.selectOption('select[aria-label=Direction]', 'later');
  await page.click('.text .token >> nth=3');
  await page.waitForSelector(`.panel .hint:has-text("position 3 · mean · loaded up to event ${evictions[49]}, the 50th eviction")`);
  assert.ok(requests <= 100, `${requests} requests`);
});
