// Server-sent events by `fetch`, which, unlike `EventSource`, can set `Last-Event-ID` and read the server's errors.
import { fetchApi } from './api.js';

/** Splits a text stream into events. `push(chunk)` returns the events that the chunk completes: `{event, data, id}`. */
export class SseParser {
  #buffer = '';
  #event = { event: 'message', data: [], id: null };

  push(chunk) {
    const events = [];
    this.#buffer += chunk;
    // A CR at the end may be the first half of a CRLF, so it stays in the buffer until the next chunk.
    const lastCr = this.#buffer.endsWith('\r') ? '\r' : '';
    const lines = this.#buffer.slice(0, this.#buffer.length - lastCr.length).split(/\r\n|\n|\r/);
    this.#buffer = lines.pop() + lastCr;
    for (const line of lines) {
      if (line === '') {
        if (this.#event.data.length) events.push({ ...this.#event, data: this.#event.data.join('\n') });
        this.#event = { event: 'message', data: [], id: null };
        continue;
      }
      const colon = line.indexOf(':');
      if (colon === 0) continue;
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
      if (field === 'data') this.#event.data.push(value);
      else if (field === 'event') this.#event.event = value;
      else if (field === 'id') this.#event.id = value;
    }
    return events;
  }
}

/** Reads the events of one response until it ends. */
export async function readEvents(response, onEvent) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new SseParser();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    for (const event of parser.push(value)) onEvent(event);
  }
}

/**
 * Reads the event stream at a path of this server, and reconnects when the connection is lost. Ends when `onEvent` returns
 * true, when the signal aborts, and when the server refuses the request with a 4xx status. `onState(text, ok, status)` is
 * called when the connection is established, lost or refused; `status` is the one of a refusal. A 404 is retried for
 * `retry404Ms` ms, because a run has its URL shortly before it is in the database.
 */
export async function follow(path, { signal, onEvent, onState = () => {}, retry404Ms = 0 }) {
  const startedAt = performance.now();
  let lastId = null;
  let waitSeconds = 1;
  let finished = false;
  while (!finished && !signal.aborted) {
    try {
      const headers = { Accept: 'text/event-stream', ...(lastId !== null && { 'Last-Event-ID': lastId }) };
      const response = await fetchApi(path, { headers, signal, cache: 'no-store' });
      onState('live', true);
      waitSeconds = 1;
      await readEvents(response, (event) => {
        if (event.id !== null) lastId = event.id;
        finished = onEvent(event) === true || finished;
      });
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 404 && performance.now() - startedAt < retry404Ms) {
        await new Promise((resolve) => setTimeout(resolve, 120));
        continue;
      }
      if (error.status >= 400 && error.status < 500) return onState(error.message, false, error.status);
    }
    if (finished || signal.aborted) return;
    onState(`connection lost, trying again in ${waitSeconds} s`, false);
    await new Promise((resolve) => setTimeout(resolve, waitSeconds * 1000));
    waitSeconds = Math.min(waitSeconds * 2, 15);
  }
}
