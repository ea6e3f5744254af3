// Alignment of tokens for the comparison of two runs.
import test from 'node:test';
import assert from 'node:assert/strict';
import { align } from '../../src/ui/assets/diff.js';
import { randomIntegers } from './random.js';

/** Returns the length of the longest common subsequence of two lists. */
function commonLength(a, b) {
  const lengths = Array.from({ length: a.length + 1 }, () => Array(b.length + 1).fill(0));
  for (let i = 1; i <= a.length; i += 1) {
    for (let j = 1; j <= b.length; j += 1) {
      lengths[i][j] = a[i - 1] === b[j - 1] ? lengths[i - 1][j - 1] + 1 : Math.max(lengths[i - 1][j], lengths[i][j - 1]);
    }
  }
  return lengths[a.length][b.length];
}

test('alignment covers both lists and has as many equal entries as possible', () => {
  const next = randomIntegers(11);
  const list = () => Array.from({ length: next(14) }, () => next(4));
  for (let round = 0; round < 2000; round += 1) {
    const [a, b] = [list(), list()];
    let [x, y, equal] = [0, 0, 0];
    for (const block of align(a, b)) {
      assert.deepEqual([block.a[0], block.b[0]], [x, y]);
      [x, y] = [block.a[1], block.b[1]];
      if (!block.same) continue;
      assert.deepEqual(a.slice(...block.a), b.slice(...block.b));
      equal += block.a[1] - block.a[0];
    }
    assert.deepEqual([x, y, equal], [a.length, b.length, commonLength(a, b)], JSON.stringify([a, b]));
  }
});

test('alignment of texts without common tokens is fast', () => {
  const a = Array.from({ length: 20000 }, (_, i) => i);
  const blocks = align(a, a.map((x) => -x - 1));
  assert.equal(blocks.length, 1);
});
