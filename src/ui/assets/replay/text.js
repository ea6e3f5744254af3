// The token text: one span per row, in blocks that the browser skips while they are off screen.
// Moving the cursor only changes classes of rows whose state changes; rows are built once. The first rows of a stored run
// are built at once, the others in tasks after the first frame.
import { h } from '../dom.js';
import { fill, show } from './glyphs.js';
import { mayCut, roles } from './parts.js';
import { isChipVisible, removals } from './removals.js';
import { NEVER } from './rows.js';

const VISIBLE = 1;
const LATER = 2;
const REMOVED = 3;
const CLASS = [' f', '', ' g', ' x'];
/** Rows that are built before the first frame, and per task after it. */
const ROWS_PER_TASK = 1000;

export class Text {
  #root;
  #run;
  #spans = [];
  #base = [];
  #bucket = [];
  #state = [];
  #blockOf = [];
  #blocks = [];
  #part = null;
  #role = null;
  #labels = null;
  #removals = [];
  #chips = new Map();
  #open = new Set();
  #options;
  #n;
  #signal;
  #isScheduled = false;
  #paint = () => -1;
  #coloursLater = false;
  #cursor = null;
  #selected = null;
  #hits = [];
  #notes = new Map();
  /** Elements in place of rows: the first row and the element. */
  #embedded = [];

  /**
   * The text at event `n`; `options.showLater` shows later rows, `options.showRemoved` removed ones. `onPick(row)` and
   * `onRemovedClick(row)` are called on clicks. No rows are built after `signal` aborts.
   */
  constructor(root, run, { n, options, signal, onPick, onRemovedClick }) {
    this.#root = root;
    this.#run = run;
    this.#n = n;
    this.#options = options;
    this.#signal = signal;
    root.addEventListener('click', (event) => {
      const chip = event.target.closest('.chip');
      if (chip) return this.#toggle(chip._removedAt);
      const token = event.target.closest('.t');
      if (!token || !getSelection().isCollapsed) return undefined;
      return this.#state[token._row] === REMOVED ? onRemovedClick(token._row) : onPick(token._row);
    });
  }

  /** Sets the prompt's parts from the Prefilled event. */
  label(prompt, addedAt) {
    this.#labels = { addedAt, roles: roles(prompt.texts?.length ?? 0, prompt.spans, prompt.texts ?? []) };
  }

  /** Adds the rows that arrived since the last call. Builds all of them if `all`, else the first ones. */
  sync(all) {
    this.#removals = removals(this.#run.count, (i) => this.#run.removedAt(i));
    this.#build(all ? Infinity : this.#spans.length + ROWS_PER_TASK);
  }

