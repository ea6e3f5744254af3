// The images of a prompt: a chip for each in the text, and the attention to its patches. An image has one or more tiles, which
// are grids of patches with one token each. This module is only loaded for runs with images.
import { base, runPath } from '../api.js';
import { palette } from '../canvas.js';
import { h } from '../dom.js';
import { percent } from './candidates.js';

/** Returns the number of patches of a tile. */
const patchCount = ({ columns, rows }) => columns * rows;

/** Returns the number of tokens of an image. Pure. */
export const tokenCount = ({ tiles }) => tiles.reduce((count, tile) => count + patchCount(tile), 0);

/**
 * Returns the attention of a step to the patches of an image: `{tiles, mass, peak, peakPlace}` with the values of the patches
 * of each tile, line by line, their sum, the highest one, and its place `{tile, column, row}`, or null. `rows` are the rows of
 * the run by position in the context, and `values` the attention to the positions. Pure.
 */
export function patchValues(tiles, rows, values) {
  /** Tile and patch by row of the run. */
  const patches = new Map();
  tiles.forEach((tile, t) => { for (let k = 0; k < patchCount(tile); k += 1) patches.set(tile.start + k, [t, k]); });
  const valuesOfTiles = tiles.map((tile) => new Float64Array(patchCount(tile)));
  let [mass, peak, peakPlace] = [0, 0, null];
  for (let pos = 0; pos < Math.min(rows.length, values.length); pos += 1) {
    const patch = patches.get(rows[pos]);
    if (!patch) continue;
    const [t, k] = patch;
    valuesOfTiles[t][k] = values[pos];
    mass += values[pos];
    if (values[pos] > peak) [peak, peakPlace] = [values[pos], { tile: t, column: k % tiles[t].columns, row: Math.floor(k / tiles[t].columns) }];
  }
  return { tiles: valuesOfTiles, mass, peak, peakPlace };
}

/** Returns the images of a prompt whose fields have the expected types, because traces of other engines are not checked. Pure. */
export function imagesOf(prompt) {
  const isCount = (value) => Number.isInteger(value) && value >= 0 && value < 1e6;
  const isTile = (tile) => tile && isCount(tile.start) && isCount(tile.columns) && isCount(tile.rows) && patchCount(tile) < 1e6;
  const list = Array.isArray(prompt.images) ? prompt.images : [];
  return list.filter((image) => /^[0-9a-f]{64}$/.test(image?.sha256) && Array.isArray(image.tiles) && image.tiles.length > 0 && image.tiles.every(isTile));
}

/** An image: its chip in the text, and its section with the attention to it. */
class PromptImage {
  #record;
  #name;
  #url;
  #canvases;
  #facts = h('p', { class: 'hint' });
  /** The shown attention, as `patchValues` returns it, or null. */
  #attention = null;
  section;

