// The attention map: the attention of all steps of a run to all positions.
import { palette, prepareCanvas } from '../canvas.js';
import { h } from '../dom.js';
import { fetchAttention } from './attention-requests.js';
import { bucketOfShare } from './color.js';

/** Maximum columns and rows of the map; a column can stand for several positions. */
const MAX_BINS = 256;
/** Delay in ms after a failure before the map is requested again. */
const RETRY_DELAY_MS = 10_000;

export class AttentionMap {
  #canvas = h('canvas', { 'aria-hidden': 'true' });
  #head = h('h2');
  #box = h('div', { class: 'map', title: 'Steps down, positions in the context across. Click to go there.', onclick: (event) => this.#onClick(event) }, this.#canvas);
  el = h('div', { hidden: true }, this.#head, this.#box);
  #run;
  #id;
  #hooks;
  /** The loaded map, as `readMap` returns it, with the number of events at that time, `count`, and whether the run was live; or null. */
  #map = null;
  #n = 0;
  /** The map without the cursor, which is copied when the cursor moves. */
  #background = document.createElement('canvas');
  /** Map, size and theme of `#background`. */
  #backgroundKey = '';

  /** `hooks.go(event)` moves the cursor, and `hooks.isLive()` returns true if the run is live. */
  constructor(run, id, hooks) {
    this.#run = run;
    this.#id = id;
    this.#hooks = hooks;
  }

  /** Loads the map, unless it is loaded or a request has just failed. That of a live run is loaded again when the run has grown by a quarter, and at its end. */
  async load() {
    const count = this.#run.eventCount;
    const isLive = this.#hooks.isLive();
    if (this.#map?.isLive === isLive && (!isLive || count < this.#map.count * 1.25)) return;
    const map = { count, isLive, rows: [] };
    this.#map = map;
    try {
      Object.assign(map, readMap(await fetchAttention(this.#id, { from: 0, to: count, bins: MAX_BINS })));
      if (this.#map !== map) return;
      this.#addPromptLengths(map.rows);
      this.#head.textContent = `Steps × positions, mean of all heads${map.isSampled ? `, ${map.rows.length} of the steps` : ''}`;
      this.redraw();
    } catch {
      if (this.#map !== map) return;
      this.el.hidden = true;
      setTimeout(() => { if (this.#map === map) this.#map = null; }, RETRY_DELAY_MS);
    }
  }

  /** Adds the number of tokens of the prompt that were in the context of each step. */
  #addPromptLengths(rows) {
    let [promptLength, end] = [0, 0];
    for (const row of rows) {
      if (row.seq >= end) {
        promptLength = this.#run.context(row.seq).filter((i) => this.#run.isPrompt(i)).length;
        end = this.#run.nextEviction(row.seq);
      }
      row.promptLength = promptLength;
    }
  }

  /** Shows the cursor at event `n`. */
  moveCursor(n) {
    this.#n = n;
    this.#draw();
  }

  /** Draws the map again, after it was loaded, or its size or colors have changed. */
  redraw() {
    this.#backgroundKey = '';
    this.#draw();
  }

  #draw() {
    const map = this.#map;
    if (!map?.rows.length) return;
    this.el.hidden = false;
    const drawing = prepareCanvas(this.#canvas);
    if (!drawing) return;
    const { context, width, height } = drawing;
    const key = `${map.count} ${width} ${document.documentElement.dataset.theme}`;
    if (key !== this.#backgroundKey) {
      this.#backgroundKey = key;
      this.#drawMap(map, drawing);
      this.#background.width = this.#canvas.width;
      this.#background.height = this.#canvas.height;
      this.#background.getContext('2d').drawImage(this.#canvas, 0, 0);
    } else context.drawImage(this.#background, 0, 0, width, height);
    const current = map.rows.findLastIndex(({ seq }) => seq <= this.#n);
    context.fillStyle = palette(['accent']).accent;
    if (current >= 0) context.fillRect(0, current * (height / map.rows.length), width, 1.5);
  }

  /** Draws the values, a line at the end of the prompt, and ticks at backtracks. */
  #drawMap(map, { context, width, height }) {
    const colors = palette(['b0', 'b1', 'b2', 'b3', 'b4', 'b5', 'b6', 'b7', 'danger', 'line-strong', 'spark']);
    const rowHeight = height / map.rows.length;
    const columnWidth = width / map.columns;
    map.rows.forEach(({ values }, y) => values.forEach((value, x) => {
      const bucket = bucketOfShare(value, map.peak);
      if (bucket < 1) return;
      context.fillStyle = bucket >= 7 ? colors.spark : colors[`b${bucket}`];
      context.fillRect(x * columnWidth, y * rowHeight, Math.ceil(columnWidth), Math.ceil(rowHeight));
    }));
    context.fillStyle = colors['line-strong'];
    map.rows.forEach(({ promptLength }, y) => context.fillRect((promptLength / map.positions) * width, y * rowHeight, 1, Math.ceil(rowHeight)));
    context.fillStyle = colors.danger;
    for (const mark of this.#run.marks) {
      if (mark.kind !== 'action' || !/^Backtrack/.test(mark.label)) continue;
      const y = map.rows.findIndex(({ seq }) => seq >= mark.seq);
      if (y >= 0) context.fillRect(0, y * rowHeight, 6, Math.max(1.5, Math.min(rowHeight, 2)));
    }
  }

  /** Moves the cursor to the step of a click. */
  #onClick(event) {
    if (!this.#map?.rows.length) return;
    const bounds = this.#box.getBoundingClientRect();
    const row = this.#map.rows[Math.floor(((event.clientY - bounds.top) / bounds.height) * this.#map.rows.length)];
    if (row) this.#hooks.go(row.seq);
  }
}

/**
 * Returns the map in a response of the API: `{rows: [{seq, values, promptLength}], columns, positions, isSampled, peak}`. `columns` is the
 * number of values in the longest row, `positions` its number of positions, and `isSampled` is true if some steps are left out.
 */
function readMap({ rows, bins, row_len: positions, sampled }) {
  // The highest value of a step is often an attention sink, so the second highest ones determine the scale.
  const secondHighest = rows.flatMap(({ values }) => [...values].sort((a, b) => b - a).slice(1, 2));
  return {
    rows: rows.map(({ sequence_order: seq, values }) => ({ seq, values, promptLength: 0 })),
    columns: bins, positions, isSampled: sampled, peak: Math.max(1e-6, ...secondHighest),
  };
}
