// The grid of all attention heads of a step, with a row for each layer, colored by a statistic of each head.
import { h } from '../dom.js';
import { percent } from './candidates.js';

/** Returns the number of positions between the newest one and the one with the highest attention of a head. */
const distance = (stats, length) => length - 1 - stats.peak_position;

/**
 * The statistics by their id in the list: name, value as text, and value from 0 to 1 for the color. Their arguments are the
 * `stats` of a head, as in the response of the API, and the number of positions, `length`.
 */
const STATISTICS = {
  entropy: { name: 'entropy', text: (stats) => `${stats.entropy.toFixed(2)} bit`, share: (stats, length) => stats.entropy / Math.log2(Math.max(2, length)) },
  sink_mass: { name: 'sink mass', text: (stats) => percent(stats.sink_mass), share: (stats) => stats.sink_mass },
  peak: { name: 'peak', text: (stats) => percent(stats.peak), share: (stats) => stats.peak },
  distance: { name: 'distance to the peak', text: (stats, length) => `${distance(stats, length)} positions`, share: (stats, length) => Math.sqrt(distance(stats, length) / Math.max(1, length - 1)) },
};

/** Returns the bucket 0–7 of a statistic of a head. Pure. */
export const bucketOfStatistic = (id, stats, length) => Math.max(0, Math.min(7, Math.floor(STATISTICS[id].share(stats, length) * 7.999)));

/** Describes a head by its layer, its number and all statistics. Pure. */
export function describe(stats, length) {
  const values = Object.values(STATISTICS).map(({ name, text }) => `${name} ${text(stats, length)}`);
  return [`layer ${stats.layer}, head ${stats.head}`, ...values].join(' · ');
}

/** Returns the cell `[row, column]` to which a key moves in a grid of `rows` × `columns` cells, or null for other keys. Pure. */
export function cellAfterKey(key, [row, column], rows, columns) {
  const to = {
    ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
    Home: [row, 0], End: [row, columns - 1], PageUp: [0, column], PageDown: [rows - 1, column],
  }[key];
  return to ? [Math.max(0, Math.min(rows - 1, to[0])), Math.max(0, Math.min(columns - 1, to[1]))] : null;
}

