// The aligned texts of two runs: equal tokens once, differing tokens side by side. Elements are created for the first tokens
// and around the cursor at once, and for the rest in short tasks, so that the browser's own search finds all text.
import { h } from './dom.js';
import { MODES } from './replay/color.js';
import { Steps } from './divergence.js';
import { appendText } from './replay/glyphs.js';
import { mayEndBlock } from './replay/blocks.js';

/** Number of tokens at the end of a collapsed common prefix that stay visible. */
const VISIBLE_TOKENS = 12;
/** Number of tokens per side whose elements are created around the cursor. */
export const FIRST_TOKENS = 400;
/** Number of tokens that are created between two checks of the time. */
const TOKENS_PER_CHECK = 64;

/** Tokens `from..to` of a side, in blocks that the browser skips while they are off screen. */
class Tokens {
  #side;
  #block = null;
  #blockSize = 0;

  constructor(parent, side, [from, to], isColored) {
    Object.assign(this, { parent, from, to, isColored, next: from });
    this.#side = side;
  }

  /** Creates the elements of up to `count` more tokens. `add(index, element)` is called for each. */
  build(count, add) {
    const { run, rows } = this.#side;
    for (const end = Math.min(this.to, this.next + count); this.next < end; this.next += 1) {
      const i = rows[this.next];
      if (!this.#block || mayEndBlock(this.#blockSize, run.text(rows[this.next - 1]))) {
        this.#block = h('div', { class: 'text-block' });
        this.#blockSize = 0;
        this.parent.append(this.#block);
      }
      const bucket = this.isColored ? MODES[0].bucket(run, i) : -1;
      const span = document.createElement('span');
      span.className = `token${run.isForced(i) ? ' forced' : ''}${bucket >= 0 ? ` b${bucket}` : ''}`;
      appendText(span, run.text(i));
      add(this.next, span);
      this.#block.append(span);
      this.#blockSize += 1;
    }
  }

  get isBuilt() { return this.next === this.to; }

  /** Returns the number of tokens to create so that the elements up to `index` and the next `FIRST_TOKENS` exist. */
  missing(index) { return Math.max(0, Math.min(this.to, index + FIRST_TOKENS) - this.next); }
}

export class AlignedText {
  /** Differences in order: `{el, index, block, from, end}`, with the steps `from..end`; `el` is null until its element is created. */
  changes = [];
  /** Number of equal tokens. */
  same = 0;
  #box;
  #sides;
  #steps;
  /** Blocks in order: `{block, from, change, tokens}`; `tokens` is null until its element is created. */
  #parts = [];
  /** Tokens of the collapsed common prefix, or null. */
  #folded = null;
  /** Number of blocks with an element, and of those that are complete. */
  #reached = 0;
  #built = 0;
  /** Elements of each side by token index. */
  #spans = [[], []];

