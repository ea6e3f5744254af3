// Images of a prompt: a chip in the text for each, and the attention to its patches. Loaded only for runs with images.
import { base, h, palette } from '../dom.js';
import { percent } from './candidates.js';

/** Returns the number of patches of a tile. Pure. */
const sizeOf = ({ columns, rows }) => columns * rows;

/** Returns the number of tokens of an image. Pure. */
export const tokensOf = ({ tiles }) => tiles.reduce((count, tile) => count + sizeOf(tile), 0);

/**
 * Returns the attention to the patches of an image at a step: for each tile its values in row order, and their sum, highest
 * value and its position. `rows` are the rows of the run by position. Pure.
 */
export function patchValues(tiles, rows, values) {
  const places = new Map();
  tiles.forEach((tile, t) => { for (let k = 0; k < sizeOf(tile); k += 1) places.set(tile.start + k, [t, k]); });
  const out = tiles.map((tile) => new Float64Array(sizeOf(tile)));
  let [mass, peak, at] = [0, 0, null];
  for (let pos = 0; pos < Math.min(rows.length, values.length); pos += 1) {
    const place = places.get(rows[pos]);
    if (!place) continue;
    const [t, k] = place;
    out[t][k] = values[pos];
    mass += values[pos];
    if (values[pos] > peak) [peak, at] = [values[pos], { tile: t, column: k % tiles[t].columns, row: Math.floor(k / tiles[t].columns) }];
  }
  return { tiles: out, mass, peak, at };
}

/** Returns the images of a prompt whose fields have the expected types; a trace can come from anywhere. Pure. */
export function imagesOf(prompt) {
  const count = (value) => Number.isInteger(value) && value >= 0 && value < 1e6;
  const isTile = (tile) => tile && count(tile.start) && count(tile.columns) && count(tile.rows) && sizeOf(tile) < 1e6;
  const list = Array.isArray(prompt.images) ? prompt.images : [];
  return list.filter((image) => /^[0-9a-f]{64}$/.test(image?.sha256) && Array.isArray(image.tiles) && image.tiles.length > 0 && image.tiles.every(isTile));
}

/** One image: its chip in the text, and its section with the attention. */
class PromptImage {
  #record;
  #name;
  #url;
  #canvases;
  #facts = h('p', { class: 'hint' });
  #drawn = null;
  section;

