// Token differences of two runs: Myers' algorithm in linear space. Pure.

/** Maximum edits in one search. Beyond it, the search splits at its furthest point, and the result may not be minimal. */
const MAX_EDITS = 256;

/**
 * Aligns two lists; returns `[{same, a: [from, to], b: [from, to]}]` that covers both in order, ends exclusive.
 */
export function align(a, b) {
  const ids = new Map();
  const numbers = (list) => Int32Array.from(list, (key) => {
    if (!ids.has(key)) ids.set(key, ids.size);
    return ids.get(key);
  });
  const matches = [];
  const same = (x, y, length) => {
    const last = matches.at(-1);
    if (last && last.x + last.length === x && last.y + last.length === y) last.length += length;
    else if (length) matches.push({ x, y, length });
  };
  new Aligner(numbers(a), numbers(b), same).align(0, a.length, 0, b.length);
  return blocks(matches, a.length, b.length);
}

function blocks(matches, lengthA, lengthB) {
  const out = [];
  let x = 0;
  let y = 0;
  for (const match of [...matches, { x: lengthA, y: lengthB, length: 0 }]) {
    if (match.x > x || match.y > y) out.push({ same: false, a: [x, match.x], b: [y, match.y] });
    x = match.x + match.length;
    y = match.y + match.length;
    if (match.length) out.push({ same: true, a: [match.x, x], b: [match.y, y] });
  }
  return out;
}

class Aligner {
  #a;
  #b;
  #same;
  #forward;
  #backward;
  #zero;

  /** `same(x, y, length)` is called for equal parts in order. */
  constructor(a, b, same) {
    this.#a = a;
    this.#b = b;
    this.#same = same;
    this.#zero = MAX_EDITS + 2;
    this.#forward = new Int32Array(2 * this.#zero + 1);
    this.#backward = new Int32Array(2 * this.#zero + 1);
  }

  align(aFrom, aTo, bFrom, bTo) {
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
    if (aFrom < aTo && bFrom < bTo) {
      const [x, y] = this.#middle(aFrom, aTo, bFrom, bTo);
      this.align(aFrom, x, bFrom, y);
      this.align(x, aTo, y, bTo);
    }
    this.#same(aTo, bTo, tail);
  }

  /** Returns a point of a shortest path that splits the ranges, whose first and last entries differ. */
  #middle(aFrom, aTo, bFrom, bTo) {
    const [a, b, f, r, zero] = [this.#a, this.#b, this.#forward, this.#backward, this.#zero];
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
export function coalesce(list, minimum = 3) {
  const out = [];
  list.forEach((block, i) => {
    const last = out.at(-1);
    const next = list[i + 1];
    const size = (side) => Math.max(side.a[1] - side.a[0], side.b[1] - side.b[0]);
    const isCoincidence = block.same && last && !last.same && next && block.a[1] - block.a[0] < Math.min(minimum, size(last), size(next));
    if (last && !last.same && (!block.same || isCoincidence)) {
      last.a = [last.a[0], block.a[1]];
      last.b = [last.b[0], block.b[1]];
    } else out.push({ ...block });
  });
  return out;
}
