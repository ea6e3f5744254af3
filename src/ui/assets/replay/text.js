// The text of a run: one span per row, in blocks that the browser skips while they are off screen.
//
// Spans are created in this order: those at the start or around the cursor before the first frame, then those in blocks to
// which the user scrolls, and then the others in short tasks, so that the browser's own search finds all text. When the cursor
// moves, only the classes of rows whose state changes are written.
import { h } from '../dom.js';
import { appendText } from './glyphs.js';
import { MAX_BLOCK_ROWS, mayEndBlock, roles } from './blocks.js';
import { isChipVisible, removals } from './removals.js';
import { NEVER } from './rows.js';

/** States of a row at the current event. A row of a later event is hidden or shown dimmed. */
const HIDDEN = 0;
const VISIBLE = 1;
const LATER = 2;
const REMOVED = 3;
/** Classes of the states. */
const STATE_CLASSES = [' hidden', '', ' later', ' removed'];
const ANSWER = { role: 'answer', dim: false };
const PROMPT = { role: 'prompt', dim: false };
const NEW_PROMPT = { role: 'new prompt', dim: false };
/** Number of rows whose spans are created before the first frame: about as many as a window shows. */
const FIRST_ROWS = 480;
/** Duration of a task that creates spans, in milliseconds. */
const TASK_MS = 16;
/** Number of rows that a task adds to blocks. */
const ROWS_PER_TASK = 4 * MAX_BLOCK_ROWS;
/** Distance from its end, in pixels, at which the text still counts as being at its end. */
const NEAR_END_PX = 40;

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
  #removals = [];
  #removalByLastRow = new Map();
  /** Chips, the buttons that fold removed rows, by the event of the removal. */
  #chips = new Map();
  /** Events whose removed rows the user has unfolded. */
  #unfolded = new Set();
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
  /** The span to which the text scrolls. */
  #target = null;
  /** Newest known scroll position. */
  #scrollTop = 0;
  /** True while the text is kept at its end, unless the user has scrolled back. */
  #isFollowing = false;
  #isScrolledBack = false;
  /** Observes the parts. New blocks get their actual heights only in the next frame, so the end moves then. */
  #resized = new ResizeObserver(() => this.#scrollToEnd());

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
    root.addEventListener('scroll', () => this.#onScroll());
  }

  /** Sets the recorded prompt, which a Prefilled event added. Its messages become parts of the text. */
  setPrompt(prompt, addedAt) {
    this.#prompt = { addedAt, roles: roles(prompt.texts?.length ?? 0, prompt.spans, prompt.texts ?? []) };
  }

  /** Adds the rows that are new since the last call. Creates the spans of all of them if `all` is true, else of the first ones. */
  addNewRows(all) {
    // The event of a scroll may arrive after the new rows.
    if (this.#root.scrollTop < this.#scrollTop) this.#onScroll();
    this.#removals = removals(this.#run.count, (i) => this.#run.removedAt(i));
    this.#removalByLastRow = new Map(this.#removals.map((removal) => [removal.last, removal]));
    this.#addRows(all ? this.#run.count : this.#blockOf.length + FIRST_ROWS);
    let rows = 0;
    for (let b = this.#firstUnbuilt; b < this.#blocks.length && (all || rows < FIRST_ROWS); b += 1) {
      this.#build(this.#blocks[b]);
      rows += this.#blocks[b].end - this.#blocks[b].first;
    }
    for (const removal of this.#removals) if (this.#spans[removal.last] && !this.#chips.has(removal.removedAt)) this.#addChip(removal);
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
    const { role } = this.#roleOf(i);
    let block = this.#blocks.at(-1);
    if (role !== this.#role) {
      this.#role = role;
      const rows = h('div');
      const part = h('div', { class: 'part', 'data-role': role }, h('b', {}, role), rows);
      this.#root.append(part);
      this.#resized.observe(part);
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

  /** Adds the chip of a removal after its last row. */
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
    const isDim = this.#roleOf(i).dim || run.isStop(i);
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

  #roleOf(i) {
    const run = this.#run;
    if (!run.isPrompt(i)) return ANSWER;
    if (this.#prompt && run.addedAt(i) > this.#prompt.addedAt) return NEW_PROMPT;
    return this.#prompt?.roles[run.pos(i)] ?? PROMPT;
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
    if (state === REMOVED && this.#unfolded.has(removedAt)) classes += ' unfolded';
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

  #isUnfolded(removal) { return this.#options.showRemoved || this.#unfolded.has(removal.removedAt); }

  /** Updates a chip, if it exists. Returns true if the chip of the removal is visible. */
  #updateChip(removal, chip) {
    const isVisible = isChipVisible(removal, this.#n, (other) => this.#isUnfolded(other));
    if (chip) {
      const expanded = String(this.#isUnfolded(removal));
      if (chip.hidden === isVisible) chip.hidden = !isVisible;
      if (chip.ariaExpanded !== expanded) chip.ariaExpanded = expanded;
    }
    return isVisible;
  }

  /** Shows or hides chips, embedded elements, blocks and parts at the current event. */
  #updateVisibility() {
    this.#updateEmbedded();
    this.#root.dataset.removed = this.#options.showRemoved ? 'shown' : 'hidden';
    for (const block of this.#blocks) block.chips = 0;
    for (const removal of this.#removals) {
      const isVisible = this.#updateChip(removal, this.#chips.get(removal.removedAt));
      const block = this.#blockOf[removal.last];
      if (isVisible && block) block.chips += 1;
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
    if (!this.#unfolded.delete(removedAt)) this.#unfolded.add(removedAt);
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
    this.#target = this.#spans[selected ?? row ?? -1];
    if (scroll && this.#target) this.#reveal(this.#target);
  }

  /** Scrolls the text so that a span is visible, at some distance from the edges. */
  #reveal(span, tries = 3) {
    const view = this.#root.getBoundingClientRect();
    const bounds = span.getBoundingClientRect();
    if (bounds.width === 0 && bounds.height === 0) return;
    const margin = Math.min(80, view.height / 4);
    // `scrollIntoView` would also scroll the page on small screens.
    const above = view.top + margin - bounds.top;
    const below = bounds.bottom - view.bottom + margin;
    if (above <= 0 && below <= 0) return;
    if (Math.max(above, below) > view.height) this.#root.scrollTop += bounds.top - view.top - view.height / 3;
    else this.#root.scrollTop += above > 0 ? -above : below;
    // Blocks that were off screen get their actual heights only now, so the position may have changed.
    if (tries) requestAnimationFrame(() => { if (this.#target === span) this.#reveal(span, tries - 1); });
  }

  /**
   * Keeps the text at its end while `isFollowing` is true. When the user scrolls back, it stays there until the user returns to the
   * end, or until a call with `resume`.
   */
  follow(isFollowing, resume) {
    this.#isFollowing = isFollowing;
    if (resume) this.#isScrolledBack = false;
    this.#scrollToEnd();
  }

  #scrollToEnd() {
    if (!this.#isFollowing || this.#isScrolledBack) return;
    this.#root.scrollTop = this.#root.scrollHeight;
    this.#scrollTop = this.#root.scrollTop;
  }

  #onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.#root;
    const rest = scrollHeight - clientHeight - scrollTop;
    // If the text becomes shorter, the browser scrolls back, but to the end of the text. Positions can be fractions of a pixel.
    if (scrollTop < this.#scrollTop) this.#isScrolledBack = rest > 1;
    else if (rest <= NEAR_END_PX) this.#isScrolledBack = false;
    this.#scrollTop = scrollTop;
  }

  /** Returns true if a row is shown: visible, or shown as a later or removed one. */
  isShown(i) {
    const state = this.#states[i] ?? this.#stateAt(i);
    return state === VISIBLE || state === LATER || (state === REMOVED && (this.#options.showRemoved || this.#unfolded.has(this.#run.removedAt(i))));
  }

  /** Highlights the rows of one match of the search, instead of the ones before. */
  highlight(rows) {
    rows.forEach((i) => this.#buildAround(i));
    const old = this.#matches;
    this.#matches = new Set(rows);
    for (const i of [...old, ...rows]) this.#writeClass(i);
    if (!rows.length) return;
    this.#target = this.#spans[rows[0]];
    this.#reveal(this.#target);
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
