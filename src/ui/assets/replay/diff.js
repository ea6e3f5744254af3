// Token differences of two runs: Myers' algorithm between the common start and end. Pure.

/** Maximum edits; beyond it the middle counts as replaced. */
const MAX_EDITS = 2000;

/**
 * Aligns two lists; returns `[{same, a: [from, to], b: [from, to]}]` that covers both in order, ends exclusive.
 */
export function align(a, b) {
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head += 1;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail += 1;
  const pairs = matches(a.slice(head, a.length - tail), b.slice(head, b.length - tail)).map(([x, y]) => [x + head, y + head]);
  const all = [];
  for (let i = 0; i < head; i += 1) all.push([i, i]);
  all.push(...pairs);
  for (let i = tail; i > 0; i -= 1) all.push([a.length - i, b.length - i]);
  return blocks(all, a.length, b.length);
}

function blocks(pairs, lengthA, lengthB) {
  const out = [];
  let x = 0;
  let y = 0;
  const gap = (toX, toY) => {
    if (toX > x || toY > y) out.push({ same: false, a: [x, toX], b: [y, toY] });
  };
  for (const [px, py] of pairs) {
    gap(px, py);
    const last = out.at(-1);
    if (last?.same && last.a[1] === px && last.b[1] === py) {
      last.a[1] += 1;
      last.b[1] += 1;
    } else out.push({ same: true, a: [px, px + 1], b: [py, py + 1] });
    x = px + 1;
    y = py + 1;
  }
  gap(lengthA, lengthB);
  return out;
}

/** Pairs of equal entries on a shortest edit path; none if the path is too long. */
function matches(a, b) {
  const most = Math.min(a.length + b.length, MAX_EDITS);
  const zero = most + 1;
  const v = new Int32Array(2 * most + 3);
  const trail = []; // of round d: the diagonals -d-1 … d+1 before it
  for (let d = 0; d <= most; d += 1) {
    trail.push(v.slice(zero - d - 1, zero + d + 2));
    for (let k = -d; k <= d; k += 2) {
      let x = isDown(v, zero, k, d) ? v[zero + k + 1] : v[zero + k - 1] + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      v[zero + k] = x;
      if (x >= a.length && x - k >= b.length) return back(trail, a.length, b.length);
    }
  }
  return [];
}

/** Returns true if the furthest path to diagonal `k` in round `d` ended with an insertion. */
const isDown = (v, zero, k, d) => k === -d || (k !== d && v[zero + k - 1] < v[zero + k + 1]);

function back(trail, endX, endY) {
  const pairs = [];
  let x = endX;
  let y = endY;
  for (let d = trail.length - 1; d >= 0; d -= 1) {
    const v = trail[d];
    const zero = d + 1;
    const before = isDown(v, zero, x - y, d) ? x - y + 1 : x - y - 1;
    const fromX = d === 0 ? 0 : v[zero + before];
    const fromY = d === 0 ? 0 : fromX - before;
    while (x > fromX && y > fromY) {
      x -= 1;
      y -= 1;
      pairs.push([x, y]);
    }
    x = fromX;
    y = fromY;
  }
  return pairs.reverse();
}
