// Search in the sections of the handbook, `{heading, page, text, slug, anchor}` in `/docs/search.json`. Pure.

/** Splits a query into its words. */
export const words = (query) => query.toLowerCase().split(/\s+/).filter(Boolean);

/** Returns the score of a section for the words `wanted`, or 0 if one of them is missing. */
function score(section, wanted) {
  const heading = section.heading.toLowerCase();
  const page = section.page.toLowerCase();
  const text = section.text.toLowerCase();
  let points = 0;
  for (const word of wanted) {
    const pointsOfWord = (heading === word ? 60 : heading.startsWith(word) ? 40 : heading.includes(word) ? 25 : 0)
      + (page.includes(word) ? 10 : 0)
      + Math.min(text.split(word).length - 1, 5);
    if (!pointsOfWord) return 0;
    points += pointsOfWord;
  }
  return points;
}

/** Returns the sections that contain all words of a query, best first. */
export function search(sections, query, limit = 12) {
  const wanted = words(query);
  if (!wanted.length) return [];
  const found = sections.map((section) => ({ section, points: score(section, wanted) })).filter(({ points }) => points > 0);
  return found.sort((a, b) => b.points - a.points).slice(0, limit).map(({ section }) => section);
}

/** Returns an excerpt of a text around the first match of one of the words `wanted`. */
export function excerpt(text, wanted, length = 110) {
  const lower = text.toLowerCase();
  const first = Math.min(...wanted.map((word) => lower.indexOf(word)).filter((offset) => offset >= 0), text.length);
  const start = first === text.length || first < 30 ? 0 : text.lastIndexOf(' ', first - 20) + 1;
  return `${start ? '… ' : ''}${text.slice(start, start + length)}`;
}

/** Splits a text into pieces `[text, isMatch]` at the matches of the words `wanted`. */
export function splitMatches(text, wanted) {
  const escaped = wanted.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, '\\$&'));
  if (!escaped.length) return [[text, false]];
  return text.split(new RegExp(`(${escaped.join('|')})`, 'i')).map((piece, i) => [piece, i % 2 === 1]).filter(([piece]) => piece);
}
