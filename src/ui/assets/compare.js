// The comparison of two runs, A and B, token by token. Equal text is shown once, differing text side by side. One cursor moves
// through both runs. A panel shows both distributions at the cursor, and a strip shows how far they diverge at every step.
import { AlignedText, FIRST_TOKENS } from './compare-text.js';
import { Alignment, Coalescer, numberTokens } from './diff.js';
import { candidatesByStep, divergence, settingsDifferences, settingText } from './divergence.js';
import { base, fetchApi, runPath } from './api.js';
import { palette, prepareCanvas, scheduleDrawing } from './canvas.js';
import { fact, h, nextFrame } from './dom.js';
import { listenForShortcuts } from './keys.js';
import { explainCandidates } from './replay/candidates.js';
import { surprise } from './replay/color.js';
import { Events } from './replay/events.js';
import { probabilityCell } from './replay/funnel.js';
import { displayText } from './replay/glyphs.js';
import { Run } from './replay/run.js';
import { TextScroll } from './replay/text-scroll.js';
import { changeOf, sortFamily } from './replay/tree.js';

const root = document.querySelector('[data-compare]');
const textBox = document.querySelector('[data-diff]');
const scroll = new TextScroll(textBox);
const panel = document.querySelector('[data-panel]');
const problem = document.querySelector('[data-problem]');
const summary = document.querySelector('[data-summary]');
const MAX_CANDIDATES = 12;
/** Maximum rows that are added to the table of settings. */
const MAX_SETTINGS = 40;
/** Maximum links to other runs. */
const MAX_LINKS = 32;
/** Duration of a task that aligns tokens or creates their elements, in milliseconds. */
const TASK_MS = 16;
/** Events per request of candidates. */
const EVENTS_PER_REQUEST = 6000;
/** Loads one side: a run, and the rows of its final answer. */
async function loadSide(id) {
  const run = await Run.load(id);
  return { id, run, rows: run.answer(), events: new Events(id) };
}

/** Both sides, A and B, as `loadSide` returns them. */
let sides = [];
/** The `AlignedText`, or null before the runs are loaded. */
let text = null;
/** Divergence of the distributions at each step, or null where a side has no candidates; empty before they are loaded. */
let divergences = [];
/** Step of the cursor. */
let cursor = -1;
/** Index of the difference at the cursor, or -1. */
let currentDifference = -1;
/** Elements of the tokens at the cursor. */
let currentElements = [];
/** True if all differences are known. */
let isAligned = false;
/** Timer that delays the loading of candidates while the cursor moves. */
let timer = 0;

const canvas = h('canvas', { 'aria-hidden': 'true' });
const slider = h('input', { type: 'range', class: 'slider', min: '0', value: '0', step: '1', 'aria-label': 'Token on both sides', oninput: () => moveCursor(Number(slider.value)) });
const note = h('p', { class: 'hint num' });
const announcer = h('p', { class: 'visually-hidden', role: 'status' });

/** Aligns the runs and shows their tokens: the first ones before the first frame, and the rest in short tasks. */
async function alignAndShow() {
  // Ids alone do not identify tokens: models have different vocabularies, and traces of other engines may have no ids.
  const tokens = sides.map(({ run, rows }) => ({ count: rows.length, token: (k) => run.token(rows[k]), text: (k) => run.text(rows[k]) }));
  const alignment = new Alignment(...numberTokens(tokens));
  const coalescer = new Coalescer();
  text = new AlignedText(textBox, sides, { onStep: moveCursor, onDifference: selectDifference });
  const alignUntil = (end) => {
    while (!alignment.isDone && performance.now() < end) alignment.advance();
    text.add(coalescer.add(alignment.take(), alignment.isDone));
    slider.max = String(Math.max(0, text.steps.count - 1));
    isAligned = alignment.isDone;
    if (isAligned) summarize();
  };
  summary.textContent = 'Aligning…';
  do alignUntil(performance.now() + TASK_MS); while (!alignment.isDone && !text.differences.length);
  text.createNext({ count: 2 * FIRST_TOKENS });
  if (text.differences.length) selectDifference(0);
  else if (text.steps.count) moveCursor(text.steps.count - 1);
  let isComplete = false;
  while (!isComplete || !alignment.isDone) {
    await nextFrame();
    const end = performance.now() + TASK_MS;
    if (!alignment.isDone) alignUntil(end);
    isComplete = text.createNext({ end });
  }
}

