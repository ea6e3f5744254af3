// Attention sinks.
import test from 'node:test';
import assert from 'node:assert/strict';
import { sinksOf } from '../../src/ui/assets/replay/attention.js';
import { bucketOfShare } from '../../src/ui/assets/replay/color.js';

test('only the first token and special tokens are attention sinks, which are excluded from the scale', () => {
  const sinksAt = (values, ...special) => {
    const { sinks, peak } = sinksOf(values, (pos) => pos === 0 || special.includes(pos));
    return [[...sinks], peak];
  };
  assert.deepEqual(sinksAt([0.6, 0.2, 0.1, 0.1]), [[0], 0.2]);
  assert.deepEqual(sinksAt([0.4, 0.1, 0.4, 0.1], 2), [[0, 2], 0.1], 'two sinks');
  assert.deepEqual(sinksAt([0, 0.0001, 0.9999, 0]), [[], 0.9999], 'a word with all attention is not a sink');
  assert.deepEqual(sinksAt([0.9999, 0.0001, 0, 0]), [[], 0.9999], 'a rest of 0.01 % is not the maximum of the scale');
  assert.deepEqual(sinksAt([0.3, 0.3, 0.4]), [[], 0.4]);
  assert.deepEqual(sinksAt([]), [[], 0]);
  assert.equal(bucketOfShare(0, 0.5), 0);
  assert.equal(bucketOfShare(0.5, 0.5), 7);
  assert.equal(bucketOfShare(1, 0.5), 7);
});
