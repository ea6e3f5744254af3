// A run that is shown: its rows (one per token), events and marks. In this folder, `i` and `row` are indexes of rows, `e` and
// `seq` indexes of events, and `n` is an event or, after the last one, the end of the run.
import { fetchApi, runPath } from '../api.js';
import { parseColumns } from './columns.js';
import { endsGeneration, EVENT_TYPES, FLAGS, NEVER, SCALE, UNKNOWN } from './run-columns.js';

export class Run {
  #columns;
  /** Event of the eviction of each evicted row. */
  #evictedAt = new Map();
  /** Number of marks whose evictions are in `#evictedAt`. */
  #readMarks = 0;
  /** The context after the last of these evictions: rows by position. */
  #kept = [];
  /** First row that was not added to the text at that eviction. */
  #nextRow = 0;

  /** `columns` are the `RunColumns` of a stored run, or the `Fold` of a live one. */
  constructor(columns) {
    this.#columns = columns;
  }

  /** Reads a stored run from its columns. */
  static stored(buffer) { return new Run(parseColumns(buffer)); }

  /** Loads a stored run. */
  static async load(id, signal) {
    const response = await fetchApi(`${runPath(id)}/columns`, { signal });
    return Run.stored(await response.arrayBuffer());
  }

  /** Applies the next item of a live run. */
  apply(item) { this.#columns.apply(item); }

  /** Number of rows, including removed ones. */
  get count() { return this.#columns.count; }
  get eventCount() { return this.#columns.eventCount; }
  /** Actions, exceptions, log lines and evictions: `{seq, kind, mod_name, label, evicted}`. */
  get marks() { return this.#columns.marks; }

  text(i) { return this.#columns.text(i); }
  token(i) { return this.#columns.token[i]; }
  /** Position in the whole text, which includes evicted tokens. */
  pos(i) { return this.#columns.pos[i]; }
  /** Event that added the row. */
  addedAt(i) { return this.#columns.addedAt[i]; }
  /** First event at which the row is no longer visible, or `NEVER`. */
  removedAt(i) { return this.#columns.removedAt[i]; }
  /** Milliseconds since the previous token, with fractions. */
  dt(i) { return this.#columns.dt[i] / 1000; }
  /** Logprob in the model's distribution, or null. */
  logprob(i) { return this.#columns.logprobs[i] === UNKNOWN ? null : -this.#columns.logprobs[i] / SCALE; }
  /** Entropy of the distribution in bits, or null. */
  entropy(i) { return this.#columns.entropies[i] === UNKNOWN ? null : this.#columns.entropies[i] / SCALE; }
  rank(i) { return this.#columns.rank[i] || null; }
  /** The `FLAGS` of a row. Later items of a live run can change them. */
  flags(i) { return this.#columns.flags[i]; }
  isPrompt(i) { return this.#hasFlag(i, FLAGS.prompt); }
  isForced(i) { return this.#hasFlag(i, FLAGS.forced); }
  /** True for a special token, such as one that begins a message. */
  isSpecial(i) { return this.#hasFlag(i, FLAGS.special); }
  /** True for the last token of a generation that ended by a stop string or by an end-of-generation token. */
  isStop(i) { return this.#hasFlag(i, FLAGS.stop); }
  /** True for an end-of-generation token, which is not counted as a token of the answer. */
  endsGeneration(i) { return endsGeneration(this.flags(i)); }
  /** True if an action of a mod forced, removed or influenced the token. */
  isTouched(i) { return this.#hasFlag(i, FLAGS.touched); }
  /** True if a mod raised an exception at the token. */
  isError(i) { return this.#hasFlag(i, FLAGS.error); }

  #hasFlag(i, flag) { return (this.flags(i) & flag) !== 0; }

  /** Returns the type of an event, such as `ForwardPass`. */
  type(e) { return EVENT_TYPES[this.#columns.kinds[e]]; }
  step(e) { return this.#columns.steps[e]; }
  /** True if the times of the events were recorded. */
  get isTimed() { return this.eventCount > 0 && this.time(this.eventCount - 1) > 0; }
  /** Time of an event in milliseconds since the run started. */
  time(e) { return this.#columns.times[e]; }

  /** Returns true if a row is part of the sequence at event `n`. */
  isVisible(i, n) { return this.addedAt(i) <= n && n < this.removedAt(i); }

  /** Returns the visible rows at event `n`, by their position. */
  sequence(n) {
    const rows = [];
    for (let i = 0; i < this.count; i += 1) if (this.isVisible(i, n)) rows[this.pos(i)] = i;
    return rows;
  }

  /**
   * Returns the rows in the model's context at event `n`, by their position in it: the visible rows without the ones that were
   * evicted because the context was full. The positions of attention are these.
   */
  context(n) {
    this.#readEvictions();
    const rows = [];
    let evicted = 0;
    for (let i = 0; i < this.count; i += 1) {
      if (!this.isVisible(i, n)) continue;
      if (n < this.#leftContextAt(i)) rows[this.pos(i) - evicted] = i;
      else evicted += 1;
    }
    return rows;
  }

  /** Returns the first event at which row `i` is no longer in the context, or `NEVER`. */
  leftContextAt(i) {
    this.#readEvictions();
    return this.#leftContextAt(i);
  }

  /** Returns the first event after `n` with an eviction, which changes the positions in the context, or `NEVER`. */
  nextEviction(n) {
    return this.marks.find(({ seq, evicted }) => evicted && seq > n)?.seq ?? NEVER;
  }

  #leftContextAt(i) { return Math.min(this.removedAt(i), this.#evictedAt.get(i) ?? NEVER); }

  /** Reads the evictions of new marks, whose ranges are positions in the context before the eviction. */
  #readEvictions() {
    for (; this.#readMarks < this.marks.length; this.#readMarks += 1) {
      const { seq, evicted } = this.marks[this.#readMarks];
      if (!evicted) continue;
      this.#updateKept(seq);
      // Backwards, because the ranges are positions before the eviction.
      for (const [from, to] of [...evicted].sort((a, b) => b[0] - a[0])) this.#kept.splice(from, to - from).forEach((row) => this.#evictedAt.set(row, seq));
    }
  }

  /** Moves `#kept` from the last eviction to event `n`: removes rows from its end and appends new ones. */
  #updateKept(n) {
    const rows = this.#kept;
    while (rows.length && !(rows.at(-1) !== undefined && this.isVisible(rows.at(-1), n))) rows.pop();
    for (; this.#nextRow < this.count && this.addedAt(this.#nextRow) <= n; this.#nextRow += 1) {
      if (this.isVisible(this.#nextRow, n)) rows[rows.length || this.pos(this.#nextRow)] = this.#nextRow;
    }
  }

  /** Returns the rows of the final answer, in order. */
  answer() {
    const rows = [];
    for (let i = 0; i < this.count; i += 1) if (!this.isPrompt(i) && this.isVisible(i, this.eventCount)) rows.push(i);
    return rows;
  }

  /** Returns the number of tokens in the answer at event `n`, without one that ends the generation. */
  answerLength(n) {
    let count = 0;
    for (let i = 0; i < this.count; i += 1) if (!this.isPrompt(i) && !this.endsGeneration(i) && this.isVisible(i, n)) count += 1;
    return count;
  }

  /** Returns the events of the step to which event `e` belongs, in order. */
  stepEvents(e) {
    if (e < 0 || e >= this.eventCount) return [];
    const step = this.step(e);
    let from = e;
    let to = e;
    while (from > 0 && this.step(from - 1) === step) from -= 1;
    while (to + 1 < this.eventCount && this.step(to + 1) === step) to += 1;
    return Array.from({ length: to - from + 1 }, (_, k) => from + k);
  }

  /** Returns the range of rows that an event added, end exclusive. */
  rowsAddedAt(e) {
    return rangeOf(e, this.count, (i) => this.addedAt(i));
  }

  /** Returns the marks of the actions at an event. */
  actionsAt(e) {
    return this.marks.slice(...rangeOf(e, this.marks.length, (i) => this.marks[i].seq)).filter((mark) => mark.kind === 'action');
  }
}

/** Returns the range of indexes, end exclusive, whose values equal `value`. The values are in ascending order. */
function rangeOf(value, count, valueAt) {
  let from = 0;
  let above = count;
  while (from < above) {
    const middle = (from + above) >> 1;
    if (valueAt(middle) < value) from = middle + 1;
    else above = middle;
  }
  let end = from;
  while (end < count && valueAt(end) === value) end += 1;
  return [from, end];
}
