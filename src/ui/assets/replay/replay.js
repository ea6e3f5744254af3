// The replay: one cursor over the events of a run, and all parts that follow it. The page of a run, the playground and
// exported pages use it. A run is live while its events are arriving.
import { base, fetchApi, h, sendJson, toast } from '../dom.js';
import { MIN_SURPRISE, MODES, legend, surprise } from './color.js';
import { Events } from './events.js';
import { find, nextMatch } from './find.js';
import { displayText } from './glyphs.js';
import { showCardOnHover } from './hover.js';
import { Lanes } from './lanes.js';
import { targetOf } from './moves.js';
import { Overview } from './overview.js';
import { Panel } from './panel.js';
import { Player } from './player.js';
import { Run } from './run.js';
import { Text } from './text.js';

/** Initial values of the state, which the URL of a page contains. `at` is null at the end of the run. */
const INITIAL_STATE = { at: null, color: 'surprise', showRemoved: false, showLater: true, attention: false, attentionView: 'mean', laterSteps: false };

export class Replay {
  /** Event of the cursor; `run.eventCount` is the end. */
  n = 0;
  /** True while the events of the run are arriving. */
  isLive;
  #root;
  #id;
  #run;
  #events;
  /** Text, panel, player and other parts, which exist after `#build`. Attention and images are added when they are loaded. */
  #parts = {};
  #state;
  #hooks;
  /** True while the cursor stays at the end of a live run. */
  #isFollowing = false;
  /** Row that the user selected, or null. */
  #selectedRow = null;
  /** Ends the connection to a live run. */
  #stopFollowing = null;
  /** Aborts when the replay is closed. */
  #closed = new AbortController();
  /** True in an exported page, which has no server. */
  #isLocal = false;
  /** First row of the highlighted match of the search, or -1, and the offset of the match in its text. */
  #match = [-1, 0];
  /** True if the attention of the run was recorded. */
  #hasAttention;
  /** Notes and feedback on tokens. */
  #annotations = [];
  /** Number of tokens in the answer of a run that has ended, or null before it is counted. */
  #finalLength = null;
  #announceTimer = 0;

  /**
   * `root` is the element of `replay_pane.html`. All hooks are optional: `hooks.changed(state)` is called when the state has
   * changed, `hooks.grown(tokenCount)` and `hooks.ended(summary)` when a live run has grown or ended,
   * `hooks.connection(text, ok)` when the connection to it is lost or restored, `hooks.prompt(prompt)` with the recorded prompt,
   * and `hooks.forked(forks, change)` when the user has started forks. `hooks.images()` returns the module of images in an
   * exported page, which cannot load it.
   */
  constructor(root, id, { state = {}, isLive = false, hasAttention = false, hooks = {} } = {}) {
    this.#root = root;
    this.#id = id;
    this.#state = { ...INITIAL_STATE, ...state };
    this.#hooks = hooks;
    this.#events = new Events(id);
    this.#hasAttention = hasAttention;
    this.isLive = isLive;
  }