  constructor(record, number, count, url) {
    this.#record = record;
    this.#name = count > 1 ? `Image ${number}` : 'Image';
    this.#url = record.recorded ? url : null;
    this.#canvases = record.tiles.map(() => h('canvas', { role: 'img' }));
    this.section = h('div', { class: 'patches', hidden: true }, h('h2', {}, `Attention to ${this.#name.toLowerCase()}`), this.#facts,
      ...record.tiles.map((tile, t) => this.#grid(tile, t)));
  }

  /** Returns the grid of a tile. The picture is shown behind it if the image has only one tile. */
  #grid({ columns, rows }, t) {
    const { width, height, tiles } = this.#record;
    const isOnlyTile = tiles.length === 1;
    const aspectRatio = isOnlyTile && rows > 1 && width && height ? `${width} / ${height}` : `${columns} / ${rows}`;
    const box = h('div', { class: 'patch-grid' }, isOnlyTile ? this.#picture() : null, this.#canvases[t]);
    box.style.aspectRatio = aspectRatio;
    return box;
  }

  #picture() {
    if (!this.#url) return null;
    return h('img', { src: this.#url, alt: '', decoding: 'async', onerror: (event) => event.target.remove() });
  }

  /** Returns the chip that replaces the tokens of the image in the text. */
  chip() {
    const { width, height, sha256, bytes } = this.#record;
    const size = width && height ? `${width} × ${height}` : 'unknown size';
    const missing = h('p', { class: 'hint' }, 'The file is not recorded; start the server with --record-images to keep the files of later runs.');
    const picture = !this.#url ? missing : h('img', {
      src: this.#url, alt: `${this.#name} of the prompt, ${size} pixels`, loading: 'lazy', decoding: 'async', onerror: (event) => event.target.replaceWith(missing),
    });
    const facts = [size, `${tokenCount(this.#record)} tokens`, sha256.slice(0, 8)].join(' · ');
    return h('details', { class: 'image-chip' },
      h('summary', { title: `SHA-256 ${sha256}` }, h('span', { 'aria-hidden': 'true' }, '▣ '), `${this.#name} · ${facts}`),
      picture, h('p', { class: 'hint' }, `SHA-256 ${sha256}${bytes ? ` · ${bytes} bytes` : ''}`));
  }

  /** Shows the attention of a step, `{values, rows}` with the rows by position, or none if it is null. */
  showAttention(attention) {
    this.#attention = attention && patchValues(this.#record.tiles, attention.rows, attention.values);
    this.section.hidden = !attention;
    if (!attention) return;
    const { mass, peak, peakPlace } = this.#attention;
    const place = peakPlace ? `, at column ${peakPlace.column + 1}, row ${peakPlace.row + 1}${this.#record.tiles.length > 1 ? ` of tile ${peakPlace.tile + 1}` : ''}` : '';
    this.#facts.textContent = `${percent(mass)} of the attention · highest patch ${percent(peak)}${place}`;
    this.draw();
  }

  /** Draws the grids. The opacity of a patch is its share of the highest value, on a square-root scale. */
  draw() {
    if (!this.#attention) return;
    const { spark, 'line-strong': line } = palette(['spark', 'line-strong']);
    this.#record.tiles.forEach(({ columns, rows }, t) => {
      const canvas = this.#canvases[t];
      const patchWidth = Math.max(2, Math.floor(640 / columns));
      canvas.width = columns * patchWidth;
      canvas.height = rows * Math.max(2, Math.floor(640 / Math.max(columns, rows)));
      const patchHeight = canvas.height / rows;
      const context = canvas.getContext('2d');
      context.clearRect(0, 0, canvas.width, canvas.height);
      const values = this.#attention.tiles[t];
      for (let k = 0; k < values.length; k += 1) {
        const [x, y] = [(k % columns) * patchWidth, Math.floor(k / columns) * patchHeight];
        context.globalAlpha = this.#attention.peak > 0 ? 0.85 * Math.sqrt(values[k] / this.#attention.peak) : 0;
        context.fillStyle = spark;
        context.fillRect(x, y, patchWidth, patchHeight);
        context.globalAlpha = 0.5;
        context.strokeStyle = line;
        context.strokeRect(x + 0.5, y + 0.5, patchWidth - 1, patchHeight - 1);
      }
      canvas.setAttribute('aria-label', `Attention over ${columns} × ${rows} patches: ${this.#facts.textContent}`);
    });
  }
}

/** The images of a run's prompt. */
export class Images {
  #images;

  /** Replaces the tokens of each image in `text` by a chip. `id` is the id of the run, or null in an exported page. */
  constructor(id, prompt, text) {
    const records = imagesOf(prompt);
    const url = (record) => (id === null ? null : `${base}${runPath(id)}/images/${record.sha256}`);
    this.#images = records.map((record, i) => new PromptImage(record, i + 1, records.length, url(record)));
    records.forEach((record, i) => {
      const chip = this.#images[i].chip();
      record.tiles.forEach((tile, t) => text.embed(tile.start, tile.start + patchCount(tile), t === 0 ? chip : null));
    });
  }

  /** Adds the sections of the images to the section of the attention, below its strip. */
  addTo(section) {
    if (this.#images[0]?.section.parentNode === section) return;
    section.querySelector('.strip').after(...this.#images.map((image) => image.section));
  }

  /** Shows the attention of a step, `{values, rows}`, or none if it is null. */
  showAttention(attention) {
    for (const image of this.#images) image.showAttention(attention);
  }

  /** Draws the attention again, in the colors of the current theme. */
  draw() {
    for (const image of this.#images) image.draw();
  }
}
