import test from 'node:test';
import assert from 'node:assert/strict';
import { removedBy } from '../../src/ui/assets/replay/candidates.js';
import { description, heights, missingRecords, passedCount } from '../../src/ui/assets/replay/funnel.js';

const stages = [{ name: 'top-k', left: 40 }, { name: 'top-p', left: 3 }, { name: 'min-p', left: 1 }];
const row = (fields) => ({ chosen: false, sampler: null, byMod: false, reason: '', removedBy: [], ...fields });

test('candidate passes the stages before the one that removed it', () => {
  assert.equal(passedCount(row({ removedBy: [1] }), stages), 1);
  assert.equal(passedCount(row({ sampler: 0.4 }), stages), 3);
  assert.equal(passedCount(row({ chosen: true }), stages), 3);
  assert.equal(passedCount(row({ byMod: true, reason: 'masked by ban-phrases' }), stages), 0);
  assert.equal(passedCount(row({}), stages), 0);
});

test('bars become lower with the number of candidates', () => {
  const [first, second, third] = heights(stages);
  assert.equal(first, 1);
  assert.ok(first > second && second > third && third >= 0.15);
  assert.deepEqual(heights([{ name: 'x', left: 0 }]), [0.15]);
});

test('description names the passed stages and the one that removed the candidate', () => {
  assert.equal(description(row({ removedBy: [1] }), stages), 'passed top-k (40 left); removed by top-p (3 left)');
  assert.equal(description(row({ byMod: true, reason: 'masked by ban-phrases' }), stages), 'passed no stage; removed by ban-phrases');
  assert.equal(description(row({ chosen: true }), stages), 'passed top-k (40 left), top-p (3 left), min-p (1 left)');
});

test('a stage that may have removed a candidate is only named if the counts permit it', () => {
  const list = (...pairs) => pairs.map(([name, left]) => ({ name, left }));
  assert.deepEqual(removedBy(stages, 2), [2]);
  assert.deepEqual(removedBy(stages, 4), [1]);
  assert.deepEqual(removedBy(stages, 41), [0]);
  // Penalties change the order, so that each later stage with fewer candidates may have removed it.
  assert.deepEqual(removedBy(list(['penalties', 99], ['top-k', 40], ['top-p', 40], ['min-p', 3]), 2), [1, 3]);
  assert.deepEqual(removedBy(list(['penalties', 99], ['argmax', 1]), 2), [1]);
  // A grammar may remove any candidate, but rank 2 passes top-k.
  assert.deepEqual(removedBy(list(['grammar', 50], ['top-k', 40], ['min-p', 1]), 2), [0, 2]);
  assert.deepEqual(removedBy(list(['top-k', 40], ['xtc', 38], ['temp', 38]), 1), [1]);
  // Tokens that mods avoid have the lowest ranks.
  assert.deepEqual(removedBy(list(['avoided', 90], ['top-p', 40]), 60), [1]);
  assert.deepEqual(removedBy(stages, 2, false), [0, 1, 2]);
  assert.equal(description(row({ removedBy: [0, 2] }), stages), 'passed no stage; removed by top-k (40 left) or min-p (1 left)');
});

test('missing records are named', () => {
  const step = { rows: [], stages, isSampled: true, isForced: false, isPartial: false, hasSampler: true };
  assert.deepEqual(missingRecords(step), []);
  assert.match(missingRecords({ ...step, isSampled: false, isForced: true })[0], /forced/);
  assert.match(missingRecords({ ...step, stages: [] })[0], /stages of this step were not recorded/);
  assert.match(missingRecords({ ...step, hasSampler: false })[0], /distribution after the stages was not recorded/);
  assert.match(missingRecords({ ...step, rows: [row({ removedBy: [0, 2] })] })[0], /do not tell which/);
  assert.match(missingRecords({ ...step, isPartial: true, rows: [row({})] })[0], /^Of the 1 candidates .* without a funnel/);
});
