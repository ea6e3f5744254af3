// Search in the sections of the handbook, `{heading, page, text, slug, anchor}` in `/docs/search.json`. Pure.

/** Words that are left out of a query, unless it has no others. */
const STOP_WORDS = new Set(['a', 'an', 'and', 'are', 'as', 'at', 'by', 'can', 'do', 'does', 'for', 'from', 'how', 'i', 'in', 'is', 'it', 'of', 'on', 'or', 'the', 'to', 'what', 'with']);

/** Splits a query into its words. */
export function words(query) {
  const all = query.toLowerCase().split(/\s+/).filter(Boolean);
  const important = all.filter((word) => !STOP_WORDS.has(word));
  return important.length ? important : all;
}

/** Points of a whole word, of the beginning of a word, and of another part of a word. */
const LEVELS = [1, 0.5, 0.05];
/** Factor of a word that joins the words of the query. */
const JOINED_FACTOR = 4;
/** Factors of the sections of the HTTP reference, and of those that describe a type. */
const REFERENCE_FACTOR = 0.5;
const TYPE_FACTOR = 0.1;

/** Endings with which a word is still the same one. */
const ENDINGS = ['', 'd', 'e', 'ed', 'es', 'ing', 's'];

const isLetter = (character) => /[\p{L}\p{N}]/u.test(character ?? '');

/** Returns a word of a query without its ending. */
const stemOf = (word) => word.replace(/(?<=\w{4})(e|ed|es|ing|s)$/, '');

/**
 * Returns the matches of a word in a text in lower case, `{at, level}`. The level is 0 for a whole word, possibly with another ending, 1 for the
 * beginning of a word, and 2 for another part of one.
 */
function matchesIn(text, word) {
  const matches = [];
  const stem = stemOf(word);
  for (let at = text.indexOf(stem); at >= 0; at = text.indexOf(stem, at + stem.length)) {
    const end = at + stem.length;
    const isStart = !isLetter(text[at - 1]) || !isLetter(stem[0]);
    const isWhole = !isLetter(stem.at(-1)) || ENDINGS.includes(/^[\p{L}\p{N}]*/u.exec(text.slice(end, end + 8))[0]);
    if (isStart) matches.push({ at, level: isWhole ? 0 : 1 });
    else if (text.startsWith(word, at)) matches.push({ at, level: 2 });
  }
  return matches;
}

/** Returns the points of the best match of a word in a text, from 0 to 1. */
const bestMatch = (matches) => LEVELS[Math.min(...matches.map(({ level }) => level))] ?? 0;

/** Returns the match of a word with a section, `{points, best}`; `best` is the points of its best match. */
function matchWord({ heading, page, text, anchor }, word) {
  const [inHeading, inPage, inText] = [heading, page, text].map((part) => matchesIn(part.toLowerCase(), word));
  const isHeading = anchor.replace(/^-+/, '') === word.replace(/^-+/, '');
  const frequency = inText.reduce((sum, { level }) => sum + LEVELS[level], 0);
  return {
    points: bestMatch(inHeading) * (isHeading ? 20 : 10) + bestMatch(inPage) * 4 + frequency / (frequency + 1) * 4,
    best: Math.max(...[inHeading, inPage, inText].map(bestMatch)),
  };
}

/** Returns the factor of a section, which is less than 1 if it is generated for the HTTP reference. */
const factorOf = ({ slug, heading }) => (slug !== 'reference' ? 1 : /^[A-Z]\w+$/.test(heading) ? TYPE_FACTOR : REFERENCE_FACTOR);

/**
 * Returns the points of the sections for words, in their order. A word counts more if fewer sections contain it, and a section
 * counts less if it lacks some of the words.
 */
function score(sections, wanted) {
  const matches = wanted.map((word) => sections.map((section) => matchWord(section, word)));
  const weights = matches.map((all) => Math.log(1 + sections.length / (1 + all.filter(({ best }) => best === 1).length)));
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  return sections.map((section, i) => {
    const sum = (value) => matches.reduce((all, match, w) => all + weights[w] * match[i][value], 0);
    return sum('points') * (sum('best') / total) ** 2 * factorOf(section);
  });
}

/** Returns the sections that match a query, best first. */
export function search(sections, query, limit = 12) {
  const wanted = words(query);
  if (!wanted.length) return [];
  // `log in` also finds `login`.
  const joined = query.toLowerCase().replace(/\s+/g, '');
  const ofWords = score(sections, wanted);
  const ofJoined = wanted[0] === joined ? ofWords : score(sections, [joined]).map((points) => points * JOINED_FACTOR);
  const found = sections.map((section, i) => ({ section, points: Math.max(ofWords[i], ofJoined[i]) })).filter(({ points }) => points > 0);
  return found.sort((a, b) => b.points - a.points).slice(0, limit).map(({ section }) => section);
}

/** Returns an excerpt of a text around the first of the best matches of the words `wanted`. */
export function excerpt(text, wanted, length = 110) {
  const matches = wanted.flatMap((word) => matchesIn(text.toLowerCase(), word)).sort((a, b) => a.level - b.level || a.at - b.at);
  const first = matches[0]?.at ?? 0;
  const start = first < 30 ? 0 : text.lastIndexOf(' ', first - 20) + 1;
  return `${start ? '… ' : ''}${text.slice(start, start + length)}`;
}

/** Splits a text into pieces `[text, isMatch]` at the words that begin with one of `wanted`. */
export function splitMatches(text, wanted) {
  const escaped = wanted.map((word) => (isLetter(word[0]) ? '(?<![\\p{L}\\p{N}])' : '') + word.replace(/[.*+?^${}()|[\]\\]/g, '\\$&'));
  if (!escaped.length) return [[text, false]];
  return text.split(new RegExp(`(${escaped.join('|')})`, 'iu')).map((piece, i) => [piece, i % 2 === 1]).filter(([piece]) => piece);
}