  /** `onStep(step)` and `onChange(index)` are called when the user selects a token or a difference. */
  constructor(box, sides, { onStep, onChange }) {
    this.#box = box;
    this.#sides = sides;
    this.#steps = new Steps(sides[0].rows.length + sides[1].rows.length);
    box.replaceChildren();
    box.addEventListener('click', ({ target }) => {
      const token = target.closest('.token');
      if (token) onStep(token._step);
      else if (target.closest('.change')) onChange(target.closest('.change')._index);
    });
    box.addEventListener('keydown', (event) => {
      if (!event.target.matches('.change') || (event.key !== 'Enter' && event.key !== ' ')) return;
      event.preventDefault();
      onChange(event.target._index);
    });
    // Tokens of an opened common prefix are created at once.
    box.addEventListener('toggle', () => this.#build(this.#parts[0], [this.#folded], FIRST_TOKENS), true);
  }

  get steps() { return this.#steps; }

  /** Adds the next blocks of the alignment. */
  add(blocks) {
    for (const block of blocks) {
      const part = { block, from: this.#steps.add(block), change: null, tokens: null };
      if (block.same) this.same += block.a[1] - block.a[0];
      else {
        part.change = { el: null, index: this.changes.length, block, from: part.from, end: this.#steps.count };
        this.changes.push(part.change);
      }
      this.#parts.push(part);
    }
  }

  /** Creates elements for `count` tokens, or until the time `end`. Returns true if all are created. */
  build({ count = Infinity, end = Infinity }) {
    for (let rest = count; rest > 0 && performance.now() < end; rest -= TOKENS_PER_CHECK) {
      if (this.#built < this.#parts.length) {
        const part = this.#reach(this.#built);
        this.#build(part, part.tokens, TOKENS_PER_CHECK);
        while (this.#parts[this.#built]?.tokens?.every((tokens) => tokens.isBuilt)) this.#built += 1;
      } else if (this.#folded?.isBuilt === false) this.#build(this.#parts[0], [this.#folded], TOKENS_PER_CHECK);
      else return true;
    }
    return false;
  }

  /** Creates the elements of the blocks up to `index`, without tokens. */
  #reach(index) {
    for (; this.#reached <= index; this.#reached += 1) {
      const part = this.#parts[this.#reached];
      part.tokens = part.change ? this.#addChange(part.change) : [this.#addSame(part.block, this.#reached === 0)];
    }
    return this.#parts[index];
  }

  /** Adds an element for equal text. If both answers start with the same text, it is collapsed except for its end. */
  #addSame(block, isFirst) {
    const [from, to] = block.a;
    const cut = isFirst && to - from > 2 * VISIBLE_TOKENS ? to - VISIBLE_TOKENS : from;
    const el = h('div', { class: 'same' });
    if (cut > from) {
      const details = h('details', {}, h('summary', {}, `${cut - from} equal tokens`));
      el.append(details);
      this.#folded = new Tokens(details, this.#sides[0], [from, cut], false);
    }
    this.#box.append(el);
    return new Tokens(el, this.#sides[0], [cut, to], false);
  }

  #addChange(change) {
    const names = [`Difference ${change.index + 1}, A: `, 'B: '];
    const cells = names.map((name) => h('div', {}, h('span', { class: 'visually-hidden' }, name)));
    change.el = h('div', { class: 'change', role: 'button', tabindex: '0' }, cells);
    change.el._index = change.index;
    this.#box.append(change.el);
    return cells.map((cell, side) => new Tokens(cell, this.#sides[side], side ? change.block.b : change.block.a, true));
  }

  /** Creates the elements of up to `count` tokens in each of `list`, which belong to a block. */
  #build({ block, from, change }, list, count) {
    list.forEach((tokens, k) => tokens.build(count, (index, span) => {
      const side = change ? k : 0;
      const offset = index - (side ? block.b : block.a)[0];
      span._step = from + offset;
      this.#spans[side][index] = span;
      if (!change) this.#spans[1][block.b[0] + offset] = span;
    }));
  }

  /** Returns the index of the difference at a step, or -1. */
  changeAt(step) { return this.changes.findIndex(({ from, end }) => from <= step && step < end); }

  /** Returns the elements of a step, at most one per side. They are created with the text after them if they are missing. */
  elements(step) {
    const index = this.#parts.findLastIndex(({ from }) => from <= step);
    for (let near = index; near < Math.min(index + 3, this.#parts.length); near += 1) {
      const part = this.#reach(near);
      const offset = Math.max(0, step - part.from);
      const isFolded = near === 0 && this.#folded && part.block.a[0] + offset < this.#folded.to;
      const list = isFolded ? [this.#folded] : part.tokens;
      const starts = [part.block.a[0], part.block.b[0]];
      this.#build(part, list, Math.max(...list.map((tokens, k) => tokens.missing(starts[k] + offset))));
    }
    return this.#steps.pair(step).map((token, side) => (token === null ? undefined : this.#spans[side][token]));
  }
}
