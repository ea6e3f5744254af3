// Removals: sets of rows that one event removed. Pure.
import { NEVER } from './rows.js';

/** Returns all removals in the order of their last rows: `[{removedAt, first, last, count, parent}]`; `parent` is the enclosing removal. */
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
  // An event removes the last tokens of the sequence, so removals are nested or disjoint: a removal that has not ended at
  // another's start encloses it.
  const open = [];
  for (const removal of [...all].sort((x, y) => x.first - y.first || y.last - x.last)) {
    while (open.length && open.at(-1).last < removal.first) open.pop();
    removal.parent = open.at(-1) ?? null;
    open.push(removal);
  }
  return all;
}

/** Returns true if the chip of a removal is visible at event `n`: the removal has happened, and no folded removal encloses it. Pure. */
export function isChipVisible(removal, n, isOpen) {
  if (removal.removedAt > n) return false;
  for (let p = removal.parent; p; p = p.parent) if (p.removedAt <= n && !isOpen(p)) return false;
  return true;
}