export class Heads {
  #statistic = h('select', { 'aria-label': 'Statistic of the heads', onchange: () => this.#updateCells() }, Object.entries(STATISTICS).map(([value, { name }]) => h('option', { value }, name)));
  #grid = h('div', { class: 'heads', role: 'grid', 'aria-label': 'Heads: layers down, heads across. Enter shades the text by a head.' });
  #facts = h('p', { class: 'hint' });
  el = h('div', { hidden: true }, h('h2', {}, 'Layers × heads'), h('div', { class: 'row' }, this.#statistic), this.#grid, this.#facts);
  #onSelect;
  #textAt;
  /** Layer numbers of the shown heads, by which a change of the grid is detected. */
  #shape = '';
  /** Number of heads per layer. */
  #headCount = 0;
  /** Elements of the heads, and their statistics in the same order. */
  #cells = [];
  #stats = [];
  /** Heads whose attention was recorded, as `layer,head`. */
  #stored = new Set();
  /** Number of positions of the step. */
  #length = 0;
  /** Index of the cell that the Tab key focuses. */
  #tabStop = 0;
  #view = '';

  /** `onSelect(view)` is called with the name of a view, `head:3:5` or `layer:3`. `textAt(position)` returns the text at a position. */
  constructor(onSelect, textAt) {
    this.#onSelect = onSelect;
    this.#textAt = textAt;
    this.#grid.addEventListener('keydown', (event) => this.#onKey(event));
    this.#grid.addEventListener('click', (event) => this.#select(event.target));
    this.#grid.addEventListener('focusin', (event) => this.#onHover(event.target));
    this.#grid.addEventListener('pointerover', (event) => this.#onHover(event.target));
    this.#grid.addEventListener('pointerleave', () => this.#showFacts(this.#cells[this.#tabStop]));
  }

  /** Shows the heads of a step, whose attention is a response of the API, and the selected view. */
  show({ stats, row_len: length, stored_heads: stored = [] }, view) {
    this.el.hidden = stats.length === 0;
    if (!stats.length) return;
    this.#stats = stats;
    this.#length = length;
    this.#stored = new Set(stored.map(String));
    const shape = stats.map((s) => s.layer).join();
    if (shape !== this.#shape) this.#build(shape);
    this.#view = view;
    this.#updateCells();
  }

  /** Creates the cells. */
  #build(shape) {
    this.#shape = shape;
    const layers = [...new Set(this.#stats.map((s) => s.layer))];
    this.#headCount = this.#stats.length / layers.length;
    this.#tabStop = 0;
    this.#grid.style.setProperty('--heads', this.#headCount);
    this.#cells = this.#stats.map(() => h('span', { role: 'gridcell', tabindex: '-1' }));
    this.#grid.replaceChildren(...layers.map((layer, i) => h('div', { role: 'row' },
      h('button', { type: 'button', role: 'rowheader', class: 'plain', tabindex: '-1', title: `Shade by the mean of layer ${layer}`, 'data-layer': layer }, String(layer)),
      this.#cells.slice(i * this.#headCount, (i + 1) * this.#headCount))));
  }

  /** Colors the cells by the selected statistic, and marks the selected head and the ones whose attention was recorded. */
  #updateCells() {
    const [name, layer, head] = this.#view.split(':');
    const selected = name === 'head' ? `${layer},${head}` : '';
    this.#stats.forEach((stats, i) => {
      const cell = this.#cells[i];
      const key = `${stats.layer},${stats.head}`;
      const classes = `b${bucketOfStatistic(this.#statistic.value, stats, this.#length)}${this.#stored.has(key) ? ' stored' : ''}`;
      if (cell.className !== classes) cell.className = classes;
      if ((key === selected) !== (cell.ariaSelected === 'true')) cell.ariaSelected = String(key === selected);
      if (key === selected && !this.#grid.contains(document.activeElement)) this.#setTabStop(i);
    });
    this.#setTabStop(this.#tabStop);
    this.#showFacts(this.#cells[this.#tabStop]);
  }

  /** Makes a cell the one that the Tab key focuses, and updates its description. */
  #setTabStop(i) {
    this.#cells[this.#tabStop].tabIndex = -1;
    this.#tabStop = i;
    const cell = this.#cells[i];
    cell.tabIndex = 0;
    cell.ariaLabel = `${describe(this.#stats[i], this.#length)}${this.#isStored(i) ? '' : ' · attention not stored'}`;
  }

  #isStored(i) { return this.#stored.has(`${this.#stats[i].layer},${this.#stats[i].head}`); }

  #onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.role !== 'gridcell') return;
    if (event.key === 'Enter' || event.key === ' ') this.#select(event.target);
    else {
      const columns = this.#headCount;
      const current = [Math.floor(this.#tabStop / columns), this.#tabStop % columns];
      const next = cellAfterKey(event.key, current, this.#cells.length / columns, columns);
      if (!next) return;
      this.#setTabStop(next[0] * columns + next[1]);
      this.#cells[this.#tabStop].focus();
    }
    event.preventDefault();
  }

  /** Selects the view of a head or of a layer. */
  #select(target) {
    const i = this.#cells.indexOf(target);
    if (target.dataset.layer !== undefined) this.#onSelect(`layer:${target.dataset.layer}`);
    else if (i >= 0) {
      this.#setTabStop(i);
      this.#onSelect(`head:${this.#stats[i].layer}:${this.#stats[i].head}`);
    }
  }

  #onHover(target) {
    if (target.role === 'gridcell') this.#showFacts(target);
  }

  /** Shows the description of a head below the grid. */
  #showFacts(cell) {
    const i = this.#cells.indexOf(cell);
    const stats = this.#stats[i];
    if (!stats) return;
    const note = this.#isStored(i) ? 'click to shade the text by it' : 'its attention is not stored';
    this.#facts.textContent = `${describe(stats, this.#length)} at ${this.#textAt(stats.peak_position)} · ${note}`;
  }
}
