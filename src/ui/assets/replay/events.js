// Events with their mod calls, logs and actions, loaded in blocks and cached.
import { fetchApi } from '../dom.js';

const EVENTS_PER_BLOCK = 96;
const MAX_BLOCKS = 24;
/** Maximum entries of a live run; older ones are fetched again. */
const MAX_LIVE_ENTRIES = 6000;

/** A request less than `BUSY_MS` after the previous one is delayed by `DELAY_MS`. */
const BUSY_MS = 250;
const DELAY_MS = 70;

/**
 * Returns a function that gives the delay of a request in milliseconds. While a key is held down, the cursor moves over many
 * events, and the delay lets the caller request only the last one. A single movement has no delay. `last` is the time of the
 * previous request.
 */
export function requestDelay(last = -Infinity) {
  return () => {
    const now = performance.now();
    const delay = now - last < BUSY_MS ? DELAY_MS : 0;
    last = now;
    return delay;
  };
}

/** Groups items in list order to entries `{event, calls: [{call, logs, actions}]}` by sequence_order. Pure. */
export class Grouping {
  entries = new Map();
  #calls = new Map();

  add(item) {
    if (item.kind === 'event') this.entries.set(item.sequence_order, { event: item, calls: [] });
    else if (item.kind === 'mod_call') {
      const call = { call: item, logs: [], actions: [] };
      this.#calls.set(item.index, call);
      this.entries.get(item.event_sequence_order)?.calls.push(call);
    } else if (item.kind === 'mod_log') this.#calls.get(item.mod_call_sequence)?.logs.push(item);
    else if (item.kind === 'action') this.#calls.get(item.mod_call_sequence)?.actions.push(item);
  }

  /** Removes the oldest entries beyond `max`. */
  trim(max) {
    while (this.entries.size > max) {
      const [seq, entry] = this.entries.entries().next().value;
      for (const { call } of entry.calls) this.#calls.delete(call.index);
      this.entries.delete(seq);
    }
  }
}

/** Groups a list of items. */
export function group(items) {
  const grouping = new Grouping();
  for (const item of items) grouping.add(item);
  return grouping.entries;
}

export class Events {
  #id;
  #blocks = new Map();
  #loading = new Map();
  #live = null;

  constructor(id) { this.#id = id; }

  /** Adds items of a live run, and keeps the newest. */
  push(items, max = MAX_LIVE_ENTRIES) {
    this.#live ??= new Grouping();
    for (const item of items) this.#live.add(item);
    this.#live.trim(max);
  }

  /** Returns the entry of an event if it is cached. */
  peek(seq) {
    return this.#live?.entries.get(seq) ?? this.#blocks.get(Math.floor(seq / EVENTS_PER_BLOCK))?.get(seq) ?? null;
  }

  /** Returns the entries of the events `from..=to`; fails with the server's message. */
  async get(from, to) {
    const out = [];
    for (let seq = from; seq <= to; seq += 1) {
      if (!this.peek(seq)) await this.#load(Math.floor(seq / EVENTS_PER_BLOCK));
      const entry = this.peek(seq);
      if (entry) out.push(entry);
    }
    return out;
  }

  #load(block) {
    if (!this.#loading.has(block)) {
      const work = (async () => {
        const url = `/api/v1/runs/${encodeURIComponent(this.#id)}/events?from=${block * EVENTS_PER_BLOCK}&to=${(block + 1) * EVENTS_PER_BLOCK}`;
        const text = await (await fetchApi(url, { headers: { Accept: 'application/x-ndjson' } })).text();
        const items = text.split('\n').filter(Boolean).map((line) => JSON.parse(line));
        this.#blocks.set(block, group(items));
        if (this.#blocks.size > MAX_BLOCKS) this.#blocks.delete(this.#blocks.keys().next().value);
      })().finally(() => this.#loading.delete(block));
      this.#loading.set(block, work);
    }
    return this.#loading.get(block);
  }
}
