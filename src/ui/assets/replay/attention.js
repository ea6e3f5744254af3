// Attention in the replay: that of one step to all positions, or that of all later steps to one token. It shades the text. Its
// section shows a strip, the positions with the most attention, the heads, and a map of the whole run.
import { fetchApi, h, palette, prepareCanvas, replaceContent } from '../dom.js';
import { bucketOfShare } from './color.js';
import { Loader, requestDelay } from './events.js';
import { percent } from './candidates.js';
import { displayText } from './glyphs.js';
import { Heads } from './heads.js';
import { AttentionMap } from './map.js';

const MAX_LISTED = 8;
const MAX_CACHED_STEPS = 200;
/** Maximum evictions up to which the attention of later steps is loaded, because each needs its own request. */
const MAX_EVICTIONS = 50;
/** Views that every run with attention has, with their names. A view selects or combines layers and heads. */
const VIEWS = [['mean', 'mean'], ['max', 'max'], ['last', 'last layer'], ['weighted_layers', 'weighted layers']];

/**
 * Finds the attention sink of a step: a position, usually the first one, that gets far more attention than any other although
 * its token has no meaning for the text. It is recognized by its value. Returns `{sink, peak}`: its position or -1, and the
 * highest other value. Pure.
 */
export function sinkOf(values) {
  let first = -1;
  let second = -1;
  for (let i = 0; i < values.length; i += 1) {
    if (first < 0 || values[i] > values[first]) {
      second = first;
      first = i;
    } else if (second < 0 || values[i] > values[second]) second = i;
  }
  const sink = first >= 0 && values.length > 2 && values[first] > 0.25 && values[first] > 2.5 * values[second] ? first : -1;
  return { sink, peak: sink >= 0 ? values[second] : first >= 0 ? values[first] : 0 };
}

/** Returns the query parameters of the API for a view such as `mean`, `layer:3` or `head:3:5`. Pure. */
export function viewQuery(name) {
  const [view, layer, head] = name.split(':');
  return { view, ...(layer !== undefined && { layer }), ...(head !== undefined && { head }) };
}

/** Descriptions of the encodings of stored values. */
const QUALITY = { f16: 'exact to 3 digits', u8: 'rounded to 1/255' };

