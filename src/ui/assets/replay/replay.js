// The replay: one cursor over the events of a run, and all parts that follow it. The page of a run, the playground and
// exported pages use it. A run is live while its events are arriving.
import { base, runPath } from '../api.js';
import { toast } from '../dom.js';
import { Coloring, MIN_SURPRISE, MODES, surprise } from './color.js';
import { Cursor } from './cursor.js';
import { measurementsOf, parametersOf } from './details.js';
import { Events } from './events.js';
import { Search } from './find.js';
import { ForkControls } from './forks.js';
import { showCardOnHover } from './hover.js';
import { Lanes } from './lanes.js';
import { eventOf, targetOf } from './moves.js';
import { OptionalParts } from './optional-parts.js';
import { Overview } from './overview.js';
import { Panel } from './panel.js';
import { Player } from './player.js';
import { Position } from './position.js';
import { Run } from './run.js';
import { Text } from './text.js';

/** Initial values of the state, which the URL of a page contains. `at` is null at the end of the run. */
const INITIAL_STATE = { at: null, color: 'surprise', showRemoved: false, showLater: true, attention: false, attentionView: 'mean', laterSteps: false };

export class Replay {
  /** True while the events of the run are arriving. */
  isLive;
  #root;
  #id;
  #run;
  #events;
  /** Text, panel, player and other parts, which exist after `#build`, as the run and the cursor do. */
  #parts = {};
  #cursor;
  #state;
  #hooks;
  /** Aborts when the replay is closed. */
  #closed = new AbortController();
  /** True in an exported page, which has no server. */
  #isLocal = false;
  /** True if the attention of the run was recorded. */
  #hasAttention;
  /** Notes and feedback on tokens. */
  #annotations = [];

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
    const { signal } = this.#closed;
    if (this.isLive) {
      const [{ followRun }, { Fold }] = await Promise.all([import('./live.js'), import('./fold.js')]);
      if (signal.aborted) return;
      this.#build(new Run(new Fold()));
      followRun(this.#id, {
        signal,
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
    try {
      const run = await Run.load(this.#id, signal);
      const [entry] = await firstEntries;
      if (!signal.aborted) this.#showComplete(run, entry?.event);
    } catch (error) {
      if (signal.aborted) return;
      placeholder.dataset.idle = 'The run could not be loaded.';
      throw error;
    }
  }

  /** Shows a run that has ended; `prefilled` is its Prefilled event. */
  #showComplete(run, prefilled) {
    this.#build(run, prefilled);
    this.#draw();
  }

  /** Shows the recorded prompt of a Prefilled event: the roles of its messages, and its images. */
  #showPrompt(event) {
    const { prompt } = measurementsOf(event);
    if (!prompt) return;
    this.#parts.text.setPrompt(prompt, event.sequence_order);
    this.#parts.forks?.offerVectors(parametersOf(prompt).steering);
    this.#hooks.prompt?.(prompt);
    if (!prompt.images?.length) return;
    const load = () => this.#hooks.images?.() ?? import('./images.js');
    this.#parts.optional.showImages(load, this.#isLocal ? null : this.#id, prompt, this.#parts.text);
  }

  /** Shows the run of an exported page. `fold` is empty and gets the items. */
  showLocal(fold, items) {
    this.#isLocal = true;
    this.#events.push(items, Infinity);
    for (const item of items) fold.apply(item);
    this.#showComplete(new Run(fold), items[0]);
  }

  /** Ends all work and removes all listeners, before another run is shown in the same element. */
  close() {
    this.#parts.player?.pause();
    this.#closed.abort();
    this.#el('find').value = '';
    this.#el('found').textContent = '';
  }

  /** Returns the element of the replay with the attribute `data-{name}`. */
  #el(name) { return this.#root.querySelector(`[data-${name}]`); }

