// Reads the items of a live run, which are the same and in the same order as those of the stored run.
import { runPath } from '../api.js';
import { follow } from '../sse.js';

/** Detects items that were received before: after a lost connection, the stream may repeat some. Pure. */
export class Deduplicator {
  /** Smallest new index by kind of item. */
  #next = { event: 0, mod_call: 0, mod_log: 0, action: 0 };

  /** Returns true if the item is new. */
  isNew(item) {
    const index = item.kind === 'event' ? item.sequence_order : item.index;
    if (index === undefined) return true;
    if (index < (this.#next[item.kind] ?? 0)) return false;
    this.#next[item.kind] = index + 1;
    return true;
  }
}

/**
 * Follows run `id` until it ends or the signal aborts. `onItems(items)` is called with the first items at once, and then with
 * new ones every 50 ms. `onEnd(summary)` is called at the end, and `onState(text, ok)` when the connection is lost or restored.
 */
export function followRun(id, { signal, onItems, onEnd, onState }) {
  const deduplicator = new Deduplicator();
  let pending = [];
  let timer = 0;
  const flush = () => {
    clearTimeout(timer);
    timer = 0;
    const items = pending;
    pending = [];
    if (items.length && !signal.aborted) onItems(items);
  };
  let isFirst = true;
  follow(`${runPath(id)}/events`, {
    signal,
    onState,
    retry404Ms: 5000,
    onEvent: ({ event, data }) => {
      if (signal.aborted) return true;
      if (event === 'end') {
        flush();
        onEnd(JSON.parse(data));
        return true;
      }
      if (event !== 'item' && event !== 'message') return false;
      const item = JSON.parse(data);
      if (!deduplicator.isNew(item)) return false;
      pending.push(item);
      if (isFirst) {
        isFirst = false;
        queueMicrotask(flush);
      }
      timer ||= setTimeout(flush, 50);
      return false;
    },
  });
}
