// Compares two runs token by token. Equal text is shown once, differing text side by side. One cursor moves through both
// runs, and a panel shows both distributions at the cursor; a strip shows how far they diverge at every step.
import { base, fetchApi, h, palette, scheduleDrawing, prepareCanvas } from './dom.js';
import { AlignedText, FIRST_TOKENS } from './compare-text.js';
import { listenForShortcuts } from './keys.js';
import { surprise } from './replay/color.js';
import { Alignment, Coalescing } from './diff.js';
import { byStep, differences, divergence, modsOf, numbered } from './divergence.js';
import { Events } from './replay/events.js';
import { displayText } from './replay/glyphs.js';
import { Run } from './replay/run.js';
import { changeOf, order } from './replay/tree.js';
import { candidateTable, percent } from './replay/candidates.js';

const root = document.querySelector('[data-compare]');
const box = document.querySelector('[data-diff]');
const panel = document.querySelector('[data-panel]');
const problem = document.querySelector('[data-problem]');
const summary = document.querySelector('[data-summary]');
const MAX_CANDIDATES = 12;
/** Duration of a task that aligns tokens or creates their elements, in milliseconds. */
const TASK_MS = 16;
/** Events per request of candidates. */
const EVENTS_PER_REQUEST = 6000;
/** Parameters that have their own rows, and `reading`, which earlier releases recorded instead of `answer_format`. */
const SKIPPED = ['mods', 'fork', 'model', 'answer_format', 'reading'];

/** Loads one side: a run, and the rows of its final answer. */
async function loadSide(id) {
  const response = await fetchApi(`/api/v1/runs/${encodeURIComponent(id)}/columns`);
  const run = Run.stored(await response.arrayBuffer());
  return { id, run, rows: run.answer(), events: new Events(id) };
}

let sides = [];
let text = null;
let divergences = [];
/** Elements of the tokens at the cursor. */
let marked = [];
let current = -1;
let at = -1;
/** True if all differences are known. */
let isAligned = false;
let timer = 0;

const canvas = h('canvas', { 'aria-hidden': 'true' });
const scrub = h('input', { type: 'range', class: 'scrub', min: '0', value: '0', step: '1', 'aria-label': 'Token on both sides', oninput: () => moveCursor(Number(scrub.value)) });
const note = h('p', { class: 'hint num' });

/** Waits until the browser has painted a frame. */
const painted = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));

/** Aligns the runs and shows their tokens, the first ones before the first frame and the rest in short tasks. */
async function draw() {
  // Token ids are only comparable within one vocabulary. Traces of other engines may have no ids, only texts.
  const alignment = new Alignment(...numbered(sides.map(({ run, rows }) => ({ count: rows.length, token: (k) => run.token(rows[k]), text: (k) => run.text(rows[k]) }))));
  const coalescing = new Coalescing();
  text = new AlignedText(box, sides, { onStep: moveCursor, onChange: selectChange });
  const alignUntil = (end) => {
    while (!alignment.isDone && performance.now() < end) alignment.advance();
    text.add(coalescing.add(alignment.take(), alignment.isDone));
    scrub.max = String(Math.max(0, text.steps.count - 1));
    isAligned = alignment.isDone;
    if (isAligned) summarize();
  };
  summary.textContent = 'Aligning…';
  do alignUntil(performance.now() + TASK_MS); while (!alignment.isDone && !text.changes.length);
  text.build({ count: 2 * FIRST_TOKENS });
  if (text.changes.length) selectChange(0);
  else if (text.steps.count) moveCursor(text.steps.count - 1);
  for (let isBuilt = false; !isBuilt || !alignment.isDone;) {
    await painted();
    const end = performance.now() + TASK_MS;
    if (!alignment.isDone) alignUntil(end);
    isBuilt = text.build({ end });
  }
}

