// Token texts as they are displayed.
import test from 'node:test';
import assert from 'node:assert/strict';
import { displayText, pieces } from '../../src/ui/assets/replay/glyphs.js';

test('characters that hide or reorder text are shown by name', () => {
  assert.deepEqual(pieces('a\u202eb'), [{ text: 'a' }, { name: 'U+202E' }, { text: 'b' }]);
  assert.deepEqual(pieces('\u0007'), [{ name: '\u2407' }]);
  assert.deepEqual(pieces('line\n\tend'), [{ text: 'line\n\tend' }]);
  assert.deepEqual(pieces('\u{e0041}'), [{ name: 'U+E0041' }]);
  assert.equal(pieces('👩\u200d🚀').length, 1, 'a joiner inside an emoji stays');
  assert.deepEqual(pieces('\u200d'), [{ name: 'U+200D' }]);
  assert.equal(displayText(' the\n'), '␣the↵');
  assert.equal(displayText(''), '∅');
});
