// The token text: one span per row, in blocks that the browser skips while they are off screen.
// A block gets its spans before it is shown: those at the start or at the cursor before the first frame, others when the user
// scrolls to them, and the rest in short tasks, so that the browser's own search finds all text. Moving the cursor only changes classes of rows whose state changes.
import { h } from '../dom.js';
import { appendText, displayText } from './glyphs.js';
import { MAX_BLOCK_ROWS, mayEndBlock, roles } from './blocks.js';
import { isChipVisible, removals } from './removals.js';
import { NEVER } from './rows.js';

const VISIBLE = 1;
const LATER = 2;
const REMOVED = 3;
/** Class of a row by its state: hidden, visible, later, removed. */
const STATE_CLASSES = [' hidden', '', ' later', ' removed'];
const ANSWER = { role: 'answer', dim: false };
const PROMPT = { role: 'prompt', dim: false };
const NEW_PROMPT = { role: 'new prompt', dim: false };
/** Number of rows whose spans are created before the first frame: about as many as a window shows. */
const FIRST_ROWS = 480;
/** Duration of a task that creates spans, in milliseconds, and the number of rows that it adds to blocks. */
const TASK_MS = 16;
const ROWS_PER_TASK = 4 * MAX_BLOCK_ROWS;

export class Text {
  #root;
  #run;
  /** Spans by row; rows of empty blocks have none. */
  #spans = [];
  /** Classes by row that never change, and the class of its color. */
  #fixedClasses = [];
  #colorClass = [];
  #state = [];
  #blockOf = [];
  /** Blocks in order: `{el, part, first, end, built, shown, chips}`, with the rows `first..end`, of which those before `built` have spans. */
  #blocks = [];
  /** Index of the first block that may lack spans. */
  #firstUnbuilt = 0;
  /** Blocks on the screen and close to it, which get their spans before others. */
  #nearby = new Set();
  #role = null;
  #labels = null;
  #removals = [];
  #removalByLastRow = new Map();
  #chips = new Map();
  /** Events whose removed rows the user has unfolded. */
  #unfolded = new Set();
  #options;
  #n;
  #signal;
  #isScheduled = false;
  #paint = () => -1;
  #colorsLater = false;
  #cursor = null;
  #selected = null;
  #matches = new Set();
  #annotations = new Map();
  /** Elements in place of rows: the first row and the element. */
  #embedded = [];

  /**
   * The text at event `n`; `options.showLater` shows later rows, `options.showRemoved` removed ones. `onSelect(row)` and
   * `onRemovedClick(row)` are called on clicks. No spans are created after `signal` aborts.
   */
  constructor(root, run, { n, options, signal, onSelect, onRemovedClick }) {
    this.#root = root;
    this.#run = run;
    this.#n = n;
    this.#options = options;
    this.#signal = signal;
    root.addEventListener('click', (event) => {
      const chip = event.target.closest('.chip');
      if (chip) return this.#toggleRemoval(chip._removedAt);
      const token = event.target.closest('.token');
      if (!token || !getSelection().isCollapsed) return undefined;
      return this.#state[token._row] === REMOVED ? onRemovedClick(token._row) : onSelect(token._row);
    });
    root.addEventListener('contentvisibilityautostatechange', ({ target, skipped }) => {
      if (!target._block) return;
      if (skipped) this.#nearby.delete(target._block);
      else this.#nearby.add(target._block);
    });
  }

  /** Sets the prompt's parts from the Prefilled event. */
  setPrompt(prompt, addedAt) {
    this.#labels = { addedAt, roles: roles(prompt.texts?.length ?? 0, prompt.spans, prompt.texts ?? []) };
  }

