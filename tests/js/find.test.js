// The search in the text of a run.
import test from 'node:test';
import assert from 'node:assert/strict';
import { find, nextMatch } from '../../src/ui/assets/replay/find.js';

test('find matches across tokens and skips hidden ones', () => {
  const texts = ['The', ' oc', 'ean', ' Ocean'];
  const text = (i) => texts[i];
  assert.deepEqual(find('ocean', 4, text, () => true), [[1, 1, 2], [3, 1, 3]]);
  assert.deepEqual(find('ocean', 4, text, (i) => i !== 2), [[3, 1, 3]]);
  assert.deepEqual(find('', 4, text, () => true), []);
});

test('position in a search is kept when the matches change', () => {
  assert.deepEqual([-1, 3, 7].map((row) => nextMatch([[3, 0, 3], [7, 0, 8]], [row, 0], 1)), [0, 1, 0]);
  assert.deepEqual([7, 3].map((row) => nextMatch([[3, 0, 3], [7, 0, 8]], [row, 0], -1)), [0, 1]);
  assert.deepEqual([1, -1].map((step) => nextMatch([[1, 0, 1], [3, 0, 3], [5, 0, 5], [7, 0, 8]], [3, 0], step)), [2, 0]);
  assert.deepEqual([1, -1].map((step) => nextMatch([], [3, 0], step)), [-1, -1]);
});

test('all matches that begin in one token are reached', () => {
  const texts = ['A', ' banana'];
  const matches = find('a', 2, (i) => texts[i], () => true);
  assert.deepEqual(matches, [[0, 0, 0], [1, 2, 1], [1, 4, 1], [1, 6, 1]]);
  const reached = (step) => {
    let match = [-1, 0];
    return matches.map(() => {
      const index = nextMatch(matches, match, step);
      match = matches[index];
      return index;
    });
  };
  assert.deepEqual([reached(1), reached(-1)], [[0, 1, 2, 3], [3, 2, 1, 0]]);
});