/** Shows the number of differences, after all of them are known. */
function summarize() {
  const [a, b] = sides;
  const { equalCount } = text;
  const { length } = text.differences;
  summary.textContent = length
    ? `${length} difference${length === 1 ? '' : 's'} · ${equalCount} of ${Math.max(a.rows.length, b.rows.length)} tokens equal · first at token ${text.differences[0].block.a[0] + 1}`
    : `No difference: ${equalCount} tokens are equal.`;
  panel.querySelector('[data-heading]')?.replaceChildren(heading());
  redrawStrip();
}

/** Moves the cursor to a difference by its index, which wraps around. */
function selectDifference(index) {
  const { length } = text.differences;
  if (length) moveCursor(text.differences[(index + length) % length].from);
}

/** Moves the cursor of both sides to a step of the alignment. */
function moveCursor(step) {
  currentElements.forEach((element) => element?.classList.remove('current'));
  cursor = Math.max(0, Math.min(text.steps.count - 1, step));
  currentElements = text.elements(cursor);
  currentElements.forEach((element) => element?.classList.add('current'));
  slider.value = String(cursor);
  text.differences[currentDifference]?.el?.removeAttribute('aria-current');
  currentDifference = text.differenceAt(cursor);
  text.differences[currentDifference]?.el.setAttribute('aria-current', 'true');
  const element = currentElements[0] ?? currentElements[1];
  const details = element?.closest('details');
  if (details && !details.open) details.open = true;
  // If the text is a scrollable box, as on small screens, the page stays at its place.
  if (textBox.scrollHeight > textBox.clientHeight) scroll.reveal(element);
  else element?.scrollIntoView({ block: 'nearest' });
  showPosition();
  clearTimeout(timer);
  // For a side without a token at this step, its next token is shown: at the start of an insertion, both follow the same text.
  timer = setTimeout(() => {
    announcer.textContent = `${heading()}, ${slider.getAttribute('aria-valuetext')}`;
    loadCandidates(text.steps.next(cursor, 0), text.steps.next(cursor, 1));
  }, 60);
}

/** Shows the position of the cursor and the divergence there. */
function showPosition() {
  const [tokenOfA, tokenOfB] = text.steps.pair(cursor).map((index) => (index === null ? '–' : index + 1));
  const value = divergences[cursor] ?? null;
  const position = `token ${tokenOfA} of A, ${tokenOfB} of B${value === null ? '' : `, divergence at least ${value.toFixed(2)} bit`}`;
  slider.setAttribute('aria-valuetext', position);
  note.textContent = `${position}. The bars show a lower bound of the KL divergence D(A ‖ B) at each step, computed from the recorded candidates.`;
}

/** Loads and shows the candidates of both sides at the cursor, for the tokens with these indexes. */
async function loadCandidates(indexOfA, indexOfB) {
  const requested = cursor;
  panel.setAttribute('aria-busy', 'true');
  try {
    const [a, b] = await Promise.all([loadStep(sides[0], indexOfA), loadStep(sides[1], indexOfB)]);
    if (requested === cursor) showCandidates(a, b);
  } catch (error) {
    if (requested === cursor) panel.replaceChildren(h('section', {}, h('p', { class: 'err' }, `Loading the distributions failed: ${error.message}.`)));
  } finally {
    panel.removeAttribute('aria-busy');
  }
}

/**
 * Returns the recorded candidates of the token at an index of a side's answer: `{id, run, row, …}` with the fields of
 * `explainCandidates`. `row` is null if the answer has no such token.
 */
async function loadStep({ id, run, rows, events }, index) {
  const row = index === null ? undefined : rows[index];
  if (row === undefined) return { id, row: null, rows: [] };
  const [first, ...rest] = run.stepEvents(run.addedAt(row));
  const entries = await events.get(first, rest.at(-1) ?? first);
  return { id, run, row, ...explainCandidates(entries) };
}

/** Returns a function from the index of a token in a side's answer to the model's candidates for it. */
async function loadAllCandidates({ id, run, rows }) {
  const alternatives = [];
  for (let from = 0; from < run.eventCount; from += EVENTS_PER_REQUEST) {
    const query = new URLSearchParams({ from, to: from + EVENTS_PER_REQUEST });
    const response = await fetchApi(`${runPath(id)}/alternatives?${query}`);
    alternatives.push(...(await response.json()).alternatives);
  }
  const byStep = candidatesByStep(alternatives);
  return (index) => (index === null ? [] : byStep.get(run.step(run.addedAt(rows[index]))) ?? []);
}

