// Attention in the replay: that of one step to all positions, or that of all later steps to one token. It shades the text. Its
// section shows a strip, the positions with the most attention, the heads, and a map of the whole run.
import { palette, prepareCanvas } from '../canvas.js';
import { h, replaceContent } from '../dom.js';
import { fetchAttention, viewQuery } from './attention-requests.js';
import { percent } from './candidates.js';
import { bucketOfShare } from './color.js';
import { Loader } from './events.js';
import { displayText } from './glyphs.js';
import { Heads } from './heads.js';
import { LaterSteps } from './later-steps.js';
import { AttentionMap } from './map.js';

const MAX_LISTED = 8;
const MAX_CACHED_STEPS = 200;
/** Views that every run with attention has, with their names. A view selects or combines layers and heads. */
const VIEWS = [['mean', 'mean'], ['max', 'max'], ['last', 'last layer'], ['weighted_layers', 'weighted layers']];

/** A sink gets at least this share of the attention, and this multiple of the highest share of a token that cannot be one. */
const MIN_SINK = 0.25;
const MIN_SINK_RATIO = 2.5;
/** Minimum of the highest other value, relative to evenly distributed attention; below it, the colors would show noise. */
const MIN_REST = 0.1;

/**
 * Finds the attention sinks of a step: positions that get far more attention than others although their tokens have no meaning
 * for the text. `canBeSink(position)` is true for the first token and for special tokens. Returns `{sinks, peak}`: the set of
 * their positions, which is empty if almost all attention is theirs, and the highest other value. Pure.
 */
export function sinksOf(values, canBeSink) {
  const highest = (isCounted) => values.reduce((max, value, pos) => (value > max && isCounted(pos) ? value : max), 0);
  const min = Math.max(MIN_SINK, MIN_SINK_RATIO * highest((pos) => !canBeSink(pos)));
  const sinks = new Set([...values.keys()].filter((pos) => values[pos] >= min && canBeSink(pos)));
  const peak = highest((pos) => !sinks.has(pos));
  return peak * values.length < MIN_REST ? { sinks: new Set(), peak: highest(() => true) } : { sinks, peak };
}

/** Descriptions of the encodings of stored values. */
const QUALITY = { f16: 'exact to 3 digits', u8: 'rounded to 1/255' };

