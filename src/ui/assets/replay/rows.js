// Rows (token instances) as stored in the columns, complete for a stored run; the fold adds rows of a live run. Pure.

/** `removedAt` of a row that exists at the end. */
export const NEVER = 0xffff_ffff;
/** logprob and entropy of a row without a value. */
export const UNKNOWN = 0xffff;
/** Factor of stored logprobs and entropies. */
export const SCALE = 2048;

export const COLUMNS = {
  textIndex: Uint32Array,
  token: Int32Array,
  pos: Uint32Array,
  addedAt: Uint32Array,
  removedAt: Uint32Array,
  logprobs: Uint16Array,
  entropies: Uint16Array,
  rank: Uint16Array,
  flags: Uint8Array,
  dt: Uint16Array,
};

/** The event types in the order of their numbers in the column `kinds`. */
export const EVENT_TYPES = ['Prefilled', 'ForwardPass', 'Sampled', 'Added'];

export const EVENT_COLUMNS = { kinds: Uint8Array, steps: Uint32Array, times: Uint32Array };

/**
 * One run: rows (token instances), events and marks. Typed arrays may be longer than `count` and `eventCount`.
 * Row `i` is visible after event `n` exactly when `addedAt[i] <= n && n < removedAt[i]`; `n` runs from 0 to `eventCount`.
 */
export class Rows {
  count = 0;
  eventCount = 0;
  marks = [];
  strings = [];

  /** Creates a run from columns `{rows, events, strings, marks, count, eventCount}`. */
  static of({ rows, events, ...rest }) { return Object.assign(new Rows(), rows, events, rest); }

  /** Returns the text of row `i`. */
  text(i) {
    return this.strings[this.textIndex[i]];
  }

  /** Returns ln p of row `i` in the model's distribution, or null. */
  logprob(i) {
    return this.logprobs[i] === UNKNOWN ? null : -this.logprobs[i] / SCALE;
  }

  /** Returns the entropy of the distribution at row `i`, in bits, or null. */
  entropy(i) {
    return this.entropies[i] === UNKNOWN ? null : this.entropies[i] / SCALE;
  }
}
