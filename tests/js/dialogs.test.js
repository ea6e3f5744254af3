// Dialogs.
import test from 'node:test';
import assert from 'node:assert/strict';
import { openConfirmDialog } from '../../src/ui/assets/dialogs.js';

test('dialog is confirmed by its button, and not by Escape after an earlier answer', async () => {
  const dialog = Object.assign(new EventTarget(), { returnValue: '', showModal() {} });
  const close = (value) => {
    const isAccepted = openConfirmDialog(dialog, 'remove');
    if (value !== undefined) dialog.returnValue = value;
    dialog.dispatchEvent(new Event('close'));
    return isAccepted;
  };
  assert.deepEqual([await close('remove'), await close(), await close('cancel')], [true, false, false]);
});
