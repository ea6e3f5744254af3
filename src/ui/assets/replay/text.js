// The token text: one span per row, in blocks that the browser skips while they are off screen.
// Moving the cursor only changes classes of rows whose state changes; rows are built once. The first rows of a stored run
// are built at once, the others in tasks after the first frame.
import { h } from '../dom.js';
import { NEVER, branches, chipVisible } from './branches.js';
import { fill, show } from './glyphs.js';
import { mayCut, roles } from './parts.js';

const ALIVE = 1;
const GHOST = 2;
const DEAD = 3;
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
  #branches = [];
  #chips = new Map();
  #open = new Set();
  #options;
  #n;
  #signal;
  #isScheduled = false;
  #paint = () => -1;
  #ghosts = false;
  #cursor = null;
  #selected = null;
  #hits = [];
  #notes = new Map();

  /**
   * The text at event `n`; `options.ahead` shows later rows, `options.dead` erased ones. `onPick(row)` and
   * `onErased(row)` are called on clicks. No rows are built after `signal` aborts.
   */
  constructor(root, run, { n, options, signal, onPick, onErased }) {
    this.#root = root;
    this.#run = run;
    this.#n = n;
    this.#options = options;
    this.#signal = signal;
    root.addEventListener('click', (event) => {
      const chip = event.target.closest('.chip');
      if (chip) return this.#toggle(chip._died);
      const token = event.target.closest('.t');
      if (!token || !getSelection().isCollapsed) return undefined;
      return this.#state[token._row] === DEAD ? onErased(token._row) : onPick(token._row);
    });
  }

  /** Sets the prompt's parts from the Prefilled event. */
  label(prompt, born) {
    this.#labels = { born, roles: roles(prompt.texts?.length ?? 0, prompt.spans, prompt.texts ?? []) };
  }

  /** Takes over the rows that arrived since the last call. Builds all of them if `all`, else the first ones. */
  sync(all) {
    this.#branches = branches(this.#run.count, (i) => this.#run.died(i));
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

  /** Builds the chips of branches whose rows are there. */
  #addChips() {
    const missing = this.#branches.filter((branch) => branch.last < this.#spans.length && !this.#chips.has(branch.died));
    if (!missing.length) return;
    const mods = Map.groupBy(this.#run.marks.filter((m) => m.kind === 'action'), (m) => m.seq);
    for (const branch of missing) {
      const names = (mods.get(branch.died - 1) ?? []).map((m) => m.mod_name);
      const chip = h('button', { type: 'button', class: 'chip', title: `${branch.count} tokens removed${names.length ? ` by ${names.join(', ')}` : ''}: show or hide them` }, `⌫ ${branch.count}`, h('span', { class: 'vh' }, ' tokens removed'));
      chip._died = branch.died;
      chip.hidden = true;
      this.#chips.set(branch.died, chip);
      this.#spans[branch.last].after(chip);
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

  /** Returns the state of a row at the current event. */
  #stateAt(i) {
    const died = this.#run.died(i);
    if (this.#run.born(i) > this.#n) return this.#options.ahead && died === NEVER ? GHOST : 0;
    return died <= this.#n ? DEAD : ALIVE;
  }

  #blockText = '';

  #roleOf(i) {
    const run = this.#run;
    if (!run.isPrompt(i)) return { role: 'answer', dim: false };
    if (this.#labels && run.born(i) > this.#labels.born) return { role: 'new prompt', dim: false };
    return this.#labels?.roles[run.pos(i)] ?? { role: 'prompt', dim: false };
  }

  #bucketClass(i) {
    const b = this.#paint(i);
    return b === 'touched' ? ' touched' : b >= 0 ? ` b${b}` : '';
  }

  #write(i) {
    const died = this.#run.died(i);
    const state = this.#state[i];
    const shadedGhost = state === GHOST && this.#ghosts && this.#bucket[i];
    let name = this.#base[i] + (state === ALIVE || shadedGhost ? this.#bucket[i] : '') + (shadedGhost ? '' : CLASS[state]);
    if (state === DEAD && this.#open.has(died)) name += ' o';
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

  /** Colours by `paint(row)`: a bucket 0–7, -1 for none, or 'touched'; `ghosts` also colours later tokens. */
  colour(paint, ghosts = false) {
    const all = ghosts !== this.#ghosts;
    this.#paint = paint;
    this.#ghosts = ghosts;
    for (let i = 0; i < this.#spans.length; i += 1) {
      const next = this.#bucketClass(i);
      if (next === this.#bucket[i] && !all) continue;
      this.#bucket[i] = next;
      if (this.#state[i] === ALIVE || this.#state[i] === GHOST) this.#write(i);
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

  /** Shows the chips of the current event, and hides blocks and parts without anything to show. */
  #hideEmpty() {
    this.#root.dataset.dead = this.#options.dead ? 'show' : 'fold';
    const isOpen = (branch) => this.#options.dead || this.#open.has(branch.died);
    for (const block of this.#blocks) if (block) block.chips = 0;
    for (const branch of this.#branches) {
      const chip = this.#chips.get(branch.died);
      if (!chip) continue;
      const visible = chipVisible(branch, this.#n, isOpen);
      if (chip.hidden === visible) chip.hidden = !visible;
      chip.setAttribute('aria-expanded', String(isOpen(branch)));
      if (visible) this.#blockOf[branch.last].chips += 1;
    }
    for (const block of this.#blocks) {
      const isEmpty = block && block.shown + block.chips === 0;
      if (block && block.el.hidden !== isEmpty) block.el.hidden = isEmpty;
    }
    for (const part of this.#root.children) part.hidden = !part.querySelector('.blk:not([hidden])');
  }

  #toggle(died) {
    if (!this.#open.delete(died)) this.#open.add(died);
    for (let i = 0; i < this.#spans.length; i += 1) if (this.#run.died(i) === died) this.#write(i);
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
    return state === ALIVE || state === GHOST || (state === DEAD && (this.#options.dead || this.#open.has(this.#run.died(i))));
  }

  /** Highlights the rows of one match. */
  ring(rows) {
    this.#ensure(rows.at(-1) ?? -1);
    const old = this.#hits;
    this.#hits = rows;
    for (const i of [...old, ...rows]) this.#write(i);
    if (!rows.length) return;
    this.#target = this.#spans[rows[0]];
    this.#reveal(this.#target);
  }

  /** Marks the rows that notes and feedback name: `{row, tone, text}`. */
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
