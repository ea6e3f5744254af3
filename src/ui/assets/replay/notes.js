// The dialog for the notes on a run and on tokens of its answer. The list of notes is updated without a reload.
import { fetchApi, runPath, sendJson } from '../api.js';
import { openSaveDialog } from '../dialogs.js';
import { h, toast } from '../dom.js';
import { reloadContents } from '../fragments.js';

/** Opens the dialog with the note on a token, or on the run if `token` is negative. `onChanged()` is called after the list has changed. */
export async function editNote(id, token, onChanged) {
  const path = `${runPath(id)}/notes`;
  const { notes } = await (await fetchApi(path)).json();
  const field = h('textarea', { rows: 4, maxlength: 10000, name: 'text', autofocus: true });
  const place = h('select', { name: 'place' }, h('option', { value: '' }, 'the run'), token < 0 ? '' : h('option', { value: String(token) }, `token ${token + 1}`));
  place.value = token < 0 ? '' : String(token);
  const showNote = () => { field.value = notes.find((note) => String(note.position ?? '') === place.value)?.text ?? ''; };
  place.addEventListener('change', showNote);
  showNote();
  const form = openSaveDialog({
    name: 'note',
    title: 'Note',
    fields: [h('label', {}, 'On', place), h('label', {}, 'Text; empty to remove the note', field)],
    save: async () => {
      const note = { text: field.value, position: place.value === '' ? null : Number(place.value) };
      await sendJson(path, note, { method: 'PUT' });
      toast(field.value.trim() ? 'Note saved' : 'Note removed');
      await reloadContents(['[data-notes]'], 'Saved', onChanged);
    },
  });
  form.querySelector('.primary').title = 'Ctrl+Enter';
  field.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
}
