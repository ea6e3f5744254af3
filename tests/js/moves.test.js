// Keys that move the cursor.
import test from 'node:test';
import assert from 'node:assert/strict';
import { surprise } from '../../src/ui/assets/replay/color.js';
import { targetOf } from '../../src/ui/assets/replay/moves.js';
import { NEVER } from '../../src/ui/assets/replay/run-columns.js';

const run = {
  eventCount: 7,
  count: 3,
  type: (e) => ['Prefilled', 'ForwardPass', 'Sampled', 'Added', 'ForwardPass', 'Sampled', 'Added'][e],
  addedAt: (i) => [0, 3, 6][i],
  removedAt: (i) => [NEVER, 5, NEVER][i],
  isPrompt: (i) => i === 0,
  marks: [{ seq: 4, kind: 'action' }, { seq: 2, kind: 'error' }],
  logprob: (i) => [null, -Math.LN2 * 5, -0.01][i],
};

test('keys move to tokens, marks, backtracks and surprising tokens', () => {
  const go = (action, n) => targetOf(action, run, n, (i) => surprise(run, i), 4);
  assert.equal(go('nextToken', 0), 3);
  assert.equal(go('nextToken', 6), 7, 'the end follows the last token');
  assert.equal(go('prevToken', 7), 6);
  assert.equal(go('prevToken', 3), 0);
  assert.equal(go('nextEvent', 7), 7);
  assert.equal(go('nextAction', 0), 4);
  assert.equal(go('nextAction', 4), 'No mod action after this.');
  assert.equal(go('prevError', 2), 'No error before this.');
  assert.equal(go('prevError', 7), 2);
  assert.equal(go('nextBacktrack', 0), 4);
  assert.equal(go('nextSurprise', 0), 3);
  assert.equal(go('nextSurprise', 3), 'No surprising token after this.');
  assert.equal(targetOf('nextBacktrack', { ...run, removedAt: () => NEVER }, 0, () => 0, 4), 'No backtrack in this run.');
  assert.equal(go('color', 3), undefined);
});
