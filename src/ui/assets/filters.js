// Saved filters of the run list: the dialog that saves a filter under a name, and their removal.
import { base, fetchApi, h, saveOnSubmit, sendJson, toast } from './dom.js';

const PATH = '/api/v1/filters';

/** Returns the link of a filter with its remove button, like those that the server renders. */
function filterElement({ name, q }) {
  return h('span', { class: 'saved', 'data-saved': name },
    h('a', { href: `${base}/runs?${new URLSearchParams({ q })}`, 'data-q': q, 'aria-current': 'true' }, name),
    h('button', { type: 'button', class: 'link', 'data-remove-filter': true, 'aria-label': `Remove the filter ${name}`, title: 'Remove this filter' }, '×'));
}

/** Opens the dialog that saves the filter `q`. `list` is the element with the saved filters. */
export function saveFilter(q, list) {
  const field = h('input', { type: 'text', required: true, maxlength: '64', autocomplete: 'off', spellcheck: 'false' });
  const form = h('form', { method: 'dialog', class: 'dialog-form' },
    h('h2', { id: 'filter-title' }, 'Save this filter'),
    h('p', {}, h('code', {}, q)),
    h('label', {}, 'Name', field),
    h('p', { class: 'form-error', role: 'alert' }),
    h('p', { class: 'links' }, h('button', { value: 'save', class: 'primary' }, 'Save'), ' ', h('button', { value: 'cancel', formnovalidate: true }, 'Cancel')));
  const dialog = h('dialog', { class: 'dialog', 'data-filter-dialog': true, 'aria-labelledby': 'filter-title' }, form);
  saveOnSubmit(form, async () => {
    const saved = await (await sendJson(PATH, { name: field.value, q })).json();
    list.querySelector(`[data-saved="${CSS.escape(saved.name)}"]`)?.remove();
    list.append(filterElement(saved));
    toast('Filter saved');
  });
  dialog.addEventListener('close', () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  field.focus();
}

/** Removes a saved filter and its element. */
export async function removeFilter(element) {
  try {
    await fetchApi(`${PATH}/${encodeURIComponent(element.dataset.saved)}`, { method: 'DELETE' });
    const next = element.nextElementSibling ?? element.previousElementSibling;
    element.remove();
    (next?.querySelector('a') ?? document.querySelector('#q')).focus();
    toast('Filter removed');
  } catch (error) {
    toast(`Not removed: ${error.message}`);
  }
}
