// Comparison of two runs: alignment of their tokens, distributions, and parameters.
import test from 'node:test';
import assert from 'node:assert/strict';
import { differences, divergence, modsOf, settingsDifferences } from '../../src/ui/assets/divergence.js';
import { Alignment, Coalescer, Steps, align, numberTokens } from '../../src/ui/assets/diff.js';
import { randomIntegers } from './random.js';

const list = (...probs) => probs.map((prob, token) => ({ token, prob }));
const coalesce = (blocks) => new Coalescer().add(blocks, true);

test('divergence is zero for equal candidates, and exact for two outcomes', () => {
  assert.equal(divergence(list(0.5, 0.3), list(0.5, 0.3)), 0);
  const exact = 0.9 * Math.log2(0.9 / 0.6) + 0.1 * Math.log2(0.1 / 0.4);
  assert.ok(Math.abs(divergence(list(0.9), list(0.6)) - exact) < 1e-9);
  assert.equal(divergence([], list(1)), null);
  // A candidate of only one side counts as one of the other tokens on both sides, so the result is at most the exact one.
  const [p, q] = [[0.7, 0.2, 0.1], [0.2, 0.5, 0.3]];
  const whole = p.reduce((sum, x, i) => sum + x * Math.log2(x / q[i]), 0);
  const part = divergence(list(0.7, 0.2), [{ token: 0, prob: 0.2 }, { token: 2, prob: 0.3 }]);
  assert.ok(part > 0 && part <= whole, `${part} ${whole}`);
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
