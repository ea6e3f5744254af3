// Differences between two runs in their distributions, parameters and mods. Pure.
import { parseCandidates } from './replay/candidates.js';

/** Parameters that have their own rows, and `reading`, which earlier releases recorded instead of `answer_format`. */
const SKIPPED_PARAMETERS = ['mods', 'fork', 'model', 'answer_format', 'reading'];
/** Paths of the parameters for which the server renders rows if they differ, by the names of these rows. */
const RENDERED_PATHS = { temperature: 'sampling.temperature', seed: 'sampling.seed', 'max tokens': 'limits.max_tokens' };

/** Maximum error of a recorded probability: other engines round them, many to 4 decimals. */
const ROUNDING_ERROR = 1e-4;

/** Returns the term of an outcome in a KL divergence, in bits. */
const term = (p, q) => (p > 0 ? p * Math.log2(p / q) : 0);

/** Returns the probabilities of candidates by the keys that `keyOf` returns. Those of equal keys are added up. */
function probabilities(list, keyOf) {
  const sums = new Map();
  for (const candidate of list) {
    const key = keyOf(candidate);
    if (candidate.prob > 0) sums.set(key, (sums.get(key) ?? 0) + candidate.prob);
  }
  return sums;
}

/**
 * Returns a lower bound of the KL divergence D(p ‖ q) in bits that follows from two lists of candidates. Its outcomes are each candidate
 * that both lists have, the candidates of `p` only, those of `q` only, and all other tokens. The rest of each list is the probability of
 * the outcomes that it lacks. Null if a list is empty.
 */
export function divergence(p, q) {
  if (!p.length || !q.length) return null;
  // Traces of other engines may have no ids. Their tokens can only be compared by text.
  const haveIds = [...p, ...q].every(({ token }) => Number.isInteger(token) && token >= 0);
  const [ofP, ofQ] = [p, q].map((list) => probabilities(list, ({ token, text }) => (haveIds ? token : text)));
  let sum = 0;
  let [onlyP, onlyQ, restOfP, restOfQ] = [0, 0, 1, 1];
  for (const [token, prob] of ofP) {
    if (ofQ.has(token)) sum += term(prob, ofQ.get(token));
    else onlyP += prob;
    restOfP -= prob;
  }
  for (const [token, prob] of ofQ) {
    if (!ofP.has(token)) onlyQ += prob;
    restOfQ -= prob;
  }
  // The sum of rounded probabilities may exceed 1. The bound decreases with the rest of `q`, so that must not be too small.
  restOfP = Math.max(restOfP, 0);
  restOfQ = Math.max(restOfQ, (q.length + 1) * ROUNDING_ERROR);
  // At its minimum, all unlisted tokens have the same ratio of p to q, unless the rests are too small for that.
  const unlisted = onlyP * onlyQ > restOfP * restOfQ
    ? term(onlyP, restOfQ) + term(restOfP, onlyQ)
    : term(onlyP + restOfP, onlyQ + restOfQ);
  return Math.max(0, sum + unlisted);
}

/** Returns the model's candidates by step, from the `alternatives` in a response of the API. */
export const candidatesByStep = (alternatives) => new Map(alternatives.map((s) => [s.step, parseCandidates(s.model)]));

/** Returns a value, or null for one that means the same: a parameter that is absent or an empty list. */
const valueOrNull = (value) => (Array.isArray(value) && !value.length ? null : value ?? null);

/** Returns the parameters that differ as `[name, a, b]`; the name of a nested parameter is its path. `skip` lists top-level names. */
export function differences(a, b, skip = [], path = '') {
  const isTree = (x) => x !== null && typeof x === 'object' && !Array.isArray(x);
  const names = [...new Set([...Object.keys(a ?? {}), ...Object.keys(b ?? {})])].filter((name) => !skip.includes(name));
  return names.flatMap((name) => {
    const [x, y] = [valueOrNull(a?.[name]), valueOrNull(b?.[name])];
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

/** Returns true if the maximum of steps is the server's default, which follows from that of tokens. */
function hasDefaultMaxSteps(parameters) {
  const { max_tokens: tokens, max_steps: steps } = parameters?.limits ?? {};
  return steps === undefined || steps === 4 * tokens + 256;
}

/** Returns the mods and parameters that differ as `[name, a, b]`, without the parameters of `rendered`, the names of the server's rows. */
export function settingsDifferences(a, b, rendered) {
  const hidden = rendered.map((name) => RENDERED_PATHS[name]);
  if (hasDefaultMaxSteps(a) && hasDefaultMaxSteps(b)) hidden.push('limits.max_steps');
  const parameters = differences(a, b, SKIPPED_PARAMETERS).filter(([path]) => !hidden.includes(path));
  // `request` repeats fields of the request that are parameters, too.
  const names = new Set(parameters.map(([path]) => path).filter((path) => !path.startsWith('request.')).map((path) => path.split('.').at(-1)));
  return [
    ...differences(modsOf(a), modsOf(b)).map(([name, ...values]) => [`mod ${name}`, ...values]),
    ...parameters.filter(([path]) => !path.startsWith('request.') || !names.has(path.slice('request.'.length))),
  ];
}

/** Returns the value of a setting, by its name in `settingsDifferences`, as text. */
export function settingText(name, value) {
  if (value === null) return '–';
  if (name === 'steering' && Array.isArray(value)) return value.map(({ name: vector, scale, layers }) => `${vector} × ${scale}${layers ? `, layers ${layers.join('–')}` : ''}`).join('; ');
  if (name === 'sampling.logit_bias' && Array.isArray(value)) return value.map(([token, bias]) => `token ${token} ${bias === null ? 'never' : bias}`).join(', ');
  return typeof value === 'string' ? value : JSON.stringify(value);
}
