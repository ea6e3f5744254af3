// The cursor of the replay.
import test from 'node:test';
import assert from 'node:assert/strict';
import { Cursor } from '../../src/ui/assets/replay/cursor.js';
import { eventOf } from '../../src/ui/assets/replay/moves.js';

/** A run whose rows are added by these events; the first `promptLength` rows are its prompt. */
function runOf(types, addedAt, { promptLength = 1, removed = [] } = {}) {
  const steps = [];
  types.forEach((type, e) => { steps[e] = type === 'ForwardPass' ? (steps[e - 1] ?? 0) + 1 : steps[e - 1] ?? 0; });
  return {
    get eventCount() { return types.length; },
    type: (e) => types[e],
    stepEvents: (e) => types.map((_, other) => other).filter((other) => steps[other] === steps[e]),
    rowsAddedAt: (e) => [addedAt.indexOf(e), addedAt.lastIndexOf(e) + 1],
    addedAt: (row) => addedAt[row],
    isPrompt: (row) => row < promptLength,
    answer: () => addedAt.map((_, row) => row).filter((row) => row >= promptLength && !removed.includes(row)),
  };
}
const TYPES = ['Prefilled', 'ForwardPass', 'Sampled', 'Added', 'ForwardPass', 'Sampled', 'Added', 'ForwardPass', 'Added'];
const ADDED_AT = [0, 3, 6, 8];

test('cursor stays within the events, and has the row that its step adds', () => {
  const cursor = new Cursor(runOf(TYPES, ADDED_AT), null, false);
  assert.deepEqual([cursor.n, cursor.atEnd, cursor.event, cursor.row, cursor.isFollowing], [9, true, 8, 3, false]);
  for (const [n, expected, event, row] of [[-4, 0, 0, null], [1.4, 1, 1, 1], [4, 4, 4, 2], [99, 9, 8, 3]]) {
    cursor.moveTo(n, false);
    assert.deepEqual([cursor.n, cursor.event, cursor.row], [expected, event, row]);
  }
  assert.equal(new Cursor(runOf([], []), 5, false).event, null);
});

test('selected row is kept until the cursor is moved, and its index in the answer omits removed rows', () => {
  const cursor = new Cursor(runOf(TYPES, ADDED_AT, { removed: [1] }), null, false);
  assert.equal(cursor.answerIndex, null, 'no token is selected at the end');
  cursor.moveTo(4, false);
  assert.equal(cursor.answerIndex, 0);
  cursor.selectedRow = 3;
  cursor.keepAt(2);
  assert.deepEqual([cursor.row, cursor.answerIndex], [3, 1]);
  cursor.moveTo(2, false);
  assert.deepEqual([cursor.row, cursor.answerIndex], [1, null]);
});

test('cursor at the end of a live run follows its newest Added until it is moved', () => {
  const types = TYPES.slice(0, 6);
  const cursor = new Cursor(runOf(types, ADDED_AT), null, true);
  assert.deepEqual([cursor.isFollowing, cursor.event], [true, 3]);
  cursor.moveTo(4, true);
  assert.deepEqual([cursor.isFollowing, cursor.event], [false, 4]);
  cursor.moveTo(99, true);
  assert.equal(cursor.isFollowing, true);
  assert.equal(new Cursor(runOf(types, ADDED_AT), 2, true).isFollowing, false);
});

test('place is an event, or a token of the answer', () => {
  const run = runOf(TYPES, ADDED_AT, { removed: [1] });
  assert.deepEqual([{ event: 5 }, { token: 1 }, { token: 2 }, { token: 0 }, { token: 50 }].map((place) => eventOf(place, run)), [5, 6, 8, 6, 8]);
  assert.equal(eventOf({ token: 1 }, runOf([], [])), 0);
});
