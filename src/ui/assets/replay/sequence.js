// The token sequence of a run that grows item by item: its rows, which are visible until they are removed. Pure.
import { COLUMNS, endsGeneration, EVENT_COLUMNS, FLAGS, NEVER, RunColumns, SCALE, UNKNOWN } from './run-columns.js';

/** Largest stored logprob or entropy; the next larger number is `UNKNOWN`. */
const MAX_QUANTIZED = 65_534;
/** Maximum rows for tokens that a trace counts but does not list. */
const MAX_PLACEHOLDER_ROWS = 65_536;
const SPECIAL_NAMES = new Set([
  '<s>', '</s>', '<bos>', '<eos>', '<pad>', '<unk>', '<mask>', '<start_of_turn>', '<end_of_turn>', '[INST]', '[/INST]',
  '<|>',
]);

/** Returns the stored value of an entropy or of a negated logprob. */
const quantize = (value) =>
  value === undefined ? UNKNOWN : Math.min(MAX_QUANTIZED, Math.max(0, Math.round(Math.fround(value) * SCALE)));

/** Returns the text of a token whose text is unknown. */
export const placeholderText = (token) => (token < 0 ? '⟨?⟩' : `⟨${token}⟩`);

/** Returns `FLAGS.special` if a text looks like that of a special token, else 0. */
export function specialFlag(text) {
  const isBetween = (open, close) => text.startsWith(open) && text.endsWith(close);
  return isBetween('<|', '|>') || isBetween('<｜', '｜>') || SPECIAL_NAMES.has(text) ? FLAGS.special : 0;
}

export class TokenSequence extends RunColumns {
  /** Number of tokens that backtracks removed. */
  backtrackedCount = 0;
  /** Number of tokens that mods forced. */
  forcedCount = 0;
  /** Indexes of texts in `strings`. */
  #textIndexes = new Map();
  /** Visible rows, in order of position. */
  #alive = [];
  /** Number of prompt rows in `#alive`. */
  #promptRows = 0;
  /** Length of the prompt if its tokens are unknown. */
  #base = 0;
  /** The newest row, if only its text suggests that it ends the generation. */
  #assumedEnd = null;
  #placeholderRows = 0;

  constructor() {
    super();
    for (const [name, Type] of Object.entries({ ...COLUMNS, ...EVENT_COLUMNS })) this[name] = new Type(256);
  }

