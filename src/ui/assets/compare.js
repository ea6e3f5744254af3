// Compares two runs token by token. Equal text is shown once, differing text side by side. One cursor moves through both
// runs, and a panel shows both distributions at the cursor; a strip shows how far they diverge at every step.
import { base, fetchApi, h, palette, scheduleDrawing, surface } from './dom.js';
import { listen } from './keys.js';
import { MODES, surprise } from './replay/color.js';
import { align, coalesce } from './replay/diff.js';
import { byStep, differences, divergence, modsOf, pairs } from './replay/divergence.js';
import { Events } from './replay/events.js';
import { fill, show } from './replay/glyphs.js';
import { Run } from './replay/run.js';
import { changeOf, order } from './replay/tree.js';
import { candidateTable, percent } from './replay/candidates.js';

const root = document.querySelector('[data-compare]');
const box = document.querySelector('[data-diff]');
const panel = document.querySelector('[data-panel]');
const problem = document.querySelector('[data-problem]');
const summary = document.querySelector('[data-summary]');
const MAX_CANDIDATES = 12;
/** Number of tokens that stay visible at the end of a common start. */
const VISIBLE_TOKENS = 12;
/** Events per request of candidates. */
const EVENTS_PER_REQUEST = 6000;
/** Parameters that have their own rows or describe the recording. */
const SKIPPED = ['mods', 'fork', 'model', 'reading'];

/** Loads one side: a run, and the rows of its final answer. */
async function loadSide(id) {
  const response = await fetchApi(`/api/v1/runs/${encodeURIComponent(id)}/columns`);
  const run = Run.stored(await response.arrayBuffer());
  const rows = run.sequence(run.eventCount).filter((i) => i !== undefined && !run.isPrompt(i));
  return { id, run, rows, events: new Events(id) };
}

let sides = [];
let changes = [];
let steps = [];
let spans = [];
let divergences = [];
let current = -1;
let at = -1;
let timer = 0;

const canvas = h('canvas', { 'aria-hidden': 'true' });
const scrub = h('input', { type: 'range', class: 'scrub', min: '0', value: '0', step: '1', 'aria-label': 'Token on both sides', oninput: () => moveCursor(Number(scrub.value)) });
const note = h('p', { class: 'hint num' });

/** Returns the elements of a range of tokens. */
function tokenSpans({ run, rows }, [from, to], side, colored) {
  return rows.slice(from, to).map((i, k) => {
    const span = document.createElement('span');
    const bucket = colored ? MODES[0].bucket(run, i) : -1;
    span.className = `t${run.isForced(i) ? ' q' : ''}${bucket >= 0 ? ` b${bucket}` : ''}`;
    fill(span, run.text(i));
    spans[side][from + k] = span;
    return span;
  });
}

/** Returns an element with equal text. If both answers start with the same text, it is collapsed except for its end. */
function equalBlock(block, first) {
  const [from, to] = block.a;
  const cut = first && to - from > 2 * VISIBLE_TOKENS ? to - VISIBLE_TOKENS : from;
  const folded = cut > from ? h('details', {}, h('summary', {}, `${cut - from} equal tokens`), tokenSpans(sides[0], [from, cut], 0, false)) : '';
  const el = h('div', { class: 'same blk', onclick: (event) => selectToken(event.target) }, folded, tokenSpans(sides[0], [cut, to], 0, false));
  for (let i = 0; i < to - from; i += 1) spans[1][block.b[0] + i] = spans[0][from + i];
  return el;
}

function draw() {
  const [a, b] = sides;
  // Token ids are only comparable within one vocabulary. Traces of other engines may have no ids, only texts.
  const keys = ({ run, rows }) => rows.map((i) => `${run.token(i)} ${run.text(i)}`);
  const aligned = align(keys(a), keys(b));
  const same = aligned.filter((s) => s.same).reduce((n, s) => n + s.a[1] - s.a[0], 0);
  const blocks = coalesce(aligned);
  changes = [];
  spans = [[], []];
  steps = pairs(blocks);
  box.replaceChildren(...blocks.map((block, i) => {
    if (block.same) return equalBlock(block, i === 0);
    const index = changes.length;
    const el = h('div', { class: 'change', role: 'button', tabindex: '0', onclick: (event) => selectToken(event.target) || selectChange(index), onkeydown: (e) => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); selectChange(index); } } },
      h('div', {}, h('span', { class: 'vh' }, `Difference ${index + 1}, A: `), tokenSpans(a, block.a, 0, true)), h('div', {}, h('span', { class: 'vh' }, 'B: '), tokenSpans(b, block.b, 1, true)));
    changes.push({ el, block, from: steps.findIndex(([x, y]) => x === block.a[0] && block.a[1] > x || y === block.b[0] && block.b[1] > y) });
    return el;
  }));
  summary.textContent = changes.length
    ? `${changes.length} difference${changes.length === 1 ? '' : 's'} · ${same} of ${Math.max(a.rows.length, b.rows.length)} tokens equal · first at token ${changes[0].block.a[0] + 1}`
    : `No difference: ${same} tokens are equal.`;
  scrub.max = String(Math.max(0, steps.length - 1));
  redrawStrip();
  if (changes.length) selectChange(0);
  else if (steps.length) moveCursor(steps.length - 1);
}

/** Moves the cursor to a difference; the last one is followed by the first one. */
function selectChange(index) {
  if (changes.length) moveCursor(changes[(index + changes.length) % changes.length].from);
}

/** Moves the cursor to a token's element; returns false for another element. */
function selectToken(target) {
  const side = spans.findIndex((list) => list.includes(target));
  if (side < 0) return false;
  const token = spans[side].indexOf(target);
  moveCursor(steps.findIndex((pair) => pair[side] === token));
  return true;
}

