// The keyboard shortcuts and their names in the help.
import test from 'node:test';
import assert from 'node:assert/strict';
import { keyLabel } from '../../src/ui/assets/help.js';
import { SHORTCUTS, actionOf, keyOf } from '../../src/ui/assets/keys.js';

test('each key has one function per page', () => {
  const rows = SHORTCUTS.flatMap(([, section]) => section);
  const names = new Set(rows.map(([, , , page]) => page).filter(Boolean));
  // The playground contains a replay.
  for (const pages of [...[...names].map((name) => [name]), ['playground', 'replay']]) {
    const keys = rows.filter(([, , , page]) => !page || pages.includes(page)).flatMap(([key]) => key);
    assert.deepEqual(keys.filter((key, i) => keys.indexOf(key) !== i), [], `${pages}`);
  }
  assert.equal(actionOf('j', ['runs']), 'nextRow');
  assert.equal(actionOf('j', ['replay']), 'nextRun');
  assert.equal(actionOf('?', ['anywhere']), 'help');
  assert.equal(actionOf('z', ['replay']), null);
  assert.equal(keyLabel('Shift+ArrowRight'), 'Shift →');
  assert.equal(keyLabel('+'), '+');
});

test('AltGr and Option are part of a typed character, and other keys with Alt are left to the browser', () => {
  const press = (key, modifiers) => keyOf({ key, shiftKey: false, ctrlKey: false, metaKey: false, altKey: false, ...modifiers, getModifierState: (name) => name === 'AltGraph' && Boolean(modifiers.altGraph) });
  assert.equal(press(']', { ctrlKey: true, altKey: true, altGraph: true }), ']', 'AltGr on Windows');
  assert.equal(press(']', { altGraph: true }), ']', 'AltGr on Linux');
  assert.equal(press('[', { altKey: true }), '[', 'Option on a Mac');
  assert.equal(press('e', { altKey: true }), null);
  assert.equal(press('[', { ctrlKey: true, altKey: true }), null);
  assert.equal(press('k', { metaKey: true }), 'Ctrl+k');
  assert.equal(press('ArrowLeft', { shiftKey: true }), 'Shift+ArrowLeft');
});