  /** Number of tokens in the prompt. */
  get promptLength() { return this.#base + this.#promptRows; }

  /** Number of visible generated rows. */
  get generatedCount() { return this.#alive.length - this.#promptRows; }

  /** Number of generated tokens without an end-of-generation token at the end. */
  get answerLength() {
    const last = this.#alive.at(-1);
    return this.generatedCount - (last !== undefined && endsGeneration(this.flags[last]) ? 1 : 0);
  }

  /** Text of the current generated tokens, without an end-of-generation token. */
  get answer() {
    return this.#alive.slice(this.#promptRows).filter((i) => !endsGeneration(this.flags[i])).map((i) => this.text(i)).join('');
  }

  /** Appends an event to the columns of events. */
  appendEvent(kind, step, time) {
    const seq = this.eventCount;
    this.#grow(EVENT_COLUMNS, seq);
    this.kinds[seq] = kind;
    this.steps[seq] = step;
    this.times[seq] = time;
    this.eventCount += 1;
  }

  /** Appends a token, which is visible from event `seq` on. */
  append(token, text, seq, flags, dt = 0, { logprob, rank, entropy } = {}) {
    const i = this.count;
    if (this.#assumedEnd !== null) this.flags[this.#assumedEnd] &= ~FLAGS.stop;
    this.#assumedEnd = null;
    this.#grow(COLUMNS, i);
    this.textIndex[i] = this.#intern(text);
    this.token[i] = token;
    this.pos[i] = this.#base + this.#alive.length;
    this.addedAt[i] = seq;
    this.removedAt[i] = NEVER;
    this.logprobs[i] = quantize(logprob === undefined ? undefined : -logprob);
    this.entropies[i] = quantize(entropy);
    this.rank[i] = Math.min(UNKNOWN, rank ?? 0);
    this.flags[i] = flags;
    this.dt[i] = dt;
    this.#alive.push(i);
    this.count += 1;
  }

  /** Appends tokens that an action forces. */
  appendForced(tokens, texts, seq) {
    tokens.forEach((token, i) => {
      const text = texts[i] ?? placeholderText(token);
      this.append(token, text, seq, FLAGS.forced | FLAGS.touched | specialFlag(text));
    });
    this.forcedCount += tokens.length;
    this.assumeEnd();
  }

  /** Assumes that a special token ends the generation while it is the newest token. Traces of other engines do not tell. */
  assumeEnd() {
    const i = this.count - 1;
    if (i < 0 || (this.flags[i] & (FLAGS.special | FLAGS.prompt)) !== FLAGS.special) return;
    this.flags[i] |= FLAGS.stop;
    this.#assumedEnd = i;
  }

  /** Adds flags to the last generated token. */
  flagLast(flags) {
    if (this.generatedCount > 0) this.flags[this.#alive.at(-1)] |= flags;
  }

  /** Returns the visible generated rows from row `from` on. */
  generatedSince(from) {
    let first = this.#alive.length;
    while (first > this.#promptRows && this.#alive[first - 1] >= from) first -= 1;
    return this.#alive.slice(first);
  }

  /** Removes the last `count` visible rows: they are not visible at event `seq` and later. */
  #removeLast(count, seq) {
    for (const i of this.#alive.splice(this.#alive.length - count, count)) {
      this.removedAt[i] = seq;
      this.flags[i] |= FLAGS.touched;
    }
  }

  /** Removes the last `count` generated tokens by a backtrack, or all if there are fewer. */
  backtrack(count, seq) {
    const removed = Math.max(0, Math.min(count, this.generatedCount));
    this.#removeLast(removed, seq);
    this.backtrackedCount += removed;
  }

  /** Removes `count` generated tokens before `rows`, the last ones, by a backtrack. `rows` are removed too and appended again. */
  backtrackBefore(rows, count, seq) {
    const removed = Math.min(count, this.generatedCount - rows.length);
    if (removed === 0 || !this.reservePlaceholders(rows.length)) return;
    const kept = rows.map((i) => [this.token[i], this.text(i), this.flags[i], this.dt[i], this.logprobs[i], this.rank[i], this.entropies[i]]);
    this.#removeLast(removed + rows.length, seq);
    for (const [token, text, flags, dt, logprob, rank, entropy] of kept) {
      this.append(token, text, seq, flags, dt);
      const i = this.count - 1;
      [this.logprobs[i], this.rank[i], this.entropies[i]] = [logprob, rank, entropy];
    }
    this.backtrackedCount += removed;
  }

  /** Removes the last `count` generated tokens, or all if there are fewer. */
  removeGenerated(seq, count = Infinity) { this.#removeLast(Math.min(count, this.generatedCount), seq); }

  /** Replaces prompt and answer by a prompt with these tokens. */
  replacePrompt(tokens, texts, seq, extraFlags = 0) {
    this.#removeLast(this.#alive.length, seq);
    this.#base = 0;
    tokens.forEach((token, index) => {
      const text = texts[index] ?? placeholderText(token);
      this.append(token, text, seq, FLAGS.prompt | extraFlags | specialFlag(text));
    });
    this.#promptRows = tokens.length;
  }

  /** Replaces prompt and answer by a prompt whose tokens are unknown, which has no rows. */
  replaceByUnknownPrompt(length, seq) {
    this.replacePrompt([], [], seq);
    this.#base = length;
  }

  /** Reserves `count` placeholder rows. Returns false if there would be too many. */
  reservePlaceholders(count) {
    if (this.#placeholderRows + count > MAX_PLACEHOLDER_ROWS) return false;
    this.#placeholderRows += count;
    return true;
  }

  #intern(text) {
    let index = this.#textIndexes.get(text);
    if (index === undefined) {
      index = this.strings.push(text) - 1;
      this.#textIndexes.set(text, index);
    }
    return index;
  }

  /** Extends the typed arrays of columns so that they have the entry `index`. */
  #grow(columns, index) {
    for (const name of Object.keys(columns)) {
      const old = this[name];
      if (index < old.length) continue;
      this[name] = new columns[name](Math.max(256, 2 * old.length));
      this[name].set(old);
    }
  }
}
