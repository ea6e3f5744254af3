// The sampling stages of a step as a funnel: one bar per stage, whose height is the number of candidates left. For each
// candidate, the stages that it passed are filled, and the one that removed it is marked.
import { h } from '../dom.js';
import { percent } from './candidates.js';

const NS = 'http://www.w3.org/2000/svg';
/** Width of a bar with the space after it. */
const BAR_WIDTH = 7;
const HEIGHT = 14;

/** Returns the number of stages that a candidate of `candidateTable` passed. */
export function passedCount(row, stages) {
  if (row.chosen || row.sampler !== null) return stages.length;
  return row.removedBy[0] ?? 0;
}

/** Returns true if the record tells where a candidate was removed, or that it was kept. */
export const isKnown = (row) => row.chosen || row.sampler !== null || row.byMod || row.removedBy.length > 0;

/** Returns the heights of the bars: the logarithm of the number of candidates, from 0.15 to 1. */
export function heights(stages) {
  const max = Math.log1p(Math.max(1, ...stages.map((stage) => stage.left)));
  return stages.map((stage) => Math.max(0.15, Math.log1p(stage.left) / max));
}

/** Returns the sentence for screen readers and the tooltip. */
export function sentence(row, stages) {
  const count = passedCount(row, stages);
  const names = stages.map((stage) => `${stage.name} (${stage.left} left)`);
  const through = count ? `passed ${names.slice(0, count).join(', ')}` : 'passed no stage';
  if (count === stages.length) return through;
  return `${through}; removed by ${row.byMod ? row.reason.replace(/^\w+ by /, '') : row.removedBy.map((i) => names[i]).join(' or ')}`;
}

function element(tag, attributes, ...children) {
  const el = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) el.setAttribute(name, value);
  el.append(...children);
  return el;
}

/** Draws the funnel of a candidate. */
export function funnel(row, stages) {
  const count = passedCount(row, stages);
  const text = sentence(row, stages);
  const title = element('title', {});
  title.textContent = text;
  const tone = (i) => (i < count ? 'kept' : !row.removedBy.includes(i) ? 'rest' : row.removedBy.length > 1 ? 'maybe' : 'cut');
  const bars = heights(stages).map((height, i) => element('rect', {
    x: i * BAR_WIDTH, y: (HEIGHT * (1 - height)) / 2, width: BAR_WIDTH - 1, height: HEIGHT * height, class: tone(i),
  }));
  return element('svg', { class: 'funnel', viewBox: `0 0 ${stages.length * BAR_WIDTH} ${HEIGHT}`, width: stages.length * BAR_WIDTH, height: HEIGHT, role: 'img', 'aria-label': text }, title, ...bars);
}

/** Returns sentences that say what the record of a step does not show about its stages. Pure. */
export function gaps({ rows, stages, isSampled, isForced, isPartial, hasSampler }) {
  if (!isSampled) return isForced ? ['A mod forced this token, so it passed no sampling stages.'] : [];
  if (!stages.length) return ['The sampling stages of this step were not recorded.'];
  const out = [];
  if (!hasSampler) out.push('The distribution after the stages was not recorded, so the funnels of the other candidates are missing.');
  if (rows.some((row) => row.removedBy.length > 1)) out.push('Where several stages are named, the recorded counts do not tell which of them removed the candidate.');
  if (isPartial) out.push(`Of the ${stages.at(-1).left} candidates after the stages, only the most probable ones were recorded${rows.every(isKnown) ? '' : '; a candidate without funnel may be one of the others'}.`);
  return out;
}

/** Draws the stages of a step with the number of candidates left after each, and what the record does not show. */
export const stageList = (candidates) => [
  candidates.stages.length ? h('div', { class: 'sampling-stages' }, 'sampler', candidates.stages.map((s, i) => h('span', { class: i === candidates.stages.length - 1 ? 'last' : null }, `${s.name} → ${s.left}`))) : '',
  ...gaps(candidates).map((text) => h('p', { class: 'hint' }, text)),
];

/** Returns the table cell of a probability, with a bar; `none` is the text if it is null. */
export function probabilityCell(p, none) {
  if (p === null) return h('td', { class: 'hint' }, none);
  const cell = h('td', { class: 'probability' }, percent(p));
  cell.style.setProperty('--p', p.toFixed(4));
  return cell;
}

/** Draws the reason for a candidate's removal, if any, and its funnel. */
export const removalReason = (row, stages, chosen) => [row.chosen ? chosen : row.reason, stages.length && isKnown(row) ? [' ', funnel(row, stages)] : null];
