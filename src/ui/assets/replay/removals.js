// Removals: the rows that one event removed, such as those of a backtrack. Pure.
import { NEVER } from './rows.js';

/**
 * Returns the removals of a run in the order of their last rows: `[{removedAt, first, last, count, parent}]`, with their first
 * and last row. `parent` is the removal that encloses it, or null.
 */
export function removals(count, removedAt) {
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
 * that is folded. `isUnfolded(removal)` tells if a removal is unfolded.
 */
export function isChipVisible(removal, n, isUnfolded) {
  if (removal.removedAt > n) return false;
  for (let outer = removal.parent; outer; outer = outer.parent) if (outer.removedAt <= n && !isUnfolded(outer)) return false;
  return true;
}
