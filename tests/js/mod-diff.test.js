// Differences between a version of a mod and the text in its editor.
import test from 'node:test';
import assert from 'node:assert/strict';
import { diffRows, restoreBlock, sourceRows } from '../../src/ui/assets/mod-diff.js';
import { randomIntegers } from './random.js';

const text = (from, to, changed = {}) => Array.from({ length: to - from }, (_, i) => changed[from + i] ?? `line ${from + i}`).join('\n');

test('rows show each difference with three equal lines around it', () => {
  const all = diffRows(text(1, 31), text(1, 31, { 10: 'other' }));
  assert.deepEqual(all.map(({ kind, a, b, count, text: line }) => [kind, a, b, count ?? line]), [
    ['skipped', undefined, undefined, 6],
    ['same', 7, 7, 'line 7'], ['same', 8, 8, 'line 8'], ['same', 9, 9, 'line 9'],
    ['block', undefined, undefined, undefined],
    ['removed', 10, undefined, 'line 10'], ['added', undefined, 10, 'other'],
    ['same', 11, 11, 'line 11'], ['same', 12, 12, 'line 12'], ['same', 13, 13, 'line 13'],
    ['skipped', undefined, undefined, 17],
  ]);
});

test('equal texts have no rows', () => {
  assert.deepEqual(diffRows('a\nb', 'a\nb'), []);
  assert.deepEqual(diffRows('', ''), []);
});

test('files of a package are compared by path', () => {
  const version = { 'a.py': 'x', 'b.py': 'same', 'c.py': 'gone' };
  const edited = { 'a.py': 'y', 'b.py': 'same', 'd/__init__.py': '' };
  const rows = sourceRows(version, edited).map(({ kind, path, note, text: line }) => [kind, path, note ?? line]);
  assert.deepEqual(rows, [
    ['file', 'a.py', ''], ['block', 'a.py', undefined], ['removed', 'a.py', 'x'], ['added', 'a.py', 'y'],
    ['file', 'c.py', 'only in the version'], ['block', 'c.py', undefined], ['removed', 'c.py', 'gone'], ['added', 'c.py', ''],
    ['file', 'd/__init__.py', 'only in the editor'],
  ]);
  assert.deepEqual(sourceRows(version, version), []);
  assert.deepEqual(sourceRows('x', 'y').map(({ kind, path }) => [kind, path]), [['block', ''], ['removed', ''], ['added', '']]);
});

test('restoring every block gives the text of the version', () => {
  const next = randomIntegers(7);
  for (let round = 0; round < 500; round += 1) {
    const list = () => Array.from({ length: next(12) }, () => `${next(4)}`).join('\n');
    const version = list();
    let edited = list();
    for (let steps = 0; ; steps += 1) {
      const difference = diffRows(version, edited).find(({ kind }) => kind === 'block');
      if (!difference) break;
      assert.ok(steps < 30, JSON.stringify([version, edited]));
      edited = restoreBlock(version, edited, difference.block);
    }
    assert.equal(edited, version);
  }
});
