// The attention sink.
import test from 'node:test';
import assert from 'node:assert/strict';
import { sinkOf } from '../../src/ui/assets/replay/attention.js';
import { bucketOfShare } from '../../src/ui/assets/replay/color.js';

test('attention sink is detected by its mass and excluded from the scale', () => {
  assert.deepEqual(sinkOf([0.1, 0.7, 0.1, 0.1]), { sink: 1, peak: 0.1 });
  assert.deepEqual(sinkOf([0.3, 0.3, 0.4]), { sink: -1, peak: 0.4 });
  assert.deepEqual(sinkOf([]), { sink: -1, peak: 0 });
  assert.equal(bucketOfShare(0, 0.5), 0);
  assert.equal(bucketOfShare(0.5, 0.5), 7);
  assert.equal(bucketOfShare(1, 0.5), 7);
});
