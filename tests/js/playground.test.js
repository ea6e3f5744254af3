// Modules of the playground that need no browser. Run: node --test tests/js
import test from 'node:test';
import assert from 'node:assert/strict';
import { NextToken } from '../../src/ui/assets/playground/next-token.js';
import { formOfRun } from '../../src/ui/assets/playground/form-of-run.js';
import { Generation } from '../../src/ui/assets/playground/generation.js';
import { loadForm, storeForm } from '../../src/ui/assets/playground/stored-form.js';

/** Replaces `fetch` in a test by `answer(path, body)`. */
const respond = (t, answer) => t.mock.method(globalThis, 'fetch', (path, { body } = {}) => answer(path, body && JSON.parse(body)));

const settled = () => new Promise((resolve) => setImmediate(resolve));

const form = {
  tab: 'raw', raw: 'one', stop: '', attention: false, model: 'm', messages: [], numbers: {}, mods: [],
};

test('late tokenization of an earlier text does not replace the newer text', async (t) => {
  const waiting = new Map();
  const prompts = [];
  respond(t, (path, body) => new Promise((resolve) => {
    if (path === '/tokenize') waiting.set(body.content, () => resolve(Response.json({ tokens: [body.content.length] })));
    else prompts.push(body.prompt);
  }));
  const box = { addEventListener() {}, setAttribute() {} };
  const page = { value: form };
  const nextToken = new NextToken(box, page, assert.fail);
  nextToken.next();
  page.value = { ...form, raw: 'longer' };
  nextToken.next();
  for (const text of ['longer', 'one']) {
    waiting.get(text)();
    await settled();
  }
  assert.deepEqual(prompts, [[6]]);
});

test('form works without the storage of the browser', (t) => {
  const blocked = () => { throw new DOMException('The storage is full.', 'QuotaExceededError'); };
  const before = Object.getOwnPropertyDescriptor(globalThis, 'localStorage');
  Object.defineProperty(globalThis, 'localStorage', { value: { getItem: blocked, setItem: blocked }, configurable: true });
  t.after(() => (before ? Object.defineProperty(globalThis, 'localStorage', before) : delete globalThis.localStorage));
  storeForm(form);
  assert.deepEqual(loadForm(), {});
});

test('form of a run without a summary has its prompt', async (t) => {
  const prefilled = { kind: 'event', event_type: 'Prefilled', details: { prompt: { texts: ['a', 'b'], parameters: { model: { name: 'm' } } } } };
  respond(t, (path) => Promise.resolve(path.includes('/events') ? new Response(JSON.stringify(prefilled)) : new Response('', { status: 503 })));
  const { values, summary } = await formOfRun('r');
  assert.deepEqual([values.tab, values.raw, values.model, summary], ['raw', 'ab', 'm', null]);
});

/** Returns a `Generation` and the list of the calls of its hooks. */
function recordedGeneration() {
  const calls = [];
  const record = (name) => (...args) => calls.push([name, ...args]);
  const generation = new Generation({ onRun: record('run'), onStatus: record('status'), onProblem: record('problem'), onBusy: record('busy') });
  return { generation, calls };
}

test('generation shows its run and its end', async (t) => {
  respond(t, async () => new Response('data: {"choices": []}\n\ndata: [DONE]\n\n', { headers: { 'x-thunder-run-id': 'r' } }));
  const { generation, calls } = recordedGeneration();
  await generation.start({ path: '/v1/completions', body: { model: 'm' } });
  const ended = calls.find(([name]) => name === 'run')[3];
  assert.deepEqual(calls, [
    ['busy', true], ['status', 'Waiting for the model…'], ['run', 'r', { model: 'm' }, ended], ['status', 'Generating…'],
    ['status', 'Done.'], ['busy', false],
  ]);
  ended({ status: 'done', completion_tokens: 6, generation_us: 2e6 });
  assert.deepEqual(calls.at(-1), ['status', 'done: 6 tokens, 3.0 tok/s']);
});

test('errors of a generation are shown, unless it was stopped', async (t) => {
  const { generation, calls } = recordedGeneration();
  respond(t, async () => new Response('data: {"error": {"message": "The model failed."}}\n\n'));
  await generation.start({ path: '/v1/completions', body: {} });
  assert.deepEqual(calls.slice(-3), [['status', ''], ['problem', 'The model failed.'], ['busy', false]]);
  t.mock.method(globalThis, 'fetch', (_, { signal }) => new Promise((_resolve, reject) => signal.addEventListener('abort', () => reject(signal.reason))));
  const stopped = generation.start({ path: '/v1/completions', body: {} });
  assert.equal(generation.isActive, true);
  generation.stop();
  await stopped;
  assert.deepEqual([generation.isActive, ...calls.slice(-2)], [false, ['status', 'Stopped.'], ['busy', false]]);
});
