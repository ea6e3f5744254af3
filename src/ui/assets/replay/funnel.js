// Elements for the candidates of a step. The funnel of a candidate shows the sampling stages as bars, whose heights are the
// numbers of candidates left. The stages that the candidate passed are filled, and the one that removed it is marked.
import { h } from '../dom.js';
import { percent } from './candidates.js';

const SVG_NAMESPACE = 'http://www.w3.org/2000/svg';
/** Width of a bar with the space after it, in pixels. */
const BAR_WIDTH = 7;
const HEIGHT = 14;

/** Returns the number of stages that a candidate, a row of `explainCandidates`, passed. Pure. */
export function passedCount(row, stages) {
  if (row.chosen || row.sampler !== null) return stages.length;
  return row.removedBy[0] ?? 0;
}

/** Returns true if the record tells where a candidate was removed, or that it was not removed. */
const isKnown = (row) => row.chosen || row.sampler !== null || row.byMod || row.removedBy.length > 0;

/** Returns the heights of the bars, from 0.15 to 1, on a logarithmic scale of the numbers of candidates. Pure. */
export function heights(stages) {
  const max = Math.log1p(Math.max(1, ...stages.map((stage) => stage.left)));
  return stages.map((stage) => Math.max(0.15, Math.log1p(stage.left) / max));
}

/** Returns the description of a funnel, for its tooltip and for screen readers. Pure. */
export function description(row, stages) {
  const count = passedCount(row, stages);
  const names = stages.map((stage) => `${stage.name} (${stage.left} left)`);
  const passed = count ? `passed ${names.slice(0, count).join(', ')}` : 'passed no stage';
  if (count === stages.length) return passed;
  return `${passed}; removed by ${row.byMod ? row.reason.replace(/^\w+ by /, '') : row.removedBy.map((i) => names[i]).join(' or ')}`;
}

function svgElement(tag, attributes, ...children) {
  const el = document.createElementNS(SVG_NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) el.setAttribute(name, value);
  el.append(...children);
  return el;
}

/** Returns the class of a bar for a candidate that passed `count` stages. */
function barClass(row, count, i) {
  if (i < count) return 'passed';
  if (!row.removedBy.includes(i)) return 'not-reached';
  return row.removedBy.length > 1 ? 'maybe-removed' : 'removed';
}

/** Returns the funnel of a candidate. */
function funnel(row, stages) {
  const count = passedCount(row, stages);
  const text = description(row, stages);
  const bars = heights(stages).map((height, i) => svgElement('rect', {
    x: i * BAR_WIDTH, y: (HEIGHT * (1 - height)) / 2, width: BAR_WIDTH - 1, height: HEIGHT * height, class: barClass(row, count, i),
  }));
  return svgElement('svg', { class: 'funnel', viewBox: `0 0 ${stages.length * BAR_WIDTH} ${HEIGHT}`, width: stages.length * BAR_WIDTH, height: HEIGHT, role: 'img', 'aria-label': text }, svgElement('title', {}, text), ...bars);
}

/** Returns sentences on what is not recorded about the stages of a step. Pure. */
export function missingRecords({ rows, stages, isSampled, isForced, isPartial, hasSampler }) {
  if (!isSampled) return isForced ? ['A mod forced this token, so it passed no sampling stages.'] : [];
  if (!stages.length) return ['The sampling stages of this step were not recorded.'];
  const sentences = [];
  if (!hasSampler) sentences.push('The distribution after the stages was not recorded, so the funnels of the other candidates are missing.');
  if (rows.some((row) => row.removedBy.length > 1)) sentences.push('Where several stages are named, the recorded counts do not tell which of them removed the candidate.');
  if (isPartial) sentences.push(`Of the ${stages.at(-1).left} candidates after the stages, only the most probable ones were recorded${rows.every(isKnown) ? '' : '; a candidate without a funnel may be one of the others'}.`);
  return sentences;
}

/**
 * Returns elements for the stages of a step, with the number of candidates left after each, and for what is not recorded about
 * them. `candidates` is the result of `explainCandidates`.
 */
export function stageList(candidates) {
  const { stages } = candidates;
  const stageElement = ({ name, left }, i) => h('span', { class: i === stages.length - 1 ? 'last' : null }, `${name} → ${left}`);
  return [
    stages.length ? h('div', { class: 'sampling-stages' }, 'sampler', stages.map(stageElement)) : '',
    ...missingRecords(candidates).map((text) => h('p', { class: 'hint' }, text)),
  ];
}

/** Returns the head of a table of candidates, as `explainCandidates` returns them. `title` is that of the column of tokens. */
export const candidateHead = ({ hasMods, hasSampler }, title) => h('thead', {}, h('tr', {},
  h('th', { scope: 'col' }, title), h('th', { scope: 'col' }, 'model'),
  hasMods && h('th', { scope: 'col' }, 'after mods'), hasSampler && h('th', { scope: 'col' }, 'drawn from'),
  h('th', { scope: 'col' }, h('span', { class: 'visually-hidden' }, 'removed by'))));

/** Returns the table cell of a probability, with a bar; `none` is the text if it is null. */
export function probabilityCell(p, none) {
  if (p === null) return h('td', { class: 'hint' }, none);
  const cell = h('td', { class: 'probability' }, percent(p));
  cell.style.setProperty('--p', p.toFixed(4));
  return cell;
}

/** Returns what happened to a candidate, as text and funnel. The text is `chosenText` for the drawn one, and else the reason of its removal. */
export const outcome = (row, stages, chosenText) => [
  row.chosen ? chosenText : row.reason,
  stages.length && isKnown(row) ? [' ', funnel(row, stages)] : null,
];
