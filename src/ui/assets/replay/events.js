// What happened at an event in full: the event, its mod calls with logs and actions. Fetched by the block, kept.
import { ask } from '../dom.js';

const BLOCK = 96;
const KEPT = 24; // blocks; a live run keeps none of its own, it asks again

/** Groups items in list order into `{event, calls: [{call, logs, actions}]}` by sequence_order. Pure. */
export function group(items, into = new Map()) {
  const calls = new Map();
  let entry = null;
  for (const entryOf of into.values()) for (const c of entryOf.calls) calls.set(c.call.index, c);
  for (const item of items) {
    if (item.kind === 'event') {
      entry = { event: item, calls: [] };
      into.set(item.sequence_order, entry);
    } else if (item.kind === 'mod_call') {
      const call = { call: item, logs: [], actions: [] };
      calls.set(item.index, call);
      (into.get(item.event_sequence_order) ?? entry)?.calls.push(call);
    } else if (item.kind === 'mod_log') calls.get(item.mod_call_sequence)?.logs.push(item);
    else if (item.kind === 'action') calls.get(item.mod_call_sequence)?.actions.push(item);
  }
  return into;
}

export class Events {
  #id;
  #blocks = new Map();
  #waiting = new Map();
  #live = null;

  constructor(id) { this.#id = id; }

  /** Items of a live run come by themselves. */
  push(items) {
    this.#live ??= { map: new Map() };
    const fresh = group(items);
    for (const [seq, entry] of fresh) this.#live.map.set(seq, entry);
    if (fresh.size === 0 || items[0].kind !== 'event') group(items.slice(0, items.findIndex((i) => i.kind === 'event') >>> 0), this.#live.map);
    while (this.#live.map.size > 6000) this.#live.map.delete(this.#live.map.keys().next().value);
  }

  /** The entry of an event if it is here already. */
  peek(seq) {
    return this.#live?.map.get(seq) ?? this.#blocks.get(Math.floor(seq / BLOCK))?.get(seq) ?? null;
  }

  /** Entries of the events `from..=to`; fails with the server's message. */
  async get(from, to) {
    const out = [];
    for (let seq = from; seq <= to; seq += 1) {
      if (!this.peek(seq)) await this.#load(Math.floor(seq / BLOCK));
      const entry = this.peek(seq);
      if (entry) out.push(entry);
    }
    return out;
  }

  #load(block) {
    if (!this.#waiting.has(block)) {
      const work = (async () => {
        const url = `/api/v1/runs/${encodeURIComponent(this.#id)}/events?from=${block * BLOCK}&to=${(block + 1) * BLOCK}`;
        const text = await (await ask(url, { headers: { Accept: 'application/x-ndjson' } })).text();
        const items = text.split('\n').filter(Boolean).map((line) => JSON.parse(line));
        this.#blocks.set(block, group(items));
        if (this.#blocks.size > KEPT) this.#blocks.delete(this.#blocks.keys().next().value);
      })().finally(() => this.#waiting.delete(block));
      this.#waiting.set(block, work);
    }
    return this.#waiting.get(block);
  }
}