export class Attention {
  /** True while attention is shown. */
  isOn = false;
  /** Name of the selected view. */
  view;
  section = h('section', { hidden: true });
  #run;
  #id;
  #hooks;
  /** Responses of the API by step and view. */
  #cache = new Map();
  /** The attention of the current step, `{values, rows, sink, peak, quality, missing}`, or null. `rows` are the rows of the context by position, and `missing` says why there are no values. */
  #current = null;
  #signal;
  /** Loads the attention of steps. Its targets are keys of `#cache`. */
  #loader = new Loader((key) => this.#load(key));
  #laterDelay = requestDelay();
  /** Layers that have their own views. */
  #layers = [];
  #strip = h('canvas', { 'aria-hidden': 'true' });
  #viewSelect = h('select', { 'aria-label': 'Attention view', onchange: (event) => this.#selectView(event.target.value) });
  #facts = h('p', { class: 'hint' });
  #topPositions = h('ol', { class: 'top-positions' });
  #note = h('p', { class: 'hint' });
  #direction = h('select', { 'aria-label': 'Direction', onchange: () => this.#selectView(this.view) },
    h('option', { value: 'step' }, 'of this step'), h('option', { value: 'later' }, 'of later steps to this token'));
  /** The token, as a row, whose attention from later steps is shown, or null. */
  #subject = null;
  /**
   * The attention of later steps to the subject, or null: `{key, byRow, steps, peak, next, evictions, isLoading, state}`. `byRow` has the values by
   * the rows that the steps added, `next` is the event from which the next range is loaded, `evictions` is their number
   * before it, and `state` is a text.
   */
  #later = null;
  #laterController = new AbortController();
  #map;
  #stripBox = h('div', { class: 'strip' }, this.#strip);
  #choices = h('div', { class: 'row' }, this.#direction, this.#viewSelect);
  #n = 0;
  #heads = new Heads((view) => this.#selectView(view), (pos) => displayText(this.#textAt(pos)));

  /**
   * `view` is the selected view. If `showsLaterSteps` is true, the attention of later steps to one token is shown.
   * `hooks.isRecorded()` returns true if the attention of the run was recorded, and `hooks.isLive()` if the run is live.
   * `hooks.go(n)` moves the cursor, and `hooks.select(row)` selects a token. `hooks.viewChanged(view, showsLaterSteps)` is called when
   * the user has selected another view, and `hooks.valuesChanged()` when the shading may have changed.
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
    this.section.append(h('h2', {}, 'Attention'),
      this.#choices, this.#facts,
      this.#note, this.#stripBox, this.#topPositions, this.#heads.el, this.#map.el);
    this.#stripBox.addEventListener('click', (event) => this.#onStripClick(event));
    const redraw = () => { this.#drawStrip(); this.#map.redraw(); };
    const resized = new ResizeObserver(redraw);
    resized.observe(this.section);
    signal.addEventListener('abort', () => { resized.disconnect(); this.#laterController.abort(); });
    document.addEventListener('theme', redraw, { signal });
  }

  /** Shows the view and the direction that the user selected. */
  #selectView(view) {
    this.view = view;
    this.#updateOptions();
    this.#hooks.viewChanged(view, this.showsLaterSteps);
    this.moveCursor(this.#n);
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
  get current() { return this.isOn && !this.showsLaterSteps && this.#current?.values.length ? this.#current : null; }

  /** A function from a row to its bucket 0–7, or -1 for none; null if no attention is loaded. */
  get shading() {
    if (!this.isOn || !this.#current) return null;
    if (this.showsLaterSteps) return this.#laterShading();
    const { values, rows, sink, peak } = this.#current;
    const buckets = new Map();
    rows.forEach((row, pos) => { if (pos < values.length && pos !== sink) buckets.set(row, bucketOfShare(values[pos], peak)); });
    return (row) => buckets.get(row) ?? -1;
  }

  /** True if the attention of later steps to one token is shown. */
  get showsLaterSteps() { return this.#direction.value === 'later'; }

  /** Returns a function from a row to the bucket of the attention of its step to the subject. */
  #laterShading() {
    const { byRow, peak } = this.#later ?? { byRow: new Map() };
    return (row) => (byRow.has(row) ? bucketOfShare(byRow.get(row), peak) : -1);
  }

  /** Sets the token whose attention from later steps is shown. */
  setSubject(row) {
    this.#subject = row;
    this.#loadLaterSteps();
  }

  /** Loads the attention of all later steps to the subject in the selected view, range by range. */
  async #loadLaterSteps() {
    if (!this.isOn || !this.showsLaterSteps) return this.#hooks.valuesChanged();
    const run = this.#run;
    const row = this.#subject;
    // The attention of a live run's last steps may not be available yet, so all steps are loaded again at its end.
    const key = `${row} ${this.view} ${this.#hooks.isLive()}`;
    if (this.#later?.key !== key) {
      this.#laterController.abort();
      this.#laterController = new AbortController();
      this.#later = { key, byRow: new Map(), steps: 0, peak: 0, next: row === null ? 0 : run.addedAt(row), evictions: 0, isLoading: false, state: row === null ? 'Choose a token.' : 'loading…' };
    }
    const later = this.#later;
    const { signal } = this.#laterController;
    const update = () => { if (this.#later === later) { this.#showFacts(); this.#hooks.valuesChanged(); } };
    update();
    if (row === null || later.isLoading) return undefined;
    later.isLoading = true;
    try {
      await new Promise((resolve) => setTimeout(resolve, this.#laterDelay()));
      // The position of the token is the same up to the next eviction.
      const last = () => Math.min(run.leftContextAt(row), run.eventCount);
      const end = () => Math.min(last(), run.nextEviction(later.next));
      for (let to = end(); later.next < to && later.evictions < MAX_EVICTIONS && !signal.aborted; to = end()) {
        const query = new URLSearchParams({ from: later.next, to, position: run.context(later.next).indexOf(row), ...viewQuery(this.view) });
        const response = await fetchApi(`/api/v1/runs/${encodeURIComponent(this.#id)}/attention?${query}`, { signal });
        const { attention } = await response.json();
        for (const { sequence_order: seq, value } of attention.rows) {
          later.steps += 1;
          later.peak = Math.max(later.peak, value);
          for (const added of rowsAddedByStep(run, seq)) later.byRow.set(added, value);
        }
        const eviction = run.nextEviction(later.next);
        later.next = attention.next ?? to;
        if (later.next === eviction) later.evictions += 1;
        update();
      }
      later.state = later.next < last() ? `loaded up to event ${later.next}, the ${MAX_EVICTIONS}th eviction` : '';
    } catch (error) {
      later.state = `loading failed: ${error.message}`;
    }
    later.isLoading = false;
    if (!signal.aborted) update();
    return undefined;
  }

  /** Shows the attention at event `n`: that of the last forward pass. */
  moveCursor(n) {
    this.#n = n;
    this.section.hidden = !this.isOn;
    this.#loader.cancel();
    if (!this.isOn) return undefined;
    this.#loadLaterSteps();
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
    const fetchView = async (name) => {
      const query = new URLSearchParams({ at: seq, ...viewQuery(name) });
      return (await (await fetchApi(`/api/v1/runs/${encodeURIComponent(this.#id)}/attention?${query}`, { signal: this.#signal })).json()).attention;
    };
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
    this.#current = { values, rows: this.#run.context(attention.sequence_order), ...sinkOf(values), quality: attention.quality ?? 'exact', missing: attention.missing };
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
    const { values, rows, sink, quality, missing } = this.#current;
    const sinkText = sink >= 0 ? ` · sink ${displayText(rows[sink] === undefined ? '' : this.#run.text(rows[sink]))} ${percent(values[sink])}, left out of the scale` : '';
    this.#facts.textContent = missing ? '' : `${values.length} positions · ${QUALITY[quality] ?? quality}${sinkText}`;
    this.#note.textContent = missing ?? '';
    const top = values.map((v, pos) => [v, pos]).filter(([, pos]) => pos !== sink).sort((a, b) => b[0] - a[0]).slice(0, MAX_LISTED);
    this.#showTopPositions(top.map(([v, pos]) => [rows[pos] === undefined ? pos : this.#run.pos(rows[pos]), rows[pos], v]));
    this.#drawStrip();
    return undefined;
  }

  #showLaterFacts() {
    const run = this.#run;
    const { byRow, steps, state } = this.#later ?? { byRow: new Map(), steps: 0, state: '' };
    const view = this.#viewSelect.selectedOptions[0]?.textContent ?? this.view;
    const row = this.#subject;
    this.#facts.textContent = row === null ? state : `${steps} later step${steps === 1 ? '' : 's'} at ${displayText(run.text(row))}, position ${run.pos(row)} · ${view}${state && ` · ${state}`}`;
    this.#note.textContent = '';
    this.#showTopPositions([...byRow].sort((a, b) => b[1] - a[1]).slice(0, MAX_LISTED).map(([later, v]) => [run.pos(later), later, v]));
  }

  /** Returns the text at a position of the current step. */
  #textAt(pos) {
    const row = this.#current?.rows[pos];
    return row === undefined ? `position ${pos}` : this.#run.text(row);
  }

  /** Lists positions, `[position, row, value]`. */
  #showTopPositions(list) {
    replaceContent(this.#topPositions, () => list.map(([pos, row, value]) => h('li', {},
      h('span', { class: 'hint' }, String(pos)),
      h('button', { type: 'button', onclick: () => row !== undefined && this.#hooks.select(row) }, row === undefined ? `position ${pos}` : displayText(this.#run.text(row))),
      h('span', {}, percent(value)))));
  }

  /** Draws the attention of the current step as bars over the positions; several positions share a bar if there is no room. */
  #drawStrip() {
    const drawing = this.#current && prepareCanvas(this.#strip);
    if (!drawing) return;
    const { context, width, height } = drawing;
    const colors = palette(['spark', 'line-strong']);
    const { values, sink, peak } = this.#current;
    const positionWidth = width / values.length;
    const columns = Math.min(values.length, Math.floor(width));
    for (let x = 0; x < columns; x += 1) {
      const from = Math.floor((x / columns) * values.length);
      const to = Math.max(from + 1, Math.floor(((x + 1) / columns) * values.length));
      let highest = 0;
      for (let i = from; i < to; i += 1) if (i !== sink && values[i] > highest) highest = values[i];
      const barHeight = Math.sqrt(peak > 0 ? highest / peak : 0) * (height - 4);
      context.fillStyle = colors.spark;
      context.fillRect((x / columns) * width, height - barHeight, Math.max(1, width / columns - 0.5), barHeight);
    }
    if (sink >= 0) {
      context.fillStyle = colors['line-strong'];
      context.fillRect(sink * positionWidth, 0, Math.max(2, Math.min(positionWidth, 4)), height);
    }
  }

  #onStripClick(event) {
    if (!this.#current) return;
    const bounds = this.#stripBox.getBoundingClientRect();
    const pos = Math.floor(((event.clientX - bounds.left) / bounds.width) * this.#current.values.length);
    const row = this.#current.rows[pos];
    if (row !== undefined) this.#hooks.select(row);
  }
}

/** Returns the rows of the answer that the step of a ForwardPass added. */
function rowsAddedByStep(run, seq) {
  return run.stepEvents(seq).flatMap((e) => {
    const [from, to] = run.rowsAddedAt(e);
    return Array.from({ length: to - from }, (_, k) => from + k).filter((row) => !run.isPrompt(row));
  });
}
