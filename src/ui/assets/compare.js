// Compares two runs token by token: equal text once, differing text side by side, and both distributions at a
// difference.
import { ask, base, h } from './dom.js';
import { listen } from './keys.js';
import { MODES, surprise } from './replay/colour.js';
import { align } from './replay/diff.js';
import { Events } from './replay/events.js';
import { fill, show } from './replay/glyphs.js';
import { Run } from './replay/run.js';
import { explain, percent } from './replay/why.js';

const root = document.querySelector('[data-compare]');
const box = document.querySelector('[data-diff]');
const panel = document.querySelector('[data-panel]');
const problem = document.querySelector('[data-problem]');
const summary = document.querySelector('[data-summary]');
const SHOWN = 12;

/** Loads one side: the run and the rows of its answer at the end. */
async function side(id) {
  const response = await ask(`/api/v1/runs/${encodeURIComponent(id)}/columns`);
  const run = Run.stored(await response.arrayBuffer());
  const rows = run.sequence(run.eventCount).filter((i) => i !== undefined && !run.isPrompt(i));
  return { id, run, rows, events: new Events(id) };
}

let sides = [];
let changes = [];
let current = -1;

function words({ run, rows }, [from, to], coloured) {
  return rows.slice(from, to).map((i) => {
    const span = h('span', { class: `t${run.isForced(i) ? ' q' : ''}` });
    const bucket = coloured ? MODES[0].bucket(run, i) : -1;
    if (bucket >= 0) span.classList.add(`b${bucket}`);
    fill(span, run.text(i));
    return span;
  });
}

function draw() {
  const [a, b] = sides;
  // Token ids are only comparable within one vocabulary; for a foreign trace without ids the text decides.
  const keys = ({ run, rows }) => rows.map((i) => `${run.token(i)} ${run.text(i)}`);
  const blocks = align(keys(a), keys(b));
  changes = [];
  const equal = blocks.filter((s) => s.same).reduce((n, s) => n + s.a[1] - s.a[0], 0);
  box.replaceChildren(...blocks.map((block) => {
    if (block.same) return h('div', { class: 'same blk' }, words(a, block.a, false));
    const index = changes.length;
    const el = h('div', { class: 'change', role: 'button', tabindex: '0', onclick: () => choose(index), onkeydown: (e) => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); choose(index); } } },
      h('div', {}, h('span', { class: 'vh' }, `Difference ${index + 1}, A: `), words(a, block.a, true)), h('div', {}, h('span', { class: 'vh' }, 'B: '), words(b, block.b, true)));
    changes.push({ el, block });
    return el;
  }));
  summary.textContent = changes.length
    ? `${changes.length} difference${changes.length === 1 ? '' : 's'} · ${equal} of ${Math.max(a.rows.length, b.rows.length)} tokens equal · first at token ${changes[0].block.a[0] + 1}`
    : `No difference: ${equal} tokens are equal.`;
  if (changes.length) choose(0);
}

async function choose(index) {
  if (!changes.length) return;
  changes[current]?.el.removeAttribute('aria-current');
  current = (index + changes.length) % changes.length;
  const { el, block } = changes[current];
  el.setAttribute('aria-current', 'true');
  el.scrollIntoView({ block: 'nearest' });
  const mine = current;
  panel.setAttribute('aria-busy', 'true');
  try {
    const [a, b] = await Promise.all([step(sides[0], block.a[0]), step(sides[1], block.b[0])]);
    if (mine === current) both(a, b);
  } catch (error) {
    if (mine === current) panel.replaceChildren(h('section', {}, h('p', { class: 'err' }, `Loading the distributions failed: ${error.message}.`)));
  } finally {
    panel.removeAttribute('aria-busy');
  }
}

/** Returns what is known about the token at an index of a side's answer. */
async function step({ id, run, rows, events }, index) {
  const row = rows[Math.min(index, rows.length - 1)];
  if (index >= rows.length || row === undefined) return { id, row: null, rows: [] };
  const steps = run.stepEvents(run.born(row));
  const entries = await events.get(steps[0], steps.at(-1));
  return { id, run, row, ...explain(entries) };
}

/** Values of a candidate besides the model's own probability: field, name, and the flag that tells whether it is known. */
const LATER = [['mods', 'after mods', 'hasMods'], ['sampler', 'drawn from', 'hasSampler']];

function both(a, b) {
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
  const rows = list.filter((r, i) => i < SHOWN || r.a?.chosen || r.b?.chosen);
  const columns = [['model', 'model'], ...LATER.filter(([, , has]) => a[has] || b[has])];
  const present = [['a', 'A', a], ['b', 'B', b]].filter(([, , s]) => s.rows.length);
  const cell = (p) => {
    const td = h('td', { class: p === null ? 'hint' : 'bar-p' }, p === null ? '·' : percent(p));
    if (p !== null) td.style.setProperty('--p', p.toFixed(4));
    return td;
  };
  const head = (s, name) => h('div', {}, h('dt', {}, name), h('dd', {}, s.row === null ? 'ended before' : h('a', { href: `${base}/runs/${encodeURIComponent(s.id)}?at=${s.run.born(s.row)}` }, show(s.run.text(s.row))),
    s.row !== null && surprise(s.run, s.row) !== null ? ` ${surprise(s.run, s.row).toFixed(2)} bit` : ''));
  panel.replaceChildren(h('section', {},
    h('h2', {}, `Difference ${current + 1} of ${changes.length}`),
    h('dl', { class: 'tok-facts' }, head(a, 'A'), head(b, 'B')),
    rows.length ? h('table', { class: 'alts both' }, h('caption', { class: 'vh' }, 'Probabilities in A and B'),
      h('thead', {}, h('tr', {}, ['token', '', ...columns.map(([, name]) => name)].map((t) => h('th', { scope: 'col' }, t || h('span', { class: 'vh' }, 'run'))))),
      rows.map((r) => h('tbody', {}, present.map(([key, name], i) => h('tr', { class: r[key]?.chosen ? 'won' : null },
        i ? null : h('th', { scope: 'rowgroup', rowspan: String(present.length) }, show(r.text)),
        h('td', { class: 'side' }, name, r[key]?.chosen ? ' ✓' : ''), columns.map(([field]) => cell(r[key]?.[field] ?? null)))))))
      : h('p', { class: 'hint' }, 'No alternatives were recorded here.')));
}

function act(action) {
  if (action === 'nextChange') choose(current + 1);
  else if (action === 'prevChange') choose(current - 1);
  else if (action === 'only') {
    const on = box.classList.toggle('only');
    document.querySelector('[data-act=only]').setAttribute('aria-pressed', String(on));
  } else return false;
  return true;
}

document.querySelector('.tools').addEventListener('click', (event) => act(event.target.closest('[data-act]')?.dataset.act));
listen(['compare'], act);

try {
  sides = await Promise.all([side(root.dataset.a), side(root.dataset.b)]);
  draw();
} catch (error) {
  problem.hidden = false;
  problem.textContent = `Loading the runs failed: ${error.message}.`;
}
