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
  // An event removes what stands last, so branches nest or lie apart: what is open at a branch's beginning encloses it.
  const open = [];
  for (const b of [...all].sort((x, y) => x.first - y.first || y.last - x.last)) {
    while (open.length && open.at(-1).last < b.first) open.pop();
    b.parent = open.at(-1) ?? null;
    open.push(b);
  }
  return all;
}

/** Whether a branch's chip stands in the text at event `n`: it has died, and no folded branch around it has. */
export function chipVisible(branch, n, isOpen) {
  if (branch.died > n) return false;
  for (let p = branch.parent; p; p = p.parent) if (p.died <= n && !isOpen(p)) return false;
  return true;
}
