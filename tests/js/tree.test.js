// The family of a run: order, descriptions, statistics.
import test from 'node:test';
import assert from 'node:assert/strict';
import { NEVER } from '../../src/ui/assets/replay/run-columns.js';
import { changeOf, neighbor, rowsSince, sortFamily, statistics } from '../../src/ui/assets/replay/tree.js';

const fork = (run_id, parent, change = {}, more = {}) => ({ run_id, parent: parent && { run_id: parent, step: 3, sequence_order: 7, change }, ...more });

test('family is ordered depth first, and forks of a missing run have depth 0', () => {
  const members = [fork('a'), fork('b', 'a'), fork('c', 'a'), fork('d', 'b'), fork('e', 'missing')];
  assert.deepEqual(sortFamily(members).map((m) => [m.run_id, m.depth]), [['a', 0], ['b', 1], ['d', 2], ['c', 1], ['e', 0]]);
  assert.equal(neighbor(sortFamily(members), 'd', 1), 'c');
  assert.equal(neighbor(sortFamily(members), 'a', -1), 'e');
  assert.equal(neighbor(sortFamily([members[0]]), 'a', 1), null);
});

test('change of a fork is described by text, sampling, mods, steering and seed', () => {
  assert.equal(changeOf(fork('a')), 'original');
  assert.equal(changeOf(fork('b', 'a')), 'unchanged');
  const change = { token: 5, text: ' so', sampling: { top_k: 3, temperature: 0 }, mods: [{ name: 'x' }, 'y'], seed: 'new' };
  assert.equal(changeOf(fork('b', 'a', change, { seed: 9 })), '“␣so”, top k 3, temperature 0, mods x, y, seed 9');
  assert.equal(changeOf(fork('b', 'a', { mods: [] })), 'no mods');
  assert.equal(changeOf(fork('b', 'a', { steering: [{ name: 'calm', scale: -0.5 }, { name: 'joy' }] })), 'steering calm -0.5, joy 1');
  assert.equal(changeOf(fork('b', 'a', { steering: [] })), 'no steering');
});

test('statistics cover the rows that were added since an event and not removed', () => {
  const rows = [
    { isPrompt: true, addedAt: 0, removedAt: NEVER, logprob: null, entropy: null, dt: 0 },
    { addedAt: 2, removedAt: NEVER, logprob: -1, entropy: 2, dt: 10 },
    { addedAt: 5, removedAt: 9, logprob: -7, entropy: null, dt: 30 },
    { addedAt: 9, removedAt: NEVER, logprob: -3, entropy: null, dt: 50, isForced: true },
    { addedAt: 12, removedAt: NEVER, logprob: -2, entropy: 4, dt: 30, endsGeneration: true },
  ];
  const column = (name) => (i) => rows[i][name];
  const run = {
    count: 5, isTimed: true, endsGeneration: column('endsGeneration'), isPrompt: column('isPrompt'), isForced: column('isForced'), addedAt: column('addedAt'), removedAt: column('removedAt'),
    logprob: column('logprob'), entropy: column('entropy'), dt: column('dt'),
  };
  assert.deepEqual(rowsSince(run), [1, 3, 4]);
  assert.deepEqual(rowsSince(run, 5), [3, 4]);
  const { tokens, meanLogprob } = statistics(run, rowsSince(run));
  assert.deepEqual([tokens, meanLogprob], [2, -2], 'an end-of-generation token is measured, but not counted');
  assert.deepEqual(statistics(run, [1, 3]), { tokens: 2, forced: 1, meanLogprob: -2, perplexity: Math.exp(2), meanEntropy: 2, mostSurprising: 3, msPerToken: 30 });
  assert.equal(statistics(run, []).meanLogprob, null);
});
