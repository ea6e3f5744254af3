import test from 'node:test';
import assert from 'node:assert/strict';
import { heights, passed, sentence } from '../../src/ui/assets/replay/funnel.js';

const stages = [{ name: 'top-k', left: 40 }, { name: 'top-p', left: 3 }, { name: 'min-p', left: 1 }];
const row = (fields) => ({ chosen: false, sampler: null, byMod: false, why: '', ...fields });

test('candidate passes the stages before the one that removed it', () => {
  assert.equal(passed(row({ why: 'top-p' }), stages), 1);
  assert.equal(passed(row({ sampler: 0.4 }), stages), 3);
  assert.equal(passed(row({ chosen: true }), stages), 3);
  assert.equal(passed(row({ byMod: true, why: 'masked by ban-phrases' }), stages), 0);
  assert.equal(passed(row({}), stages), 0);
});

test('bars become lower with the number of candidates', () => {
  const [first, second, third] = heights(stages);
  assert.equal(first, 1);
  assert.ok(first > second && second > third && third >= 0.15);
  assert.deepEqual(heights([{ name: 'x', left: 0 }]), [0.15]);
});

test('sentence names the passed stages and the one that removed the candidate', () => {
  assert.equal(sentence(row({ why: 'top-p' }), stages), 'passed top-k (40 left); removed by top-p (3 left)');
  assert.equal(sentence(row({ byMod: true, why: 'masked by ban-phrases' }), stages), 'passed no stage; removed by ban-phrases');
  assert.equal(sentence(row({ chosen: true }), stages), 'passed top-k (40 left), top-p (3 left), min-p (1 left)');
});