  /** Adds the rows that arrived since the last call. Creates all of their spans if `all`, else the first ones. */
  sync(all) {
    this.#removals = removals(this.#run.count, (i) => this.#run.removedAt(i));
    this.#removalByLastRow = new Map(this.#removals.map((removal) => [removal.last, removal]));
    this.#addRows(all ? this.#run.count : this.#blockOf.length + FIRST_ROWS);
    let rows = 0;
    for (let b = this.#firstUnbuilt; b < this.#blocks.length && (all || rows < FIRST_ROWS); b += 1) {
      this.#build(this.#blocks[b]);
      rows += this.#blocks[b].end - this.#blocks[b].first;
    }
    for (const removal of this.#removals) if (this.#spans[removal.last] && !this.#chips.has(removal.removedAt)) this.#addChip(removal);
    this.#updateVisibility();
    this.#schedule();
  }

  /** Adds the rows before `end` to blocks. */
  #addRows(end) {
    for (let i = this.#blockOf.length; i < Math.min(end, this.#run.count); i += 1) this.#addToBlock(i);
  }

  /** Adds row `i` to the last block, or to a new one. */
  #addToBlock(i) {
    const { role } = this.#roleOf(i);
    let block = this.#blocks.at(-1);
    if (role !== this.#role) {
      this.#role = role;
      const rows = h('div');
      const part = h('div', { class: 'part', 'data-role': role }, h('b', {}, role), rows);
      this.#root.append(part);
      block = this.#addBlock(i, part, rows);
    } else if (mayEndBlock(block.end - block.first, this.#run.text(i - 1))) {
      block = this.#addBlock(i, block.part, block.el.parentElement);
    }
    block.end = i + 1;
    this.#blockOf[i] = block;
    this.#state[i] = this.#stateAt(i);
    if (this.isShown(i)) block.shown += 1;
  }

  #addBlock(first, part, parent) {
    const block = { el: h('div', { class: 'text-block' }), part, first, end: first, built: first, shown: 0, chips: 0 };
    parent.append(block.el);
    this.#blocks.push(block);
    block.el._block = block;
    return block;
  }

