// Removals: the rows that one event removed, such as those of a backtrack, and the chips in the text that fold and unfold them.
import { h } from '../dom.js';
import { NEVER } from './run-columns.js';

/**
 * Returns the removals of a run in the order of their last rows: `[{removedAt, first, last, count, parent}]`, with their first
 * and last row. `parent` is the removal that encloses it, or null. Pure.
 */
export function findRemovals(count, removedAt) {
  const byEvent = new Map();
  for (let i = 0; i < count; i += 1) {
    const event = removedAt(i);
    if (event === NEVER) continue;
    const removal = byEvent.get(event);
    if (removal) {
      removal.last = i;
      removal.count += 1;
    } else byEvent.set(event, { removedAt: event, first: i, last: i, count: 1, parent: null });
  }
  const all = [...byEvent.values()].sort((a, b) => a.last - b.last || b.first - a.first);
  // An event removes the last tokens of the sequence, so removals are nested or disjoint. `enclosing` are those whose rows are
  // around the current removal, the outermost one first.
  const enclosing = [];
  for (const removal of [...all].sort((x, y) => x.first - y.first || y.last - x.last)) {
    while (enclosing.length && enclosing.at(-1).last < removal.first) enclosing.pop();
    removal.parent = enclosing.at(-1) ?? null;
    enclosing.push(removal);
  }
  return all;
}

/**
 * Returns true if the chip of a removal is visible at event `n`: the removal has happened, and it is not inside another one
 * that is folded. `isUnfolded(removal)` tells if a removal is unfolded. Pure.
 */
export function isChipVisible(removal, n, isUnfolded) {
  if (removal.removedAt > n) return false;
  for (let outer = removal.parent; outer; outer = outer.parent) if (outer.removedAt <= n && !isUnfolded(outer)) return false;
  return true;
}

/** The chips of a run: buttons after removed rows that fold and unfold them. */
export class RemovalChips {
  #run;
  #removals = [];
  #removalByLastRow = new Map();
  /** Chips by the event of the removal. */
  #chips = new Map();
  /** Events whose removed rows the user has unfolded. */
  #unfolded = new Set();
  #n = 0;
  #showRemoved = false;

  constructor(run) {
    this.#run = run;
  }

  /** Finds the removals again, because rows may have been removed. Returns the last rows of those that have no chip yet. */
  refresh() {
    this.#removals = findRemovals(this.#run.count, (i) => this.#run.removedAt(i));
    this.#removalByLastRow = new Map(this.#removals.map((removal) => [removal.last, removal]));
    return this.#removals.filter(({ removedAt }) => !this.#chips.has(removedAt)).map(({ last }) => last);
  }

  /** Adds the chip of the removal whose last row is `i` after the span of that row, if there is one without a chip. */
  add(i, span) {
    const removal = this.#removalByLastRow.get(i);
    if (!removal || this.#chips.has(removal.removedAt)) return;
    const names = this.#run.actionsAt(removal.removedAt - 1).map((mark) => mark.mod_name);
    const chip = h('button', { type: 'button', class: 'chip', title: `${removal.count} tokens removed${names.length ? ` by ${names.join(', ')}` : ''}: show or hide them` }, `⌫ ${removal.count}`, h('span', { class: 'visually-hidden' }, ' tokens removed'));
    chip._removedAt = removal.removedAt;
    this.#chips.set(removal.removedAt, chip);
    span.after(chip);
    this.#update(removal);
  }

  /** Returns true if the user has unfolded the rows that an event removed. */
  isUnfolded(removedAt) { return this.#unfolded.has(removedAt); }

  /** Folds or unfolds the rows that an event removed. */
  toggle(removedAt) {
    if (!this.#unfolded.delete(removedAt)) this.#unfolded.add(removedAt);
  }

  /** Updates the chips at event `n`, where all removals are unfolded if `showRemoved`. Returns the last rows of those with visible chips. */
  update(n, showRemoved) {
    this.#n = n;
    this.#showRemoved = showRemoved;
    return this.#removals.filter((removal) => this.#update(removal)).map(({ last }) => last);
  }

  /** Updates the chip of a removal, if it exists. Returns true if the chip is visible. */
  #update(removal) {
    const isUnfolded = ({ removedAt }) => this.#showRemoved || this.#unfolded.has(removedAt);
    const isVisible = isChipVisible(removal, this.#n, isUnfolded);
    const chip = this.#chips.get(removal.removedAt);
    if (chip) {
      const expanded = String(isUnfolded(removal));
      if (chip.hidden === isVisible) chip.hidden = !isVisible;
      if (chip.ariaExpanded !== expanded) chip.ariaExpanded = expanded;
    }
    return isVisible;
  }
}
