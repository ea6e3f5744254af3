// One lane per mod with a mark for every action, exception and log line, on the axis of the slider, and a table of the
// marks.
import { h, palette, scheduleDrawing, prepareCanvas } from '../dom.js';

const MAX_LISTED = 400;

/** Returns the color of a mark. Pure. */
export function toneOf(mark) {
  if (mark.kind === 'log') return 'line-strong';
  if (mark.kind === 'error' || /^(Backtrack|EmitError)/.test(mark.label)) return 'danger';
  return /^Force/.test(mark.label) ? 'forced' : 'accent';
}

export class Lanes {
  #root;
  #run;
  #go;
  #lanes = new Map();
  #table = h('tbody');
  #details;
  /** Kinds of marks in the table. */
  #kinds = new Set(['action', 'error', 'log']);
  /** Number of marks at the last update. */
  #seen = -1;
  #n = 0;

  constructor(root, run, onGo, signal) {
    this.#root = root;
    this.#run = run;
    this.#go = onGo;
    const filter = ['action', 'error', 'log'].map((kind) => {
      const box = h('input', { type: 'checkbox', onchange: () => { if (box.checked) this.#kinds.add(kind); else this.#kinds.delete(kind); this.#list(); } });
      box.checked = true;
      return h('label', { class: 'check' }, box, { action: 'actions', error: 'errors', log: 'logs' }[kind]);
    });
    this.#details = h('details', { ontoggle: () => this.#list() },
      h('summary', { class: 'hint' }, 'List view'),
      h('div', { class: 'row' }, filter),
      h('div', { class: 'scroll', tabindex: '0', role: 'group', 'aria-label': 'Marks as a table' },
        h('table', { class: 'table' },
          h('thead', {}, h('tr', {}, ['Event', 'Mod', 'Kind', 'What'].map((t) => h('th', { scope: 'col' }, t)))), this.#table)));
    this.#lanesBox = h('div');
    root.replaceChildren(this.#lanesBox, this.#details);
    this.#redraw = scheduleDrawing(root, () => this.#draw(), signal);
  }

  #lanesBox;
  #redraw;

  /** Adds marks that arrived since the last call. */
  sync() {
    const { marks } = this.#run;
    if (this.#seen === marks.length) return;
    this.#seen = marks.length;
    this.#root.hidden = marks.length === 0;
    for (const mark of marks) {
      if (this.#lanes.has(mark.mod_name)) continue;
      const canvas = h('canvas', { 'aria-hidden': 'true' });
      const cursor = h('div', { class: 'cursor' });
      const box = h('div', { onclick: (event) => this.#click(mark.mod_name, box, event) }, canvas, cursor);
      this.#lanes.set(mark.mod_name, { canvas, cursor, box });
      this.#lanesBox.append(h('div', { class: 'lane' }, h('b', { title: mark.mod_name }, mark.mod_name), box));
    }
    this.#redraw();
    this.#list();
  }

  #click(name, box, event) {
    const at = box.getBoundingClientRect();
    const seq = ((event.clientX - at.left) / at.width) * this.#run.eventCount;
    const mine = this.#run.marks.filter((m) => m.mod_name === name);
    const nearest = mine.reduce((a, b) => (Math.abs(b.seq - seq) < Math.abs(a.seq - seq) ? b : a));
    this.#go(nearest.seq);
  }

  #draw() {
    if (!this.#lanes.size) return;
    const c = palette(['accent', 'danger', 'forced', 'line-strong']);
    const span = Math.max(1, this.#run.eventCount);
    const ready = new Map();
    for (const [name, lane] of this.#lanes) {
      const s = prepareCanvas(lane.canvas);
      if (s) ready.set(name, s);
    }
    for (const mark of this.#run.marks) {
      const s = ready.get(mark.mod_name);
      if (!s) continue;
      const x = (mark.seq / span) * s.width;
      const mid = s.height / 2;
      s.context.fillStyle = c[toneOf(mark)];
      if (mark.kind === 'log') {
        s.context.fillRect(x - 0.5, mid + 3, 1.5, 4);
      } else if (mark.kind === 'error') {
        s.context.fillRect(x - 1, mid - 8, 2.5, 16);
      } else {
        s.context.beginPath();
        s.context.arc(x, mid, 3, 0, 7);
        s.context.fill();
      }
    }
  }

  #list() {
    if (!this.#details.open) return;
    const all = this.#run.marks.filter((m) => this.#kinds.has(m.kind));
    const first = Math.max(0, all.findLastIndex((m) => m.seq <= this.#n) - MAX_LISTED / 2);
    this.#table.replaceChildren(...all.slice(first, first + MAX_LISTED).map((m) => h('tr', {},
      h('td', { class: 'num' }, h('button', { type: 'button', onclick: () => this.#go(m.seq) }, String(m.seq))),
      h('td', {}, m.mod_name), h('td', { class: m.kind === 'error' ? 'err' : '' }, m.kind), h('td', {}, m.label))));
    if (all.length > MAX_LISTED) this.#table.append(h('tr', {}, h('td', { colspan: '4', class: 'hint' }, `${all.length} marks; the table shows the ${MAX_LISTED} around the cursor.`)));
  }

  /** Moves the cursor to event `n`. */
  at(n) {
    this.#n = n;
    const left = `calc(${((n / Math.max(1, this.#run.eventCount)) * 100).toFixed(3)}% - 1px)`;
    for (const { cursor } of this.#lanes.values()) cursor.style.left = left;
  }
}
