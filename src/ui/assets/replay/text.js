// The text of a run: one span per row, in blocks that the browser skips while they are off screen.
//
// Spans are created in this order: those at the start or around the cursor before the first frame, then those in blocks to
// which the user scrolls, and then the others in short tasks, so that the browser's own search finds all text. When the cursor
// moves, only the classes of rows whose state changes are written.
import { h } from '../dom.js';
import { appendText } from './glyphs.js';
import { MAX_BLOCK_ROWS, mayEndBlock, roleOf, rolesOf } from './blocks.js';
import { RemovalChips } from './removals.js';
import { NEVER } from './run-columns.js';
import { TextScroll } from './text-scroll.js';

/** States of a row at the current event. A row of a later event is hidden or shown dimmed. */
const HIDDEN = 0;
const VISIBLE = 1;
const LATER = 2;
const REMOVED = 3;
/** Classes of the states. */
const STATE_CLASSES = [' hidden', '', ' later', ' removed'];
/** Number of rows whose spans are created before the first frame: about as many as a window shows. */
const FIRST_ROWS = 480;
/** Duration of a task that creates spans, in milliseconds. */
const TASK_MS = 16;
/** Number of rows that a task adds to blocks. */
const ROWS_PER_TASK = 4 * MAX_BLOCK_ROWS;

export class Text {
  #root;
  #run;
  /** Spans by row. */
  #spans = [];
  /** Flags by row, on which its classes depend. */
  #flags = [];
  /** Classes by row that only depend on its role and flags. */
  #fixedClasses = [];
  /** Class of the color by row. */
  #colorClasses = [];
  /** States by row. */
  #states = [];
  /** Blocks by row. */
  #blockOf = [];
  /**
   * Blocks in order: `{el, part, first, end, built, shown, chips}`. A block has the rows `first..end`, of which those before
   * `built` have spans. `shown` and `chips` are the numbers of its rows and chips that are shown, and `part` is the element of its message.
   */
  #blocks = [];
  /** Index of the first block that may lack spans. */
  #firstUnbuilt = 0;
  /** Blocks on the screen or close to it, which get their spans before others. */
  #nearby = new Set();
  /** Role of the last row in a block. */
  #role = null;
  /** The recorded prompt: `{addedAt, roles}` with the roles by position, or null. */
  #prompt = null;
  #chips;
  #scroll;
  #options;
  #n;
  #signal;
  /** True while a task is scheduled. */
  #isScheduled = false;
  /** Returns the color of a row, as in `colorBy`. */
  #colorOf = () => -1;
  #colorsLater = false;
  #cursor = null;
  #selected = null;
  /** Rows of the highlighted match of the search. */
  #matches = new Set();
  /** Notes and feedback by row. */
  #annotations = new Map();
  /** Elements that replace rows: `[first row, element]`. */
  #embedded = [];

  /**
   * Shows the text at event `n`, including later rows if `options.showLater`, and removed ones if `options.showRemoved`.
   * `onSelect(row)` is called for a clicked row, or `onRemovedClick(row)` if it is removed. No spans are created after `signal` aborts.
   */
  constructor(root, run, { n, options, signal, onSelect, onRemovedClick }) {
    this.#root = root;
    this.#run = run;
    this.#n = n;
    this.#options = options;
    this.#signal = signal;
    this.#chips = new RemovalChips(run);
    this.#scroll = new TextScroll(root);
    root.addEventListener('click', (event) => {
      const chip = event.target.closest('.chip');
      if (chip) return this.#toggleRemoval(chip._removedAt);
      const token = event.target.closest('.token');
      if (!token || !getSelection().isCollapsed) return undefined;
      return this.#states[token._row] === REMOVED ? onRemovedClick(token._row) : onSelect(token._row);
    });
    root.addEventListener('contentvisibilityautostatechange', ({ target, skipped }) => {
      if (!target._block) return;
      if (skipped) this.#nearby.delete(target._block);
      else this.#nearby.add(target._block);
    });
  }

  /** Sets the recorded prompt, which a Prefilled event added. Its messages become parts of the text. */
  setPrompt(prompt, addedAt) {
    this.#prompt = { addedAt, roles: rolesOf(prompt.texts?.length ?? 0, prompt.spans, prompt.texts ?? []) };
  }

