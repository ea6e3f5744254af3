// Differences between two runs in their distributions, parameters and mods. Pure.
import { parseCandidates } from './replay/candidates.js';

/** Parameters that have their own rows, and `reading`, which earlier releases recorded instead of `answer_format`. */
const SKIPPED_PARAMETERS = ['mods', 'fork', 'model', 'answer_format', 'reading'];
/** Paths of the parameters for which the server renders rows if they differ, by the names of these rows. */
const RENDERED_PATHS = { temperature: 'sampling.temperature', seed: 'sampling.seed', 'max tokens': 'limits.max_tokens' };

/**
 * Returns a lower bound of the KL divergence D(p ‖ q) in bits, for two lists of candidates. Candidates that only one list has
 * count as one outcome, together with the tokens that are in neither list. Null if a list is empty.
 */
export function divergence(p, q) {
  if (!p.length || !q.length) return null;
  const probsOfQ = new Map(q.map((c) => [c.token, c.prob]));
  let sum = 0;
  let restOfP = 1;
  let restOfQ = 1;
  for (const { token, prob } of p) {
    const probOfQ = probsOfQ.get(token);
    if (!(prob > 0) || !(probOfQ > 0)) continue;
    sum += prob * Math.log2(prob / probOfQ);
    restOfP -= prob;
    restOfQ -= probOfQ;
  }
  // The sum of rounded probabilities may exceed 1.
  restOfP = Math.max(restOfP, 1e-6);
  restOfQ = Math.max(restOfQ, 1e-6);
  return Math.max(0, sum + restOfP * Math.log2(restOfP / restOfQ));
}

/** Returns the model's candidates by step, from the `alternatives` in a response of the API. */
export const candidatesByStep = (alternatives) => new Map(alternatives.map((s) => [s.step, parseCandidates(s.model)]));

/** Returns the parameters that differ as `[name, a, b]`; the name of a nested parameter is its path. `skip` lists top-level names. */
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

/** Returns the versions and configurations of the recorded mods by their names. */
export const modsOf = (parameters) => Object.fromEntries((parameters?.mods ?? []).map((m) => (typeof m === 'string' ? [m, {}] : [m.name, { version: m.version, config: m.config ?? null }])));

/** Returns the mods and parameters that differ as `[name, a, b]`, without the parameters of `rendered`, the names of the server's rows. */
export function settingsDifferences(a, b, rendered) {
  const paths = rendered.map((name) => RENDERED_PATHS[name]);
  return [
    ...differences(modsOf(a), modsOf(b)).map(([name, ...values]) => [`mod ${name}`, ...values]),
    ...differences(a, b, SKIPPED_PARAMETERS).filter(([path]) => !paths.includes(path)),
  ];
}
