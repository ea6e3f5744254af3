// The columns of a run, in the encoding of the stored ones. It has a row for each token that ever entered the sequence. The
// subclass `Fold` adds the items of a live run. Pure.

/** `removedAt` of a row that is never removed. */
export const NEVER = 0xffff_ffff;
/** Stored logprob or entropy of a row without a value. */
export const UNKNOWN = 0xffff;
/** Stored logprobs and entropies are multiplied by this factor. */
export const SCALE = 2048;

/** Bits of `flags`; `special` means a special token, and `touched` one that a mod's action forced, removed or influenced. */
export const FLAGS = { prompt: 1, forced: 2, stop: 4, special: 8, touched: 16, error: 32, sampled: 64 };

/** Returns true if the flags are those of an end-of-generation token. The last token of a stop string is not special. */
export const endsGeneration = (flags) => (flags & FLAGS.stop) !== 0 && (flags & FLAGS.special) !== 0;

/** Columns of the rows. `dt` is the time in µs since the previous token, and `rank` is 0 if it is unknown. */
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
  dt: Uint32Array,
};

/** Event types in the order of their numbers in the column `kinds`. */
export const EVENT_TYPES = ['Prefilled', 'ForwardPass', 'Sampled', 'Added'];

/** Columns of the events. `times` are in ms since the start of the run. */
export const EVENT_COLUMNS = { kinds: Uint8Array, steps: Uint32Array, times: Uint32Array };

/**
 * Rows, events and marks of one run. The typed arrays may be longer than `count` and `eventCount`. Row `i` is visible at event
 * `n`, from 0 to `eventCount`, if `addedAt[i] <= n && n < removedAt[i]`.
 */
export class RunColumns {
  count = 0;
  eventCount = 0;
  marks = [];
  strings = [];

  /** Creates the columns of a stored run; `rows` and `events` are those of its rows and events. */
  static of({ rows, events, ...rest }) { return Object.assign(new RunColumns(), rows, events, rest); }

  /** Returns the text of row `i`. */
  text(i) {
    return this.strings[this.textIndex[i]];
  }
}
