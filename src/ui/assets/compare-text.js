// The aligned texts of two runs: equal tokens once, differing tokens side by side. The elements of the first tokens and of
// those around the cursor are created at once, and the others in short tasks, so that the browser's own search finds all text.
import { Steps } from './diff.js';
import { h } from './dom.js';
import { mayEndBlock } from './replay/blocks.js';
import { MODES } from './replay/color.js';
import { appendText } from './replay/glyphs.js';

/** Number of tokens that remain visible at the end of the collapsed common prefix. */
const VISIBLE_TOKENS = 12;
/** Number of tokens per side whose elements are created at once: those after the start, or after the cursor. */
export const FIRST_TOKENS = 400;
/** Number of tokens whose elements are created between two checks of the time. */
const TOKENS_PER_CHECK = 64;

/** The elements of the tokens `from..to` of a side, in blocks that the browser skips while they are off screen. */
class TokenElements {
  to;
  #parent;
  #side;
  #isColored;
  /** Index of the next token whose element is created. */
  #next;
  #block = null;
  #blockSize = 0;

  constructor(parent, side, [from, to], isColored) {
    this.to = to;
    this.#parent = parent;
    this.#side = side;
    this.#isColored = isColored;
    this.#next = from;
  }

  /** Creates the elements of up to `count` more tokens, and calls `onCreate(index, element)` for each. */
  create(count, onCreate) {
    const { run, rows } = this.#side;
    for (const end = Math.min(this.to, this.#next + count); this.#next < end; this.#next += 1) {
      const i = rows[this.#next];
      if (!this.#block || mayEndBlock(this.#blockSize, run.text(rows[this.#next - 1]))) {
        this.#block = h('div', { class: 'text-block' });
        this.#blockSize = 0;
        this.#parent.append(this.#block);
      }
      const bucket = this.#isColored ? MODES[0].bucket(run, i) : -1;
      const span = document.createElement('span');
      span.className = `token${run.isForced(i) ? ' forced' : ''}${bucket >= 0 ? ` b${bucket}` : ''}`;
      appendText(span, run.text(i));
      onCreate(this.#next, span);
      this.#block.append(span);
      this.#blockSize += 1;
    }
  }

  get isComplete() { return this.#next === this.to; }

  /** Returns the number of elements that are missing up to `index` and among the next `FIRST_TOKENS`. */
  missing(index) { return Math.max(0, Math.min(this.to, index + FIRST_TOKENS) - this.#next); }
}

export class AlignedText {
  /** Differences in order: `{el, index, block, from, end}`, with the steps `from..end`; `el` is null until its element is created. */
  differences = [];
  /** Number of equal tokens. */
  equalCount = 0;
  #box;
  #sides;
  #steps;
  /**
   * Blocks of the alignment in order: `{block, from, difference, tokens}`. `from` is the first step, `difference` is null for
   * equal tokens, and `tokens` lists the `TokenElements` of each side, or of one for equal tokens; null until the element of the block is created.
   */
  #parts = [];
  /** `TokenElements` of the collapsed common prefix, or null. */
  #collapsed = null;
  /** Number of parts whose elements were created, without tokens. */
  #createdParts = 0;
  /** Number of parts whose tokens were all created. */
  #completeParts = 0;
  /** Elements of the tokens of each side, by token index. */
  #spans = [[], []];

  /** `onStep(step)` and `onDifference(index)` are called when the user selects a token or a difference. */
  constructor(box, sides, { onStep, onDifference }) {
    this.#box = box;
    this.#sides = sides;
    this.#steps = new Steps(sides[0].rows.length + sides[1].rows.length);
    box.replaceChildren();
    box.addEventListener('click', ({ target }) => {
      const token = target.closest('.token');
      if (token) onStep(token._step);
      else if (target.closest('.difference')) onDifference(target.closest('.difference')._index);
    });
    box.addEventListener('keydown', (event) => {
      if (!event.target.matches('.difference') || (event.key !== 'Enter' && event.key !== ' ')) return;
      event.preventDefault();
      onDifference(event.target._index);
    });
    // The common prefix was opened, so its first tokens are needed at once.
    box.addEventListener('toggle', () => this.#createTokens(this.#parts[0], [this.#collapsed], FIRST_TOKENS), true);
  }

  get steps() { return this.#steps; }

  /** Adds the next blocks of the alignment. */
  add(blocks) {
    for (const block of blocks) {
      const part = { block, from: this.#steps.add(block), difference: null, tokens: null };
      if (block.same) this.equalCount += block.a[1] - block.a[0];
      else {
        part.difference = { el: null, index: this.differences.length, block, from: part.from, end: this.#steps.count };
        this.differences.push(part.difference);
      }
      this.#parts.push(part);
    }
  }

  /** Creates the elements of the next `count` tokens, or as many as possible until the time `end`. Returns true if all exist. */
  createNext({ count = Infinity, end = Infinity }) {
    for (let rest = count; rest > 0 && performance.now() < end; rest -= TOKENS_PER_CHECK) {
      if (this.#completeParts < this.#parts.length) {
        const part = this.#createPart(this.#completeParts);
        this.#createTokens(part, part.tokens, TOKENS_PER_CHECK);
        while (this.#parts[this.#completeParts]?.tokens?.every((tokens) => tokens.isComplete)) this.#completeParts += 1;
      } else if (this.#collapsed?.isComplete === false) this.#createTokens(this.#parts[0], [this.#collapsed], TOKENS_PER_CHECK);
      else return true;
    }
    return false;
  }

  /** Creates the elements of the parts up to `index`, without tokens, and returns the part at `index`. */
  #createPart(index) {
    for (; this.#createdParts <= index; this.#createdParts += 1) {
      const part = this.#parts[this.#createdParts];
      part.tokens = part.difference ? this.#addDifference(part.difference) : [this.#addEqual(part.block, this.#createdParts === 0)];
    }
    return this.#parts[index];
  }

  /** Adds an element for equal text. A long equal text at the start of both answers is collapsed, except for its end. */
  #addEqual(block, isFirst) {
    const [from, to] = block.a;
    const collapsedEnd = isFirst && to - from > 2 * VISIBLE_TOKENS ? to - VISIBLE_TOKENS : from;
    const el = h('div', { class: 'same' });
    if (collapsedEnd > from) {
      const details = h('details', {}, h('summary', {}, `${collapsedEnd - from} equal tokens`));
      el.append(details);
      this.#collapsed = new TokenElements(details, this.#sides[0], [from, collapsedEnd], false);
    }
    this.#box.append(el);
    return new TokenElements(el, this.#sides[0], [collapsedEnd, to], false);
  }

  #addDifference(difference) {
    const names = [`Difference ${difference.index + 1}, A: `, 'B: '];
    const cells = names.map((name) => h('div', {}, h('span', { class: 'visually-hidden' }, name)));
    difference.el = h('div', { class: 'difference', role: 'button', tabindex: '0' }, cells);
    difference.el._index = difference.index;
    this.#box.append(difference.el);
    const { a, b } = difference.block;
    return [a, b].map((range, side) => new TokenElements(cells[side], this.#sides[side], range, true));
  }

  /** Creates the elements of up to `count` tokens in each of `list`, which are `TokenElements` of a part. */
  #createTokens({ block, from, difference }, list, count) {
    list.forEach((tokens, side) => tokens.create(count, (index, span) => {
      const offset = index - (side === 0 ? block.a : block.b)[0];
      span._step = from + offset;
      this.#spans[side][index] = span;
      // An equal token has one element for both sides.
      if (!difference) this.#spans[1][block.b[0] + offset] = span;
    }));
  }

  /** Returns the index of the difference at a step, or -1. */
  differenceAt(step) { return this.differences.findIndex(({ from, end }) => from <= step && step < end); }

  /** Returns the elements of a step, one per side, or undefined for a side without a token. Missing ones are created, with the text after them. */
  elements(step) {
    const first = this.#parts.findLastIndex(({ from }) => from <= step);
    for (let index = first; index < Math.min(first + 3, this.#parts.length); index += 1) {
      const part = this.#createPart(index);
      const offset = Math.max(0, step - part.from);
      const isCollapsed = index === 0 && this.#collapsed && part.block.a[0] + offset < this.#collapsed.to;
      const list = isCollapsed ? [this.#collapsed] : part.tokens;
      const starts = [part.block.a[0], part.block.b[0]];
      this.#createTokens(part, list, Math.max(...list.map((tokens, side) => tokens.missing(starts[side] + offset))));
    }
    return this.#steps.pair(step).map((token, side) => (token === null ? undefined : this.#spans[side][token]));
  }
}
