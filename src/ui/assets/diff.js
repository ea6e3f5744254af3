// Alignment of two lists, such as the tokens of two answers, by Myers' algorithm in linear space. The result is a list of
// blocks `{same, a: [from, to], b: [from, to]}`, which cover both lists in order; the ends are exclusive. Pure.

/** Maximum edits in one search. Beyond it, the search splits at its furthest point, and the result may not be minimal. */
const MAX_EDITS = 256;
/** Index of diagonal 0 in the arrays of a search. */
const ZERO = MAX_EDITS + 2;

/** Returns the blocks of two lists. */
export function align(a, b) {
  const ids = new Map();
  const numbers = (list) => Int32Array.from(list, (key) => {
    if (!ids.has(key)) ids.set(key, ids.size);
    return ids.get(key);
  });
  const alignment = new Alignment(numbers(a), numbers(b));
  while (!alignment.isDone) alignment.advance();
  return alignment.take();
}

/** An alignment of two arrays of numbers, which `advance()` computes from start to end, one search at a time. */
export class Alignment {
  #a;
  #b;
  #forward = new Int32Array(2 * ZERO + 1);
  #backward = new Int32Array(2 * ZERO + 1);
  /**
   * Stack of the remaining work, with the next entry on top: ranges that are not aligned yet, `[aFrom, aTo, bFrom, bTo]`, and
   * parts that are known to be equal, `[aFrom, bFrom, length]`.
   */
  #todo;
  /** Blocks that `take()` has not returned yet. The last one may grow. */
  #blocks = [];
  /** End of the last block in `a` and in `b`. */
  #endA = 0;
  #endB = 0;

  constructor(a, b) {
    this.#a = a;
    this.#b = b;
    this.#todo = [[0, a.length, 0, b.length]];
  }

