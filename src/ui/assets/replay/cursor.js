// The cursor of a replay: its event, the row at it, and whether it follows a live run. Pure.

/** Number of events before the end of a live run among which the newest Added is looked for. */
const MAX_EVENTS_AFTER_ADDED = 8;

export class Cursor {
  /** Event of the cursor; `run.eventCount` is the end. */
  n;
  /** True while the cursor stays at the end of a live run. */
  isFollowing;
  /** Row that the user selected, or null. */
  selectedRow = null;
  #run;

  /** The cursor is at event `at`, or at the end if it is null, where it follows a live run. */
  constructor(run, at, isLive) {
    this.#run = run;
    this.isFollowing = isLive && at === null;
    this.keepAt(at ?? run.eventCount);
  }

  /** Moves to event `n` and keeps the selected row. */
  keepAt(n) { this.n = Math.max(0, Math.min(this.#run.eventCount, Math.round(n))); }

  /** Moves to event `n`, where no row is selected. At the end of a live run, the cursor follows it. */
  moveTo(n, isLive) {
    this.keepAt(n);
    this.selectedRow = null;
    this.isFollowing = isLive && this.atEnd;
  }

  /** True if the cursor is after the last event. */
  get atEnd() { return this.n === this.#run.eventCount; }

  /** The event at the cursor, or null if there are no events. While a live run is followed, it is the newest Added. */
  get event() {
    const run = this.#run;
    if (!run.eventCount) return null;
    const e = Math.min(this.n, run.eventCount - 1);
    if (!this.isFollowing) return e;
    for (let earlier = e; earlier > Math.max(-1, e - MAX_EVENTS_AFTER_ADDED); earlier -= 1) if (run.type(earlier) === 'Added') return earlier;
    return e;
  }

  /** The row of the answer that the event, or a later event of its step, added, or null. */
  get addedRow() {
    const e = this.event;
    if (e === null) return null;
    for (const event of this.#run.stepEvents(e).filter((other) => other >= e)) {
      const [from, to] = this.#run.rowsAddedAt(event);
      if (to > from && !this.#run.isPrompt(from)) return to - 1;
    }
    return null;
  }

  /** The selected row, or else the one at the event, or null. */
  get row() { return this.selectedRow ?? this.addedRow; }

  /** Index of the row in the final answer. Null at the end, and if the row belongs to the prompt or was removed. */
  get answerIndex() {
    const row = this.selectedRow ?? (this.atEnd ? null : this.addedRow);
    const index = row === null ? -1 : this.#run.answer().indexOf(row);
    return index < 0 ? null : index;
  }
}
