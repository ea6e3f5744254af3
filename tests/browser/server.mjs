// Requests of the tests to their servers.
import assert from 'node:assert/strict';

export const URL_ = process.env.THUNDER_URL;
if (!URL_) throw new Error('THUNDER_URL must name a running server, e.g. http://127.0.0.1:6767');

const STORED_MS = 45_000;

/** Sends a body as JSON. The options are those of `fetch`, and `server`. */
export const post = (path, body, { server = URL_, headers, ...options } = {}) => fetch(server + path, {
  method: 'POST', headers: { 'content-type': 'application/json', ...headers }, body: JSON.stringify(body), ...options,
});

/** Returns the body of a response. The options are those of `fetch`, and `server`. */
export const json = async (path, { server = URL_, ...options } = {}) => (await fetch(server + path, options)).json();

/** Waits until a run has ended and is stored. Returns its document. */
export async function stored(id, options) {
  const limit = Date.now() + STORED_MS;
  while (Date.now() < limit) {
    const found = await json(`/api/v1/runs/${id}`, options);
    if (found.run && found.run.status !== 'running') return found;
    await new Promise((resolve) => setTimeout(resolve, 30));
  }
  throw new Error(`run ${id} was not stored as an ended run within ${STORED_MS / 1000} s`);
}

/** Generates the run of a chat, waits until it is stored, and returns its id. */
export async function generate(fields, options) {
  const response = await post('/v1/chat/completions', { messages: [{ role: 'user', content: 'Tell me a short story about a girl and a cat.' }], seed: 1, max_tokens: 60, ...fields }, options);
  const answer = await response.json();
  assert.equal(response.status, 200, JSON.stringify(answer));
  return (await stored(answer.thunder.run_id, options)).run.run_id;
}

/** Stores the trace of another engine. Returns the id of its run. */
export async function ingest(trace, options) {
  const response = await post('/ingest', trace, options);
  assert.equal(response.status, 201, await response.text());
  return (await json(`/api/v1/runs/${trace.request.request_id}`, options)).run.run_id;
}

/** Returns a function that returns the result of the first call of `create`: what several tests of a file need. */
export function once(create) {
  let created;
  return () => (created ??= create());
}