  /** Adds the rows that are new since the last call. Creates the spans of all of them if `buildAll` is true, else of the first ones. */
  addNewRows({ buildAll }) {
    this.#scroll.noticeScroll();
    const withoutChip = this.#chips.refresh();
    this.#addRows(buildAll ? this.#run.count : this.#blockOf.length + FIRST_ROWS);
    for (const i of withoutChip) if (this.#spans[i]) this.#chips.add(i, this.#spans[i]);
    let rows = 0;
    for (let b = this.#firstUnbuilt; b < this.#blocks.length && (buildAll || rows < FIRST_ROWS); b += 1) {
      this.#build(this.#blocks[b]);
      rows += this.#blocks[b].end - this.#blocks[b].first;
    }
    // Rows may have been removed since the last call, and their flags may have changed.
    this.#spans.forEach((_, i) => { if (this.#run.flags(i) !== this.#flags[i]) this.#setClasses(i); });
    this.#updateStates();
    this.#schedule();
  }

  /** Adds the rows before `end` to blocks. */
  #addRows(end) {
    for (let i = this.#blockOf.length; i < Math.min(end, this.#run.count); i += 1) this.#addToBlock(i);
  }

  /** Adds row `i` to the last block, or to a new one. */
  #addToBlock(i) {
    const { role } = roleOf(this.#run, this.#prompt, i);
    let block = this.#blocks.at(-1);
    if (role !== this.#role) {
      this.#role = role;
      const rows = h('div');
      const part = h('div', { class: 'part', 'data-role': role }, h('b', {}, role), rows);
      this.#root.append(part);
      this.#scroll.observe(part);
      block = this.#addBlock(i, part, rows);
    } else if (mayEndBlock(block.end - block.first, this.#run.text(i - 1))) {
      block = this.#addBlock(i, block.part, block.el.parentElement);
    }
    block.end = i + 1;
    this.#blockOf[i] = block;
    this.#states[i] = this.#stateAt(i);
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
      this.#chips.add(i, this.#spans[i]);
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

  /** Creates the spans of the block with row `i`, and of its neighbors, which may be on the screen together with it. */
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

  /** Creates the span of row `i`. */
  #addSpan(parent, i) {
    const span = document.createElement('span');
    span._row = i;
    appendText(span, this.#run.text(i));
    this.#spans[i] = span;
    this.#setClasses(i);
    parent.append(span);
  }

  /** Determines the classes of row `i`, which has a span. */
  #setClasses(i) {
    const run = this.#run;
    const isDim = roleOf(run, this.#prompt, i).dim || run.isStop(i);
    this.#flags[i] = run.flags(i);
    this.#fixedClasses[i] = `token${run.isPrompt(i) ? ' prompt' : run.isForced(i) ? ' forced' : ''}${isDim ? ' dim' : ''}${run.isError(i) ? ' error' : ''}`;
    this.#colorClasses[i] = this.#colorClassOf(i);
    this.#writeClass(i);
  }

  /** Hides the rows `from..to`, and shows an element, if one is given, in their place. */
  embed(from, to, element) {
    for (let i = from; i < Math.min(to, this.#run.count); i += 1) {
      this.#buildAround(i);
      this.#spans[i].hidden = true;
    }
    if (!element || !this.#spans[from]) return;
    this.#spans[from].before(element);
    this.#embedded.push([from, element]);
    this.#updateEmbedded();
  }

  #updateEmbedded() {
    for (const [row, element] of this.#embedded) element.hidden = !this.isShown(row);
  }

  /** Returns the state of a row at the current event. */
  #stateAt(i) {
    const removedAt = this.#run.removedAt(i);
    if (this.#run.addedAt(i) > this.#n) return this.#options.showLater && removedAt === NEVER ? LATER : HIDDEN;
    return removedAt <= this.#n ? REMOVED : VISIBLE;
  }

  #colorClassOf(i) {
    const color = this.#colorOf(i);
    return color === 'touched' ? ' touched' : color >= 0 ? ` b${color}` : '';
  }

  /** Writes the class of row `i`. A row without a span gets its class when the span is created. */
  #writeClass(i) {
    if (!this.#spans[i]) return;
    const removedAt = this.#run.removedAt(i);
    const state = this.#states[i];
    const isShadedLater = state === LATER && this.#colorsLater && this.#colorClasses[i];
    let classes = this.#fixedClasses[i] + (state === VISIBLE || isShadedLater ? this.#colorClasses[i] : '') + (isShadedLater ? '' : STATE_CLASSES[state]);
    if (state === REMOVED && this.#chips.isUnfolded(removedAt)) classes += ' unfolded';
    if (i === this.#cursor) classes += ' current';
    if (i === this.#selected) classes += ' selected';
    if (this.#matches.has(i)) classes += ' match';
    const note = this.#annotations.get(i);
    if (note) {
      classes += ` note ${note.tone}`;
      this.#spans[i].title = note.text;
    }
    this.#spans[i].className = classes;
  }

  /** Colors the rows by `colorOf(row)`: a bucket 0–7, -1 for none, or `touched`. If `colorsLater` is true, later rows also have colors. */
  colorBy(colorOf, colorsLater = false) {
    const mustWriteAll = colorsLater !== this.#colorsLater;
    this.#colorOf = colorOf;
    this.#colorsLater = colorsLater;
    for (let i = 0; i < this.#spans.length; i += 1) {
      if (!this.#spans[i]) continue;
      const next = this.#colorClassOf(i);
      if (next === this.#colorClasses[i] && !mustWriteAll) continue;
      this.#colorClasses[i] = next;
      if (this.#states[i] === VISIBLE || this.#states[i] === LATER) this.#writeClass(i);
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
        if (state !== this.#states[i]) {
          this.#states[i] = state;
          this.#writeClass(i);
        }
        if (this.isShown(i)) block.shown += 1;
      }
    }
    this.#updateVisibility();
  }

  /** Shows or hides chips, embedded elements, blocks and parts at the current event. */
  #updateVisibility() {
    this.#updateEmbedded();
    this.#root.dataset.removed = this.#options.showRemoved ? 'shown' : 'hidden';
    for (const block of this.#blocks) block.chips = 0;
    for (const row of this.#chips.update(this.#n, this.#options.showRemoved)) {
      const block = this.#blockOf[row];
      if (block) block.chips += 1;
    }
    const visibleParts = new Set();
    for (const block of this.#blocks) {
      const isEmpty = block.shown + block.chips === 0;
      if (block.el.hidden !== isEmpty) block.el.hidden = isEmpty;
      if (!isEmpty) visibleParts.add(block.part);
    }
    for (const part of this.#root.children) {
      const isHidden = !visibleParts.has(part);
      if (part.hidden !== isHidden) part.hidden = isHidden;
    }
  }

  /** Folds or unfolds the rows that an event removed. */
  #toggleRemoval(removedAt) {
    this.#chips.toggle(removedAt);
    for (let i = 0; i < this.#run.count; i += 1) if (this.#run.removedAt(i) === removedAt) this.#writeClass(i);
    this.#updateStates();
  }

  /** Marks the row of the current event and the selected row, and scrolls to the latter, or else to the former. */
  setCursor(row, selected = null, scroll = true) {
    this.#buildAround(selected ?? row ?? -1);
    const old = [this.#cursor, this.#selected];
    this.#cursor = row;
    this.#selected = selected;
    for (const i of new Set([...old, row, selected])) if (i !== null) this.#writeClass(i);
    this.#scroll.reveal(scroll ? this.#spans[selected ?? row ?? -1] : null);
  }

  /** Keeps the text at its end while `isFollowing` is true. When the user scrolls back, it stays there until the user returns to the end. */
  follow(isFollowing) { this.#scroll.follow(isFollowing); }

  /** Lets the text follow its end again, although the user has scrolled back. */
  resumeFollowing() { this.#scroll.resumeFollowing(); }

  /** Returns true if a row is shown: visible, or shown as a later or removed one. */
  isShown(i) {
    const state = this.#states[i] ?? this.#stateAt(i);
    return state === VISIBLE || state === LATER || (state === REMOVED && (this.#options.showRemoved || this.#chips.isUnfolded(this.#run.removedAt(i))));
  }

  /** Highlights the rows of one match of the search, instead of the ones before. */
  highlight(rows) {
    rows.forEach((i) => this.#buildAround(i));
    const old = this.#matches;
    this.#matches = new Set(rows);
    for (const i of [...old, ...rows]) this.#writeClass(i);
    if (rows.length) this.#scroll.reveal(this.#spans[rows[0]]);
  }

  /** Marks the rows with notes and feedback, `{row, tone, text}`. */
  annotate(entries) {
    const old = [...this.#annotations.keys()];
    this.#annotations.clear();
    for (const { row, tone, text } of entries) {
      const other = this.#annotations.get(row);
      this.#annotations.set(row, other ? { tone: other.tone === tone ? tone : 'neutral', text: `${other.text}\n${text}` } : { tone, text });
    }
    for (const row of new Set([...old, ...this.#annotations.keys()])) this.#writeClass(row);
  }
}