  /** Creates the missing spans of the rows of a block, and the chips between them. */
  #build(block) {
    for (; block.built < block.end; block.built += 1) {
      const i = block.built;
      this.#addSpan(block.el, i);
      const removal = this.#removalByLastRow.get(i);
      if (removal) this.#addChip(removal);
    }
  }

  /** Creates the missing spans in short tasks. */
  #schedule() {
    const isBuilt = (block) => block.built === block.end;
    // The last block stays, because it may get more rows.
    while (this.#firstUnbuilt < this.#blocks.length - 1 && isBuilt(this.#blocks[this.#firstUnbuilt])) this.#firstUnbuilt += 1;
    const isDone = this.#blockOf.length === this.#run.count && this.#blocks.slice(this.#firstUnbuilt).every(isBuilt);
    if (isDone || this.#isScheduled) return;
    this.#isScheduled = true;
    // One task per frame, after it was painted.
    requestAnimationFrame(() => setTimeout(() => {
      this.#isScheduled = false;
      if (this.#signal.aborted) return;
      const end = performance.now() + TASK_MS;
      this.#addRows(this.#blockOf.length + ROWS_PER_TASK);
      for (const block of [...this.#nearby, ...this.#blocks.slice(this.#firstUnbuilt)]) {
        this.#build(block);
        if (performance.now() > end) break;
      }
      this.#updateVisibility();
      this.#schedule();
    }));
  }

  /** Creates the spans of the block with row `i` and of its neighbors, which may be visible together with it. */
  #buildAround(i) {
    if (i >= this.#blockOf.length) {
      this.#addRows(i + FIRST_ROWS);
      this.#updateVisibility();
    }
    const block = this.#blockOf[i];
    if (!block) return;
    const b = this.#blocks.indexOf(block);
    for (const near of this.#blocks.slice(Math.max(0, b - 2), b + 3)) this.#build(near);
  }

  #addChip(removal) {
    const names = this.#run.actionsAt(removal.removedAt - 1).map((mark) => mark.mod_name);
    const chip = h('button', { type: 'button', class: 'chip', title: `${removal.count} tokens removed${names.length ? ` by ${names.join(', ')}` : ''}: show or hide them` }, `⌫ ${removal.count}`, h('span', { class: 'visually-hidden' }, ' tokens removed'));
    chip._removedAt = removal.removedAt;
    this.#chips.set(removal.removedAt, chip);
    this.#spans[removal.last].after(chip);
    this.#updateChip(removal, chip);
  }

  /** Creates the span of row `i`. */
  #addSpan(parent, i) {
    const run = this.#run;
    const span = document.createElement('span');
    span._row = i;
    appendText(span, run.text(i));
    this.#spans[i] = span;
    const isDim = this.#roleOf(i).dim || run.isStop(i);
    this.#fixedClasses[i] = `token${run.isPrompt(i) ? ' prompt' : run.isForced(i) ? ' forced' : ''}${isDim ? ' dim' : ''}${run.isError(i) ? ' error' : ''}`;
    this.#colorClass[i] = this.#colorClassOf(i);
    this.#writeClass(i);
    parent.append(span);
  }

  /** Shows an element, if any, in place of the rows from `from` to the one before `to`. */
  embed(from, to, element) {
    for (let i = from; i < Math.min(to, this.#run.count); i += 1) {
      this.#buildAround(i);
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

  #roleOf(i) {
    const run = this.#run;
    if (!run.isPrompt(i)) return ANSWER;
    if (this.#labels && run.addedAt(i) > this.#labels.addedAt) return NEW_PROMPT;
    return this.#labels?.roles[run.pos(i)] ?? PROMPT;
  }

  #colorClassOf(i) {
    const b = this.#paint(i);
    return b === 'touched' ? ' touched' : b >= 0 ? ` b${b}` : '';
  }

  /** Writes the class of row `i`. A row without a span gets its class when the span is created. */
  #writeClass(i) {
    if (!this.#spans[i]) return;
    const removedAt = this.#run.removedAt(i);
    const state = this.#state[i];
    const isShadedLater = state === LATER && this.#colorsLater && this.#colorClass[i];
    let name = this.#fixedClasses[i] + (state === VISIBLE || isShadedLater ? this.#colorClass[i] : '') + (isShadedLater ? '' : STATE_CLASSES[state]);
    if (state === REMOVED && this.#unfolded.has(removedAt)) name += ' unfolded';
    if (i === this.#cursor) name += ' current';
    if (i === this.#selected) name += ' selected';
    if (this.#matches.has(i)) name += ' match';
    const note = this.#annotations.get(i);
    if (note) {
      name += ` note ${note.tone}`;
      this.#spans[i].title = note.text;
    }
    this.#spans[i].className = name;
  }

  /** Colors by `paint(row)`: a bucket 0–7, -1 for none, or 'touched'; `colorsLater` also colors later tokens. */
  colorBy(paint, colorsLater = false) {
    const all = colorsLater !== this.#colorsLater;
    this.#paint = paint;
    this.#colorsLater = colorsLater;
    for (let i = 0; i < this.#spans.length; i += 1) {
      if (!this.#spans[i]) continue;
      const next = this.#colorClassOf(i);
      if (next === this.#colorClass[i] && !all) continue;
      this.#colorClass[i] = next;
      if (this.#state[i] === VISIBLE || this.#state[i] === LATER) this.#writeClass(i);
    }
  }

  /** Shows the text at event `n`. */
  show(n, options) {
    const old = this.#options;
    if (n === this.#n && options.showLater === old.showLater && options.showRemoved === old.showRemoved) return;
    this.#n = n;
    this.#options = options;
    this.#updateStates();
  }

  #updateStates() {
    for (const block of this.#blocks) {
      block.shown = 0;
      for (let i = block.first; i < block.end; i += 1) {
        const state = this.#stateAt(i);
        if (state !== this.#state[i]) {
          this.#state[i] = state;
          this.#writeClass(i);
        }
        if (this.isShown(i)) block.shown += 1;
      }
    }
    this.#updateVisibility();
  }

  #isOpen(removal) { return this.#options.showRemoved || this.#unfolded.has(removal.removedAt); }

  #updateChip(removal, chip) {
    const isVisible = isChipVisible(removal, this.#n, (other) => this.#isOpen(other));
    if (chip) {
      const isOpen = String(this.#isOpen(removal));
      if (chip.hidden === isVisible) chip.hidden = !isVisible;
      if (chip.ariaExpanded !== isOpen) chip.ariaExpanded = isOpen;
    }
    return isVisible;
  }

  /** Shows the chips of the current event, and hides empty blocks and parts. */
  #updateVisibility() {
    this.#showEmbedded();
    this.#root.dataset.removed = this.#options.showRemoved ? 'shown' : 'hidden';
    for (const block of this.#blocks) block.chips = 0;
    for (const removal of this.#removals) if (this.#updateChip(removal, this.#chips.get(removal.removedAt)) && this.#blockOf[removal.last]) this.#blockOf[removal.last].chips += 1;
    const visibleParts = new Set();
    for (const block of this.#blocks) {
      const isEmpty = block.shown + block.chips === 0;
      if (block.el.hidden !== isEmpty) block.el.hidden = isEmpty;
      if (!isEmpty) visibleParts.add(block.part);
    }
    for (const part of this.#root.children) if (part.hidden === visibleParts.has(part)) part.hidden = !part.hidden;
  }

  #toggleRemoval(removedAt) {
    if (!this.#unfolded.delete(removedAt)) this.#unfolded.add(removedAt);
    for (let i = 0; i < this.#run.count; i += 1) if (this.#run.removedAt(i) === removedAt) this.#writeClass(i);
    this.#updateStates();
  }

  /** Marks the row of the current event, and a selected row. */
  cursor(row, selected = null, scroll = true) {
    this.#buildAround(selected ?? row ?? -1);
    const old = [this.#cursor, this.#selected];
    this.#cursor = row;
    this.#selected = selected;
    for (const i of new Set([...old, row, selected])) if (i !== null) this.#writeClass(i);
    this.#target = this.#spans[selected ?? row ?? -1];
    if (scroll && this.#target) this.#reveal(this.#target);
  }

  /** The span to which the text scrolls. */
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
  scrollToEnd() {
    this.#root.scrollTop = this.#root.scrollHeight;
  }

  /** Returns true if the row is visible as text, for the search. */
  isShown(i) {
    const state = this.#state[i] ?? this.#stateAt(i);
    return state === VISIBLE || state === LATER || (state === REMOVED && (this.#options.showRemoved || this.#unfolded.has(this.#run.removedAt(i))));
  }

  /** Highlights the rows of one match. */
  highlight(rows) {
    rows.forEach((i) => this.#buildAround(i));
    const old = this.#matches;
    this.#matches = new Set(rows);
    for (const i of [...old, ...rows]) this.#writeClass(i);
    if (!rows.length) return;
    this.#target = this.#spans[rows[0]];
    this.#reveal(this.#target);
  }

  /** Marks the rows with notes or feedback: `{row, tone, text}`. */
  annotate(entries) {
    const old = [...this.#annotations.keys()];
    this.#annotations.clear();
    for (const { row, tone, text } of entries) {
      const other = this.#annotations.get(row);
      this.#annotations.set(row, other ? { tone: other.tone === tone ? tone : 'plain', text: `${other.text}\n${text}` } : { tone, text });
    }
    for (const row of new Set([...old, ...this.#annotations.keys()])) this.#writeClass(row);
  }

  /** Returns the text of a row for places outside of the answer. */
  displayText(i) {
    return displayText(this.#run.text(i));
  }
}
