// Layers × heads of one step as a grid, colored by a statistic of each head.
import { h } from '../dom.js';
import { percent } from './candidates.js';

const distance = (s, length) => length - 1 - s.peak_position;

/** The statistics: name, value as text, and share of the color scale. `length` is the number of positions of the row. */
export const STATISTICS = {
  entropy: { name: 'entropy', text: (s) => `${s.entropy.toFixed(2)} bit`, share: (s, length) => s.entropy / Math.log2(Math.max(2, length)) },
  sink_mass: { name: 'sink mass', text: (s) => percent(s.sink_mass), share: (s) => s.sink_mass },
  peak: { name: 'peak', text: (s) => percent(s.peak), share: (s) => s.peak },
  distance: { name: 'distance to the peak', text: (s, length) => `${distance(s, length)} back`, share: (s, length) => Math.sqrt(distance(s, length) / Math.max(1, length - 1)) },
};

/** Returns the bucket 0–7 of a statistic. Pure. */
export const bucketIn = (name, s, length) => Math.max(0, Math.min(7, Math.floor(STATISTICS[name].share(s, length) * 7.999)));

/** Describes a head: layer, head and every statistic. Pure. */
export const describe = (s, length) => [`layer ${s.layer}, head ${s.head}`, ...Object.values(STATISTICS).map(({ name, text }) => `${name} ${text(s, length)}`)].join(' · ');

/** Returns the cell `[row, column]` to which a key moves in a grid of `rows` × `columns`, or null. Pure. */
export function cellAfterKey(key, [row, column], rows, columns) {
  const to = {
    ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
    Home: [row, 0], End: [row, columns - 1], PageUp: [0, column], PageDown: [rows - 1, column],
  }[key];
  return to ? [Math.max(0, Math.min(rows - 1, to[0])), Math.max(0, Math.min(columns - 1, to[1]))] : null;
}

export class Heads {
  #statistic = h('select', { 'aria-label': 'Statistic of the heads', onchange: () => this.#paint() }, Object.entries(STATISTICS).map(([value, { name }]) => h('option', { value }, name)));
  #grid = h('div', { class: 'heads', role: 'grid', 'aria-label': 'Heads: layers down, heads across. Enter shades the text by a head.' });
  #facts = h('p', { class: 'hint' });
  el = h('div', { hidden: true }, h('h2', {}, 'Layers × heads'), h('div', { class: 'row' }, this.#statistic), this.#grid, this.#facts);
  #choose;
  #token;
  #shape = '';
  #heads = 0;
  #cells = [];
  #stats = [];
  #stored = new Set();
  #length = 0;
  #at = 0;
  #view = '';

  /** `choose(view)` is called with `head:L:H` or `layer:L`; `token(position)` returns the text at a position. */
  constructor(choose, token) {
    this.#choose = choose;
    this.#token = token;
    this.#grid.addEventListener('keydown', (event) => this.#key(event));
    this.#grid.addEventListener('click', (event) => this.#pick(event.target));
    this.#grid.addEventListener('focusin', (event) => this.#onHover(event.target));
    this.#grid.addEventListener('pointerover', (event) => this.#onHover(event.target));
    this.#grid.addEventListener('pointerleave', () => this.#showFacts(this.#cells[this.#at]));
  }

  /** Shows a step with `stats`, `row_len` and `stored_heads`, and the chosen view. */
  show({ stats, row_len: length, stored_heads: stored = [] }, view) {
    this.el.hidden = stats.length === 0;
    if (!stats.length) return;
    this.#stats = stats;
    this.#length = length;
    this.#stored = new Set(stored.map(String));
    const shape = stats.map((s) => s.layer).join();
    if (shape !== this.#shape) this.#build(shape);
    this.#view = view;
    this.#paint();
  }

  #build(shape) {
    this.#shape = shape;
    const layers = [...new Set(this.#stats.map((s) => s.layer))];
    this.#heads = this.#stats.length / layers.length;
    this.#at = 0;
    this.#grid.style.setProperty('--heads', this.#heads);
    this.#cells = this.#stats.map(() => h('span', { role: 'gridcell', tabindex: '-1' }));
    this.#grid.replaceChildren(...layers.map((layer, i) => h('div', { role: 'row' },
      h('button', { type: 'button', role: 'rowheader', class: 'plain', tabindex: '-1', title: `Shade by the mean of layer ${layer}`, 'data-layer': layer }, String(layer)),
      this.#cells.slice(i * this.#heads, (i + 1) * this.#heads))));
  }

  #paint() {
    const [name, layer, head] = this.#view.split(':');
    const chosen = name === 'head' ? `${layer},${head}` : '';
    this.#stats.forEach((s, i) => {
      const cell = this.#cells[i];
      const key = `${s.layer},${s.head}`;
      const style = `b${bucketIn(this.#statistic.value, s, this.#length)}${this.#stored.has(key) ? ' kept' : ''}`;
      if (cell.className !== style) cell.className = style;
      if ((key === chosen) !== (cell.ariaSelected === 'true')) cell.ariaSelected = String(key === chosen);
      if (key === chosen && !this.#grid.contains(document.activeElement)) this.#enter(i);
    });
    this.#enter(this.#at);
    this.#showFacts(this.#cells[this.#at]);
  }

  /** Makes a cell the one that the Tab key focuses. */
  #enter(i) {
    this.#cells[this.#at].tabIndex = -1;
    this.#at = i;
    const cell = this.#cells[i];
    cell.tabIndex = 0;
    cell.ariaLabel = `${describe(this.#stats[i], this.#length)}${this.#isStored(i) ? '' : ' · rows not stored'}`;
  }

  #isStored(i) { return this.#stored.has(`${this.#stats[i].layer},${this.#stats[i].head}`); }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.role !== 'gridcell') return;
    if (event.key === 'Enter' || event.key === ' ') this.#pick(event.target);
    else {
      const to = cellAfterKey(event.key, [Math.floor(this.#at / this.#heads), this.#at % this.#heads], this.#cells.length / this.#heads, this.#heads);
      if (!to) return;
      this.#enter(to[0] * this.#heads + to[1]);
      this.#cells[this.#at].focus();
    }
    event.preventDefault();
  }

  #pick(target) {
    const i = this.#cells.indexOf(target);
    if (target.dataset.layer !== undefined) this.#choose(`layer:${target.dataset.layer}`);
    else if (i >= 0) {
      this.#enter(i);
      this.#choose(`head:${this.#stats[i].layer}:${this.#stats[i].head}`);
    }
  }

  #onHover(target) {
    if (target.role === 'gridcell') this.#showFacts(target);
  }

  #showFacts(cell) {
    const i = this.#cells.indexOf(cell);
    const s = this.#stats[i];
    if (s) this.#facts.textContent = `${describe(s, this.#length)} at ${this.#token(s.peak_position)} · ${this.#isStored(i) ? 'click to shade the text by it' : 'its rows are not stored'}`;
  }
}
