// Search in the shown text of a run. A match can span several tokens.

/**
 * Returns the matches of `needle` in the first `count` rows, without regard to case, as `[first, offset, last]`: the first
 * row, the offset of the match in its text, and the last row. `text(i)` returns the text of a row, and `isShown(i)` tells if it is
 * shown. Pure.
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
 * matches. The last match is followed by the first one. Pure.
 */
export function nextMatch(matches, [row, offset], step) {
  const distance = ([first, start]) => first - row || start - offset;
  const next = step > 0 ? matches.findIndex((match) => distance(match) > 0) : matches.findLastIndex((match) => distance(match) < 0);
  if (next >= 0) return next;
  return step > 0 ? Math.min(0, matches.length - 1) : matches.length - 1;
}

/** The search field of a replay, with the number of the highlighted match. */
export class Search {
  #field;
  #result;
  #run;
  #text;
  /** First row of the highlighted match, or -1, and the offset of the match in its text. */
  #match = [-1, 0];

  /** `text` is the `Text` that highlights matches. `onLeave()` is called when the user leaves the field by Escape. */
  constructor(field, result, run, text, { signal, onLeave }) {
    this.#field = field;
    this.#result = result;
    this.#run = run;
    this.#text = text;
    field.addEventListener('input', () => this.#highlightFirst(), { signal });
    field.addEventListener('keydown', (event) => {
      if (event.key === 'Enter') {
        event.preventDefault();
        this.#highlightNext(event.shiftKey ? -1 : 1);
      } else if (event.key === 'Escape') {
        event.stopPropagation();
        field.value = '';
        this.#highlightFirst();
        onLeave();
      }
    }, { signal });
    // The user may have typed while the run was loading.
    if (field.value) this.#highlightFirst();
  }

  focus() {
    this.#field.focus();
    this.#field.select();
  }

  #highlightFirst() {
    this.#match = [-1, 0];
    this.#highlightNext(1);
  }

  /** Searches the shown text, and highlights the next match after the current one, or the previous one if `step` is -1. */
  #highlightNext(step) {
    const needle = this.#field.value;
    const isShown = (i) => this.#text.isShown(i);
    const matches = find(needle, this.#run.count, (i) => this.#run.text(i), isShown);
    const index = nextMatch(matches, this.#match, step);
    const [from, offset, to] = matches[index] ?? [-1, 0, -2];
    this.#match = [from, offset];
    this.#text.highlight(Array.from({ length: to - from + 1 }, (_, k) => from + k).filter(isShown));
    this.#result.textContent = matches.length ? `${index + 1}/${matches.length}` : needle && 'none';
  }
}