function summarize() {
  const [a, b] = sides;
  const { changes, same } = text;
  summary.textContent = changes.length
    ? `${changes.length} difference${changes.length === 1 ? '' : 's'} · ${same} of ${Math.max(a.rows.length, b.rows.length)} tokens equal · first at token ${changes[0].block.a[0] + 1}`
    : `No difference: ${same} tokens are equal.`;
  panel.querySelector('[data-heading]')?.replaceChildren(heading());
  redrawStrip();
}

/** Moves the cursor to a difference; the last one is followed by the first one. */
function selectChange(index) {
  const { changes } = text;
  if (changes.length) moveCursor(changes[(index + changes.length) % changes.length].from);
}

/** Moves the cursor of both sides to a step of the alignment. */
function moveCursor(step) {
  marked.forEach((span) => span?.classList.remove('current'));
  at = Math.max(0, Math.min(text.steps.count - 1, step));
  marked = text.elements(at);
  marked.forEach((span) => span?.classList.add('current'));
  scrub.value = String(at);
  text.changes[current]?.el?.removeAttribute('aria-current');
  current = text.changeAt(at);
  text.changes[current]?.el.setAttribute('aria-current', 'true');
  const span = marked[0] ?? marked[1];
  const details = span?.closest('details');
  if (details && !details.open) details.open = true;
  span?.scrollIntoView({ block: 'nearest' });
  describe();
  clearTimeout(timer);
  // If a side has no token at this step, its next token is compared: at the start of an insertion, both follow the same text.
  timer = setTimeout(() => loadCandidates(text.steps.next(at, 0), text.steps.next(at, 1)), 60);
}

/** Shows the position of the cursor and the divergence there. */
function describe() {
  const [x, y] = text.steps.pair(at);
  const value = divergences[at];
  const position = `token ${x === null ? '–' : x + 1} of A, ${y === null ? '–' : y + 1} of B${value === null || value === undefined ? '' : `, divergence at least ${value.toFixed(2)} bit`}`;
  scrub.setAttribute('aria-valuetext', position);
  note.textContent = `${position}. The bars are a lower bound of the KL divergence of B from A at each step, computed from the recorded candidates and the rest as one outcome.`;
}

/** Loads and shows the candidates of both sides at the cursor. */
async function loadCandidates(x, y) {
  const requestedAt = at;
  panel.setAttribute('aria-busy', 'true');
  try {
    const [a, b] = await Promise.all([loadStep(sides[0], x), loadStep(sides[1], y)]);
    if (requestedAt === at) showCandidates(a, b);
  } catch (error) {
    if (requestedAt === at) panel.replaceChildren(h('section', {}, h('p', { class: 'err' }, `Loading the distributions failed: ${error.message}.`)));
  } finally {
    panel.removeAttribute('aria-busy');
  }
}

/** Returns the recorded details of the token at an index of a side's answer. */
async function loadStep({ id, run, rows, events }, index) {
  const row = index === null ? undefined : rows[index];
  if (row === undefined) return { id, row: null, rows: [] };
  const [first, ...rest] = run.stepEvents(run.addedAt(row));
  const entries = await events.get(first, rest.at(-1) ?? first);
  return { id, run, row, ...candidateTable(entries) };
}

/** Loads the candidates of both runs and draws their divergence. */
async function loadDivergences() {
  const models = await Promise.all(sides.map(async ({ id, run }) => {
    const all = [];
    for (let from = 0; from < run.eventCount; from += EVENTS_PER_REQUEST) all.push(...(await (await fetchApi(`/api/v1/runs/${encodeURIComponent(id)}/alternatives?from=${from}&to=${from + EVENTS_PER_REQUEST}`)).json()).alternatives);
    return byStep(all);
  }));
  const of = (side, token) => (token === null ? [] : models[side].get(sides[side].run.step(sides[side].run.addedAt(sides[side].rows[token]))) ?? []);
  divergences = Array.from({ length: text.steps.count }, (_, step) => divergence(of(0, text.steps.at(step, 0)), of(1, text.steps.at(step, 1))));
  redrawStrip();
  if (at >= 0) describe();
}

