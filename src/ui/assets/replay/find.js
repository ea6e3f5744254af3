// Search in the shown text of a run. A match can span several tokens. Pure.

/**
 * Returns the matches of `needle` in the first `count` rows, without regard to case, as ranges of rows `[first, last]`. `text(i)`
 * returns the text of a row, and `isShown(i)` tells if it is shown.
 */
export function find(needle, count, text, isShown, limit = 2000) {
  const wanted = needle.toLowerCase();
  if (!wanted) return [];
  /** Position of each shown row in the whole text. */
  const starts = [];
  const rows = [];
  let all = '';
  for (let i = 0; i < count; i += 1) {
    if (!isShown(i)) continue;
    starts.push(all.length);
    rows.push(i);
    all += text(i).toLowerCase();
  }
  const matches = [];
  for (let offset = all.indexOf(wanted); offset >= 0 && matches.length < limit; offset = all.indexOf(wanted, offset + wanted.length)) {
    matches.push([rows[lastStart(starts, offset)], rows[lastStart(starts, offset + wanted.length - 1)]]);
  }
  return matches;
}

/** Returns the index of the last start at or before an offset, by binary search. */
function lastStart(starts, offset) {
  let low = 0;
  let high = starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= offset) low = middle;
    else high = middle - 1;
  }
  return low;
}
