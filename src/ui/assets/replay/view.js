// The replay component: one cursor over the events of a run, and all views that follow it. The replay page and the
// playground use the same component; a live run is one whose events are still arriving.
import { base, fetchApi, h, toast } from '../dom.js';
import { MODES, MIN_SURPRISE, legend, surprise } from './color.js';
import { Events } from './events.js';
import { find } from './find.js';
import { hover } from './hover.js';
import { Lanes } from './lanes.js';
import { Overview } from './overview.js';
import { Panel } from './panel.js';
import { Player } from './player.js';
import { Run } from './run.js';
import { Text } from './text.js';
import { targetOf } from './moves.js';

/** Initial values of the state that a link contains. */
const INITIAL_STATE = { at: null, color: 'surprise', showRemoved: false, showLater: true, attention: false, view: 'mean', laterSteps: false };

export class Replay {
  /** Event of the cursor. */
  n = 0;
  #root;
  #id;
  #run;
  #events;
  #parts = {};
  #state;
  #hooks;
  /** True while the cursor stays at the end of a live run. */
  #follow = false;
  /** Row that the user selected, or null. */
  #picked = null;
  /** Stops following a live run. */
  #stop = null;
  /** Matches of the search as ranges of rows, and the index of the shown one. */
  #hits = [];
  #hit = -1;
  /** True if the run has recorded attention. */
  #recorded;
  #feedback = [];

  /**
   * `hooks.changed(state)` is called for every change that a link should contain, `hooks.grown(tokens)` and `hooks.ended(summary)` for a live run,
   * `hooks.forked(forks, change)` for started forks, `hooks.prompt(prompt)` for the recorded prompt with its parameters. `hooks.images()` returns the module of images
   * in an exported page, which cannot load it. `hooks.connection(text, ok)` shows the state of the connection to a live run.
   */
  constructor(root, id, { state = {}, live = false, recorded = false, hooks = {} } = {}) {
    this.#root = root;
    this.#id = id;
    this.#state = { ...INITIAL_STATE, ...state };
    this.#hooks = hooks;
    this.#events = new Events(id);
    this.#recorded = recorded;
    this.live = live;
  }