  /** Builds rows up to `end`, and the others in later tasks. */
  #build(end) {
    const { count } = this.#run;
    while (this.#spans.length < Math.min(end, count)) this.#append(this.#spans.length);
    this.#addChips();
    this.#hideEmpty();
    if (this.#spans.length === count || this.#isScheduled) return;
    this.#isScheduled = true;
    setTimeout(() => {
      this.#isScheduled = false;
      if (!this.#signal.aborted) this.#build(this.#spans.length + ROWS_PER_TASK);
    });
  }

  /** Builds the rows up to row `i`. */
  #ensure(i) {
    if (i >= this.#spans.length) this.#build(i + 1);
  }

  /** Builds the chips of removals whose rows are built. */
  #addChips() {
    const missing = this.#removals.filter((removal) => removal.last < this.#spans.length && !this.#chips.has(removal.removedAt));
    if (!missing.length) return;
    const mods = Map.groupBy(this.#run.marks.filter((m) => m.kind === 'action'), (m) => m.seq);
    for (const removal of missing) {
      const names = (mods.get(removal.removedAt - 1) ?? []).map((m) => m.mod_name);
      const chip = h('button', { type: 'button', class: 'chip', title: `${removal.count} tokens removed${names.length ? ` by ${names.join(', ')}` : ''}: show or hide them` }, `⌫ ${removal.count}`, h('span', { class: 'vh' }, ' tokens removed'));
      chip._removedAt = removal.removedAt;
      chip.hidden = true;
      this.#chips.set(removal.removedAt, chip);
      this.#spans[removal.last].after(chip);
    }
  }

  #append(i) {
    const run = this.#run;
    const text = run.text(i);
    const { role, dim } = this.#roleOf(i);
    if (role !== this.#role) {
      this.#role = role;
      this.#part = h('div');
      this.#root.append(h('div', { class: 'part', 'data-role': role }, h('b', {}, role), this.#part));
      this.#blocks.push(null);
    }
    let block = this.#blocks.at(-1);
    if (!block || mayCut(block.rows, this.#blockText)) {
      block = { el: h('div', { class: 'blk' }), rows: 0, shown: 0, chips: 0 };
      this.#part.append(block.el);
      this.#blocks.push(block);
    }
    this.#blockText = text;
    const span = document.createElement('span');
    span._row = i;
    fill(span, text);
    block.el.append(span);
    block.rows += 1;
    this.#blockOf[i] = block;
    this.#spans[i] = span;
    this.#base[i] = `t${run.isPrompt(i) ? ' p' : run.isForced(i) ? ' q' : ''}${dim || run.isStop(i) ? ' tpl' : ''}${run.isError(i) ? ' e' : ''}`;
    this.#bucket[i] = this.#bucketClass(i);
    this.#state[i] = this.#stateAt(i);
    if (this.isShown(i)) block.shown += 1;
    this.#write(i);
  }

  /** Shows an element, if any, in place of the rows from `from` to the one before `to`. */
  embed(from, to, element) {
    for (let i = from; i < Math.min(to, this.#run.count); i += 1) {
      this.#ensure(i);
      this.#spans[i].hidden = true;
    }
    if (!element || !this.#spans[from]) return;
    this.#spans[from].before(element);
    this.#embedded.push([from, element]);
    this.#showEmbedded();
  }

  #showEmbedded() {
    for (const [row, element] of this.#embedded) element.hidden = !this.isShown(row);
  }

  /** Returns the state of a row at the current event. */
  #stateAt(i) {
    const removedAt = this.#run.removedAt(i);
    if (this.#run.addedAt(i) > this.#n) return this.#options.showLater && removedAt === NEVER ? LATER : 0;
    return removedAt <= this.#n ? REMOVED : VISIBLE;
  }

  #blockText = '';

  #roleOf(i) {
    const run = this.#run;
    if (!run.isPrompt(i)) return { role: 'answer', dim: false };
    if (this.#labels && run.addedAt(i) > this.#labels.addedAt) return { role: 'new prompt', dim: false };
    return this.#labels?.roles[run.pos(i)] ?? { role: 'prompt', dim: false };
  }

  #bucketClass(i) {
    const b = this.#paint(i);
    return b === 'touched' ? ' touched' : b >= 0 ? ` b${b}` : '';
  }

  #write(i) {
    const removedAt = this.#run.removedAt(i);
    const state = this.#state[i];
    const isShadedLater = state === LATER && this.#coloursLater && this.#bucket[i];
    let name = this.#base[i] + (state === VISIBLE || isShadedLater ? this.#bucket[i] : '') + (isShadedLater ? '' : CLASS[state]);
    if (state === REMOVED && this.#open.has(removedAt)) name += ' o';
    if (i === this.#cursor) name += ' cur';
    if (i === this.#selected) name += ' sel';
    if (this.#hits.includes(i)) name += ' hit';
    const note = this.#notes.get(i);
    if (note) {
      name += ` note ${note.tone}`;
      this.#spans[i].title = note.text;
    }
    this.#spans[i].className = name;
  }

  /** Colours by `paint(row)`: a bucket 0–7, -1 for none, or 'touched'; `coloursLater` also colours later tokens. */
  colour(paint, coloursLater = false) {
    const all = coloursLater !== this.#coloursLater;
    this.#paint = paint;
    this.#coloursLater = coloursLater;
    for (let i = 0; i < this.#spans.length; i += 1) {
      const next = this.#bucketClass(i);
      if (next === this.#bucket[i] && !all) continue;
      this.#bucket[i] = next;
      if (this.#state[i] === VISIBLE || this.#state[i] === LATER) this.#write(i);
    }
  }

  /** Shows the text at event `n`. */
  show(n, options = this.#options) {
    this.#n = n;
    this.#options = options;
    for (const block of this.#blocks) if (block) block.shown = 0;
    for (let i = 0; i < this.#spans.length; i += 1) {
      const state = this.#stateAt(i);
      if (state !== this.#state[i]) {
        this.#state[i] = state;
        this.#write(i);
      }
      if (this.isShown(i)) this.#blockOf[i].shown += 1;
    }
    this.#hideEmpty();
  }

  /** Shows the chips of the current event, and hides empty blocks and parts. */
  #hideEmpty() {
    this.#showEmbedded();
    this.#root.dataset.removed = this.#options.showRemoved ? 'shown' : 'hidden';
    const isOpen = (removal) => this.#options.showRemoved || this.#open.has(removal.removedAt);
    for (const block of this.#blocks) if (block) block.chips = 0;
    for (const removal of this.#removals) {
      const chip = this.#chips.get(removal.removedAt);
      if (!chip) continue;
      const visible = isChipVisible(removal, this.#n, isOpen);
      if (chip.hidden === visible) chip.hidden = !visible;
      chip.setAttribute('aria-expanded', String(isOpen(removal)));
      if (visible) this.#blockOf[removal.last].chips += 1;
    }
    for (const block of this.#blocks) {
      const isEmpty = block && block.shown + block.chips === 0;
      if (block && block.el.hidden !== isEmpty) block.el.hidden = isEmpty;
    }
    for (const part of this.#root.children) part.hidden = !part.querySelector('.blk:not([hidden])');
  }

  #toggle(removedAt) {
    if (!this.#open.delete(removedAt)) this.#open.add(removedAt);
    for (let i = 0; i < this.#spans.length; i += 1) if (this.#run.removedAt(i) === removedAt) this.#write(i);
    this.show(this.#n);
  }

  /** Marks the row of the current event, and a selected row. */
  cursor(row, selected = null, scroll = true) {
    this.#ensure(selected ?? row ?? -1);
    const old = [this.#cursor, this.#selected];
    this.#cursor = row;
    this.#selected = selected;
    for (const i of new Set([...old, row, selected])) if (i !== null && this.#spans[i]) this.#write(i);
    this.#target = this.#spans[selected ?? row ?? -1];
    if (scroll && this.#target) this.#reveal(this.#target);
  }

  #target = null;

  #reveal(span, tries = 3) {
    const box = this.#root.getBoundingClientRect();
    const at = span.getBoundingClientRect();
    if (at.width === 0 && at.height === 0) return;
    const room = Math.min(80, box.height / 4);
    // scrollIntoView would also scroll the page on small screens.
    const above = box.top + room - at.top;
    const below = at.bottom - box.bottom + room;
    if (above <= 0 && below <= 0) return;
    if (Math.max(above, below) > box.height) this.#root.scrollTop += at.top - box.top - box.height / 3;
    else this.#root.scrollTop += above > 0 ? -above : below;
    // Blocks that were off screen get their actual height only now, so the position is checked again.
    if (tries) requestAnimationFrame(() => { if (this.#target === span) this.#reveal(span, tries - 1); });
  }

  /** Scrolls to the end while a live run is followed. */
  toEnd() {
    this.#root.scrollTop = this.#root.scrollHeight;
  }

  /** Returns true if the row is visible as text, for the search. */
  isShown(i) {
    const state = this.#state[i] ?? this.#stateAt(i);
    return state === VISIBLE || state === LATER || (state === REMOVED && (this.#options.showRemoved || this.#open.has(this.#run.removedAt(i))));
  }

  /** Highlights the rows of one match. */
  highlight(rows) {
    this.#ensure(rows.at(-1) ?? -1);
    const old = this.#hits;
    this.#hits = rows;
    for (const i of [...old, ...rows]) this.#write(i);
    if (!rows.length) return;
    this.#target = this.#spans[rows[0]];
    this.#reveal(this.#target);
  }

  /** Marks the rows with notes or feedback: `{row, tone, text}`. */
  note(entries) {
    const old = [...this.#notes.keys()];
    this.#notes.clear();
    for (const { row, tone, text } of entries) {
      const other = this.#notes.get(row);
      this.#notes.set(row, other ? { tone: other.tone === tone ? tone : 'plain', text: `${other.text}\n${text}` } : { tone, text });
    }
    for (const row of new Set([...old, ...this.#notes.keys()])) if (this.#spans[row]) this.#write(row);
  }

  /** Returns the text of a row for places outside of the answer. */
  name(i) {
    return show(this.#run.text(i));
  }
}
