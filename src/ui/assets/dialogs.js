// Dialogs with a form or a question, apart from the helpers that all pages load.
import { h } from './dom.js';

/**
 * Calls `save()` when the form in a dialog is submitted, except by its button `cancel`, and closes the dialog. If `save` throws
 * an error, the form shows it and stays open.
 */
export function saveOnSubmit(form, save) {
  const button = form.querySelector('.primary');
  const problem = form.querySelector('[role=alert]');
  form.addEventListener('submit', async (event) => {
    if (event.submitter?.value === 'cancel') return;
    event.preventDefault();
    button.disabled = true;
    problem.textContent = '';
    try {
      await save();
      form.closest('dialog').close();
    } catch (error) {
      problem.textContent = `Not saved: ${error.message}`;
    } finally {
      button.disabled = false;
    }
  });
}

/**
 * Opens a dialog with the buttons “Save” and “Cancel”, which is removed when it is closed. It has the attribute
 * `data-{name}-dialog`, and its title the id `{name}-title`; `fields` are the elements between title and buttons; the one with `autofocus` gets the focus. `save()` is
 * called as by `saveOnSubmit`. Returns the form.
 */
export function openSaveDialog({ name, title, fields, save }) {
  const form = h('form', { method: 'dialog', class: 'dialog-form' },
    h('h2', { id: `${name}-title` }, title),
    fields,
    h('p', { class: 'form-error', role: 'alert' }),
    h('p', { class: 'links' }, h('button', { value: 'save', class: 'primary' }, 'Save'), ' ', h('button', { value: 'cancel', formnovalidate: true }, 'Cancel')));
  const dialog = h('dialog', { class: 'dialog', [`data-${name}-dialog`]: true, 'aria-labelledby': `${name}-title` }, form);
  saveOnSubmit(form, save);
  dialog.addEventListener('close', () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return form;
}

/** Opens a dialog that asks the user. Returns true if it is closed with the button `value`. */
export function openConfirmDialog(dialog, value) {
  // Escape does not change the value, which may be that of an earlier answer.
  dialog.returnValue = '';
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener('close', () => resolve(dialog.returnValue === value), { once: true });
  });
}