/** Draws the strip: bars of the divergence, and a background color at differences. */
function drawStrip() {
  const s = prepareCanvas(canvas);
  if (!s) return;
  const { context, width, height } = s;
  const c = palette(['spark', 'accent-wash']);
  if (!text) return;
  const stepWidth = width / Math.max(1, text.steps.count);
  context.fillStyle = c['accent-wash'];
  for (const { from, end } of text.changes) context.fillRect(from * stepWidth, 0, Math.max(1, (end - from) * stepWidth), height);
  context.fillStyle = c.spark;
  divergences.forEach((value, i) => {
    if (!value) return;
    const barHeight = Math.max(1, Math.sqrt(Math.min(1, value / 8)) * (height - 6));
    context.fillRect(i * stepWidth, height - barHeight, Math.max(1, stepWidth - (stepWidth > 4 ? 1 : 0)), barHeight);
  });
}

/** Adds the parameters and mods that differ to the table of settings. */
async function showSettings() {
  const [a, b] = await Promise.all(sides.map(async ({ events }) => (await events.get(0, 0))[0]?.event?.details?.prompt?.parameters ?? {}));
  const found = [...differences(modsOf(a), modsOf(b)).map(([name, ...values]) => [`mod ${name}`, ...values]), ...differences(a, b, SKIPPED)];
  const known = new Set([...document.querySelectorAll('.settings th[scope=row]')].map((el) => el.textContent.replaceAll(' ', '_')));
  const text = (value) => (value === null ? '–' : typeof value === 'string' ? value : JSON.stringify(value));
  const short = (value) => (text(value).length > 200 ? `${text(value).slice(0, 200)}…` : text(value));
  document.querySelector('.settings tbody').append(...found.filter(([name]) => !known.has(name.split('.').at(-1))).slice(0, 40)
    .map(([name, x, y]) => h('tr', {}, h('th', { scope: 'row' }, name), h('td', {}, short(x)), h('td', {}, short(y)))));
}

/** Shows links that compare A with its family, and with the other selected runs in the URL. */
async function showLinks() {
  const family = await (await fetchApi(`/api/v1/runs/${encodeURIComponent(sides[0].id)}/family`)).json();
  const selected = new URL(location).searchParams.get('with')?.split(',').filter(Boolean) ?? [];
  const list = [...order(family.runs), ...selected.filter((id) => !family.runs.some((m) => m.run_id === id)).map((run_id, i) => ({ run_id, name: `selected run ${i + 1}` }))];
  const others = list.filter((m) => m.run_id !== sides[0].id);
  if (others.length < 2) return;
  const keep = selected.length ? [...new Set([...selected, sides[1].id])].join(',') : '';
  document.querySelector('.tools').before(h('nav', { class: 'links', 'aria-label': 'Compare A with' }, h('span', { class: 'hint' }, 'Compare A with'), others.slice(0, 32).map((m) => h('a', {
    class: 'button', 'aria-current': m.run_id === sides[1].id ? 'true' : null, href: `${base}/compare?${new URLSearchParams({ a: sides[0].id, b: m.run_id, ...(keep && { with: keep }) })}`,
  }, m.name ?? changeOf(m), m.parent ? h('small', { class: 'hint' }, `step ${m.parent.step}`) : ''))));
}

/** Returns the heading of the panel. */
const heading = () => (current < 0 ? 'Equal tokens' : `Difference ${current + 1}${isAligned ? ` of ${text.changes.length}` : ''}`);

/** Values of a candidate besides the model's probability: field, column title, and the flag for its presence. */
const LATER_COLUMNS = [['mods', 'after mods', 'hasMods'], ['sampler', 'drawn from', 'hasSampler']];