  /** Loads the run, or starts to follow it. */
  async open() {
    if (this.live) {
      const [{ followRun }, { RunState }] = await Promise.all([import('./live.js'), import('./fold.js')]);
      if (this.#closed.signal.aborted) return;
      this.#build(new Run(new RunState()));
      this.#follow = this.#state.at === null;
      this.#stop = followRun(this.#id, {
        onItems: (items) => this.#addItems(items),
        onEnd: (summary) => this.#ended(summary),
        onState: (text, ok) => this.#hooks.connection?.(text, ok),
      });
      return;
    }
    const first = this.#events.get(0, 0).catch(() => []);
    const wait = this.#el('text');
    wait.dataset.idle = 'Loading the run…';
    wait.toggleAttribute('data-none', true);
    const response = await fetchApi(`/api/v1/runs/${encodeURIComponent(this.#id)}/columns`).catch((error) => {
      wait.dataset.idle = 'The run could not be loaded.';
      throw error;
    });
    const run = Run.stored(await response.arrayBuffer());
    const [entry] = await first;
    this.#start(run, entry?.event);
  }

  #start(run, prefilled) {
    this.n = Math.min(run.eventCount, this.#state.at ?? run.eventCount);
    this.#build(run, prefilled);
    this.go(this.n, { quiet: true });
  }

  /** Labels the messages of the prompt. */
  #prefilled(event) {
    const prompt = event?.details?.prompt;
    if (!prompt) return;
    this.#parts.text.label(prompt, event.sequence_order);
    this.#parts.panel.offer(prompt.parameters?.steering ?? []);
    this.#hooks.prompt?.(prompt);
    if (prompt.images?.length) this.#showImages(prompt);
  }

  /** Shows the images of the prompt. */
  async #showImages(prompt) {
    const parts = this.#parts;
    try {
      const { Images } = await (this.#hooks.images?.() ?? import('./images.js'));
      if (this.#closed.signal.aborted || parts.images) return;
      parts.images = new Images(this.#run, this.#isLocal ? null : this.#id, prompt, parts.text);
      document.addEventListener('theme', () => parts.images.draw(), { signal: this.#closed.signal });
      this.#paint();
    } catch (error) {
      toast(`The images could not be shown: ${error.message}`);
    }
  }

  /** Shows a run without a server: folds its items into an empty `state`. */
  showLocal(state, items) {
    this.#isLocal = true;
    this.#events.push(items, Infinity);
    for (const item of items) state.apply(item);
    this.#start(new Run(state), items[0]);
  }

  /** True if there is no server, in an exported page. */
  #isLocal = false;

  /** Releases all resources, before another run is shown. */
  close() {
    this.#stop?.();
    this.#parts.player?.pause();
    this.#closed.abort();
  }

  #closed = new AbortController();

  /** Returns the element of the component with `data-name`. */
  #el(name) { return this.#root.querySelector(`[data-${name}]`); }

  #on(el, type, listener) { el.addEventListener(type, listener, { signal: this.#closed.signal }); }

  #build(run, prefilled) {
    this.#run = run;
    const go = (n) => { this.#parts.player.pause(); this.go(n); };
    const textBox = replaced(this.#el('text'));
    const text = new Text(textBox, run, {
      n: this.n,
      options: { showLater: this.#state.showLater, showRemoved: this.#state.showRemoved },
      signal: this.#closed.signal,
      onPick: (row) => this.pick(row),
      onRemovedClick: (row) => go(run.removedAt(row) - 1),
    });
    hover(textBox, run, this.#closed.signal);
    this.#parts = {
      text,
      textBox,
      attention: null,
      overview: new Overview(this.#el('overview'), run, this.#closed.signal),
      lanes: new Lanes(this.#el('lanes'), run, go, this.#closed.signal),
      panel: new Panel(this.#el('panel'), run, this.#events, { go, fork: (n, next) => this.fork(n, next), branch: this.#isLocal ? null : (...fork) => this.#branch(...fork), vectors: JSON.parse(this.#root.dataset.vectors ?? 'null') }),
      player: new Player(run, { at: () => this.n, go: (n) => this.go(n, { playing: true }), changed: (playing) => this.#onPlayingChanged(playing) }),
    };
    this.#prefilled(prefilled);
    this.#controls();
    this.#sync();
    this.#loadAttention();
  }

  /** Loads the attention on first use. */
  async #loadAttention() {
    const parts = this.#parts;
    if (!this.#state.attention || parts.isLoadingAttention) return;
    parts.isLoadingAttention = true;
    try {
      const { Attention } = await import('./attention.js');
      if (this.#closed.signal.aborted) return;
      const attention = new Attention(this.#run, this.#id, {
        recorded: () => this.#recorded,
        live: () => this.live,
        changed: () => { this.#state.view = attention.view; this.#state.laterSteps = attention.showsLaterSteps; this.#notify(); attention.at(this.n); },
        painted: () => this.#paint(),
        go: (n) => { parts.player.pause(); this.go(n); },
        pick: (row) => this.pick(row),
      }, this.#closed.signal, this.#state.view, this.#state.laterSteps);
      parts.panel.put(attention.section);
      parts.attention = attention;
      attention.on = this.#state.attention;
      this.go(this.n, { live: true, quiet: true });
    } catch (error) {
      parts.isLoadingAttention = false;
      toast(`Attention could not be loaded: ${error.message}`);
    }
  }

  #controls() {
    const scrub = this.#el('scrub');
    this.#on(scrub, 'input', () => { this.#parts.player.pause(); this.go(Number(scrub.value)); });
    this.#on(this.#root, 'click', (event) => {
      const action = event.target.closest('[data-act]')?.dataset.act;
      if (action) this.act(action);
    });
    const speed = this.#el('speed');
    this.#on(speed, 'change', () => this.#parts.player.setSpeed(speed.value));
    this.#parts.player.setSpeed(speed.value);
    this.#el('colors').replaceChildren(h('legend', { class: 'vh' }, 'Color by'), ...MODES.map((mode, i) => {
      const input = h('input', { type: 'radio', name: 'color', value: mode.id, onchange: () => this.colorBy(mode.id) });
      return h('label', { title: `${mode.name} (${i + 1})` }, input, mode.name);
    }));
    const box = this.#el('find');
    this.#on(box, 'input', () => this.#find(box.value));
    this.#on(box, 'keydown', (event) => {
      if (event.key === 'Enter') { event.preventDefault(); this.#nextHit(event.shiftKey ? -1 : 1); }
      if (event.key === 'Escape') { box.value = ''; this.#find(''); this.#parts.textBox.focus(); event.stopPropagation(); }
    });
    this.#paint();
    this.#toggles();
  }

  /** Adds new rows, events and marks. */
  #sync() {
    const { text, overview, lanes } = this.#parts;
    text.sync(this.live);
    lanes.sync();
    this.#markNotes();
    overview.redraw();
    const { textBox } = this.#parts;
    textBox.toggleAttribute('data-none', this.#run.count === 0);
    textBox.dataset.idle = this.live ? 'Waiting for the first event…' : this.#run.eventCount ? 'No tokens were added in this run.' : 'The trace of this run has no events.';
    this.#root.classList.toggle('idle', !this.live && this.#run.eventCount === 0);
  }

  /** Marks the tokens that notes and feedback name: `{token, tone, text}`, with the index of the token in the answer. */
  set feedback(entries) {
    this.#feedback = entries;
    this.#markNotes();
    this.#parts.overview?.redraw();
  }

  #markNotes() {
    const { text, overview } = this.#parts;
    if (!overview || !(this.#feedback.length || overview.notes.length)) return;
    const answer = this.#run.answer();
    const notes = this.#feedback.filter(({ token }) => token < answer.length).map((entry) => ({ ...entry, row: answer[entry.token] }));
    overview.notes = notes;
    text.note(notes);
  }

  /**
   * Index of the selected token, or else of the token at the cursor, in the final answer. Null if no token is selected and the
   * cursor is at the end, and for a token that the final answer does not contain: one of the prompt, or a removed one.
   */
  get token() {
    const row = this.#picked ?? (this.atEnd ? null : this.#row(this.#event()));
    const index = row === null ? -1 : this.#run.answer().indexOf(row);
    return index < 0 ? null : index;
  }

  #addItems(items) {
    for (const item of items) {
      this.#run.apply(item);
      if (item.kind === 'event' && item.event_type === 'Prefilled') this.#prefilled(item);
    }
    this.#events.push(items);
    this.#sync();
    this.go(this.#follow ? this.#run.eventCount : this.#state.at ?? this.n, { quiet: this.#follow, live: true });
  }

  #ended(summary) {
    this.live = false;
    this.#sync();
    this.#recorded = this.#recorded || Boolean(summary?.has_attention);
    this.#hooks.ended?.(summary);
    this.go(this.#follow ? this.#run.eventCount : this.n, { quiet: true });
  }

  /**
   * Moves the cursor to event `n`; `run.eventCount` is the end. `quiet` leaves the URL as it is, `playing` is set by the
   * player, and `live` keeps the selected row.
   */
  go(n, { quiet = false, playing = false, live = false } = {}) {
    const run = this.#run;
    if (!run) return;
    this.n = Math.max(0, Math.min(run.eventCount, Math.round(n)));
    if (!live) {
      this.#picked = null;
      if (this.live) this.#follow = this.n === run.eventCount;
    }
    const { text, overview, lanes, panel, attention } = this.#parts;
    text.show(this.n, { showLater: this.#state.showLater && !playing && !this.#follow, showRemoved: this.#state.showRemoved });
    const e = this.#event();
    const row = this.#row(e);
    text.cursor(this.n === run.eventCount && this.#picked === null ? null : row, this.#picked, !this.#follow);
    if (this.#follow || (playing && this.n === run.eventCount)) text.toEnd();
    overview.at(this.n);
    lanes.at(this.n);
    panel.show(e, this.#picked ?? row);
    attention?.setSubject(this.#picked ?? row);
    attention?.at(this.n);
    this.#showPosition(e, row);
    if (!live && !playing && !quiet) {
      this.#state.at = this.n === run.eventCount ? null : this.n;
      this.#notify();
    }
  }

  /** Returns the event at the cursor; for a live run that is followed, the newest Added. */
  #event() {
    const run = this.#run;
    if (!run.eventCount) return null;
    const e = Math.min(this.n, run.eventCount - 1);
    if (!this.#follow) return e;
    for (let back = e; back > Math.max(-1, e - 8); back -= 1) if (run.type(back) === 'Added') return back;
    return e;
  }

  /** Moves to an `{event}`, or to a `{token}` of the answer, counted from 1. */
  visit({ event, token }) {
    const run = this.#run;
    if (!run) return;
    this.#parts.player.pause();
    const rows = token === undefined ? [] : run.answer();
    this.go(token === undefined ? event : rows.length ? run.addedAt(rows[Math.max(0, Math.min(rows.length, token) - 1)]) : 0);
  }

  /** Selects a row. For a row of the answer, the cursor moves to the event that added it. */
  pick(row) {
    this.#parts.player.pause();
    if (!this.#run.isPrompt(row)) this.go(this.#run.addedAt(row));
    this.#picked = row;
    const e = this.#event();
    this.#parts.text.cursor(this.#row(e), row);
    this.#parts.panel.show(e, row);
    this.#parts.attention?.setSubject(row);
  }

  /** Returns the row that an event, or a later event of its step, added. */
  #row(e) {
    if (e === null) return null;
    for (const event of this.#run.stepEvents(e).filter((other) => other >= e)) {
      const [from, to] = this.#run.rowsAddedAt(event);
      if (to > from && !this.#run.isPrompt(from)) return to - 1;
    }
    return null;
  }

  /** Returns the number of tokens in the answer at the end; it is counted once when the run has ended. */
  #total() {
    if (this.live) return this.#run.answerLength(this.#run.eventCount);
    this.#finalTotal ??= this.#run.answerLength(this.#run.eventCount);
    return this.#finalTotal;
  }

  #finalTotal = null;

  #showPosition(e, row) {
    const run = this.#run;
    const total = this.#total();
    const count = this.atEnd ? total : run.answerLength(this.n);
    if (this.live) this.#hooks.grown?.(total);
    const seconds = e === null ? 0 : run.time(e) / 1000;
    const end = this.n === run.eventCount;
    this.#el('where').replaceChildren('token ', h('b', {}, String(count)), ` / ${total} · event `, h('b', {}, end ? (this.live ? 'live' : 'end') : String(this.n)), ` / ${run.eventCount}${seconds ? ` · ${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : ''}`);
    const scrub = this.#el('scrub');
    const p = row === null ? null : run.logprob(row);
    const words = row === null
      ? (end ? 'end of the run' : `event ${this.n} of ${run.eventCount}`)
      : `token ${count} of ${total}, ${this.#parts.text.name(row)}${p === null ? '' : `, probability ${Math.round(Math.exp(p) * 100)} percent`}, ${run.isForced(row) ? 'forced' : 'sampled'}`;
    scrub.setAttribute('aria-valuetext', words);
    clearTimeout(this.#announceTimer);
    if (!this.#follow && !this.#parts.player.playing) this.#announceTimer = setTimeout(() => { this.#el('announce').textContent = words; }, 250);
  }

  #announceTimer = 0;

  #onPlayingChanged(playing) {
    const button = this.#root.querySelector('[data-act=play]');
    button.setAttribute('aria-pressed', String(playing));
    button.querySelector('.vh').textContent = playing ? 'Pause' : 'Play';
    if (!playing) this.go(this.n);
  }

  /** Colors the text by attention if it is enabled, else by the selected metric. */
  #paint() {
    const { text, attention } = this.#parts;
    if (!text) return;
    const run = this.#run;
    const mode = MODES.find((m) => m.id === this.#state.color) ?? MODES[0];
    const shading = this.#state.attention ? attention?.shading : null;
    if (attention) this.#parts.images?.join(attention.section);
    this.#parts.images?.attention(shading ? attention.now : null);
    if (shading) text.colorBy(shading, attention.showsLaterSteps);
    else if (mode.id === 'mods') text.colorBy((i) => (run.isTouched(i) || run.isForced(i) ? 'touched' : -1));
    else text.colorBy((i) => mode.bucket(run, i));
    const box = this.#el('legend');
    if (shading) box.replaceChildren(h('span', {}, 'attention, less'), ...Array.from({ length: 8 }, (_, b) => h('i', { class: `b${b}` }, '\u00a0')), h('span', {}, 'more'));
    else box.replaceChildren(...legend(mode).map(({ bucket, from }) => h('i', { class: `b${bucket}` }, String(from))), mode.unit ? h('span', {}, mode.unit) : '');
  }

  /** Colors the text by a metric. */
  colorBy(id) {
    this.#state.color = id;
    if (this.#state.attention) {
      this.#state.attention = false;
      this.#updateAttention();
    }
    this.#toggles();
    this.#paint();
    this.#notify();
  }

  /** Updates the view after attention was enabled or disabled. */
  #updateAttention() {
    const { attention } = this.#parts;
    if (!attention) this.#loadAttention();
    else {
      attention.on = this.#state.attention;
      attention.at(this.n);
    }
  }

  /** Shows which buttons and colors are selected. */
  #toggles() {
    for (const name of ['showRemoved', 'showLater', 'attention']) {
      this.#root.querySelector(`[data-act=${name}]`).setAttribute('aria-pressed', String(this.#state[name]));
    }
    // The text has one coloring at a time, so no metric is selected while attention is shown.
    for (const input of this.#el('colors').querySelectorAll('input')) input.checked = input.value === this.#state.color && !this.#state.attention;
  }

  /** Highlights the first match of a text. */
  #find(needle) {
    const { text } = this.#parts;
    this.#hits = find(needle, this.#run.count, (i) => this.#run.text(i), (i) => text.isShown(i));
    this.#hit = -1;
    this.#nextHit(1);
    if (!this.#hits.length) {
      text.highlight([]);
      this.#el('found').textContent = needle ? 'none' : '';
    }
  }

  #nextHit(step) {
    if (!this.#hits.length) return;
    this.#hit = (this.#hit + step + this.#hits.length) % this.#hits.length;
    const [from, to] = this.#hits[this.#hit];
    this.#parts.text.highlight(Array.from({ length: to - from + 1 }, (_, k) => from + k).filter((i) => this.#parts.text.isShown(i)));
    this.#el('found').textContent = `${this.#hit + 1}/${this.#hits.length}`;
  }

  /** The state that a link to this view contains. */
  get state() { return { ...this.#state }; }

  /** True if the cursor is after the last event. */
  get atEnd() { return !this.#run || this.n === this.#run.eventCount; }

  /** Returns the URL of the playground that continues the text at event `n` with `next`. Null for a live run, in an exported page, and if the trace has no prompt. */
  fork(n = this.n, next = '') {
    const run = this.#run;
    if (this.live || this.#isLocal || !run?.count || run.pos(0) !== 0) return null;
    return `${base}/playground?${new URLSearchParams({ from: this.#id, at: String(n), ...(next && { next }) })}`;
  }

  /** Sets the reason why the run cannot be forked, or null. */
  set refusal(reason) {
    this.#parts.panel.refusal = reason;
    if (reason) this.go(this.n, { live: true });
  }

  /** The run as loaded so far, or undefined. */
  get run() { return this.#run; }

  /** Starts forks of the run at the step of event `n`; opens the first one where the page does not show them. */
  async #branch(n, change, text) {
    try {
      const response = await fetchApi(`/api/v1/runs/${encodeURIComponent(this.#id)}/forks`, {
        method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ at: { event: n }, ...change }),
      });
      const forks = await response.json();
      if (this.#hooks.forked) this.#hooks.forked(forks, { ...change, ...(text !== undefined && { text }) });
      else location.assign(`${base}/runs/${encodeURIComponent(forks.runs[0].run_id)}`);
    } catch (error) {
      toast(`Not forked: ${error.message}`);
    }
  }

  #notify() { this.#hooks.changed?.({ ...this.#state }); }

  /** Performs an action of the key table; returns false for actions of other components. */
  act(action, key) {
    const { player, panel, textBox } = this.#parts;
    if (!player) return false;
    const run = this.#run;
    const to = targetOf(action, run, this.n, (i) => surprise(run, i), MIN_SURPRISE);
    if (to !== undefined) {
      player.pause();
      if (typeof to === 'string') toast(to);
      else this.go(to);
      return true;
    }
    switch (action) {
      case 'play': player.toggle(); return true;
      case 'faster': case 'slower': {
        const speed = this.#el('speed');
        speed.selectedIndex = Math.max(0, Math.min(speed.options.length - 1, speed.selectedIndex + (action === 'faster' ? 1 : -1)));
        player.setSpeed(speed.value);
        return true;
      }
      case 'color': this.colorBy(MODES[Number(key) - 1].id); return true;
      case 'showRemoved': case 'showLater': case 'attention':
        this.#state[action] = !this.#state[action];
        this.#toggles();
        this.#updateAttention();
        this.go(this.n, { live: true });
        this.#paint();
        this.#notify();
        return true;
      case 'stages': panel.showStages(); return true;
      case 'find': this.#el('find').focus(); this.#el('find').select(); return true;
      case 'focus': textBox.focus(); return true;
      default: return false;
    }
  }
}

/** Replaces an element by a copy without the listeners of an earlier run, and returns the copy. */
function replaced(el) {
  const copy = el.cloneNode(!el.matches('[data-text]'));
  el.replaceWith(copy);
  return copy;
}
