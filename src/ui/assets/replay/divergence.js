// Differences of two runs besides their tokens: distributions and parameters. Pure.
import { candidates } from './candidates.js';

/**
 * Returns the KL divergence in bits of the candidates `q` from `p`, over the candidates recorded on both sides and the rest
 * as one outcome. This is a lower bound of the divergence over the vocabulary. Null if a side has no candidates.
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

/** Returns the pairs of token indexes `[a, b]` in the order of the alignment; null if a side has no token. */
export function pairs(blocks) {
  const out = [];
  for (const { a, b } of blocks) {
    for (let i = 0; i < Math.max(a[1] - a[0], b[1] - b[0]); i += 1) out.push([a[0] + i < a[1] ? a[0] + i : null, b[0] + i < b[1] ? b[0] + i : null]);
  }
  return out;
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
