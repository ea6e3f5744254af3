// A run that is shown: its rows (one per token), events and marks. In this folder, `i` and `row` are indexes of rows, `e` and
// `seq` indexes of events, and `n` is an event or, after the last one, the end of the run.
import { parseColumns } from './columns.js';
import { EVENT_TYPES, FLAGS } from './rows.js';

export class Run {
  #rows;

  /** `rows` are the `Rows` of a stored run, or the `RunState` of a live one. */
  constructor(rows) {
    this.#rows = rows;
  }

  /** Reads a stored run from its columns. */
  static stored(buffer) { return new Run(parseColumns(buffer)); }

  /** Applies the next item of a live run. */
  apply(item) { this.#rows.apply(item); }

  /** Number of rows, including removed ones. */
  get count() { return this.#rows.count; }
  get eventCount() { return this.#rows.eventCount; }
  /** Actions, exceptions and log lines: `{seq, kind, mod_name, label}`. */
  get marks() { return this.#rows.marks; }

  text(i) { return this.#rows.text(i); }
  token(i) { return this.#rows.token[i]; }
  /** Position in the sequence. */
  pos(i) { return this.#rows.pos[i]; }
  /** Event that added the row. */
  addedAt(i) { return this.#rows.addedAt[i]; }
  /** First event at which the row is not visible anymore, or `NEVER`. */
  removedAt(i) { return this.#rows.removedAt[i]; }
  /** Milliseconds since the previous token. */
  dt(i) { return this.#rows.dt[i]; }
  logprob(i) { return this.#rows.logprob(i); }
  entropy(i) { return this.#rows.entropy(i); }
  rank(i) { return this.#rows.rank[i] || null; }
  /** The `FLAGS` of a row. Later items of a live run can change them. */
  flags(i) { return this.#rows.flags[i]; }
  isPrompt(i) { return this.#hasFlag(i, FLAGS.prompt); }
  isForced(i) { return this.#hasFlag(i, FLAGS.forced); }
  /** True for a token that ended the generation. */
  isStop(i) { return this.#hasFlag(i, FLAGS.stop); }
  /** True if an action of a mod forced, removed or influenced the token. */
  isTouched(i) { return this.#hasFlag(i, FLAGS.touched); }
  /** True if a mod raised an exception at the token. */
  isError(i) { return this.#hasFlag(i, FLAGS.error); }

  #hasFlag(i, flag) { return (this.flags(i) & flag) !== 0; }

  /** Returns the type of an event, such as `ForwardPass`. */
  type(e) { return EVENT_TYPES[this.#rows.kinds[e]]; }
  step(e) { return this.#rows.steps[e]; }
  /** True if the times of the events were recorded. */
  get isTimed() { return this.eventCount > 0 && this.time(this.eventCount - 1) > 0; }
  /** Time of an event in milliseconds since the run started. */
  time(e) { return this.#rows.times[e]; }

  /** Returns true if a row is part of the sequence at event `n`. */
  isVisible(i, n) { return this.addedAt(i) <= n && n < this.removedAt(i); }

  /** Returns the visible rows at event `n`, by their position. */
  sequence(n) {
    const rows = [];
    for (let i = 0; i < this.count; i += 1) if (this.isVisible(i, n)) rows[this.pos(i)] = i;
    return rows;
  }

  /** Returns the rows of the final answer, in order. */
  answer() {
    const rows = [];
    for (let i = 0; i < this.count; i += 1) if (!this.isPrompt(i) && this.isVisible(i, this.eventCount)) rows.push(i);
    return rows;
  }

  /** Returns the number of tokens in the answer at event `n`. */
  answerLength(n) {
    let count = 0;
    for (let i = 0; i < this.count; i += 1) if (!this.isPrompt(i) && this.isVisible(i, n)) count += 1;
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