export class Attention {
  /** Name of the selected view. */
  view;
  section = h('section', { hidden: true });
  #run;
  #id;
  #hooks;
  /** Responses of the API by step and view. */
  #cache = new Map();
  /** The attention of the current step, `{values, rows, sinks, peak, quality, missing}`, or null. `rows` are the rows of the context by position, and `missing` says why there are no values. */
  #current = null;
  #signal;
  /** Loads the attention of steps. Its targets are keys of `#cache`. */
  #loader = new Loader((key) => this.#load(key));
  /** Layers that have their own views. */
  #layers = [];
  #strip = h('canvas', { 'aria-hidden': 'true' });
  #viewSelect = h('select', { 'aria-label': 'Attention view', onchange: (event) => this.#selectView(event.target.value) });
  #facts = h('p', { class: 'hint' });
  #topPositions = h('ol', { class: 'top-positions' });
  #note = h('p', { class: 'hint' });
  #direction = h('select', { 'aria-label': 'Direction', onchange: () => this.#selectView(this.view) },
    h('option', { value: 'step' }, 'of this step'), h('option', { value: 'later' }, 'of later steps to this token'));
  #later;
  /** The token, as a row, whose attention from later steps is shown, or null. */
  #subject = null;
  #map;
  #stripBox = h('div', { class: 'strip' }, this.#strip);
  #choices = h('div', { class: 'row' }, this.#direction, this.#viewSelect);
  #n = 0;
  #heads = new Heads((view) => this.#selectView(view), (pos) => displayText(this.#textAt(pos)));

  /**
   * `view` is the selected view. If `showsLaterSteps` is true, the attention of later steps to one token is shown.
   * `hooks.isShown()` returns true while attention is shown, `hooks.isRecorded()` if the attention of the run was recorded, and
   * `hooks.isLive()` if the run is live. `hooks.go(n)` moves the cursor, and `hooks.select(row)` selects a token.
   * `hooks.viewChanged(view, showsLaterSteps)` is called when the user has selected another view, and `hooks.valuesChanged()` when the
   * shading may have changed.
   */
  constructor(run, id, { hooks, signal, view, showsLaterSteps }) {
    this.view = view;
    if (showsLaterSteps) this.#direction.value = 'later';
    this.#run = run;
    this.#id = id;
    this.#hooks = hooks;
    this.#signal = signal;
    this.#updateOptions();
    this.#map = new AttentionMap(run, id, hooks);
    this.#later = new LaterSteps(run, id, { isLive: hooks.isLive, changed: () => { this.#showFacts(); hooks.valuesChanged(); } }, signal);
    this.section.append(h('h2', {}, 'Attention'),
      this.#choices, this.#facts,
      this.#note, this.#stripBox, this.#topPositions, this.#heads.el, this.#map.el);
    this.#stripBox.addEventListener('click', (event) => this.#onStripClick(event));
    const redraw = () => { this.#drawStrip(); this.#map.redraw(); };
    const resized = new ResizeObserver(redraw);
    resized.observe(this.section);
    signal.addEventListener('abort', () => resized.disconnect());
    document.addEventListener('theme', redraw, { signal });
  }

  /** Shows the view and the direction that the user selected. */
  #selectView(view) {
    this.view = view;
    this.#updateOptions();
    this.#hooks.viewChanged(view, this.showsLaterSteps);
    this.moveCursor(this.#n, this.#subject);
  }

  /** Updates the list of views. A head is only listed while it is selected. */
  #updateOptions() {
    const [kind, layer, head] = this.view.split(':');
    const layers = this.#layers.map((number) => [`layer:${number}`, `layer ${number}`]);
    const heads = kind === 'head' ? [[this.view, `layer ${layer}, head ${head}`]] : [];
    this.#viewSelect.replaceChildren(...[...VIEWS, ...layers, ...heads].map(([value, name]) => h('option', { value }, name)));
    this.#viewSelect.value = this.view;
  }

  /** The shown attention of the current step, or null. */
  get current() { return this.#hooks.isShown() && !this.showsLaterSteps && this.#current?.values.length ? this.#current : null; }

  /** A function from a row to its bucket 0–7, or -1 for none; null if no attention is loaded. */
  get shading() {
    if (!this.#hooks.isShown() || !this.#current) return null;
    if (this.showsLaterSteps) return (row) => this.#later.bucketOf(row);
    const { values, rows, sinks, peak } = this.#current;
    const buckets = new Map();
    rows.forEach((row, pos) => { if (pos < values.length && !sinks.has(pos)) buckets.set(row, bucketOfShare(values[pos], peak)); });
    return (row) => buckets.get(row) ?? -1;
  }

  /** True if the attention of later steps to one token is shown. */
  get showsLaterSteps() { return this.#direction.value === 'later'; }

  /** Shows the attention at event `n`: that of the last forward pass, or that of later steps to the token of row `subject`, if any. */
  moveCursor(n, subject) {
    this.#n = n;
    this.#subject = subject;
    this.section.hidden = !this.#hooks.isShown();
    this.#loader.cancel();
    if (!this.#hooks.isShown()) return undefined;
    if (this.showsLaterSteps) this.#later.load(subject, this.view);
    else this.#hooks.valuesChanged();
    this.#choices.hidden = !this.#hooks.isRecorded();
    if (!this.#hooks.isRecorded()) return this.#showNothing('Attention was not recorded for this run. Request it in the playground, or with "attention": true in a request.');
    const seq = this.#forwardPassAt(n);
    if (seq === null) return this.#showNothing('No forward pass has happened at this event yet.');
    const key = `${seq} ${this.view}`;
    if (this.#cache.has(key)) return this.#show(this.#cache.get(key));
    this.#loader.request(key);
    return undefined;
  }

  /** Shows a text instead of attention. */
  #showNothing(text) {
    this.#current = null;
    this.#facts.textContent = '';
    this.#note.textContent = text;
    this.#topPositions.replaceChildren();
    this.#stripBox.hidden = true;
    this.#heads.el.hidden = true;
    this.#map.el.hidden = true;
    this.#hooks.valuesChanged();
  }

  /** Returns the last ForwardPass at or before event `n`, or null. */
  #forwardPassAt(n) {
    const run = this.#run;
    for (let e = Math.min(n, run.eventCount - 1); e >= 0; e -= 1) if (run.type(e) === 'ForwardPass') return e;
    return null;
  }

  /** Loads the attention of a step in a view, and shows it unless the cursor has moved to an event whose attention is known. */
  async #load(key) {
    const [seq, view] = key.split(' ');
    const fetchView = (name) => fetchAttention(this.#id, { at: seq, ...viewQuery(name) }, this.#signal);
    // If the attention of the selected head was not recorded, the statistics of all heads are shown nevertheless.
    const fetchStatistics = async (error) => {
      if (error.status !== 404 || !view.startsWith('head:')) throw error;
      return { ...(await fetchView('mean')), values: [], missing: error.message };
    };
    try {
      const attention = await fetchView(view).catch(fetchStatistics);
      this.#cache.set(key, attention);
      if (this.#cache.size > MAX_CACHED_STEPS) this.#cache.delete(this.#cache.keys().next().value);
      if (attention.layer_ids && String(attention.layer_ids) !== String(this.#layers)) {
        this.#layers = attention.layer_ids;
        this.#updateOptions();
      }
      if (this.#loader.target && view === this.view) this.#show(attention);
    } catch (error) {
      if (this.#loader.target === key && error.name !== 'AbortError') this.#showNothing(error.status === 404 ? 'No attention was recorded for this step.' : `Attention could not be loaded: ${error.message}.`);
    }
  }

  #show(attention) {
    const values = attention.values ?? [];
    const rows = this.#run.context(attention.sequence_order);
    const canBeSink = (pos) => pos === 0 || (rows[pos] !== undefined && this.#run.isSpecial(rows[pos]));
    this.#current = { values, rows, ...sinksOf(values, canBeSink), quality: attention.quality ?? 'exact', missing: attention.missing };
    this.#heads.show(attention, this.view);
    this.#showFacts();
    this.#map.load();
    this.#map.moveCursor(this.#n);
    this.#hooks.valuesChanged();
  }

  /** Shows facts about the loaded attention, and the positions with the most attention. */
  #showFacts() {
    if (!this.#current) return undefined;
    this.#stripBox.hidden = this.showsLaterSteps || !this.#current.values.length;
    if (this.showsLaterSteps) return this.#showLaterFacts();
    const { values, rows, sinks, peak, quality, missing } = this.#current;
    this.#facts.textContent = missing ? '' : `${values.length} positions · ${QUALITY[quality] ?? quality} · colors up to ${percent(peak)}${sinks.size ? ', without sinks' : ''}`;
    this.#note.textContent = missing ?? '';
    const top = values.map((v, pos) => [v, pos]).filter(([v]) => v > 0).sort((a, b) => b[0] - a[0]).slice(0, MAX_LISTED);
    this.#showTopPositions(top.map(([v, pos]) => [rows[pos] === undefined ? pos : this.#run.pos(rows[pos]), rows[pos], v, sinks.has(pos)]));
    this.#drawStrip();
    return undefined;
  }

  #showLaterFacts() {
    const run = this.#run;
    const { byRow, count, state } = this.#later;
    const view = this.#viewSelect.selectedOptions[0]?.textContent ?? this.view;
    const row = this.#subject;
    this.#facts.textContent = row === null ? state : `${count} later step${count === 1 ? '' : 's'} at ${displayText(run.text(row))}, position ${run.pos(row)} · ${view}${state && ` · ${state}`}`;
    this.#note.textContent = '';
    this.#showTopPositions([...byRow].sort((a, b) => b[1] - a[1]).slice(0, MAX_LISTED).map(([later, v]) => [run.pos(later), later, v]));
  }

  /** Returns the text at a position of the current step. */
  #textAt(pos) {
    const row = this.#current?.rows[pos];
    return row === undefined ? `position ${pos}` : this.#run.text(row);
  }

  /** Lists positions, `[position, row, value, isSink]`. */
  #showTopPositions(list) {
    replaceContent(this.#topPositions, () => list.map(([pos, row, value, isSink]) => h('li', {},
      h('span', { class: 'hint' }, String(pos)),
      h('button', { type: 'button', onclick: () => row !== undefined && this.#hooks.select(row) }, row === undefined ? `position ${pos}` : displayText(this.#run.text(row))),
      h('span', {}, isSink && h('span', { class: 'hint' }, 'sink '), percent(value)))));
  }

  /** Draws the attention of the current step as bars over the positions; several positions share a bar if there is no room. */
  #drawStrip() {
    const drawing = this.#current && prepareCanvas(this.#strip);
    if (!drawing) return;
    const { context, width, height } = drawing;
    const colors = palette(['spark', 'line-strong']);
    const { values, sinks, peak } = this.#current;
    const positionWidth = width / values.length;
    const columns = Math.min(values.length, Math.floor(width));
    for (let x = 0; x < columns; x += 1) {
      const from = Math.floor((x / columns) * values.length);
      const to = Math.max(from + 1, Math.floor(((x + 1) / columns) * values.length));
      let highest = 0;
      for (let i = from; i < to; i += 1) if (!sinks.has(i) && values[i] > highest) highest = values[i];
      const barHeight = Math.sqrt(peak > 0 ? highest / peak : 0) * (height - 4);
      context.fillStyle = colors.spark;
      context.fillRect((x / columns) * width, height - barHeight, Math.max(1, width / columns - 0.5), barHeight);
    }
    context.fillStyle = colors['line-strong'];
    for (const pos of sinks) context.fillRect(pos * positionWidth, 0, Math.max(2, Math.min(positionWidth, 4)), height);
  }

  #onStripClick(event) {
    if (!this.#current) return;
    const bounds = this.#stripBox.getBoundingClientRect();
    const pos = Math.floor(((event.clientX - bounds.left) / bounds.width) * this.#current.values.length);
    const row = this.#current.rows[pos];
    if (row !== undefined) this.#hooks.select(row);
  }
}
