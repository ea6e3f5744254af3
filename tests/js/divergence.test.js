// Comparison of two runs: alignment of their tokens, distributions, and parameters.
import test from 'node:test';
import assert from 'node:assert/strict';
import { differences, divergence, modsOf, settingsDifferences, settingText } from '../../src/ui/assets/divergence.js';
import { Alignment, Coalescer, Steps, align, numberTokens } from '../../src/ui/assets/diff.js';
import { randomIntegers } from './random.js';

const list = (...probs) => probs.map((prob, token) => ({ token, prob }));
const coalesce = (blocks) => new Coalescer().add(blocks, true);

test('divergence is zero for equal candidates, and exact for two outcomes', () => {
  assert.equal(divergence(list(0.5, 0.3), list(0.5, 0.3)), 0);
  const exact = 0.9 * Math.log2(0.9 / 0.6) + 0.1 * Math.log2(0.1 / 0.4);
  assert.ok(Math.abs(divergence(list(0.9), list(0.6)) - exact) < 1e-9);
  assert.equal(divergence([], list(1)), null);
  // All unlisted tokens have the same ratio of 0.5 to 0.7.
  const joined = 0.5 * Math.log2(0.5 / 0.3) + 0.5 * Math.log2(0.5 / 0.7);
  assert.ok(Math.abs(divergence(list(0.5, 0.1), [{ token: 0, prob: 0.3 }, { token: 2, prob: 0.1 }]) - joined) < 1e-9);
  // A's candidate has at most 0.1 in B, and B's candidate at most 0.1 in A: 0.9 log2 9 + 0.1 log2(1/9).
  assert.ok(Math.abs(divergence([{ token: 1, prob: 0.9 }], [{ token: 2, prob: 0.9 }]) - 2.53594) < 1e-5);
  assert.ok(Math.abs(divergence([{ token: -1, text: 'a', prob: 0.9 }], [{ token: -1, text: 'b', prob: 0.9 }]) - 2.53594) < 1e-5, 'no ids');
  // A candidate of only one side counts as one of the other tokens on both sides, so the result is at most the exact one.
  const [p, q] = [[0.7, 0.2, 0.1], [0.2, 0.5, 0.3]];
  const whole = p.reduce((sum, x, i) => sum + x * Math.log2(x / q[i]), 0);
  const part = divergence(list(0.7, 0.2), [{ token: 0, prob: 0.2 }, { token: 2, prob: 0.3 }]);
  assert.ok(part > 0 && part <= whole + 1e-9, `${part} ${whole}`);
});

test('divergence compares candidates by text if some have no ids', () => {
  const withIds = [{ token: 5, text: ' a', prob: 0.6 }, { token: 9, text: ' b', prob: 0.4 }];
  for (const token of [null, undefined, -1, 'a']) {
    const other = withIds.map(({ text, prob }) => ({ token, text, prob }));
    assert.equal(divergence(withIds, other), 0, `${token}`);
    assert.ok(divergence(withIds, [{ ...other[0], prob: 0.1 }, { ...other[1], prob: 0.9 }]) > 0.5, `${token}`);
    // Candidates with the same text are one outcome.
    assert.equal(divergence(withIds, [{ ...other[0], prob: 0.5 }, { ...other[0], prob: 0.1 }, other[1]]), 0, `${token}`);
  }
  // Two tokens with ids can have the same text.
  const same = (...probs) => probs.map((prob, token) => ({ token, text: 'x', prob }));
  assert.ok(divergence(same(0.9, 0.1), same(0.1, 0.9)) > 2);
});