  /** Creates all parts. `prefilled` is the Prefilled event, if it is known already. */
  #build(run, prefilled) {
    this.#run = run;
    this.#cursor = new Cursor(run, this.#state.at, this.isLive);
    const { signal } = this.#closed;
    const slider = this.#el('slider');
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
    const forks = this.#isLocal ? null : new ForkControls(`${runPath(this.#id)}/forks`, { forked: this.#hooks.forked, vectors: JSON.parse(this.#root.dataset.vectors ?? 'null') });
    this.#parts = {
      text,
      textBox,
      coloring: new Coloring(this.#el('colors'), this.#el('legend'), run, text, { name: `color-${this.#id}`, onChoose: (id) => this.colorBy(id) }),
      position: new Position(run, { where: this.#el('where'), slider, announcer: this.#el('announce') }, signal),
      optional: new OptionalParts(signal, () => this.#showState()),
      overview: new Overview(this.#el('overview'), run, signal),
      lanes: new Lanes(this.#el('lanes'), run, go, signal),
      forks,
      panel: new Panel(this.#el('panel'), run, this.#events, forks, { go, playgroundUrl: (n, next) => this.playgroundUrl(n, next) }),
      player: new Player(run, this.#root.querySelector('[data-action=play]'), this.#el('speed'), signal, {
        at: () => this.n,
        go: (n) => this.go(n),
        // The state gets the position of the cursor.
        ended: () => this.go(this.n),
      }),
    };
    this.#showPrompt(prefilled);
    slider.addEventListener('input', () => go(Number(slider.value)), { signal });
    this.#root.addEventListener('click', (event) => {
      const action = event.target.closest('[data-action]')?.dataset.action;
      if (action) this.act(action);
    }, { signal });
    this.#showState();
    this.#addNewRows();
    // When it is created, it searches for the text that was typed while the run was loading.
    this.#parts.search = new Search(this.#el('find'), this.#el('found'), run, text, { signal, onLeave: () => textBox.focus() });
    if (this.#state.attention) this.#loadAttention();
  }

  /** Adds the part that shows attention. */
  async #loadAttention() {
    const { attentionView: view, laterSteps: showsLaterSteps } = this.#state;
    const attention = await this.#parts.optional?.loadAttention(this.#run, this.#id, { view, showsLaterSteps }, {
      isShown: () => this.#state.attention,
      isRecorded: () => this.#hasAttention,
      isLive: () => this.isLive,
      viewChanged: (attentionView, laterSteps) => this.#setState({ attentionView, laterSteps }),
      valuesChanged: () => this.#showState(),
      go: (n) => this.#jump(n),
      select: (row) => this.select(row),
    });
    if (!attention) return;
    this.#parts.panel.addSection(attention.section);
    this.#draw();
  }

