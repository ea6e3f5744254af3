// The attention of all later steps of a run to one token.
import { fetchAttention, viewQuery } from './attention-requests.js';
import { bucketOfShare } from './color.js';
import { requestDelay } from './events.js';

/** Maximum evictions up to which the attention is loaded, because each needs its own request. */
const MAX_EVICTIONS = 50;

/** Returns the rows of the answer that the step of a ForwardPass added. */
function rowsAddedByStep(run, seq) {
  return run.stepEvents(seq).flatMap((e) => {
    const [from, to] = run.rowsAddedAt(e);
    return Array.from({ length: to - from }, (_, k) => from + k).filter((row) => !run.isPrompt(row));
  });
}

export class LaterSteps {
  /** The values by the rows that the steps added. */
  byRow = new Map();
  /** Number of loaded steps. */
  count = 0;
  /** Progress or problem of the loading as text, which is empty when all is loaded. */
  state = '';
  #run;
  #id;
  #hooks;
  /** Token, view and state of the run for which attention is loaded. */
  #key = null;
  #peak = 0;
  /** Event from which the next range is loaded. */
  #next = 0;
  /** Number of evictions before that event. */
  #evictions = 0;
  #isLoading = false;
  #controller = new AbortController();
  #delay = requestDelay();

  /** `hooks.isLive()` returns true if the run is live, and `hooks.changed()` is called when the values have changed. */
  constructor(run, id, hooks, signal) {
    this.#run = run;
    this.#id = id;
    this.#hooks = hooks;
    signal.addEventListener('abort', () => this.#controller.abort());
  }

  /** Returns the bucket 0–7 of the attention of the step that added a row, or -1 for none. */
  bucketOf(row) { return this.byRow.has(row) ? bucketOfShare(this.byRow.get(row), this.#peak) : -1; }

  /** Loads the attention to a row in a view, range by range, unless it is loaded or being loaded. `row` is null if no token is chosen. */
  async load(row, view) {
    // The attention of a live run's last steps may not be available yet, so all steps are loaded again at its end.
    const key = `${row} ${view} ${this.#hooks.isLive()}`;
    if (this.#key !== key) this.#start(key, row);
    this.#hooks.changed();
    if (row === null || this.#isLoading) return;
    this.#isLoading = true;
    const { signal } = this.#controller;
    try {
      await new Promise((resolve) => setTimeout(resolve, this.#delay()));
      await this.#loadRanges(row, view, signal);
    } catch (error) {
      if (!signal.aborted) this.state = `loading failed: ${error.message}`;
    }
    if (signal.aborted) return;
    this.#isLoading = false;
    this.#hooks.changed();
  }

  /** Starts again without values. */
  #start(key, row) {
    this.#controller.abort();
    this.#controller = new AbortController();
    this.#key = key;
    this.byRow = new Map();
    this.count = 0;
    this.state = row === null ? 'Choose a token.' : 'loading…';
    this.#peak = 0;
    this.#next = row === null ? 0 : this.#run.addedAt(row);
    this.#evictions = 0;
    this.#isLoading = false;
  }

  /** Loads the ranges of steps up to the last one; in each, the position of the token is the same. */
  async #loadRanges(row, view, signal) {
    const run = this.#run;
    const last = () => Math.min(run.leftContextAt(row), run.eventCount);
    const end = () => Math.min(last(), run.nextEviction(this.#next));
    for (let to = end(); this.#next < to && this.#evictions < MAX_EVICTIONS && !signal.aborted; to = end()) {
      const query = { from: this.#next, to, position: run.context(this.#next).indexOf(row), ...viewQuery(view) };
      const attention = await fetchAttention(this.#id, query, signal);
      // The request may have ended just before another token was chosen.
      if (signal.aborted) return;
      for (const { sequence_order: seq, value } of attention.rows) {
        this.count += 1;
        this.#peak = Math.max(this.#peak, value);
        for (const added of rowsAddedByStep(run, seq)) this.byRow.set(added, value);
      }
      const eviction = run.nextEviction(this.#next);
      this.#next = attention.next ?? to;
      if (this.#next === eviction) this.#evictions += 1;
      this.#hooks.changed();
    }
    if (!signal.aborted) this.state = this.#next < last() ? `loaded up to event ${this.#next}, the ${MAX_EVICTIONS}th eviction` : '';
  }
}
