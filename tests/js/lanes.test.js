// The table of marks below the text of a run.
import test from 'node:test';
import assert from 'node:assert/strict';
import { firstListed } from '../../src/ui/assets/replay/lanes.js';

test('listed marks are those around the cursor, and stay while it is in the middle of them', () => {
  assert.equal(firstListed(30, 29, 0), 0, 'all marks are listed');
  assert.equal(firstListed(1000, -1, 0), 0, 'the cursor is before the first mark');
  assert.equal(firstListed(1000, 299, 0), 0);
  assert.equal(firstListed(1000, 300, 0), 100, 'the cursor left the middle');
  assert.equal(firstListed(1000, 350, 100), 100);
  assert.equal(firstListed(1000, 150, 100), 0);
  assert.equal(firstListed(1000, 999, 100), 600, 'the end is reached');
  assert.equal(firstListed(1003, 1002, 600), 603, 'new marks of a live run are listed');
});
