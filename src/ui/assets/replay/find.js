// Search in the shown text of a run. A match can span several tokens. Pure.

/**
 * Returns the matches of `needle` in the first `count` rows, without regard to case, as ranges of rows `[first, last]`. `text(i)`
 * returns the text of a row, and `isShown(i)` tells if it is shown.
 */
export function find(needle, count, text, isShown, limit = 2000) {
  const wanted = needle.toLowerCase();
  if (!wanted) return [];
  let all = '';
  /** Rows by the offset in the whole text. */
  const rows = [];
  for (let i = 0; i < count; i += 1) {
    if (isShown(i)) all += text(i).toLowerCase();
    while (rows.length < all.length) rows.push(i);
  }
  const matches = [];
  for (let offset = all.indexOf(wanted); offset >= 0 && matches.length < limit; offset = all.indexOf(wanted, offset + wanted.length)) {
    matches.push([rows[offset], rows[offset + wanted.length - 1]]);
  }
  return matches;
}