  /** Loads the run and shows it. A live run is shown while it grows. */
  async open() {
    if (this.isLive) {
      const [{ followRun }, { RunState }] = await Promise.all([import('./live.js'), import('./fold.js')]);
      if (this.#closed.signal.aborted) return;
      this.#build(new Run(new RunState()));
      this.#isFollowing = this.#state.at === null;
      this.#stopFollowing = followRun(this.#id, {
        onItems: (items) => this.#addItems(items),
        onEnd: (summary) => this.#onEnd(summary),
        onState: (text, ok) => this.#hooks.connection?.(text, ok),
      });
      return;
    }
    const firstEntries = this.#events.get(0, 0).catch(() => []);
    const placeholder = this.#el('text');
    placeholder.dataset.idle = 'Loading the run…';
    placeholder.toggleAttribute('data-empty', true);
    const response = await fetchApi(`/api/v1/runs/${encodeURIComponent(this.#id)}/columns`).catch((error) => {
      placeholder.dataset.idle = 'The run could not be loaded.';
      throw error;
    });
    const run = Run.stored(await response.arrayBuffer());
    const [entry] = await firstEntries;
    this.#showComplete(run, entry?.event);
  }

  /** Shows a run that has ended; `prefilled` is its Prefilled event. */
  #showComplete(run, prefilled) {
    this.n = Math.min(run.eventCount, this.#state.at ?? run.eventCount);
    this.#build(run, prefilled);
    this.go(this.n, { keepSelection: true });
  }

  /** Shows the recorded prompt of a Prefilled event: the roles of its messages, and its images. */
  #showPrompt(event) {
    const prompt = event?.details?.prompt;
    if (!prompt) return;
    this.#parts.text.setPrompt(prompt, event.sequence_order);
    this.#parts.panel.offerVectors(prompt.parameters?.steering ?? []);
    this.#hooks.prompt?.(prompt);
    if (prompt.images?.length) this.#showImages(prompt);
  }

  async #showImages(prompt) {
    const parts = this.#parts;
    try {
      const { Images } = await (this.#hooks.images?.() ?? import('./images.js'));
      if (this.#closed.signal.aborted || parts.images) return;
      parts.images = new Images(this.#isLocal ? null : this.#id, prompt, parts.text);
      document.addEventListener('theme', () => parts.images.draw(), { signal: this.#closed.signal });
      this.#updateColors();
    } catch (error) {
      toast(`The images could not be shown: ${error.message}`);
    }
  }

  /** Shows the run of an exported page. `rows` is an empty `RunState`, which gets the items. */
  showLocal(rows, items) {
    this.#isLocal = true;
    this.#events.push(items, Infinity);
    for (const item of items) rows.apply(item);
    this.#showComplete(new Run(rows), items[0]);
  }

  /** Ends all work and removes all listeners, before another run is shown in the same element. */
  close() {
    this.#stopFollowing?.();
    this.#parts.player?.pause();
    this.#closed.abort();
    this.#el('find').value = '';
    this.#el('found').textContent = '';
  }

  /** Returns the element of the replay with the attribute `data-{name}`. */
  #el(name) { return this.#root.querySelector(`[data-${name}]`); }

  /** Adds a listener that is removed when the replay is closed. */
  #on(el, type, listener) { el.addEventListener(type, listener, { signal: this.#closed.signal }); }

  /** Creates all parts. `prefilled` is the Prefilled event, if it is known already. */
  #build(run, prefilled) {
    this.#run = run;
    const signal = this.#closed.signal;
    const go = (n) => this.#jump(n);
    // The copy is empty and does not have the listeners of an earlier run.
    const textBox = this.#el('text').cloneNode();
    this.#el('text').replaceWith(textBox);
    const text = new Text(textBox, run, {
      n: this.n,
      options: { showLater: this.#state.showLater, showRemoved: this.#state.showRemoved },
      signal,
      onSelect: (row) => this.select(row),
      onRemovedClick: (row) => go(run.removedAt(row) - 1),
    });
    showCardOnHover(textBox, run, signal);
    this.#parts = {
      text,
      textBox,
      attention: null,
      overview: new Overview(this.#el('overview'), run, signal),
      lanes: new Lanes(this.#el('lanes'), run, go, signal),
      panel: new Panel(this.#el('panel'), run, this.#events, {
        go,
        playgroundUrl: (n, next) => this.playgroundUrl(n, next),
        startForks: this.#isLocal ? null : (...args) => this.#startForks(...args),
        vectors: JSON.parse(this.#root.dataset.vectors ?? 'null'),
      }),
      player: new Player(run, {
        at: () => this.n,
        go: (n) => this.go(n),
        changed: (isPlaying) => this.#onPlayingChanged(isPlaying),
      }),
    };
    this.#showPrompt(prefilled);
    this.#setUpControls();
    this.#addNewRows();
    // The user may have typed while the run was loading.
    if (this.#el('find').value) this.#highlightFirstMatch();
    this.#loadAttention();
  }

  /** Adds the part that shows attention. Its code is loaded on first use. */
  async #loadAttention() {
    const parts = this.#parts;
    if (!this.#state.attention || parts.isLoadingAttention) return;
    parts.isLoadingAttention = true;
    try {
      const { Attention } = await import('./attention.js');
      const { signal } = this.#closed;
      if (signal.aborted) return;
      const hooks = {
        isRecorded: () => this.#hasAttention,
        isLive: () => this.isLive,
        viewChanged: () => {
          this.#state.attentionView = attention.view;
          this.#state.laterSteps = attention.showsLaterSteps;
          this.#notify();
          attention.moveCursor(this.n);
        },
        valuesChanged: () => this.#updateColors(),
        go: (n) => this.#jump(n),
        select: (row) => this.select(row),
      };
      const { attentionView: view, laterSteps: showsLaterSteps } = this.#state;
      const attention = new Attention(this.#run, this.#id, { hooks, signal, view, showsLaterSteps });
      parts.panel.addSection(attention.section);
      parts.attention = attention;
      attention.isOn = this.#state.attention;
      this.go(this.n, { keepSelection: true });
    } catch (error) {
      parts.isLoadingAttention = false;
      toast(`Attention could not be loaded: ${error.message}`);
    }
  }

  /** Connects the controls above the text. */
  #setUpControls() {
    const slider = this.#el('slider');
    this.#on(slider, 'input', () => this.#jump(Number(slider.value)));
    this.#on(this.#root, 'click', (event) => {
      const action = event.target.closest('[data-action]')?.dataset.action;
      if (action) this.act(action);
    });
    const speed = this.#el('speed');
    this.#on(speed, 'change', () => this.#parts.player.setSpeed(speed.value));
    this.#parts.player.setSpeed(speed.value);
    this.#el('colors').replaceChildren(h('legend', { class: 'visually-hidden' }, 'Color by'), ...MODES.map((mode, i) => {
      const input = h('input', { type: 'radio', name: `color-${this.#id}`, value: mode.id, onchange: () => this.colorBy(mode.id) });
      return h('label', { title: `${mode.name} (${i + 1})` }, input, mode.name);
    }));
    const searchBox = this.#el('find');
    this.#on(searchBox, 'input', () => this.#highlightFirstMatch());
    this.#on(searchBox, 'keydown', (event) => {
      if (event.key === 'Enter') {
        event.preventDefault();
        this.#highlightNextMatch(event.shiftKey ? -1 : 1);
      } else if (event.key === 'Escape') {
        event.stopPropagation();
        searchBox.value = '';
        this.#highlightFirstMatch();
        this.#parts.textBox.focus();
      }
    });
    this.#updateColors();
    this.#updateButtons();
  }

  /** Shows the rows and marks that are new since the last call. */
  #addNewRows() {
    const { text, textBox, overview, lanes } = this.#parts;
    text.addNewRows(this.isLive);
    lanes.addNewMarks();
    this.#markAnnotations();
    overview.redraw();
    textBox.toggleAttribute('data-empty', this.#run.count === 0);
    textBox.dataset.idle = this.isLive ? 'Waiting for the first event…' : this.#run.eventCount ? 'No tokens were added in this run.' : 'The trace of this run has no events.';
    this.#root.classList.toggle('idle', !this.isLive && this.#run.eventCount === 0);
  }

  /** Sets the notes and feedback on tokens: `{token, tone, text}`, with the index of the token in the answer. Their tokens are marked. */
  set annotations(entries) {
    this.#annotations = entries;
    this.#markAnnotations();
    this.#parts.overview?.redraw();
  }

  #markAnnotations() {
    const { text, overview } = this.#parts;
    if (!overview || !(this.#annotations.length || overview.annotations.length)) return;
    const answer = this.#run.answer();
    const annotations = this.#annotations.filter(({ token }) => token < answer.length).map((entry) => ({ ...entry, row: answer[entry.token] }));
    overview.annotations = annotations;
    text.annotate(annotations);
  }

  /**
   * Index, in the final answer, of the selected token, or else of the token at the cursor. Null if there is neither, and if the
   * token is not in the final answer, because it belongs to the prompt or was removed.
   */
  get token() {
    const row = this.#selectedRow ?? (this.atEnd ? null : this.#rowAddedBy(this.#eventAtCursor()));
    const index = row === null ? -1 : this.#run.answer().indexOf(row);
    return index < 0 ? null : index;
  }

  /** Adds items of a live run. */
  #addItems(items) {
    const run = this.#run;
    const e = this.#eventAtCursor();
    // The items of one step arrive before those of the next one.
    const isComplete = run.step(e) !== run.step(run.eventCount - 1);
    const row = this.#selectedRow ?? this.#rowAddedBy(e);
    const removedAt = run.removedAt(row);
    for (const item of items) {
      run.apply(item);
      if (item.kind === 'event' && item.event_type === 'Prefilled') this.#showPrompt(item);
    }
    this.#events.push(items);
    this.#addNewRows();
    const n = this.#isFollowing ? run.eventCount : this.#parts.player.isPlaying ? this.n : this.#state.at ?? this.n;
    this.go(n, { keepSelection: true, keepPanel: isComplete && n === this.n && removedAt === run.removedAt(row) });
  }

  #onEnd(summary) {
    const n = this.#isFollowing ? this.#run.eventCount : this.n;
    this.isLive = false;
    this.#isFollowing = false;
    this.#addNewRows();
    this.#hasAttention = this.#hasAttention || Boolean(summary?.has_attention);
    this.#hooks.ended?.(summary);
    this.go(n, { keepSelection: true });
  }

  /**
   * Moves the cursor to event `n`; `run.eventCount` is the end. `keepSelection` keeps the selected row, and does not report a
   * change of the state. `keepPanel` also keeps the panel and the mark of the cursor, if neither has changed.
   */
  go(n, { keepSelection = false, keepPanel = false } = {}) {
    const run = this.#run;
    if (!run) return;
    this.n = Math.max(0, Math.min(run.eventCount, Math.round(n)));
    if (!keepSelection) {
      this.#selectedRow = null;
      if (this.isLive) this.#isFollowing = this.n === run.eventCount;
    }
    const { text, overview, lanes, panel, attention, player: { isPlaying } } = this.#parts;
    text.show(this.n, { showLater: this.#state.showLater && !isPlaying && !this.#isFollowing, showRemoved: this.#state.showRemoved });
    const e = this.#eventAtCursor();
    const row = this.#rowAddedBy(e);
    if (!keepPanel) {
      text.setCursor(this.atEnd && this.#selectedRow === null ? null : row, this.#selectedRow, !this.#isFollowing);
      panel.show(e, this.#selectedRow ?? row);
    }
    text.follow(this.#isFollowing || (isPlaying && this.atEnd), !keepSelection);
    overview.moveCursor(this.n);
    lanes.moveCursor(this.n);
    attention?.setSubject(this.#selectedRow ?? row);
    attention?.moveCursor(this.n);
    this.#showPosition(e, row);
    if (!keepSelection && !isPlaying) {
      this.#state.at = this.atEnd ? null : this.n;
      this.#notify();
    }
  }

  /** Ends playback and moves the cursor to event `n`. */
  #jump(n) {
    this.#parts.player.pause();
    this.go(n);
  }

  /** Returns the event at the cursor, or null if there are no events. While a live run is followed, it is the newest Added. */
  #eventAtCursor() {
    const run = this.#run;
    if (!run.eventCount) return null;
    const e = Math.min(this.n, run.eventCount - 1);
    if (!this.#isFollowing) return e;
    for (let earlier = e; earlier > Math.max(-1, e - 8); earlier -= 1) if (run.type(earlier) === 'Added') return earlier;
    return e;
  }

  /** Moves to an `{event}`, or to a `{token}` of the answer, counted from 1. */
  visit({ event, token }) {
    const run = this.#run;
    if (!run) return;
    const rows = token === undefined ? [] : run.answer();
    this.#jump(token === undefined ? event : rows.length ? run.addedAt(rows[Math.max(0, Math.min(rows.length, token) - 1)]) : 0);
  }

  /** Selects a row. For a row of the answer, the cursor moves to the event that added it. */
  select(row) {
    this.#parts.player.pause();
    if (!this.#run.isPrompt(row)) this.go(this.#run.addedAt(row));
    this.#selectedRow = row;
    this.go(this.n, { keepSelection: true });
  }

  /** Returns the row of the answer that an event, or a later event of its step, added, or null. */
  #rowAddedBy(e) {
    if (e === null) return null;
    for (const event of this.#run.stepEvents(e).filter((other) => other >= e)) {
      const [from, to] = this.#run.rowsAddedAt(event);
      if (to > from && !this.#run.isPrompt(from)) return to - 1;
    }
    return null;
  }

  /** Returns the number of tokens in the answer so far, or in the final answer. */
  #answerLength() {
    const length = this.#finalLength ?? this.#run.answerLength(this.#run.eventCount);
    if (!this.isLive) this.#finalLength = length;
    return length;
  }

  /** Shows the position of the cursor, also to screen readers. */
  #showPosition(e, row) {
    const run = this.#run;
    const total = this.#answerLength();
    const count = this.atEnd ? total : run.answerLength(this.n);
    if (this.isLive) this.#hooks.grown?.(total);
    const seconds = e === null ? 0 : run.time(e) / 1000;
    const event = !this.atEnd ? String(this.n) : this.isLive ? 'live' : 'end';
    const time = seconds ? ` · ${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : '';
    this.#el('where').replaceChildren('token ', h('b', {}, String(count)), ` / ${total} · event `, h('b', {}, event), ` / ${run.eventCount}${time}`);
    const spoken = this.#spokenPosition(row, count, total);
    this.#el('slider').setAttribute('aria-valuetext', spoken);
    clearTimeout(this.#announceTimer);
    if (!this.#isFollowing && !this.#parts.player.isPlaying) this.#announceTimer = setTimeout(() => { this.#el('announce').textContent = spoken; }, 250);
  }

  /** Returns the position for screen readers. */
  #spokenPosition(row, count, total) {
    const run = this.#run;
    if (row === null) return this.atEnd ? 'end of the run' : `event ${this.n} of ${run.eventCount}`;
    const logprob = run.logprob(row);
    const probability = logprob === null ? '' : `, probability ${Math.round(Math.exp(logprob) * 100)} percent`;
    return `token ${count} of ${total}, ${displayText(run.text(row))}${probability}, ${run.isForced(row) ? 'forced' : 'sampled'}`;
  }

  /** Updates the button when playback starts or ends. At the end, the state gets the position of the cursor. */
  #onPlayingChanged(isPlaying) {
    const button = this.#root.querySelector('[data-action=play]');
    button.setAttribute('aria-pressed', String(isPlaying));
    button.querySelector('.visually-hidden').textContent = isPlaying ? 'Pause' : 'Play';
    if (!isPlaying) this.go(this.n);
  }

  /** Colors the text and the images, and shows the legend: by attention if it is shown, else by the selected mode. */
  #updateColors() {
    const { text, attention } = this.#parts;
    if (!text) return;
    const run = this.#run;
    const mode = MODES.find((m) => m.id === this.#state.color) ?? MODES[0];
    const shading = this.#state.attention ? attention?.shading : null;
    if (attention) this.#parts.images?.addTo(attention.section);
    this.#parts.images?.showAttention(shading ? attention.current : null);
    if (shading) text.colorBy(shading, attention.showsLaterSteps);
    else if (mode.id === 'mods') text.colorBy((i) => (run.isTouched(i) || run.isForced(i) ? 'touched' : -1));
    else text.colorBy((i) => mode.bucket(run, i));
    const legendBox = this.#el('legend');
    if (shading) legendBox.replaceChildren(h('span', {}, 'attention, less'), ...Array.from({ length: 8 }, (_, b) => h('i', { class: `b${b}` }, '\u00a0')), h('span', {}, 'more'));
    else legendBox.replaceChildren(...legend(mode).map(({ bucket, from }) => h('i', { class: `b${bucket}` }, String(from))), mode.unit ? h('span', {}, mode.unit) : '');
  }

  /** Selects the mode that colors the text, instead of attention. */
  colorBy(id) {
    this.#state.color = id;
    if (this.#state.attention) {
      this.#state.attention = false;
      this.#updateAttention();
    }
    this.#updateButtons();
    this.#updateColors();
    this.#notify();
  }

  /** Shows or hides attention, after it was enabled or disabled. */
  #updateAttention() {
    const { attention } = this.#parts;
    if (!attention) this.#loadAttention();
    else {
      attention.isOn = this.#state.attention;
      attention.moveCursor(this.n);
    }
  }

  /** Shows which buttons are pressed, and which color mode is selected. */
  #updateButtons() {
    for (const name of ['showRemoved', 'showLater', 'attention']) {
      this.#root.querySelector(`[data-action=${name}]`).setAttribute('aria-pressed', String(this.#state[name]));
    }
    // While attention is shown, it colors the text, so no mode is selected.
    for (const input of this.#el('colors').querySelectorAll('input')) input.checked = input.value === this.#state.color && !this.#state.attention;
  }

  #highlightFirstMatch() {
    this.#match = [-1, 0];
    this.#highlightNextMatch(1);
  }

  /** Searches the shown text, and highlights the next match after the current one, or the previous one if `step` is -1. */
  #highlightNextMatch(step) {
    const { text } = this.#parts;
    const needle = this.#el('find').value;
    const isShown = (i) => text.isShown(i);
    const matches = find(needle, this.#run.count, (i) => this.#run.text(i), isShown);
    const index = nextMatch(matches, this.#match, step);
    const [from, offset, to] = matches[index] ?? [-1, 0, -2];
    this.#match = [from, offset];
    text.highlight(Array.from({ length: to - from + 1 }, (_, k) => from + k).filter(isShown));
    this.#el('found').textContent = matches.length ? `${index + 1}/${matches.length}` : needle && 'none';
  }

  /** A copy of the state, which the URL of a page contains. */
  get state() { return { ...this.#state }; }

  /** True if the cursor is after the last event. */
  get atEnd() { return !this.#run || this.n === this.#run.eventCount; }

  /**
   * Returns the URL of the playground that continues the text at event `n` with `next`. Null for a live run, in an exported
   * page, and if the prompt was not recorded.
   */
  playgroundUrl(n = this.n, next = '') {
    const run = this.#run;
    if (this.isLive || this.#isLocal || !run?.count || run.pos(0) !== 0) return null;
    return `${base}/playground?${new URLSearchParams({ from: this.#id, at: String(n), ...(next && { next }) })}`;
  }

  /** Sets the reason why the run cannot be forked, or null. The panel shows it. */
  set notForkable(reason) {
    const { panel } = this.#parts;
    if (panel.notForkable === reason) return;
    panel.notForkable = reason;
    this.go(this.n, { keepSelection: true });
  }

  /** The run, or undefined before it is loaded. */
  get run() { return this.#run; }

  /** Starts forks of the run at the step of event `n`. Opens the first one, unless the page shows them. `text` is that of a changed token. */
  async #startForks(n, change, text) {
    try {
      const response = await sendJson(`/api/v1/runs/${encodeURIComponent(this.#id)}/forks`, { at: { event: n }, ...change });
      const forks = await response.json();
      if (this.#hooks.forked) this.#hooks.forked(forks, { ...change, ...(text !== undefined && { text }) });
      else location.assign(`${base}/runs/${encodeURIComponent(forks.runs[0].run_id)}`);
    } catch (error) {
      toast(`Not forked: ${error.message}`);
    }
  }

  #notify() { this.#hooks.changed?.(this.state); }

  /** Performs an action of a shortcut or button. Returns false if the replay has no such action. */
  act(action, key) {
    const { player, panel, textBox } = this.#parts;
    if (!player) return false;
    const run = this.#run;
    const target = targetOf(action, run, this.n, (i) => surprise(run, i), MIN_SURPRISE);
    if (target !== undefined) {
      player.pause();
      if (typeof target === 'string') toast(target);
      else this.go(target);
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
        this.#updateButtons();
        this.#updateAttention();
        this.go(this.n, { keepSelection: true });
        this.#updateColors();
        this.#notify();
        return true;
      case 'stages': panel.showStages(); return true;
      case 'find': this.#el('find').focus(); this.#el('find').select(); return true;
      case 'focus': textBox.focus(); return true;
      default: return false;
    }
  }
}
