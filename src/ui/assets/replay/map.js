// Attention of a whole run as a map of steps × positions.
import { fetchApi, h, palette, prepareCanvas } from '../dom.js';
import { bucketOfShare } from './color.js';

const MAX_BINS = 256;

export class AttentionMap {
  #canvas = h('canvas', { 'aria-hidden': 'true' });
  #head = h('h2');
  #box = h('div', { class: 'map', title: 'Steps down, positions across. Click to go there.', onclick: (event) => this.#click(event) }, this.#canvas);
  el = h('div', { hidden: true }, this.#head, this.#box);
  #run;
  #id;
  #go;
  #map = null;
  #n = 0;
  /** The map without the cursor, drawn once and copied when the cursor moves, and a description of what it shows. */
  #base = document.createElement('canvas');
  #drawn = '';

  /** `go(event)` moves the cursor. */
  constructor(run, id, go) {
    this.#run = run;
    this.#id = id;
    this.#go = go;
  }

  /** Loads the map of the run, again after the run has grown by a quarter. */
  async load() {
    const count = this.#run.eventCount;
    if (this.#map && (this.#map.count === count || count < this.#map.count * 1.25)) return;
    this.#map = { count, rows: [] };
    try {
      const query = new URLSearchParams({ from: 0, to: count, bins: MAX_BINS });
      const response = await fetchApi(`/api/v1/runs/${encodeURIComponent(this.#id)}/attention?${query}`);
      this.#map = { count, ...(await readMap(response)) };
      this.#head.textContent = `Steps × positions, mean of all heads${this.#map.sampled ? `, ${this.#map.rows.length} of the steps` : ''}`;
      this.redraw();
    } catch {
      this.#map = null;
      this.el.hidden = true;
    }
  }

  /** Shows the cursor at event `n`. */
  at(n) {
    this.#n = n;
    this.#draw();
  }

  /** Draws the map again, after its size or colors changed. */
  redraw() {
    this.#drawn = '';
    this.#draw();
  }

  #draw() {
    const map = this.#map;
    if (!map?.rows.length) return;
    this.el.hidden = false;
    const s = prepareCanvas(this.#canvas);
    if (!s) return;
    const key = `${map.count} ${s.width} ${document.documentElement.dataset.theme}`;
    if (key !== this.#drawn) {
      this.#drawn = key;
      this.#drawBase(map, s);
      this.#base.width = this.#canvas.width;
      this.#base.height = this.#canvas.height;
      this.#base.getContext('2d').drawImage(this.#canvas, 0, 0);
    } else s.context.drawImage(this.#base, 0, 0, s.width, s.height);
    const y = map.rows.findLastIndex((r) => r.seq <= this.#n);
    s.context.fillStyle = palette(['accent']).accent;
    if (y >= 0) s.context.fillRect(0, y * (s.height / map.rows.length), s.width, 1.5);
  }

  #drawBase(map, s) {
    const c = palette(['b0', 'b1', 'b2', 'b3', 'b4', 'b5', 'b6', 'b7', 'danger', 'line-strong', 'spark']);
    const rowHeight = s.height / map.rows.length;
    map.rows.forEach((row, y) => {
      const columnWidth = s.width / map.width;
      row.values.forEach((v, x) => {
        const b = bucketOfShare(v, map.peak);
        if (b < 1) return;
        s.context.fillStyle = b >= 7 ? c.spark : c[`b${b}`];
        s.context.fillRect(x * columnWidth, y * rowHeight, Math.ceil(columnWidth), Math.ceil(rowHeight));
      });
    });
    const prompt = this.#run.sequence(0).length;
    s.context.fillStyle = c['line-strong'];
    if (map.length) s.context.fillRect((prompt / map.length) * s.width, 0, 1, s.height);
    s.context.fillStyle = c.danger;
    for (const mark of this.#run.marks) {
      if (mark.kind !== 'action' || !/^Backtrack/.test(mark.label)) continue;
      const y = map.rows.findIndex((r) => r.seq >= mark.seq);
      if (y >= 0) s.context.fillRect(0, y * rowHeight, 6, Math.max(1.5, Math.min(rowHeight, 2)));
    }
  }

  #click(event) {
    if (!this.#map?.rows.length) return;
    const at = this.#box.getBoundingClientRect();
    const row = this.#map.rows[Math.floor(((event.clientY - at.top) / at.height) * this.#map.rows.length)];
    if (row) this.#go(row.seq);
  }
}

/** Returns the map as `{rows: [{seq, values}], width, length, peak}`; `length` is the widest row in positions. */
async function readMap(response) {
  const { attention } = await response.json();
  const rows = (attention.rows ?? attention.steps ?? []).map((r) => ({ seq: r.sequence_order, values: r.values }));
  const width = attention.bins ?? Math.max(0, ...rows.map((r) => r.values.length));
  const all = rows.flatMap((r) => [...r.values].sort((a, b) => b - a).slice(1, 2));
  return { rows, width, length: attention.row_len ?? width, sampled: attention.sampled === true, peak: Math.max(1e-6, ...all) };
}
