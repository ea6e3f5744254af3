// Search in the shown text of a run. A match can span several tokens. Pure.

/**
 * Returns the matches of `needle` in the first `count` rows, without regard to case, as `[first, offset, last]`: the first
 * row, the offset of the match in its text, and the last row. `text(i)` returns the text of a row, and `isShown(i)` tells if it is shown.
 */
export function find(needle, count, text, isShown, limit = 2000) {
  const wanted = needle.toLowerCase();
  if (!wanted) return [];
  let all = '';
  /** Rows by the offset in the whole text. */
  const rows = [];
  /** Offsets of rows in the whole text. */
  const starts = [];
  for (let i = 0; i < count; i += 1) {
    starts[i] = all.length;
    if (isShown(i)) all += text(i).toLowerCase();
    while (rows.length < all.length) rows.push(i);
  }
  const matches = [];
  for (let offset = all.indexOf(wanted); offset >= 0 && matches.length < limit; offset = all.indexOf(wanted, offset + wanted.length)) {
    matches.push([rows[offset], offset - starts[rows[offset]], rows[offset + wanted.length - 1]]);
  }
  return matches;
}

/**
 * Returns the index of the next match after the one at `[row, offset]`, or of the previous one if `step` is -1; -1 without
 * matches. The last match is followed by the first one.
 */
export function nextMatch(matches, [row, offset], step) {
  const distance = ([first, start]) => first - row || start - offset;
  const next = step > 0 ? matches.findIndex((match) => distance(match) > 0) : matches.findLastIndex((match) => distance(match) < 0);
  if (next >= 0) return next;
  return step > 0 ? Math.min(0, matches.length - 1) : matches.length - 1;
}
