// The sampling stages of a step as a funnel: one bar per stage, whose height is the number of candidates left. For each
// candidate, the stages that it passed are filled.

const NS = 'http://www.w3.org/2000/svg';
const STEP = 7;
const HEIGHT = 14;

/** Returns the number of stages that a candidate of `explain` passed. */
export function passed(row, stages) {
  if (row.chosen || row.sampler !== null) return stages.length;
  const at = row.byMod ? 0 : stages.findIndex((stage) => stage.name === row.why);
  return Math.max(0, at);
}

/** Returns the heights of the bars: the logarithm of the number of candidates, from 0.15 to 1. */
export function heights(stages) {
  const most = Math.log1p(Math.max(1, ...stages.map((stage) => stage.left)));
  return stages.map((stage) => Math.max(0.15, Math.log1p(stage.left) / most));
}

/** Returns the sentence for screen readers and the tooltip. */
export function sentence(row, stages) {
  const count = passed(row, stages);
  const names = stages.map((stage) => `${stage.name} (${stage.left} left)`);
  const through = count ? `passed ${names.slice(0, count).join(', ')}` : 'passed no stage';
  return count < stages.length ? `${through}; removed by ${row.byMod ? row.why.replace(/^\w+ by /, '') : names[count]}` : through;
}

function element(tag, attributes, ...children) {
  const el = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) el.setAttribute(name, value);
  el.append(...children);
  return el;
}

/** Draws the funnel of a candidate. */
export function funnel(row, stages) {
  const count = passed(row, stages);
  const text = sentence(row, stages);
  const title = element('title', {});
  title.textContent = text;
  const bars = heights(stages).map((height, i) => element('rect', {
    x: i * STEP, y: (HEIGHT * (1 - height)) / 2, width: STEP - 1, height: HEIGHT * height, class: i < count ? 'kept' : i === count ? 'cut' : 'rest',
  }));
  return element('svg', { class: 'funnel', viewBox: `0 0 ${stages.length * STEP} ${HEIGHT}`, width: stages.length * STEP, height: HEIGHT, role: 'img', 'aria-label': text }, title, ...bars);
}
