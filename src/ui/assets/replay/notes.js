// The dialog for the notes on a run and on tokens of its answer. The list of notes is updated without a reload.
import { fetchApi, h, saveOnSubmit, sendJson, toast } from '../dom.js';
import { reloadElement } from '../refresh.js';

/** Opens the dialog with the note on a token, or on the run if `token` is negative. `onChanged()` is called after the list has changed. */
export async function editNote(id, token, onChanged) {
  const path = `/api/v1/runs/${encodeURIComponent(id)}/notes`;
  const { notes } = await (await fetchApi(path)).json();
  const field = h('textarea', { rows: 4, maxlength: 10000, name: 'text' });
  const place = h('select', { name: 'place' }, h('option', { value: '' }, 'the run'), token < 0 ? '' : h('option', { value: String(token) }, `token ${token + 1}`));
  place.value = token < 0 ? '' : String(token);
  const showNote = () => { field.value = notes.find((note) => String(note.position ?? '') === place.value)?.text ?? ''; };
  place.addEventListener('change', showNote);
  showNote();
  const save = h('button', { value: 'save', class: 'primary', title: 'Ctrl+Enter' }, 'Save');
  const form = h('form', { method: 'dialog', class: 'dialog-form' },
    h('h2', { id: 'note-title' }, 'Note'),
    h('label', {}, 'On', place),
    h('label', {}, 'Text; empty to remove the note', field),
    h('p', { class: 'form-error', role: 'alert' }),
    h('p', { class: 'links' }, save, ' ', h('button', { value: 'cancel', formnovalidate: true }, 'Cancel')));
  const dialog = h('dialog', { class: 'dialog', 'data-note-dialog': true, 'aria-labelledby': 'note-title' }, form);
  field.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) form.requestSubmit(save);
  });
  saveOnSubmit(form, async () => {
    const note = { text: field.value, position: place.value === '' ? null : Number(place.value) };
    await sendJson(path, note, { method: 'PUT' });
    toast(field.value.trim() ? 'Note saved' : 'Note removed');
    await reloadElement('[data-notes]');
    onChanged();
  });
  dialog.addEventListener('close', () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  field.focus();
}
