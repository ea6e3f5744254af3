// A run of the page: rows, events and marks, from stored columns or from items of a live run.
import { parseColumns } from './columns.js';
import { EVENT_TYPES } from './rows.js';

export class Run {
  #rows;

  /** `rows` are those of stored columns, or a RunState, which grows. */
  constructor(rows) {
    this.#rows = rows;
  }

  /** Reads a stored run from its columns. */
  static stored(buffer) { return new Run(parseColumns(buffer)); }

  /** Applies the next item of a live run. */
  apply(item) { this.#rows.apply(item); }

  /** Number of rows ever created. */
  get count() { return this.#rows.count; }
  get eventCount() { return this.#rows.eventCount; }
  get marks() { return this.#rows.marks; }

  text(i) { return this.#rows.text(i); }
  token(i) { return this.#rows.token[i]; }
  pos(i) { return this.#rows.pos[i]; }
  addedAt(i) { return this.#rows.addedAt[i]; }
  removedAt(i) { return this.#rows.removedAt[i]; }
  dt(i) { return this.#rows.dt[i]; }
  logprob(i) { return this.#rows.logprob(i); }
  entropy(i) { return this.#rows.entropy(i); }
  rank(i) { return this.#rows.rank[i] || null; }
  isPrompt(i) { return (this.#rows.flags[i] & 1) !== 0; }
  isForced(i) { return (this.#rows.flags[i] & 2) !== 0; }
  isStop(i) { return (this.#rows.flags[i] & 4) !== 0; }
  isTouched(i) { return (this.#rows.flags[i] & 16) !== 0; }
  isError(i) { return (this.#rows.flags[i] & 32) !== 0; }
  isSampled(i) { return (this.#rows.flags[i] & 64) !== 0; }

  /** Returns the type of an event, such as `ForwardPass`. */
  type(e) { return EVENT_TYPES[this.#rows.kinds[e]]; }
  step(e) { return this.#rows.steps[e]; }
  /** True if the trace has times. */
  get isTimed() { return this.eventCount > 0 && this.time(this.eventCount - 1) > 0; }
  /** Milliseconds since the run started. */
  time(e) { return this.#rows.times[e]; }

  /** Returns the row at a position of the sequence at event `n`, or null. */
  rowAt(n, pos) {
    for (let i = this.count - 1; i >= 0; i -= 1) {
      if (this.pos(i) === pos && this.addedAt(i) <= n && n < this.removedAt(i)) return i;
    }
    return null;
  }

  /** Returns the rows at event `n` by their position. */
  sequence(n) {
    const rows = [];
    for (let i = 0; i < this.count; i += 1) if (this.addedAt(i) <= n && n < this.removedAt(i)) rows[this.pos(i)] = i;
    return rows;
  }

  /** Returns the rows of the answer at the end, in order. */
  answer() {
    const { addedAt, removedAt, flags } = this.#rows;
    const [n, rows] = [this.eventCount, []];
    for (let i = 0; i < this.count; i += 1) if (addedAt[i] <= n && n < removedAt[i] && (flags[i] & 1) === 0) rows.push(i);
    return rows;
  }

  /** Returns the number of tokens in the answer at event `n`. */
  answerLength(n) {
    const { addedAt, removedAt, flags } = this.#rows;
    let count = 0;
    for (let i = 0; i < this.count; i += 1) if (addedAt[i] <= n && n < removedAt[i] && (flags[i] & 1) === 0) count += 1;
    return count;
  }

  /** Returns the events of the step of event `e`, in order. */
  stepEvents(e) {
    if (e < 0 || e >= this.eventCount) return [];
    const step = this.step(e);
    let from = e;
    let to = e;
    while (from > 0 && this.step(from - 1) === step) from -= 1;
    while (to + 1 < this.eventCount && this.step(to + 1) === step) to += 1;
    return Array.from({ length: to - from + 1 }, (_, k) => from + k);
  }

  /** Returns the rows that an event added: the first one, and the one after the last. */
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
