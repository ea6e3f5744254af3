// Search in the handbook: returns the matching sections, best first. Does not use the DOM.

/** Splits a query into its words. */
export const words = (query) => query.toLowerCase().split(/\s+/).filter(Boolean);

/** Returns the score of a section for these words; 0 unless it contains all of them. */
function score(entry, wanted) {
  const heading = entry.heading.toLowerCase();
  const page = entry.page.toLowerCase();
  const text = entry.text.toLowerCase();
  let points = 0;
  for (const word of wanted) {
    const found = (heading === word ? 60 : heading.startsWith(word) ? 40 : heading.includes(word) ? 25 : 0)
      + (page.includes(word) ? 10 : 0)
      + Math.min(text.split(word).length - 1, 5);
    if (!found) return 0;
    points += found;
  }
  return points;
}

/** Returns the sections that match a query, best first; `entries` is the content of /docs/search.json. Pure. */
export function search(entries, query, limit = 12) {
  const wanted = words(query);
  if (!wanted.length) return [];
  const found = entries.map((entry) => ({ entry, points: score(entry, wanted) })).filter(({ points }) => points > 0);
  return found.sort((a, b) => b.points - a.points).slice(0, limit).map(({ entry }) => entry);
}

/** Returns an excerpt of the text around the first match of these words. Pure. */
export function excerpt(text, wanted, length = 110) {
  const lower = text.toLowerCase();
  const first = Math.min(...wanted.map((word) => lower.indexOf(word)).filter((at) => at >= 0), text.length);
  const start = first === text.length || first < 30 ? 0 : text.lastIndexOf(' ', first - 20) + 1;
  return `${start ? '… ' : ''}${text.slice(start, start + length)}`;
}

/** Splits a text into `[piece, isMatch]`. Pure. */
export function splitMatches(text, wanted) {
  const escaped = wanted.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, '\\$&'));
  if (!escaped.length) return [[text, false]];
  return text.split(new RegExp(`(${escaped.join('|')})`, 'i')).map((piece, i) => [piece, i % 2 === 1]).filter(([piece]) => piece);
}