test('divergence is a lower bound also if the probabilities are rounded', () => {
  // q(0) is 5e-5 at most, which is less than the last candidate.
  const exact = 0.5 * Math.log2(0.5 / 5e-5) + 0.4999 * Math.log2(0.4999 / 0.9999) + 1e-4 * Math.log2(1e-4 / 1e-4);
  const bound = divergence(list(0.5, 0.4999), [{ token: 1, prob: 0.9999 }, { token: 2, prob: 0.0001 }]);
  assert.ok(bound > 4 && bound <= exact, `${bound} ${exact}`);
  // The sums exceed 1.
  assert.equal(divergence(list(0.5001, 0.5001), list(0.5001, 0.5001)), 0);
  assert.ok(divergence(list(1, 0.0001), [{ token: 2, prob: 1 }]) <= Math.log2(1 / 1e-4));
});

test('divergence of lists that overlap in part counts the others as one outcome each', () => {
  const [p, q] = [list(0.6, 0.3), [{ token: 1, prob: 0.8 }, { token: 2, prob: 0.1 }]];
  // Only P's candidate has at most 0.1 in Q, and only Q's candidate at most 0.1 in P.
  const expected = 0.3 * Math.log2(0.3 / 0.8) + 0.6 * Math.log2(0.6 / 0.1) + 0.1 * Math.log2(0.1 / 0.1);
  assert.ok(Math.abs(divergence(p, q) - expected) < 1e-9);
});

test('divergence is at most that of any distributions with the same candidates', () => {
  const next = randomIntegers(7);
  for (let round = 0; round < 2000; round += 1) {
    const [p, q] = [0, 1].map(() => {
      const weights = Array.from({ length: 6 }, () => Math.exp(next(12)));
      const total = weights.reduce((a, b) => a + b);
      return weights.map((weight, token) => ({ token, prob: weight / total }));
    });
    const top = (candidates) => candidates.toSorted((a, b) => b.prob - a.prob).slice(0, 1 + next(4));
    const exact = p.reduce((sum, { prob }, i) => sum + prob * Math.log2(prob / q[i].prob), 0);
    const bound = divergence(top(p), top(q));
    assert.ok(bound <= exact + 1e-9, `${bound} > ${exact}`);
  }
});

test('steps go through both sides of a difference', () => {
  const steps = new Steps(7);
  const blocks = [{ same: true, a: [0, 1], b: [0, 1] }, { same: false, a: [1, 3], b: [1, 2] }, { same: true, a: [3, 4], b: [2, 3] }];
  assert.deepEqual(blocks.map((block) => steps.add(block)), [0, 1, 3]);
  assert.deepEqual(Array.from({ length: 5 }, (_, step) => steps.pair(step)), [[0, 0], [1, 1], [2, null], [3, 2], [null, null]]);
  assert.equal(steps.next(2, 1), 2);
  assert.equal(steps.next(4, 0), null);
});

test('tokens are numbered by id and text on both sides', () => {
  const side = (...tokens) => ({ count: tokens.length, token: (k) => tokens[k][0], text: (k) => tokens[k][1] });
  const [a, b] = numberTokens([side([1, 'x'], [1, 'y'], [-1, 'x']), side([-1, 'x'], [2, 'x'], [1, 'x'])]);
  assert.deepEqual([...a], [0, 1, 2]);
  assert.deepEqual([...b], [2, 3, 0]);
});

test('an alignment that is taken in parts equals the one that is taken at the end', () => {
  const next = randomIntegers(3);
  for (let round = 0; round < 200; round += 1) {
    const [a, b] = [0, 1].map(() => Int32Array.from({ length: next(60) }, () => next(5)));
    const alignment = new Alignment(a, b);
    const coalescer = new Coalescer();
    const parts = [];
    while (!alignment.isDone) {
      alignment.advance();
      if (next(3)) parts.push(...coalescer.add(alignment.take(), alignment.isDone).map((block) => structuredClone(block)));
    }
    parts.push(...coalescer.add(alignment.take(), true));
    assert.deepEqual(parts, coalesce(align(a, b)));
  }
});

