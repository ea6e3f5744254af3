// The modes that color tokens.
import test from 'node:test';
import assert from 'node:assert/strict';
import { MODES, legendOf } from '../../src/ui/assets/replay/color.js';

const run = { logprob: (i) => [null, -Math.LN2 * 5][i] };

test('legend has the same buckets as the text', () => {
  for (const mode of MODES.filter((m) => m.edges.length)) {
    assert.deepEqual(legendOf(mode).map((l) => l.bucket), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert.equal(mode.edges.length, 7);
  }
  assert.equal(MODES[0].bucket(run, 1), 5, 'five bits');
  assert.equal(MODES[0].bucket(run, 0), -1, 'not measured');
});
