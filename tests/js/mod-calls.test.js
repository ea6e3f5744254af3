// The mod calls of an event.
import test from 'node:test';
import assert from 'node:assert/strict';
import { durationText } from '../../src/ui/assets/replay/mod-calls.js';

test('only durations from 0 are shown', () => {
  assert.deepEqual([0, 0.25, 1.25, undefined, null, 'x', -1, -1e308].map(durationText), ['0 µs', '250 µs', '1.3 ms', null, null, null, null, null]);
});