  get isDone() { return this.#todo.length === 0; }

  /** Returns the complete blocks that no earlier call returned. */
  take() { return this.#blocks.splice(0, this.#blocks.length - (this.isDone ? 0 : 1)); }

  /** Aligns the next range, or splits it in two. */
  advance() {
    const next = this.#todo.pop();
    if (next.length === 3) this.#addEqual(...next);
    else this.#align(...next);
    if (this.isDone) this.#addDifference(this.#a.length, this.#b.length);
  }

  /** Adds a difference from the last block to these positions, unless it is empty. */
  #addDifference(toA, toB) {
    if (toA > this.#endA || toB > this.#endB) this.#blocks.push({ same: false, a: [this.#endA, toA], b: [this.#endB, toB] });
    [this.#endA, this.#endB] = [toA, toB];
  }

  /** Adds an equal part, and the difference before it. */
  #addEqual(fromA, fromB, length) {
    if (!length) return;
    this.#addDifference(fromA, fromB);
    const last = this.#blocks.at(-1);
    [this.#endA, this.#endB] = [fromA + length, fromB + length];
    if (last?.same) [last.a[1], last.b[1]] = [this.#endA, this.#endB];
    else this.#blocks.push({ same: true, a: [fromA, this.#endA], b: [fromB, this.#endB] });
  }

  /** Adds the equal entries at the start of the ranges, and pushes the rest in two halves. */
  #align(aFrom, aTo, bFrom, bTo) {
    const a = this.#a;
    const b = this.#b;
    let head = 0;
    while (aFrom + head < aTo && bFrom + head < bTo && a[aFrom + head] === b[bFrom + head]) head += 1;
    this.#addEqual(aFrom, bFrom, head);
    aFrom += head;
    bFrom += head;
    let tail = 0;
    while (aFrom < aTo - tail && bFrom < bTo - tail && a[aTo - 1 - tail] === b[bTo - 1 - tail]) tail += 1;
    aTo -= tail;
    bTo -= tail;
    if (tail) this.#todo.push([aTo, bTo, tail]);
    if (aFrom === aTo || bFrom === bTo) return;
    const [x, y] = this.#middle(aFrom, aTo, bFrom, bTo);
    this.#todo.push([x, aTo, y, bTo], [aFrom, x, bFrom, y]);
  }

  /**
   * Returns the positions `[inA, inB]` at which to split the ranges, whose first and last entries differ: a point on a shortest
   * edit path, where the searches from the start and from the end meet.
   */
  #middle(aFrom, aTo, bFrom, bTo) {
    // The names are those of Myers' paper: `x` is the furthest position on diagonal `k` with `d` edits.
    const [a, b, forward, backward] = [this.#a, this.#b, this.#forward, this.#backward];
    const n = aTo - aFrom;
    const m = bTo - bFrom;
    const delta = n - m;
    const isOdd = delta % 2 !== 0;
    forward[ZERO + 1] = 0;
    backward[ZERO + 1] = 0;
    let furthest = [0, 0];
    for (let d = 0; d <= MAX_EDITS; d += 1) {
      for (let k = -d; k <= d; k += 2) {
        let x = k === -d || (k !== d && forward[ZERO + k - 1] < forward[ZERO + k + 1]) ? forward[ZERO + k + 1] : forward[ZERO + k - 1] + 1;
        while (x < n && x - k < m && a[aFrom + x] === b[bFrom + x - k]) x += 1;
        forward[ZERO + k] = x;
        if (x <= n && x - k <= m && x + x - k > furthest[0] + furthest[1]) furthest = [x, x - k];
        // The same diagonal in the other search.
        const mirrored = delta - k;
        if (isOdd && Math.abs(mirrored) < d && x + backward[ZERO + mirrored] >= n) return [aFrom + x, bFrom + x - k];
      }
      for (let k = -d; k <= d; k += 2) {
        let x = k === -d || (k !== d && backward[ZERO + k - 1] < backward[ZERO + k + 1]) ? backward[ZERO + k + 1] : backward[ZERO + k - 1] + 1;
        while (x < n && x - k < m && a[aTo - 1 - x] === b[bTo - 1 - x + k]) x += 1;
        backward[ZERO + k] = x;
        const mirrored = delta - k;
        if (!isOdd && Math.abs(mirrored) <= d && x + forward[ZERO + mirrored] >= n) return [aTo - x, bTo - x + k];
      }
    }
    return [aFrom + furthest[0], bFrom + furthest[1]];
  }
}

/** Minimum number of equal tokens between two differences; fewer are often equal by chance. */
const MIN_EQUAL = 3;

/** Joins differences with fewer than `MIN_EQUAL` equal tokens between them, while the alignment is computed. */
export class Coalescer {
  /** Joined blocks that `add()` has not returned yet. The last one may grow. */
  #joined = [];
  /** The newest block, which is added when the block after it is known. */
  #newest = null;

  /** Adds the next blocks of the alignment; `isEnd` is true for the last ones. Returns the joined blocks that are complete. */
  add(blocks, isEnd) {
    for (const block of isEnd ? [...blocks, null] : blocks) {
      if (this.#newest) this.#append(this.#newest, block);
      this.#newest = block;
    }
    return this.#joined.splice(0, this.#joined.length - (isEnd ? 0 : 1));
  }

  /** Appends a block, or joins it to the last one; `next` is the block after it, or null. */
  #append(block, next) {
    const last = this.#joined.at(-1);
    const size = ({ a, b }) => Math.max(a[1] - a[0], b[1] - b[0]);
    const isByChance = block.same && last && !last.same && next && size(block) < Math.min(MIN_EQUAL, size(last), size(next));
    if (last && !last.same && (!block.same || isByChance)) {
      last.a = [last.a[0], block.a[1]];
      last.b = [last.b[0], block.b[1]];
    } else this.#joined.push({ ...block });
  }
}

/**
 * Returns the tokens of each side, `{count, token(k), text(k)}`, as an array of numbers that `Alignment` can compare: tokens
 * with the same id and text have the same number.
 */
export function numberTokens(sides) {
  const textNumbers = new Map();
  const tokenNumbers = new Map();
  const numberOf = (map, key) => {
    if (!map.has(key)) map.set(key, map.size);
    return map.get(key);
  };
  return sides.map(({ count, token, text }) => {
    const numbers = new Int32Array(count);
    // Numbers of texts are below 2^21 and token ids below 2^31, so each key is an exact integer.
    for (let k = 0; k < count; k += 1) numbers[k] = numberOf(tokenNumbers, token(k) * 0x200000 + numberOf(textNumbers, text(k)));
    return numbers;
  });
}

/**
 * The steps of an alignment in order. A step is a pair of token indexes, one per side; where one side of a difference is
 * longer, the other side has no token, and its index is null.
 */
export class Steps {
  #indexes;
  count = 0;

  /** Creates an empty list that can hold `max` steps. */
  constructor(max) { this.#indexes = [new Int32Array(max), new Int32Array(max)]; }

  /** Adds the steps of the next block. Returns the first one. */
  add({ a, b }) {
    const from = this.count;
    this.count += Math.max(a[1] - a[0], b[1] - b[0]);
    [a, b].forEach(([first, end], side) => {
      for (let k = 0; k < this.count - from; k += 1) this.#indexes[side][from + k] = first + k < end ? first + k : -1;
    });
    return from;
  }

  /** Returns the token index of a side at a step, or null. */
  indexAt(step, side) {
    const index = step < 0 || step >= this.count ? -1 : this.#indexes[side][step];
    return index < 0 ? null : index;
  }

  /** Returns the token indexes of both sides at a step. */
  pair(step) { return [this.indexAt(step, 0), this.indexAt(step, 1)]; }

  /** Returns the first token index of a side at a step or later, or null. */
  next(step, side) {
    for (let later = step; later < this.count; later += 1) if (this.#indexes[side][later] >= 0) return this.#indexes[side][later];
    return null;
  }
}