/** Loads the candidates of both runs and shows their divergence. */
async function loadDivergences() {
  const [candidatesOfA, candidatesOfB] = await Promise.all(sides.map(loadAllCandidates));
  divergences = Array.from({ length: text.steps.count }, (_, step) => {
    const [indexOfA, indexOfB] = text.steps.pair(step);
    return divergence(candidatesOfA(indexOfA), candidatesOfB(indexOfB));
  });
  redrawStrip();
  if (cursor >= 0) showPosition();
}

/** Draws the strip: bars of the divergence, and a background color at differences. */
function drawStrip() {
  const drawing = prepareCanvas(canvas);
  if (!drawing || !text) return;
  const { context, width, height } = drawing;
  const colors = palette(['spark', 'accent-wash']);
  const stepWidth = width / Math.max(1, text.steps.count);
  context.fillStyle = colors['accent-wash'];
  for (const { from, end } of text.differences) context.fillRect(from * stepWidth, 0, Math.max(1, (end - from) * stepWidth), height);
  context.fillStyle = colors.spark;
  divergences.forEach((value, i) => {
    if (!value) return;
    const barHeight = Math.max(1, Math.sqrt(Math.min(1, value / 8)) * (height - 6));
    context.fillRect(i * stepWidth, height - barHeight, Math.max(1, stepWidth - (stepWidth > 4 ? 1 : 0)), barHeight);
  });
}

/** Adds the parameters and mods that differ to the table of settings. */
async function showSettings() {
  const [a, b] = await Promise.all(sides.map(async ({ events }) => (await events.get(0, 0))[0]?.event?.details?.prompt?.parameters ?? {}));
  const rendered = [...document.querySelectorAll('.settings th[scope=row]')].map((el) => el.textContent);
  const added = settingsDifferences(a, b, rendered).slice(0, MAX_SETTINGS);
  const shortened = (text) => (text.length > 200 ? `${text.slice(0, 200)}…` : text);
  document.querySelector('.settings tbody').append(...added.map(([name, ofA, ofB]) => h('tr', {},
    h('th', { scope: 'row' }, name), [ofA, ofB].map((value) => h('td', {}, shortened(settingText(name, value)))))));
}

/** Shows links that compare A with the runs of its family, and with the other runs that were selected in the list (`?with=`). */
async function showLinks() {
  const [a, b] = sides.map(({ id }) => id);
  const family = await (await fetchApi(`${runPath(a)}/family`)).json();
  const selected = new URL(location).searchParams.get('with')?.split(',').filter(Boolean) ?? [];
  const unrelated = selected.filter((id) => !family.runs.some((m) => m.run_id === id)).map((run_id, i) => ({ run_id, name: `selected run ${i + 1}` }));
  const others = [...sortFamily(family.runs), ...unrelated].filter((m) => m.run_id !== a);
  if (others.length < 2) return;
  const selection = selected.length ? { with: [...new Set([...selected, b])].join(',') } : {};
  const link = (m) => h('a', { class: 'button', 'aria-current': m.run_id === b ? 'true' : null, href: `${base}/compare?${new URLSearchParams({ a, b: m.run_id, ...selection })}` },
    m.name ?? changeOf(m), m.parent ? h('small', { class: 'hint' }, `step ${m.parent.step}`) : '');
  document.querySelector('.tools').before(h('nav', { class: 'links', 'aria-label': 'Compare A with' },
    h('span', { class: 'hint' }, 'Compare A with'), others.slice(0, MAX_LINKS).map(link)));
}

/** Returns the heading of the panel. */
const heading = () => (currentDifference < 0 ? 'Equal tokens' : `Difference ${currentDifference + 1}${isAligned ? ` of ${text.differences.length}` : ''}`);

/** Columns of probabilities that not every step has: field of a candidate, title, and field of the table that tells if it has them. */
const OPTIONAL_COLUMNS = [['mods', 'after mods', 'hasMods'], ['sampler', 'drawn from', 'hasSampler']];

/** Returns the token of a side, with a link to its event and its surprise. */
function tokenFact({ id, run, row }, name) {
  if (row === null) return fact(name, 'ended before');
  const bits = surprise(run, row);
  const link = h('a', { href: `${base}/runs/${encodeURIComponent(id)}?at=${run.addedAt(row)}` }, displayText(run.text(row)));
  return fact(name, [link, bits === null ? '' : ` ${bits.toFixed(2)} bit`]);
}

