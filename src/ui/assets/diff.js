// Token differences of two runs: Myers' algorithm in linear space. Pure.

/** Maximum edits in one search. Beyond it, the search splits at its furthest point, and the result may not be minimal. */
const MAX_EDITS = 256;
/** Index of diagonal 0. */
const ZERO = MAX_EDITS + 2;

/**
 * Aligns two lists; returns `[{same, a: [from, to], b: [from, to]}]` that covers both in order, ends exclusive.
 */
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

/** An alignment of two arrays of numbers that is computed in order, one search at a time. */
export class Alignment {
  #a;
  #b;
  #forward = new Int32Array(2 * ZERO + 1);
  #backward = new Int32Array(2 * ZERO + 1);
  /** Stack of ranges that are not aligned yet, `[aFrom, aTo, bFrom, bTo]`, and of equal parts between them, `[x, y, length]`. The next one is on top. */
  #todo;
  /** Blocks that were not taken yet. The last one may grow. */
  #blocks = [];
  /** End of the blocks on both sides. */
  #x = 0;
  #y = 0;

  constructor(a, b) {
    this.#a = a;
    this.#b = b;
    this.#todo = [[0, a.length, 0, b.length]];
  }

  get isDone() { return this.#todo.length === 0; }

  /** Returns the blocks since the last call that are complete. */
  take() { return this.#blocks.splice(0, this.#blocks.length - (this.isDone ? 0 : 1)); }

  /** Aligns the next range, or splits it in two. */
  advance() {
    const next = this.#todo.pop();
    if (next.length === 3) this.#same(...next);
    else this.#align(...next);
    if (this.isDone) this.#change(this.#a.length, this.#b.length);
  }

  /** Adds the change before a point. */
  #change(x, y) {
    if (x > this.#x || y > this.#y) this.#blocks.push({ same: false, a: [this.#x, x], b: [this.#y, y] });
    [this.#x, this.#y] = [x, y];
  }

  /** Adds an equal part. */
  #same(x, y, length) {
    if (!length) return;
    this.#change(x, y);
    const last = this.#blocks.at(-1);
    [this.#x, this.#y] = [x + length, y + length];
    if (last?.same) [last.a[1], last.b[1]] = [this.#x, this.#y];
    else this.#blocks.push({ same: true, a: [x, this.#x], b: [y, this.#y] });
  }

  #align(aFrom, aTo, bFrom, bTo) {
    const a = this.#a;
    const b = this.#b;
    let head = 0;
    while (aFrom + head < aTo && bFrom + head < bTo && a[aFrom + head] === b[bFrom + head]) head += 1;
    this.#same(aFrom, bFrom, head);
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

  /** Returns a point of a shortest path that splits the ranges, whose first and last entries differ. */
  #middle(aFrom, aTo, bFrom, bTo) {
    const [a, b, f, r, zero] = [this.#a, this.#b, this.#forward, this.#backward, ZERO];
    const n = aTo - aFrom;
    const m = bTo - bFrom;
    const delta = n - m;
    const odd = delta % 2 !== 0;
    f[zero + 1] = 0;
    r[zero + 1] = 0;
    let far = [0, 0];
    for (let d = 0; d <= MAX_EDITS; d += 1) {
      for (let k = -d; k <= d; k += 2) {
        let x = k === -d || (k !== d && f[zero + k - 1] < f[zero + k + 1]) ? f[zero + k + 1] : f[zero + k - 1] + 1;
        while (x < n && x - k < m && a[aFrom + x] === b[bFrom + x - k]) x += 1;
        f[zero + k] = x;
        if (x <= n && x - k <= m && x + x - k > far[0] + far[1]) far = [x, x - k];
        const back = delta - k;
        if (odd && Math.abs(back) < d && x + r[zero + back] >= n) return [aFrom + x, bFrom + x - k];
      }
      for (let k = -d; k <= d; k += 2) {
        let x = k === -d || (k !== d && r[zero + k - 1] < r[zero + k + 1]) ? r[zero + k + 1] : r[zero + k - 1] + 1;
        while (x < n && x - k < m && a[aTo - 1 - x] === b[bTo - 1 - x + k]) x += 1;
        r[zero + k] = x;
        const forth = delta - k;
        if (!odd && Math.abs(forth) <= d && x + f[zero + forth] >= n) return [aTo - x, bTo - x + k];
      }
    }
    return [aFrom + far[0], bFrom + far[1]];
  }
}

/** Joins changes with only a few equal tokens between them, because short matches are often coincidences. Pure. */
export const coalesce = (list, minimum) => new Coalescing(minimum).add(list, true);

/** Joins the blocks of an alignment while it is computed. */
export class Coalescing {
  #minimum;
  #out = [];
  /** The newest block, which is added when the next one is known. */
  #held = null;

  constructor(minimum = 3) { this.#minimum = minimum; }

  /** Adds blocks, the last ones if `isEnd`, and returns the joined blocks that are complete. */
  add(blocks, isEnd) {
    for (const block of isEnd ? [...blocks, null] : blocks) {
      if (this.#held) this.#put(this.#held, block);
      this.#held = block;
    }
    return this.#out.splice(0, this.#out.length - (isEnd ? 0 : 1));
  }

  #put(block, next) {
    const last = this.#out.at(-1);
    const size = (side) => Math.max(side.a[1] - side.a[0], side.b[1] - side.b[0]);
    const isCoincidence = block.same && last && !last.same && next && block.a[1] - block.a[0] < Math.min(this.#minimum, size(last), size(next));
    if (last && !last.same && (!block.same || isCoincidence)) {
      last.a = [last.a[0], block.a[1]];
      last.b = [last.b[0], block.b[1]];
    } else this.#out.push({ ...block });
  }
}