  /** Shows the rows and marks that are new since the last call. */
  #addNewRows() {
    const { text, textBox, overview, lanes } = this.#parts;
    text.addNewRows({ buildAll: this.isLive });
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
    overview.annotations = this.#annotations.map((entry) => ({ ...entry, row: answer[entry.token] })).filter(({ row }) => row !== undefined);
    text.annotate(overview.annotations);
  }

  /**
   * Index, in the final answer, of the selected token, or else of the token at the cursor. Null if there is neither, and if the
   * token is not in the final answer, because it belongs to the prompt or was removed.
   */
  get token() { return this.#cursor?.answerIndex ?? null; }

  /** Adds items of a live run. */
  #addItems(items) {
    const run = this.#run;
    const cursor = this.#cursor;
    const { event, row } = cursor;
    // The items of one step arrive before those of the next one, so the panel of an earlier step does not change.
    const isStepComplete = run.step(event) !== run.step(run.eventCount - 1);
    const removedAt = run.removedAt(row);
    for (const item of items) {
      run.apply(item);
      if (item.kind === 'event' && item.event_type === 'Prefilled') this.#showPrompt(item);
    }
    this.#events.push(items);
    this.#addNewRows();
    const { n } = cursor;
    cursor.keepAt(cursor.isFollowing ? run.eventCount : this.#parts.player.isPlaying ? n : this.#state.at ?? n);
    this.#draw({ keepPanel: isStepComplete && n === this.n && removedAt === run.removedAt(row) });
  }

  #onEnd(summary) {
    if (this.#cursor.isFollowing) this.#cursor.keepAt(this.#run.eventCount);
    this.isLive = false;
    this.#cursor.isFollowing = false;
    this.#addNewRows();
    this.#hasAttention = this.#hasAttention || Boolean(summary?.has_attention);
    this.#hooks.ended?.(summary);
    this.#draw();
  }

  /** Moves the cursor to event `n`, where no row is selected; `run.eventCount` is the end. */
  go(n) {
    const { text, player } = this.#parts;
    this.#cursor.moveTo(n, this.isLive);
    text.resumeFollowing();
    this.#draw();
    if (!player.isPlaying) this.#setState({ at: this.atEnd ? null : this.n });
  }

  /** Draws all parts at the cursor. `keepPanel` keeps the panel and the mark of the cursor, if neither has changed. */
  #draw({ keepPanel = false } = {}) {
    const cursor = this.#cursor;
    const { text, overview, lanes, panel, position, optional: { attention }, player: { isPlaying } } = this.#parts;
    const { isFollowing, atEnd, selectedRow, row } = cursor;
    text.show(this.n, { showLater: this.#state.showLater && !isPlaying && !isFollowing, showRemoved: this.#state.showRemoved });
    if (!keepPanel) {
      text.setCursor(atEnd && selectedRow === null ? null : cursor.addedRow, selectedRow, !isFollowing);
      panel.show(cursor.event, row);
    }
    text.follow(isFollowing || (isPlaying && atEnd));
    overview.moveCursor(this.n);
    lanes.moveCursor(this.n);
    attention?.moveCursor(this.n, row);
    const answerLength = position.show(cursor, { isLive: this.isLive, isQuiet: isFollowing || isPlaying });
    if (this.isLive) this.#hooks.grown?.(answerLength);
  }

  /** Ends playback and moves the cursor to event `n`. */
  #jump(n) {
    this.#parts.player.pause();
    this.go(n);
  }

  /** Moves to an `{event}`, or to a `{token}` of the answer, counted from 1. */
  visit(place) {
    if (this.#run) this.#jump(eventOf(place, this.#run));
  }

  /** Selects a row. For a row of the answer, the cursor moves to the event that added it. */
  select(row) {
    this.#parts.player.pause();
    if (!this.#run.isPrompt(row)) this.go(this.#run.addedAt(row));
    this.#cursor.selectedRow = row;
    this.#draw();
  }

  /** Shows which buttons are pressed, and colors the text and the images: by attention if it is shown, else by the selected mode. */
  #showState() {
    const { coloring, optional } = this.#parts;
    if (!coloring) return;
    for (const name of ['showRemoved', 'showLater', 'attention']) {
      this.#root.querySelector(`[data-action=${name}]`).setAttribute('aria-pressed', String(this.#state[name]));
    }
    const { attention, images } = optional;
    if (attention) images?.addTo(attention.section);
    images?.showAttention(attention?.current ?? null);
    coloring.show(this.#state.color, this.#state.attention, attention);
  }

  /** Selects the mode that colors the text, instead of attention. */
  colorBy(id) { this.#changeState({ color: id, attention: false }); }

  /** Changes and reports the state, and shows or hides attention. */
  #changeState(change) {
    this.#setState(change);
    const attention = this.#parts.optional?.attention;
    if (attention) attention.moveCursor(this.n, this.#cursor.row);
    else if (this.#state.attention) this.#loadAttention();
    this.#showState();
  }

  /** A copy of the state, which the URL of a page contains. */
  get state() { return { ...this.#state }; }

  /** True if the cursor is after the last event. */
  get atEnd() { return this.#cursor?.atEnd ?? true; }

  /** Event of the cursor; `run.eventCount` is the end. */
  get n() { return this.#cursor?.n ?? 0; }

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
    const { forks } = this.#parts;
    if (forks.notForkable === reason) return;
    forks.notForkable = reason;
    this.#draw();
  }

  /** The run, or undefined before it is loaded. */
  get run() { return this.#run; }

  /** Changes and reports the state. */
  #setState(change) {
    Object.assign(this.#state, change);
    this.#hooks.changed?.(this.state);
  }

  /** Performs an action of a shortcut or button. Returns false if the replay has no such action. */
  act(action, key) {
    const { player, panel, search } = this.#parts;
    if (!player) return false;
    const target = targetOf(action, this.#run, this.n, (i) => surprise(this.#run, i), MIN_SURPRISE);
    if (target !== undefined) {
      player.pause();
      if (typeof target === 'string') toast(target);
      else this.go(target);
      return true;
    }
    switch (action) {
      case 'play': player.toggle(); return true;
      case 'faster': player.changeSpeed(1); return true;
      case 'slower': player.changeSpeed(-1); return true;
      case 'color': this.colorBy(MODES[Number(key) - 1].id); return true;
      case 'showRemoved': case 'showLater': case 'attention':
        this.#changeState({ [action]: !this.#state[action] });
        this.#draw();
        return true;
      case 'stages': panel.showStages(); return true;
      case 'find': search.focus(); return true;
      default: return false;
    }
  }
}