/** Shows the candidates of both sides in the panel; `a` and `b` are results of `loadStep`. */
function showCandidates(a, b) {
  /** Candidates of both sides by token: `{text, a, b}` with the row of each side, or null. */
  const merged = new Map();
  for (const [side, { rows }] of [['a', a], ['b', b]]) {
    for (const row of rows) {
      const key = `${row.token} ${row.text}`;
      const entry = merged.get(key) ?? { text: row.text, a: null, b: null };
      entry[side] = row;
      merged.set(key, entry);
    }
  }
  const highest = (entry) => Math.max(entry.a?.model ?? 0, entry.b?.model ?? 0);
  const entries = [...merged.values()].sort((x, y) => highest(y) - highest(x))
    .filter((entry, i) => i < MAX_CANDIDATES || entry.a?.chosen || entry.b?.chosen);
  panel.replaceChildren(h('section', {},
    h('h2', { 'data-heading': true }, heading()),
    h('dl', { class: 'token-facts' }, tokenFact(a, 'A'), tokenFact(b, 'B')),
    entries.length ? candidatesOfBoth(entries, a, b) : h('p', { class: 'hint' }, 'No candidates were recorded here.')));
}

/** Returns the table of candidates, with a row for each side that has some. */
function candidatesOfBoth(entries, a, b) {
  const columns = [['model', 'model'], ...OPTIONAL_COLUMNS.filter(([, , has]) => a[has] || b[has])];
  const shownSides = [['a', 'A', a], ['b', 'B', b]].filter(([, , { rows }]) => rows.length);
  const sideRow = (entry, [side, name], i) => h('tr', { class: entry[side]?.chosen ? 'chosen' : null },
    i === 0 ? h('th', { scope: 'rowgroup', rowspan: String(shownSides.length) }, displayText(entry.text)) : null,
    h('td', { class: 'side' }, name, entry[side]?.chosen ? ' ✓' : ''),
    columns.map(([field]) => probabilityCell(entry[side]?.[field] ?? null, '·')));
  return h('table', { class: 'candidates two-sides' },
    h('caption', { class: 'visually-hidden' }, 'Probabilities in A and B'),
    h('thead', {}, h('tr', {},
      h('th', { scope: 'col' }, 'token'), h('th', { scope: 'col' }, h('span', { class: 'visually-hidden' }, 'run')),
      columns.map(([, title]) => h('th', { scope: 'col' }, title)))),
    entries.map((entry) => h('tbody', {}, shownSides.map((side, i) => sideRow(entry, side, i)))));
}

/** Performs an action of the shortcuts or buttons. Returns false for other actions. */
function act(action) {
  if (!text) return false;
  if (action === 'nextDifference') selectDifference(Math.max(0, text.differences.findIndex(({ from }) => from > cursor)));
  else if (action === 'prevDifference') selectDifference(text.differences.findLastIndex(({ from }) => from < cursor));
  else if (action === 'nextPair' && text.steps.count) moveCursor(cursor + 1);
  else if (action === 'prevPair' && text.steps.count) moveCursor(cursor - 1);
  else if (action === 'onlyDifferences') {
    const isOn = textBox.classList.toggle('only-differences');
    document.querySelector('[data-action=onlyDifferences]').setAttribute('aria-pressed', String(isOn));
  } else return false;
  return true;
}

document.querySelector('.tools').addEventListener('click', (event) => act(event.target.closest('[data-action]')?.dataset.action));
listenForShortcuts(['compare'], act);

document.querySelector('.tools').after(h('div', { class: 'overview divergence-strip' }, canvas, slider), note, announcer);
const redrawStrip = scheduleDrawing(canvas, drawStrip, new AbortController().signal);

try {
  sides = await Promise.all([loadSide(root.dataset.a), loadSide(root.dataset.b)]);
  await alignAndShow();
  // If one of these parts fails, the comparison is still useful.
  for (const part of [showSettings, loadDivergences, showLinks]) part().catch((error) => { note.textContent = `A part of the comparison could not be loaded: ${error.message}.`; });
} catch (error) {
  problem.hidden = false;
  problem.textContent = `Loading the runs failed: ${error.message}.`;
}
