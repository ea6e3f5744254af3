// The events of a run with their mod calls, logs and actions, which are loaded in blocks and cached.
import { fetchApi, runPath } from '../api.js';

const EVENTS_PER_BLOCK = 96;
const MAX_BLOCKS = 24;
/** Maximum entries of a live run; older ones are fetched again. */
const MAX_LIVE_ENTRIES = 6000;

/** A request less than `BUSY_MS` after the previous one is delayed by `DELAY_MS`. */
const BUSY_MS = 250;
const DELAY_MS = 70;

/** Loads what the cursor needs, one target after the other. While the cursor moves, as in playback, targets in between are skipped. */
export class Loader {
  /** The newest target, until it is loaded or cancelled; else null. */
  target = null;
  #load;
  #delay;
  #isBusy = false;

  /** `load(target)` is called for one target at a time, and does not throw. `last` is the time of the previous request, if any. */
  constructor(load, last) {
    this.#load = load;
    this.#delay = requestDelay(last);
  }

  cancel() { this.target = null; }

  /** Requests a target instead of the one before. */
  async request(target) {
    this.target = target;
    if (this.#isBusy) return;
    this.#isBusy = true;
    while (this.target !== null) {
      await new Promise((resolve) => setTimeout(resolve, this.#delay()));
      const current = this.target;
      if (current !== null) await this.#load(current);
      if (this.target === current) this.target = null;
    }
    this.#isBusy = false;
  }
}

/**
 * Returns a function that returns the delay, in milliseconds, before the next request. It is 0 for a single movement of the
 * cursor. While a key is held down, the cursor moves over many events, and the delay lets the caller request only the last
 * one. `last` is the time of the previous request.
 */
export function requestDelay(last = -Infinity) {
  return () => {
    const now = performance.now();
    const delay = now - last < BUSY_MS ? DELAY_MS : 0;
    last = now;
    return delay;
  };
}

/** Parses items in lines of JSON. Pure. */
export const parseItems = (text) => text.split('\n').filter(Boolean).map((line) => JSON.parse(line));

/** Loads the items of a run: those of all events, or of a `range` in query parameters of the API. */
export async function fetchItems(id, range = {}) {
  const response = await fetchApi(`${runPath(id)}/events?${new URLSearchParams(range)}`, { headers: { Accept: 'application/x-ndjson' } });
  return parseItems(await response.text());
}

/** Groups items, which are added in order, into entries `{event, calls: [{call, logs, actions}]}`. Pure. */
class EntryGrouper {
  /** Entries by `sequence_order` of their event. */
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

/** Returns the entries of a list of items, by `sequence_order` of their event. Pure. */
export function group(items) {
  const grouper = new EntryGrouper();
  for (const item of items) grouper.add(item);
  return grouper.entries;
}

export class Events {
  #id;
  /** Entries of the loaded blocks, by the number of the block. */
  #blocks = new Map();
  /** Promises of the blocks that are being loaded. */
  #loading = new Map();
  /** The newest entries of a live run, or null. */
  #live = null;

  constructor(id) { this.#id = id; }

  /** Adds items of a live run. Only the newest `max` entries are kept. */
  push(items, max = MAX_LIVE_ENTRIES) {
    this.#live ??= new EntryGrouper();
    for (const item of items) this.#live.add(item);
    this.#live.trim(max);
  }

  /** Returns the entry of an event if it is loaded, else null. */
  peek(seq) {
    return this.#live?.entries.get(seq) ?? this.#blocks.get(Math.floor(seq / EVENTS_PER_BLOCK))?.get(seq) ?? null;
  }

  /** Loads and returns the entries of the events from `from` to `to`, inclusive. */
  async get(from, to) {
    const entries = [];
    for (let seq = from; seq <= to; seq += 1) {
      if (!this.peek(seq)) await this.#load(Math.floor(seq / EVENTS_PER_BLOCK));
      const entry = this.peek(seq);
      if (entry) entries.push(entry);
    }
    return entries;
  }

  #load(block) {
    if (!this.#loading.has(block)) {
      const loaded = (async () => {
        const items = await fetchItems(this.#id, { from: block * EVENTS_PER_BLOCK, to: (block + 1) * EVENTS_PER_BLOCK });
        this.#blocks.set(block, group(items));
        if (this.#blocks.size > MAX_BLOCKS) this.#blocks.delete(this.#blocks.keys().next().value);
      })().finally(() => this.#loading.delete(block));
      this.#loading.set(block, loaded);
    }
    return this.#loading.get(block);
  }
}
