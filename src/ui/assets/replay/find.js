// Search in the visible text of a run. A match can span several tokens. Pure.

/**
 * Returns the rows of each match of `needle` (case-insensitive) as `[[firstRow, lastRow], …]` in reading order.
 * `text(i)` is a row's text, and `shown(i)` is true if it is visible.
 */
export function find(needle, count, text, shown, limit = 2000) {
  const wanted = needle.toLowerCase();
  if (!wanted) return [];
  const starts = [];
  const rows = [];
  let all = '';
  for (let i = 0; i < count; i += 1) {
    if (!shown(i)) continue;
    starts.push(all.length);
    rows.push(i);
    all += text(i).toLowerCase();
  }
  const hits = [];
  for (let at = all.indexOf(wanted); at >= 0 && hits.length < limit; at = all.indexOf(wanted, at + wanted.length)) {
    hits.push([rows[last(starts, at)], rows[last(starts, at + wanted.length - 1)]]);
  }
  return hits;
}

/** Returns the index of the last start at or before `at`. */
function last(starts, at) {
  let lo = 0;
  let hi = starts.length - 1;
  while (lo < hi) {
    const mid = (lo + hi + 1) >> 1;
    if (starts[mid] <= at) lo = mid;
    else hi = mid - 1;
  }
  return lo;
}