/** Moves the cursor of both sides to a step of the alignment. */
function moveCursor(step) {
  const marked = (on) => steps[at]?.forEach((token, side) => spans[side][token]?.classList.toggle('cur', on));
  marked(false);
  at = Math.max(0, Math.min(steps.length - 1, step));
  marked(true);
  scrub.value = String(at);
  const [x, y] = steps[at];
  const inside = (range, token) => token !== null && token >= range[0] && token < range[1];
  changes[current]?.el.removeAttribute('aria-current');
  current = changes.findIndex(({ block }) => inside(block.a, x) || inside(block.b, y));
  changes[current]?.el.setAttribute('aria-current', 'true');
  const span = spans[0][x] ?? spans[1][y];
  const details = span?.closest('details');
  if (details && !details.open) details.open = true;
  span?.scrollIntoView({ block: 'nearest' });
  const value = divergences[at];
  const position = `token ${x === null ? '–' : x + 1} of A, ${y === null ? '–' : y + 1} of B${value === null || value === undefined ? '' : `, divergence at least ${value.toFixed(2)} bit`}`;
  scrub.setAttribute('aria-valuetext', position);
  note.textContent = `${position}. The bars are a lower bound of the KL divergence of B from A at each step, computed from the recorded candidates and the rest as one outcome.`;
  clearTimeout(timer);
  // If a side has no token at this step, its next token is compared, because both tokens follow the same text.
  const next = (side) => steps.slice(at).find((pair) => pair[side] !== null)?.[side] ?? null;
  timer = setTimeout(() => loadCandidates(next(0), next(1)), 60);
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
  divergences = steps.map(([x, y]) => divergence(of(0, x), of(1, y)));
  redrawStrip();
  if (at >= 0) moveCursor(at);
}

/** Draws the strip: bars of the divergence, and a background color at differences. */
function drawStrip() {
  const s = surface(canvas);
  if (!s) return;
  const { g, w, h: height } = s;
  const c = palette(['spark', 'accent-wash']);
  const stepWidth = w / Math.max(1, steps.length);
  g.fillStyle = c['accent-wash'];
  for (const { block, from } of changes) g.fillRect(from * stepWidth, 0, Math.max(1, Math.max(block.a[1] - block.a[0], block.b[1] - block.b[0]) * stepWidth), height);
  g.fillStyle = c.spark;
  divergences.forEach((value, i) => {
    if (!value) return;
    const barHeight = Math.max(1, Math.sqrt(Math.min(1, value / 8)) * (height - 6));
    g.fillRect(i * stepWidth, height - barHeight, Math.max(1, stepWidth - (stepWidth > 4 ? 1 : 0)), barHeight);
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
  const head = (s, name) => h('div', {}, h('dt', {}, name), h('dd', {}, s.row === null ? 'ended before' : h('a', { href: `${base}/runs/${encodeURIComponent(s.id)}?at=${s.run.addedAt(s.row)}` }, show(s.run.text(s.row))),
    s.row !== null && surprise(s.run, s.row) !== null ? ` ${surprise(s.run, s.row).toFixed(2)} bit` : ''));
  panel.replaceChildren(h('section', {},
    h('h2', {}, current < 0 ? 'Equal tokens' : `Difference ${current + 1} of ${changes.length}`),
    h('dl', { class: 'tok-facts' }, head(a, 'A'), head(b, 'B')),
    rows.length ? h('table', { class: 'alts both' }, h('caption', { class: 'vh' }, 'Probabilities in A and B'),
      h('thead', {}, h('tr', {}, ['token', '', ...columns.map(([, name]) => name)].map((t) => h('th', { scope: 'col' }, t || h('span', { class: 'vh' }, 'run'))))),
      rows.map((r) => h('tbody', {}, present.map(([key, name], i) => h('tr', { class: r[key]?.chosen ? 'won' : null },
        i ? null : h('th', { scope: 'rowgroup', rowspan: String(present.length) }, show(r.text)),
        h('td', { class: 'side' }, name, r[key]?.chosen ? ' ✓' : ''), columns.map(([field]) => cell(r[key]?.[field] ?? null)))))))
      : h('p', { class: 'hint' }, 'No alternatives were recorded here.')));
}

function act(action) {
  if (action === 'nextChange') selectChange(Math.max(0, changes.findIndex((c) => c.from > at)));
  else if (action === 'prevChange') selectChange(changes.findLastIndex((c) => c.from < at));
  else if (action === 'nextPair' && steps.length) moveCursor(at + 1);
  else if (action === 'prevPair' && steps.length) moveCursor(at - 1);
  else if (action === 'only') {
    const on = box.classList.toggle('only');
    document.querySelector('[data-act=only]').setAttribute('aria-pressed', String(on));
  } else return false;
  return true;
}

document.querySelector('.tools').addEventListener('click', (event) => act(event.target.closest('[data-act]')?.dataset.act));
listen(['compare'], act);

document.querySelector('.tools').after(h('div', { class: 'overview apart' }, canvas, scrub), note);
const redrawStrip = scheduleDrawing(canvas, drawStrip, new AbortController().signal);

try {
  sides = await Promise.all([loadSide(root.dataset.a), loadSide(root.dataset.b)]);
  draw();
  // If one of these parts fails, the comparison is still useful.
  for (const part of [showSettings, loadDivergences, showLinks]) part().catch((error) => { note.textContent = `A part of the comparison could not be loaded: ${error.message}.`; });
} catch (error) {
  problem.hidden = false;
  problem.textContent = `Loading the runs failed: ${error.message}.`;
}
