// A branch is the set of rows that one event removed. Pure.

/** Row is alive to the end. */
export const NEVER = 0xffff_ffff;

/** All branches, by the row they end at: `[{died, first, last, count, parent}]`; `parent` is the enclosing one. */
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
  for (const b of all) {
    for (const p of all) {
      if (p !== b && p.first <= b.first && p.last >= b.last && (!b.parent || p.last - p.first < b.parent.last - b.parent.first)) b.parent = p;
    }
  }
  return all;
}

/** Whether a branch's chip stands in the text at event `n`: it has died, and no folded branch around it has. */
export function chipVisible(branch, n, isOpen) {
  if (branch.died > n) return false;
  for (let p = branch.parent; p; p = p.parent) if (p.died <= n && !isOpen(p)) return false;
  return true;
}