  constructor(record, number, count, url) {
    this.#record = record;
    this.#name = count > 1 ? `Image ${number}` : 'Image';
    this.#url = record.recorded ? url : null;
    this.#canvases = record.tiles.map(() => h('canvas', { role: 'img' }));
    this.section = h('div', { class: 'patches', hidden: true }, h('h2', {}, `Attention to ${this.#name.toLowerCase()}`), this.#facts,
      ...record.tiles.map((tile, t) => this.#grid(tile, t)));
  }

  /** The grid of a tile. A recorded image of one tile is shown behind its grid. */
  #grid({ columns, rows }, t) {
    const { width, height, tiles } = this.#record;
    const isWhole = tiles.length === 1;
    const shape = isWhole && rows > 1 && width && height ? `${width} / ${height}` : `${columns} / ${rows}`;
    const box = h('div', { class: 'patch-grid' }, isWhole ? this.#picture() : null, this.#canvases[t]);
    box.style.aspectRatio = shape;
    return box;
  }

  #picture() {
    if (!this.#url) return null;
    return h('img', { src: this.#url, alt: '', decoding: 'async', onerror: (event) => event.target.remove() });
  }

  /** The chip that replaces the tokens of the image in the text. */
  chip() {
    const { width, height, sha256, bytes } = this.#record;
    const size = width && height ? `${width} × ${height}` : 'unknown size';
    const missing = h('p', { class: 'hint' }, 'The file is not recorded; start the server with --record-images to keep the files of later runs.');
    const picture = this.#url ? h('img', { src: this.#url, alt: `${this.#name} of the prompt, ${size} pixels`, loading: 'lazy', decoding: 'async', onerror: (event) => event.target.replaceWith(missing) }) : missing;
    const facts = [size, `${tokensOf(this.#record)} tokens`, sha256.slice(0, 8)].join(' · ');
    return h('details', { class: 'image-chip' },
      h('summary', { title: `SHA-256 ${sha256}` }, h('span', { 'aria-hidden': 'true' }, '▣ '), `${this.#name} · ${facts}`),
      picture, h('p', { class: 'hint' }, `SHA-256 ${sha256}${bytes ? ` · ${bytes} bytes` : ''}`));
  }

  /** Shows the attention to the patches at a step, or hides it without `now`. */
  attention(now, sequence) {
    this.#drawn = now && patchValues(this.#record.tiles, sequence, now.values);
    this.section.hidden = !now;
    if (!now) return;
    const { mass, peak, at } = this.#drawn;
    const place = at ? `, at column ${at.column + 1}, row ${at.row + 1}${this.#record.tiles.length > 1 ? ` of tile ${at.tile + 1}` : ''}` : '';
    this.#facts.textContent = `${percent(mass)} of the attention · highest patch ${percent(peak)}${place}`;
    this.draw();
  }

  /** Draws the grids, each patch by its share of the highest value on a square-root scale. */
  draw() {
    if (!this.#drawn || this.section.hidden) return;
    const { spark, 'line-strong': line } = palette(['spark', 'line-strong']);
    this.#record.tiles.forEach(({ columns, rows }, t) => {
      const canvas = this.#canvases[t];
      const patchWidth = Math.max(2, Math.floor(640 / columns));
      canvas.width = columns * patchWidth;
      canvas.height = rows * Math.max(2, Math.floor(640 / Math.max(columns, rows)));
      const patchHeight = canvas.height / rows;
      const g = canvas.getContext('2d');
      g.clearRect(0, 0, canvas.width, canvas.height);
      const values = this.#drawn.tiles[t];
      for (let k = 0; k < values.length; k += 1) {
        const [x, y] = [(k % columns) * patchWidth, Math.floor(k / columns) * patchHeight];
        g.globalAlpha = this.#drawn.peak > 0 ? 0.85 * Math.sqrt(values[k] / this.#drawn.peak) : 0;
        g.fillStyle = spark;
        g.fillRect(x, y, patchWidth, patchHeight);
        g.globalAlpha = 0.5;
        g.strokeStyle = line;
        g.strokeRect(x + 0.5, y + 0.5, patchWidth - 1, patchHeight - 1);
      }
      canvas.setAttribute('aria-label', `Attention over ${columns} × ${rows} patches: ${this.#facts.textContent}`);
    });
  }
}

/** The images of a run. */
export class Images {
  #run;
  #images;

  /** Replaces the tokens of each image in `text` by a chip. `id` is null in an exported page. */
  constructor(run, id, prompt, text) {
    this.#run = run;
    const records = imagesOf(prompt);
    const url = (record) => (id === null ? null : `${base}/api/v1/runs/${encodeURIComponent(id)}/images/${record.sha256}`);
    this.#images = records.map((record, i) => new PromptImage(record, i + 1, records.length, url(record)));
    records.forEach((record, i) => {
      const chip = this.#images[i].chip();
      record.tiles.forEach((tile, t) => text.embed(tile.start, tile.start + sizeOf(tile), t === 0 ? chip : null));
    });
  }

  /** Adds the sections of the images to the section of the attention, below its strip. */
  join(section) {
    if (this.#images[0]?.section.parentNode === section) return;
    section.querySelector('.strip').after(...this.#images.map((image) => image.section));
  }

  /** Shows the attention of a step, `{values, seq}`, or none. */
  attention(now) {
    const sequence = now ? this.#run.sequence(now.seq) : [];
    for (const image of this.#images) image.attention(now, sequence);
  }

  /** Draws again, in the colors of the theme. */
  draw() {
    for (const image of this.#images) image.draw();
  }
}
