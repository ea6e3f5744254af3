// The family of a run: order, descriptions, statistics.
import test from 'node:test';
import assert from 'node:assert/strict';
import { changeOf, neighbor, order, rowsSince, statistics } from '../../src/ui/assets/replay/tree.js';

const fork = (run_id, parent, change = {}, more = {}) => ({ run_id, parent: parent && { run_id: parent, step: 3, sequence_order: 7, change }, ...more });

test('family is ordered depth first, and forks of a hidden run are kept', () => {
  const members = [fork('a'), fork('b', 'a'), fork('c', 'a'), fork('d', 'b'), fork('e', 'hidden')];
  assert.deepEqual(order(members).map((m) => [m.run_id, m.depth]), [['a', 0], ['b', 1], ['d', 2], ['c', 1], ['e', 0]]);
  assert.equal(neighbor(order(members), 'd', 1), 'c');
  assert.equal(neighbor(order(members), 'a', -1), 'e');
  assert.equal(neighbor(order([members[0]]), 'a', 1), null);
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
  const NEVER = 0xffff_ffff;
  const rows = [[1, 0, NEVER, null, 0], [0, 2, NEVER, -1, 10], [0, 5, 9, -7, 30], [0, 9, NEVER, -3, 50]];
  const run = {
    count: 4, isTimed: true,
    isPrompt: (i) => rows[i][0] === 1, addedAt: (i) => rows[i][1], removedAt: (i) => rows[i][2], logprob: (i) => rows[i][3], dt: (i) => rows[i][4],
    entropy: (i) => (i === 1 ? 2 : null), isForced: (i) => i === 3,
  };
  assert.deepEqual(rowsSince(run), [1, 3]);
  assert.deepEqual(rowsSince(run, 5), [3]);
  assert.deepEqual(statistics(run, [1, 3]), { tokens: 2, forced: 1, meanLogprob: -2, perplexity: Math.exp(2), meanEntropy: 2, mostSurprising: 3, msPerToken: 30 });
  assert.equal(statistics(run, []).meanLogprob, null);
});
