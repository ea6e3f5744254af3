// Lanes below the text: one per mod, with a mark for each action, exception and log line at the position of its event, and a
// table of the marks.
import { palette, prepareCanvas, scheduleDrawing } from '../canvas.js';
import { h } from '../dom.js';

/** Maximum rows of the table. */
const MAX_LISTED = 400;
/** Kinds of marks, with the labels of their checkboxes. */
const KINDS = { action: 'actions', error: 'errors', log: 'logs' };

/** Returns the name of the color of a mark. */
export function colorNameOf(mark) {
  if (mark.kind === 'log') return 'line-strong';
  if (mark.kind === 'error' || /^(Backtrack|EmitError)/.test(mark.label)) return 'danger';
  return /^Force/.test(mark.label) ? 'forced' : 'accent';
}

/**
 * Returns the index of the first listed one of `count` marks, if `first` was listed first before: the same, unless the cursor,
 * at the mark with the index `at`, has left the middle half of the table. Pure.
 */
export function firstListed(count, at, first) {
  const isCentered = at >= first + MAX_LISTED / 4 && at < first + MAX_LISTED * 3 / 4;
  return Math.max(0, Math.min(count - MAX_LISTED, isCentered ? first : at - MAX_LISTED / 2));
}

export class Lanes {
  #root;
  #run;
  #go;
  /** Lanes by the name of their mod: `{canvas, cursor, box}`. */
  #lanes = new Map();
  #lanesBox = h('div');
  #tableBody = h('tbody');
  /** The line above the table that says which marks it shows. */
  #listedText = h('p', { class: 'hint', hidden: true });
  /** Index of the first listed one of the shown marks. */
  #first = 0;
  /** Listed marks, with their rows. */
  #listed = new Map();
  /** The element with the table, which the user can open. */
  #details;
  /** Kinds of marks that the table shows. */
  #shownKinds = new Set(Object.keys(KINDS));
  /** Number of marks at the last update. */
  #markCount = -1;
  #n = 0;
  #redraw;

  /** `go(n)` moves the cursor. */
  constructor(root, run, go, signal) {
    this.#root = root;
    this.#run = run;
    this.#go = go;
    const filter = Object.entries(KINDS).map(([kind, label]) => {
      const checkbox = h('input', { type: 'checkbox', onchange: () => this.#showKind(kind, checkbox.checked) });
      checkbox.checked = true;
      return h('label', { class: 'check' }, checkbox, label);
    });
    this.#details = h('details', { ontoggle: () => this.#updateTable() },
      h('summary', { class: 'hint' }, 'List view'),
      h('div', { class: 'row' }, filter),
      this.#listedText,
      h('div', { class: 'scroll', tabindex: '0', role: 'group', 'aria-label': 'Marks as a table' },
        h('table', { class: 'table' },
          h('thead', {}, h('tr', {}, ['Event', 'Mod', 'Kind', 'Description'].map((title) => h('th', { scope: 'col' }, title)))), this.#tableBody)));
    root.replaceChildren(this.#lanesBox, this.#details);
    this.#redraw = scheduleDrawing(root, () => this.#draw(), signal);
  }

  #showKind(kind, isShown) {
    if (isShown) this.#shownKinds.add(kind);
    else this.#shownKinds.delete(kind);
    this.#updateTable();
  }

  /** Shows the marks that are new since the last call. */
  addNewMarks() {
    const { marks } = this.#run;
    if (this.#markCount === marks.length) return;
    this.#markCount = marks.length;
    this.#root.hidden = marks.length === 0;
    for (const mark of marks) {
      if (this.#lanes.has(mark.mod_name)) continue;
      const canvas = h('canvas', { 'aria-hidden': 'true' });
      const cursor = h('div', { class: 'cursor' });
      const box = h('div', { onclick: (event) => this.#onClick(mark.mod_name, box, event) }, canvas, cursor);
      this.#lanes.set(mark.mod_name, { canvas, cursor, box });
      this.#lanesBox.append(h('div', { class: 'lane' }, h('b', { title: mark.mod_name }, mark.mod_name), box));
    }
    this.#redraw();
    this.#updateTable();
  }

  /** Moves the cursor to the mark of a mod that is nearest to a click in its lane. */
  #onClick(name, box, event) {
    const bounds = box.getBoundingClientRect();
    const seq = ((event.clientX - bounds.left) / bounds.width) * this.#run.eventCount;
    const marks = this.#run.marks.filter((mark) => mark.mod_name === name);
    const nearest = marks.reduce((a, b) => (Math.abs(b.seq - seq) < Math.abs(a.seq - seq) ? b : a));
    this.#go(nearest.seq);
  }

  #draw() {
    if (!this.#lanes.size) return;
    const colors = palette(['accent', 'danger', 'forced', 'line-strong']);
    const eventCount = Math.max(1, this.#run.eventCount);
    const drawings = new Map();
    for (const [name, lane] of this.#lanes) {
      const drawing = prepareCanvas(lane.canvas);
      if (drawing) drawings.set(name, drawing);
    }
    for (const mark of this.#run.marks) {
      const drawing = drawings.get(mark.mod_name);
      if (!drawing) continue;
      const { context, width, height } = drawing;
      const x = (mark.seq / eventCount) * width;
      const middle = height / 2;
      context.fillStyle = colors[colorNameOf(mark)];
      if (mark.kind === 'log') {
        context.fillRect(x - 0.5, middle + 3, 1.5, 4);
      } else if (mark.kind === 'error') {
        context.fillRect(x - 1, middle - 8, 2.5, 16);
      } else {
        context.beginPath();
        context.arc(x, middle, 3, 0, 2 * Math.PI);
        context.fill();
      }
    }
  }

  /** Shows the marks around the cursor in the table, if it is open. Rows that were listed before keep their place and focus. */
  #updateTable() {
    if (!this.#details.open) return;
    const marks = this.#run.marks.filter((mark) => this.#shownKinds.has(mark.kind));
    this.#first = firstListed(marks.length, marks.findLastIndex((mark) => mark.seq <= this.#n), this.#first);
    const listed = marks.slice(this.#first, this.#first + MAX_LISTED);
    const rows = new Map(listed.map((mark) => [mark, this.#listed.get(mark) ?? this.#row(mark)]));
    for (const [mark, row] of this.#listed) if (!rows.has(mark)) row.remove();
    let next = this.#tableBody.firstChild;
    for (const row of rows.values()) {
      if (row === next) next = row.nextSibling;
      else this.#tableBody.insertBefore(row, next);
    }
    this.#listed = rows;
    this.#listedText.hidden = marks.length <= MAX_LISTED;
    this.#listedText.textContent = `${marks.length} marks; the table shows the ${MAX_LISTED} around the cursor.`;
  }

  /** Returns the row of a mark in the table. */
  #row(mark) {
    return h('tr', {},
      h('td', { class: 'num' }, h('button', { type: 'button', onclick: () => this.#go(mark.seq) }, String(mark.seq))),
      h('td', {}, mark.mod_name), h('td', { class: mark.kind === 'error' ? 'err' : '' }, mark.kind), h('td', {}, mark.label));
  }

  /** Shows the cursor at event `n`. */
  moveCursor(n) {
    this.#n = n;
    if (this.#run.marks.length > MAX_LISTED) this.#updateTable();
    const left = `calc(${((n / Math.max(1, this.#run.eventCount)) * 100).toFixed(3)}% - 1px)`;
    for (const { cursor } of this.#lanes.values()) cursor.style.left = left;
  }
}