function showCandidates(a, b) {
  const merged = new Map();
  for (const [name, s] of [['a', a], ['b', b]]) {
    for (const r of s.rows) {
      const entry = merged.get(`${r.token} ${r.text}`) ?? { text: r.text, a: null, b: null };
      entry[name] = r;
      merged.set(`${r.token} ${r.text}`, entry);
    }
  }
  const best = (r) => Math.max(r.a?.model ?? 0, r.b?.model ?? 0);
  const list = [...merged.values()].sort((x, y) => best(y) - best(x));
  const rows = list.filter((r, i) => i < MAX_CANDIDATES || r.a?.chosen || r.b?.chosen);
  const columns = [['model', 'model'], ...LATER_COLUMNS.filter(([, , has]) => a[has] || b[has])];
  const present = [['a', 'A', a], ['b', 'B', b]].filter(([, , s]) => s.rows.length);
  const cell = (p) => {
    const td = h('td', { class: p === null ? 'hint' : 'bar-p' }, p === null ? '·' : percent(p));
    if (p !== null) td.style.setProperty('--p', p.toFixed(4));
    return td;
  };
  const head = (s, name) => h('div', {}, h('dt', {}, name), h('dd', {}, s.row === null ? 'ended before' : h('a', { href: `${base}/runs/${encodeURIComponent(s.id)}?at=${s.run.addedAt(s.row)}` }, displayText(s.run.text(s.row))),
    s.row !== null && surprise(s.run, s.row) !== null ? ` ${surprise(s.run, s.row).toFixed(2)} bit` : ''));
  panel.replaceChildren(h('section', {},
    h('h2', { 'data-heading': true }, heading()),
    h('dl', { class: 'token-facts' }, head(a, 'A'), head(b, 'B')),
    rows.length ? h('table', { class: 'candidates both' }, h('caption', { class: 'visually-hidden' }, 'Probabilities in A and B'),
      h('thead', {}, h('tr', {}, ['token', '', ...columns.map(([, name]) => name)].map((t) => h('th', { scope: 'col' }, t || h('span', { class: 'visually-hidden' }, 'run'))))),
      rows.map((r) => h('tbody', {}, present.map(([key, name], i) => h('tr', { class: r[key]?.chosen ? 'chosen' : null },
        i ? null : h('th', { scope: 'rowgroup', rowspan: String(present.length) }, displayText(r.text)),
        h('td', { class: 'side' }, name, r[key]?.chosen ? ' ✓' : ''), columns.map(([field]) => cell(r[key]?.[field] ?? null)))))))
      : h('p', { class: 'hint' }, 'No alternatives were recorded here.')));
}

function act(action) {
  if (!text) return false;
  if (action === 'nextChange') selectChange(Math.max(0, text.changes.findIndex((c) => c.from > at)));
  else if (action === 'prevChange') selectChange(text.changes.findLastIndex((c) => c.from < at));
  else if (action === 'nextPair' && text.steps.count) moveCursor(at + 1);
  else if (action === 'prevPair' && text.steps.count) moveCursor(at - 1);
  else if (action === 'only') {
    const on = box.classList.toggle('only-differences');
    document.querySelector('[data-action=only]').setAttribute('aria-pressed', String(on));
  } else return false;
  return true;
}

document.querySelector('.tools').addEventListener('click', (event) => act(event.target.closest('[data-action]')?.dataset.action));
listenForShortcuts(['compare'], act);

document.querySelector('.tools').after(h('div', { class: 'overview divergence-strip' }, canvas, scrub), note);
const redrawStrip = scheduleDrawing(canvas, drawStrip, new AbortController().signal);

try {
  sides = await Promise.all([loadSide(root.dataset.a), loadSide(root.dataset.b)]);
  await draw();
  // If one of these parts fails, the comparison is still useful.
  for (const part of [showSettings, loadDivergences, showLinks]) part().catch((error) => { note.textContent = `A part of the comparison could not be loaded: ${error.message}.`; });
} catch (error) {
  problem.hidden = false;
  problem.textContent = `Loading the runs failed: ${error.message}.`;
}
