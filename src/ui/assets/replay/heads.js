// The grid of all attention heads of a step, with a row for each layer, colored by a statistic of each head.
import { h } from '../dom.js';
import { percent } from './candidates.js';
import { Grid } from './grid.js';

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
  distance: { name: 'distance to the peak', text: (stats, length) => `${distance(stats, length)} position${distance(stats, length) === 1 ? '' : 's'}`, share: (stats, length) => Math.sqrt(distance(stats, length) / Math.max(1, length - 1)) },
};

/** Returns the bucket 0–7 of a statistic of a head. Pure. */
export const bucketOfStatistic = (id, stats, length) => Math.max(0, Math.min(7, Math.floor(STATISTICS[id].share(stats, length) * 7.999)));

/** Describes a head by its layer, its number and all statistics. Pure. */
export function describe(stats, length) {
  const values = Object.values(STATISTICS).map(({ name, text }) => `${name} ${text(stats, length)}`);
  return [`layer ${stats.layer}, head ${stats.head}`, ...values].join(' · ');
}

export class Heads {
  #statistic = h('select', { 'aria-label': 'Statistic of the heads', onchange: () => this.#updateCells() }, Object.entries(STATISTICS).map(([value, { name }]) => h('option', { value }, name)));
  #grid = new Grid('heads', 'Heads: layers down, heads across. Enter shades the text by a head.', (i) => this.#describe(i), (i) => this.#onSelect(`head:${this.#stats[i].layer}:${this.#stats[i].head}`));
  el = h('div', { hidden: true }, h('h2', {}, 'Layers × heads'), h('div', { class: 'row' }, this.#statistic), this.#grid.el, this.#grid.facts);
  #onSelect;
  #textAt;
  /** Layer numbers of the shown heads, by which a change of the grid is detected. */
  #shape = '';
  /** Statistics of the heads, in the order of the cells. */
  #stats = [];
  /** Heads whose attention was recorded, as `layer,head`. */
  #stored = new Set();
  /** Number of positions of the step. */
  #length = 0;
  #view = '';

  /** `onSelect(view)` is called with the name of a view, `head:3:5` or `layer:3`. `textAt(position)` returns the text at a position. */
  constructor(onSelect, textAt) {
    this.#onSelect = onSelect;
    this.#textAt = textAt;
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

  #build(shape) {
    this.#shape = shape;
    const layers = [...new Set(this.#stats.map((s) => s.layer))];
    const header = (layer) => h('div', { role: 'rowheader' }, h('button', { type: 'button', class: 'plain', tabindex: '-1', title: `Shade by the mean of layer ${layer}`, onclick: () => this.#onSelect(`layer:${layer}`) }, String(layer)));
    this.#grid.setRows(layers.map(header), this.#stats.length / layers.length);
  }

  /** Colors the cells by the selected statistic, and marks the selected head and the ones whose attention was recorded. */
  #updateCells() {
    const { value } = this.#statistic;
    this.#grid.update(
      (i) => `b${bucketOfStatistic(value, this.#stats[i], this.#length)}${this.#isStored(i) ? ' framed' : ''}`,
      this.#stats.findIndex(({ layer, head }) => this.#view === `head:${layer}:${head}`));
  }

  #isStored(i) { return this.#stored.has(`${this.#stats[i].layer},${this.#stats[i].head}`); }

  #describe(i) {
    const note = this.#isStored(i) ? 'click to shade the text by it' : 'its attention is not stored';
    return `${describe(this.#stats[i], this.#length)} at ${this.#textAt(this.#stats[i].peak_position)} · ${note}`;
  }
}
