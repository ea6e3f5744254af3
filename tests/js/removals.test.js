// Removed rows and their chips.
import test from 'node:test';
import assert from 'node:assert/strict';
import { findRemovals, isChipVisible } from '../../src/ui/assets/replay/removals.js';
import { NEVER } from '../../src/ui/assets/replay/run-columns.js';

test('removals are nested, and a folded removal hides its inner chips', () => {
  // Rows 1–5 are removed at event 50, but rows 2–3 were already removed at event 30.
  const removedAt = [NEVER, 50, 30, 30, 50, 50, NEVER];
  const all = findRemovals(removedAt.length, (i) => removedAt[i]);
  assert.deepEqual(all.map((b) => [b.removedAt, b.first, b.last, b.count]), [[30, 2, 3, 2], [50, 1, 5, 3]]);
  const inner = all[0];
  assert.equal(inner.parent, all[1]);
  assert.equal(isChipVisible(inner, 29, () => false), false, 'not removed yet');
  assert.equal(isChipVisible(inner, 40, () => false), true);
  assert.equal(isChipVisible(inner, 60, () => false), false, 'inside a folded removal');
  assert.equal(isChipVisible(inner, 60, () => true), true);
});
