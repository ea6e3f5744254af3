// Attention of one step over the text and as a strip.
import { fetchApi, h, palette, prepareCanvas } from '../dom.js';
import { bucketOfShare } from './color.js';
import { requestDelay } from './events.js';
import { percent } from './candidates.js';
import { displayText } from './glyphs.js';
import { Heads } from './heads.js';
import { AttentionMap } from './map.js';

const MAX_LISTED = 8;
const VIEWS = [['mean', 'mean'], ['max', 'max'], ['last', 'last layer'], ['weighted_layers', 'weighted layers']];

/**
 * Finds the attention sink of a row: a position that receives far more attention than any other without carrying meaning. It is
 * detected by its share of the attention, not by its position. Returns `{sink, peak}`: its index or -1, and the highest other value. Pure.
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

/** Returns the API's parameters of a view: `mean`, `layer:3` or `head:3:5`. Pure. */
export function viewQuery(chosen) {
  const [view, layer, head] = chosen.split(':');
  return { view, ...(layer !== undefined && { layer }), ...(head !== undefined && { head }) };
}

const QUALITY = { f16: 'exact to 3 digits', u8: 'rounded to 1/255' };

export class Attention {
  on = false;
  view;
  section = h('section', { hidden: true });
  #run;
  #id;
  #hooks;
  #cache = new Map();
  /** The attention of the current step, or null. */
  #now = null;
  #abort = null;
  #timer = 0;
  /** Step and view that are being loaded, or null. */
  #loadingKey = null;
  #rowDelay = requestDelay();
  #laterDelay = requestDelay();
  #layers = [];
  #strip = h('canvas', { 'aria-hidden': 'true' });
  #select = h('select', { 'aria-label': 'Which attention', onchange: (e) => { this.view = e.target.value; this.#hooks.changed(); } });
  #facts = h('p', { class: 'hint' });
  #tops = h('ol', { class: 'top-positions' });
  #note = h('p', { class: 'hint' });
  #direction = h('select', { 'aria-label': 'Direction', onchange: () => { this.#hooks.changed(); } }, h('option', { value: 'earlier' }, 'of this step'), h('option', { value: 'later' }, 'of later steps to this token'));
  /** Row whose attention from later steps is shown. */
  #subject = null;
  #later = null;
  #laterAbort = new AbortController();
  #map;
  #stripBox = h('div', { class: 'strip' }, this.#strip);
  #choices = h('div', { class: 'row' }, this.#direction, this.#select);
  #n = 0;
  #heads = new Heads((view) => {
    this.view = view;
    this.#options();
    this.#hooks.changed();
  }, (pos) => displayText(this.#textAt(pos)));

  /** `hooks`: `hasAttention()`, `live()`, `changed()`, `painted()`, `go(n)`, `select(row)`. `showsLaterSteps` selects the attention of later steps to one token. */
  constructor(run, id, hooks, signal, view, showsLaterSteps) {
    this.view = view;
    if (showsLaterSteps) this.#direction.value = 'later';
    this.#run = run;
    this.#id = id;
    this.#hooks = hooks;
    this.#options();
    this.#map = new AttentionMap(run, id, (seq) => hooks.go(seq));
    this.section.append(h('h2', {}, 'Attention'),
      this.#choices, this.#facts,
      this.#note, this.#stripBox, this.#tops, this.#heads.el, this.#map.el);
    this.#stripBox.addEventListener('click', (e) => this.#stripClick(e));
    const redraw = () => { this.#drawStrip(); this.#map.redraw(); };
    const resized = new ResizeObserver(redraw);
    resized.observe(this.section);
    signal.addEventListener('abort', () => { resized.disconnect(); this.#abort?.abort(); this.#laterAbort.abort(); });
    document.addEventListener('theme', redraw, { signal });
  }

  #options() {
    const [name, layer, head] = this.view.split(':');
    const all = [...VIEWS, ...this.#layers.map((l) => [`layer:${l}`, `layer ${l}`]), ...(name === 'head' ? [[this.view, `layer ${layer}, head ${head}`]] : [])];
    this.#select.replaceChildren(...all.map(([value, name]) => h('option', { value }, name)));
    this.#select.value = this.view;
  }

  /** The attention of the current step, `{values, seq}`, or null. */
  get now() { return this.on && !this.showsLaterSteps && this.#now?.values.length ? this.#now : null; }

  /** Returns a function from a row to its bucket, or null if no attention is loaded. */
  get shading() {
    if (!this.on || !this.#now) return null;
    if (this.showsLaterSteps) return this.#laterShading();
    const { values, sink, peak, seq } = this.#now;
    const run = this.#run;
    return (i) => {
      const pos = run.pos(i);
      const isPresent = run.addedAt(i) <= seq && seq < run.removedAt(i);
      return isPresent && pos < values.length && pos !== sink ? bucketOfShare(values[pos], peak) : -1;
    };
  }

  /** True if the attention of later steps to one token is shown. */
  get showsLaterSteps() { return this.#direction.value === 'later'; }

  /** Returns a function from a row to the bucket of the attention that its step pays to the subject. */
  #laterShading() {
    const { byRow, peak } = this.#later ?? { byRow: new Map() };
    return (row) => (byRow.has(row) ? bucketOfShare(byRow.get(row), peak) : -1);
  }

  /** Sets the token whose attention from later steps is shown. */
  setSubject(row) {
    this.#subject = row;
    this.#loadLater();
  }

  /** Loads the attention of every later step to the subject in the chosen view, range by range. */
  async #loadLater() {
    if (!this.on || !this.showsLaterSteps) return this.#hooks.painted();
    const run = this.#run;
    const row = this.#subject;
    // The attention of a live run's last steps may not be available yet, so all steps are loaded again at its end.
    const key = `${row} ${this.view} ${this.#hooks.live()}`;
    if (this.#later?.key !== key) {
      this.#laterAbort.abort();
      this.#laterAbort = new AbortController();
      this.#later = { key, byRow: new Map(), steps: 0, peak: 0, next: row === null ? 0 : run.addedAt(row), isReading: false, state: row === null ? 'Choose a token.' : 'loading…' };
    }
    const later = this.#later;
    const { signal } = this.#laterAbort;
    const update = () => { if (this.#later === later) { this.#describe(); this.#hooks.painted(); } };
    update();
    if (row === null || later.isReading) return undefined;
    later.isReading = true;
    try {
      await new Promise((resolve) => setTimeout(resolve, this.#laterDelay()));
      const end = () => Math.min(run.removedAt(row), run.eventCount);
      for (let to = end(); later.next < to && !signal.aborted; to = end()) {
        const query = new URLSearchParams({ from: later.next, to, position: run.pos(row), ...viewQuery(this.view) });
        const response = await fetchApi(`/api/v1/runs/${encodeURIComponent(this.#id)}/attention?${query}`, { signal });
        const { attention } = await response.json();
        for (const { sequence_order: seq, value } of attention.rows) {
          later.steps += 1;
          later.peak = Math.max(later.peak, value);
          for (const added of stepRows(run, seq)) later.byRow.set(added, value);
        }
        later.next = attention.next ?? to;
        update();
      }
      later.state = '';
    } catch (error) {
      later.state = `loading failed: ${error.message}`;
    }
    later.isReading = false;
    if (!signal.aborted) update();
    return undefined;
  }

  /** Moves to event `n`. */
  at(n) {
    this.#n = n;
    this.section.hidden = !this.on;
    if (!this.on) return undefined;
    this.#loadLater();
    this.#choices.hidden = !this.#hooks.hasAttention();
    if (!this.#hooks.hasAttention()) return this.#none('Attention was not recorded for this run. Request it in the playground, or with "attention": true in a request.');
    const seq = this.#forwardAt(n);
    if (seq === null) return this.#none('No forward pass has happened at this event yet.');
    const key = `${seq} ${this.view}`;
    if (key === this.#loadingKey) return undefined;
    clearTimeout(this.#timer);
    this.#abort?.abort();
    this.#loadingKey = null;
    if (this.#cache.has(key)) return this.#set(this.#cache.get(key));
    this.#loadingKey = key;
    this.#timer = setTimeout(() => this.#load(seq, key), this.#rowDelay());
    return undefined;
  }

  #none(text) {
    this.#now = null;
    this.#facts.textContent = '';
    this.#note.textContent = text;
    this.#tops.replaceChildren();
    this.#stripBox.hidden = true;
    this.#heads.el.hidden = true;
    this.#map.el.hidden = true;
    this.#hooks.painted();
  }

  /** Returns the last ForwardPass at or before event `n`, or null. */
  #forwardAt(n) {
    const run = this.#run;
    for (let e = Math.min(n, run.eventCount - 1); e >= 0; e -= 1) if (run.type(e) === 'ForwardPass') return e;
    return null;
  }

  async #load(seq, key) {
    this.#abort = new AbortController();
    const { signal } = this.#abort;
    const read = async (view) => {
      const query = new URLSearchParams({ at: seq, ...viewQuery(view) });
      return (await (await fetchApi(`/api/v1/runs/${encodeURIComponent(this.#id)}/attention?${query}`, { signal })).json()).attention;
    };
    const { view } = this;
    // Statistics of heads are also shown if the rows of the chosen head are not stored.
    const other = async (error) => {
      if (error.status !== 404 || !view.startsWith('head:')) throw error;
      return { ...(await read('mean')), values: [], missing: error.message };
    };
    try {
      const attention = await read(view).catch(other);
      this.#cache.set(key, attention);
      if (this.#cache.size > 200) this.#cache.delete(this.#cache.keys().next().value);
      if (attention.layer_ids && String(attention.layer_ids) !== String(this.#layers)) {
        this.#layers = attention.layer_ids;
        this.#options();
      }
      this.#set(attention);
      this.#map.load();
    } catch (error) {
      if (error.name !== 'AbortError') this.#none(error.status === 404 ? 'No attention was recorded for this step.' : `Attention could not be loaded: ${error.message}.`);
    } finally {
      if (this.#loadingKey === key) this.#loadingKey = null;
    }
  }

  #set(attention) {
    const values = attention.values ?? [];
    this.#now = { values, ...sinkOf(values), seq: attention.sequence_order, quality: attention.quality ?? 'exact', missing: attention.missing };
    this.#heads.show(attention, this.view);
    this.#describe();
    this.#map.at(this.#n);
    this.#hooks.painted();
  }

  /** Lists the largest values of the shading. */
  #describe() {
    if (!this.#now) return undefined;
    this.#stripBox.hidden = this.showsLaterSteps || !this.#now.values.length;
    if (this.showsLaterSteps) return this.#describeLater();
    const { values, sink, seq, quality, missing } = this.#now;
    const rows = this.#run.sequence(seq);
    this.#facts.textContent = missing ? '' : `${values.length} positions · ${QUALITY[quality] ?? quality}${sink >= 0 ? ` · sink ${displayText(rows[sink] === undefined ? '' : this.#run.text(rows[sink]))} ${percent(values[sink])}, left out of the scale` : ''}`;
    this.#note.textContent = missing ?? '';
    const top = values.map((v, pos) => [v, pos]).filter(([, pos]) => pos !== sink).sort((a, b) => b[0] - a[0]).slice(0, MAX_LISTED);
    this.#list(top.map(([v, pos]) => [pos, rows[pos], v]));
    this.#drawStrip();
    return undefined;
  }

  #describeLater() {
    const run = this.#run;
    const { byRow, steps, state } = this.#later ?? { byRow: new Map(), steps: 0, state: '' };
    const view = this.#select.selectedOptions[0]?.textContent ?? this.view;
    const row = this.#subject;
    this.#facts.textContent = row === null ? state : `${steps} later step${steps === 1 ? '' : 's'} at ${displayText(run.text(row))}, position ${run.pos(row)} · ${view}${state && ` · ${state}`}`;
    this.#note.textContent = '';
    this.#list([...byRow].sort((a, b) => b[1] - a[1]).slice(0, MAX_LISTED).map(([later, v]) => [run.pos(later), later, v]));
  }

  /** Returns the text at a position of the current step. */
  #textAt(pos) {
    const row = this.#now && this.#run.sequence(this.#now.seq)[pos];
    return row === undefined ? `position ${pos}` : this.#run.text(row);
  }

  /** Lists the largest values: `[position, row, value]`. */
  #list(tops) {
    this.#tops.replaceChildren(...tops.map(([pos, row, v]) => h('li', {}, h('span', { class: 'hint' }, String(pos)),
      h('button', { type: 'button', onclick: () => row !== undefined && this.#hooks.select(row) }, row === undefined ? `position ${pos}` : displayText(this.#run.text(row))), h('span', {}, percent(v)))));
  }

  #drawStrip() {
    const s = this.#now && prepareCanvas(this.#strip);
    if (!s) return;
    const c = palette(['spark', 'line-strong']);
    const { values, sink, peak } = this.#now;
    const positionWidth = s.width / values.length;
    const columns = Math.min(values.length, Math.floor(s.width));
    for (let x = 0; x < columns; x += 1) {
      const from = Math.floor((x / columns) * values.length);
      const to = Math.max(from + 1, Math.floor(((x + 1) / columns) * values.length));
      let high = 0;
      for (let i = from; i < to; i += 1) if (i !== sink && values[i] > high) high = values[i];
      const barHeight = Math.sqrt(peak > 0 ? high / peak : 0) * (s.height - 4);
      s.context.fillStyle = c.spark;
      s.context.fillRect((x / columns) * s.width, s.height - barHeight, Math.max(1, s.width / columns - 0.5), barHeight);
    }
    if (sink >= 0) {
      s.context.fillStyle = c['line-strong'];
      s.context.fillRect(sink * positionWidth, 0, Math.max(2, Math.min(positionWidth, 4)), s.height);
    }
  }

  #stripClick(event) {
    if (!this.#now) return;
    const at = this.#stripBox.getBoundingClientRect();
    const pos = Math.floor(((event.clientX - at.left) / at.width) * this.#now.values.length);
    const row = this.#run.sequence(this.#now.seq)[pos];
    if (row !== undefined) this.#hooks.select(row);
  }
}

/** Returns the rows of the answer that the step of a ForwardPass added. Pure. */
export function stepRows(run, seq) {
  return run.stepEvents(seq).flatMap((e) => {
    const [from, to] = run.rowsAddedAt(e);
    return Array.from({ length: to - from }, (_, k) => from + k).filter((row) => !run.isPrompt(row));
  });
}
