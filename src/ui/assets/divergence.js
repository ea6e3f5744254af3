// Differences of two runs besides their tokens: distributions and parameters. Pure.
import { candidates } from './replay/candidates.js';

/**
 * Returns the KL divergence D(p ‖ q) of two lists of candidates in bits, over the candidates recorded on both sides and the
 * rest as one outcome. This is a lower bound of the divergence over the vocabulary. Null if a side has no candidates.
 */
export function divergence(p, q) {
  if (!p.length || !q.length) return null;
  const other = new Map(q.map((c) => [c.token, c.prob]));
  let sum = 0;
  let restP = 1;
  let restQ = 1;
  for (const { token, prob } of p) {
    const theirs = other.get(token);
    if (!(prob > 0) || !(theirs > 0)) continue;
    sum += prob * Math.log2(prob / theirs);
    restP -= prob;
    restQ -= theirs;
  }
  // The sum of rounded probabilities may exceed 1.
  const [x, y] = [Math.max(restP, 1e-6), Math.max(restQ, 1e-6)];
  return Math.max(0, sum + x * Math.log2(x / y));
}

/** Returns the model's candidates by step from a response of `/alternatives`. */
export const byStep = (alternatives) => new Map(alternatives.map((s) => [s.step, candidates(s.model)]));

/**
 * Returns an array for each side `{count, token(k), text(k)}`, with a number for each token. Tokens with the same id and text
 * have the same number on all sides.
 */
export function numbered(sides) {
  const texts = new Map();
  const ids = new Map();
  const numberOf = (map, key) => {
    let number = map.get(key);
    if (number === undefined) map.set(key, number = map.size);
    return number;
  };
  return sides.map(({ count, token, text }) => {
    const out = new Int32Array(count);
    // Text numbers are below 2^21, and token ids below 2^31.
    for (let k = 0; k < count; k += 1) out[k] = numberOf(ids, token(k) * 0x200000 + numberOf(texts, text(k)));
    return out;
  });
}

/** The steps of an alignment: pairs of token indexes in its order; null if a side has no token. */
export class Steps {
  #indexes;
  count = 0;

  /** `max` is the maximum number of steps. */
  constructor(max) { this.#indexes = [new Int32Array(max), new Int32Array(max)]; }

  /** Adds the next block and returns its first step. */
  add({ a, b }) {
    const from = this.count;
    this.count += Math.max(a[1] - a[0], b[1] - b[0]);
    [a, b].forEach(([first, end], side) => {
      for (let k = 0; k < this.count - from; k += 1) this.#indexes[side][from + k] = first + k < end ? first + k : -1;
    });
    return from;
  }

  /** Returns the token index of a side at a step. */
  at(step, side) {
    const index = step < 0 || step >= this.count ? -1 : this.#indexes[side][step];
    return index < 0 ? null : index;
  }

  pair(step) { return [this.at(step, 0), this.at(step, 1)]; }

  /** Returns the first token index of a side at a step or later. */
  next(step, side) {
    for (let later = step; later < this.count; later += 1) if (this.#indexes[side][later] >= 0) return this.#indexes[side][later];
    return null;
  }
}

/** Returns the parameters that differ as `[name, a, b]`, nested ones with their path. `skip` lists top-level names. */
export function differences(a, b, skip = [], path = '') {
  const isTree = (x) => x !== null && typeof x === 'object' && !Array.isArray(x);
  const names = [...new Set([...Object.keys(a ?? {}), ...Object.keys(b ?? {})])].filter((name) => !skip.includes(name));
  return names.flatMap((name) => {
    const [x, y] = [a?.[name] ?? null, b?.[name] ?? null];
    if (JSON.stringify(x) === JSON.stringify(y)) return [];
    if ((isTree(x) || isTree(y)) && (x === null || isTree(x)) && (y === null || isTree(y))) {
      const inner = differences(x, y, [], `${path}${name}.`);
      if (inner.length) return inner;
    }
    return [[path + name, x, y]];
  });
}

/** Returns the mods as an object by name, so that versions and configurations can be compared. */
export const modsOf = (parameters) => Object.fromEntries((parameters?.mods ?? []).map((m) => (typeof m === 'string' ? [m, {}] : [m.name, { version: m.version, config: m.config ?? null }])));
