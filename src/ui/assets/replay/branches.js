// A branch is the set of rows that one event removed. Pure.

/** `died` of a row that is never removed. */
export const NEVER = 0xffff_ffff;

/** Returns all branches, by the row they end at: `[{died, first, last, count, parent}]`; `parent` is the enclosing one. */
export function branches(count, died) {
  const by = new Map();
  for (let i = 0; i < count; i += 1) {
    const d = died(i);
    if (d === NEVER) continue;
    const b = by.get(d);
    if (b) {
      b.last = i;
      b.count += 1;
    } else by.set(d, { died: d, first: i, last: i, count: 1, parent: null });
  }
  const all = [...by.values()].sort((a, b) => a.last - b.last || b.first - a.first);
  // An event removes the last tokens, so branches nest or are disjoint: a branch that is open at another's start
  // encloses it.
  const open = [];
  for (const b of [...all].sort((x, y) => x.first - y.first || y.last - x.last)) {
    while (open.length && open.at(-1).last < b.first) open.pop();
    b.parent = open.at(-1) ?? null;
    open.push(b);
  }
  return all;
}

/** Returns true if a branch's chip is visible at event `n`: the branch was removed, and no folded branch encloses it. Pure. */
export function chipVisible(branch, n, isOpen) {
  if (branch.died > n) return false;
  for (let p = branch.parent; p; p = p.parent) if (p.died <= n && !isOpen(p)) return false;
  return true;
}
