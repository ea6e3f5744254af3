// Follows a live run, whose items are the same and in the same order as those of the stored run.
import { follow } from '../sse.js';

/** Detects repeated items, because a resumed stream may overlap. Pure. */
export class Deduplicator {
  #next = { event: 0, mod_call: 0, mod_log: 0, action: 0 };

  /** Returns true if the item is new. */
  isNew(item) {
    const at = item.kind === 'event' ? item.sequence_order : item.index;
    if (at === undefined) return true;
    if (at < (this.#next[item.kind] ?? 0)) return false;
    this.#next[item.kind] = at + 1;
    return true;
  }
}

/**
 * Follows run `id`. `onItems(items)` is called immediately for the first items, then every 50 ms if there are new ones;
 * `onEnd(summary)` once; `onState(text, ok)` when the connection is lost or restored.
 */
export function followRun(id, { onItems, onEnd, onState }) {
  const stop = new AbortController();
  const deduplicator = new Deduplicator();
  let waiting = [];
  let timer = 0;
  const flush = () => {
    clearTimeout(timer);
    timer = 0;
    const items = waiting;
    waiting = [];
    if (items.length) onItems(items);
  };
  let isFirst = true;
  follow(`/api/v1/runs/${encodeURIComponent(id)}/events`, {
    signal: stop.signal,
    onState,
    retry404Ms: 5000,
    onEvent: ({ event, data }) => {
      if (event === 'end') {
        flush();
        onEnd(JSON.parse(data));
        return true;
      }
      if (event !== 'item' && event !== 'message') return false;
      const item = JSON.parse(data);
      if (!deduplicator.isNew(item)) return false;
      waiting.push(item);
      if (isFirst) {
        isFirst = false;
        queueMicrotask(flush);
      }
      timer ||= setTimeout(flush, 50);
      return false;
    },
  });
  return () => stop.abort();
}
