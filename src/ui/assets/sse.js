// Server-sent events over fetch. Unlike EventSource, fetch can set Last-Event-ID and read the server's errors.
import { fetchApi } from './dom.js';

/** Splits a text stream into events. `push(chunk)` returns the completed events: `{event, data, id}`. */
export class SseParser {
  #buffer = '';
  #event = { event: 'message', data: [], id: null };

  push(chunk) {
    const events = [];
    this.#buffer += chunk;
    // A CR at the end may be the first half of a CRLF, so it waits for the next chunk.
    const held = this.#buffer.endsWith('\r') ? '\r' : '';
    const lines = this.#buffer.slice(0, this.#buffer.length - held.length).split(/\r\n|\n|\r/);
    this.#buffer = lines.pop() + held;
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
async function readEvents(response, onEvent) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new SseParser();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    for (const event of parser.push(value)) onEvent(event);
  }
}

/**
 * Follows a path of this server and reconnects until `onEvent` returns true or the signal aborts.
 * `onState(text, ok, status)` is called when the connection is lost or restored; `status` is that of an error after which it is not
 * tried again. A 404 is retried for `retry404Ms` ms, because a run gets its URL shortly before it is in the database.
 */
export async function follow(path, { signal, onEvent, onState = () => {}, retry404Ms = 0 }) {
  const began = performance.now();
  let last = null;
  let wait = 1;
  let finished = false;
  while (!finished && !signal.aborted) {
    try {
      const headers = { Accept: 'text/event-stream', ...(last !== null && { 'Last-Event-ID': last }) };
      const response = await fetchApi(path, { headers, signal, cache: 'no-store' });
      onState('live', true);
      wait = 1;
      await readEvents(response, (event) => {
        if (event.id !== null) last = event.id;
        finished = onEvent(event) === true || finished;
      });
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 404 && performance.now() - began < retry404Ms) {
        await new Promise((resolve) => setTimeout(resolve, 120));
        continue;
      }
      if (error.status >= 400 && error.status < 500) return onState(error.message, false, error.status);
    }
    if (finished || signal.aborted) return;
    onState(`connection lost, trying again in ${wait} s`, false);
    await new Promise((resolve) => setTimeout(resolve, wait * 1000));
    wait = Math.min(wait * 2, 15);
  }
}