test('parameters differ by path, and mods by version and configuration', () => {
  const a = { sampling: { top_k: 40, seed: 1, dry: { base: 2 } }, limits: null };
  const b = { sampling: { top_k: 40, seed: 2, dry: { base: 3 } }, limits: { max_tokens: 3 }, fork: 1 };
  assert.deepEqual(differences(a, b, ['fork']), [['sampling.seed', 1, 2], ['sampling.dry.base', 2, 3], ['limits.max_tokens', null, 3]]);
  assert.deepEqual(differences(modsOf({ mods: [{ name: 'x', version: '1' }] }), modsOf({ mods: [{ name: 'x', version: '2' }, 'y'] })), [['x.version', '1', '2'], ['y', null, {}]]);
});

test('rows of the server replace the parameters that they show, but not those of mods and other parameters', () => {
  const run = (tokens) => ({ seed: tokens, sampling: { seed: tokens, top_k: tokens }, limits: { max_tokens: tokens }, mods: [{ name: 'think-budget', config: { seed: tokens, max_tokens: 3 } }] });
  assert.deepEqual(settingsDifferences(run(100), run(1000), ['started', 'seed', 'max tokens']), [
    ['mod think-budget.config.seed', 100, 1000], ['seed', 100, 1000], ['sampling.top_k', 100, 1000],
  ]);
  assert.equal(settingsDifferences(run(100), run(1000), []).length, 5);
});

test('derived and repeated parameters are hidden, and values are readable', () => {
  const run = (on) => ({ limits: { max_tokens: 100 + on, max_steps: 656 + 4 * on, ignore_eos: on }, request: { ignore_eos: on, top_logprobs: on ? 1 : 2 } });
  assert.deepEqual(settingsDifferences(run(true), run(false), ['max tokens']).map(([path]) => path), ['limits.ignore_eos', 'request.top_logprobs']);
  const limits = (max_tokens, max_steps) => ({ limits: { max_tokens, max_steps } });
  assert.deepEqual(settingsDifferences(limits(100, 656), limits(100, 20), []), [['limits.max_steps', 656, 20]], 'a requested maximum is shown');
  assert.deepEqual(settingsDifferences(limits(100, 656), {}, ['max tokens']), []);
  assert.equal(settingText('steering', [{ name: 'happy', scale: 3, layers: [1, 3], fingerprint: 'f' }]), 'happy × 3, layers 1–3');
  assert.equal(settingText('sampling.logit_bias', [[0, null], [2, -1.5]]), 'token 0 never, token 2 -1.5');
  assert.deepEqual([settingText('x', null), settingText('x', 'y'), settingText('x', [1])], ['–', 'y', '[1]']);
  assert.deepEqual([settingText('steering', 'happy'), settingText('sampling.logit_bias', { 5: 1 })], ['happy', '{"5":1}'], 'of another engine');
  assert.deepEqual(differences({ steering: [] }, {}), [], 'an empty list is like none');
  assert.deepEqual(differences({ steering: [] }, { steering: [1] }), [['steering', null, [1]]]);
});

test('differences are joined across tokens that are equal by chance', () => {
  const [a, b] = [[...'abcXdefgh'], [...'ABCXDEFgh']];
  const blocks = coalesce(align(a, b));
  assert.deepEqual(blocks, [{ same: false, a: [0, 7], b: [0, 7] }, { same: true, a: [7, 9], b: [7, 9] }]);
  const small = align([...'aXb'], [...'aYb']);
  assert.deepEqual(coalesce(small), small);
});

test('two answers of 10 000 tokens that diverge are aligned within 300 ms of processor time', (t) => {
  const next = randomIntegers(5);
  // Frequent tokens are equal by chance, as in natural text.
  const words = (length) => Array.from({ length }, () => `${next(3) ? next(2000) : next(12)} word`);
  const start = words(1000);
  const [a, b] = [[...start, ...words(9000)], [...start, ...words(9000)]];
  const began = process.cpuUsage();
  const blocks = align(a, b);
  const took = process.cpuUsage(began).user / 1000;
  t.diagnostic(`${took.toFixed(0)} ms`);
  assert.ok(blocks[0].a[1] >= 1000);
  assert.ok(took < 300, `${took} ms`);
});
