// Saved filters of the run list: the dialog that saves a filter under a name, and their removal.
import { base, fetchApi, sendJson } from './api.js';
import { openSaveDialog } from './dialogs.js';
import { h, toast } from './dom.js';

const PATH = '/api/v1/filters';

/** Returns the link of a filter with its remove button, like those that the server renders. */
function filterElement({ name, q }) {
  return h('span', { class: 'saved', 'data-saved': name },
    h('a', { href: `${base}/runs?${new URLSearchParams({ q })}`, 'data-q': q, 'aria-current': 'true' }, name),
    h('button', { type: 'button', class: 'link', 'data-remove-filter': true, 'aria-label': `Remove the filter ${name}`, title: 'Remove this filter' }, '×'));
}

/** Opens the dialog that saves the filter `q`. `list` is the element with the saved filters. */
export function saveFilter(q, list) {
  const field = h('input', { type: 'text', required: true, maxlength: '64', autocomplete: 'off', spellcheck: 'false', autofocus: true });
  openSaveDialog({
    name: 'filter',
    title: 'Save this filter',
    fields: [h('p', {}, h('code', {}, q)), h('label', {}, 'Name', field)],
    save: async () => {
      const saved = await (await sendJson(PATH, { name: field.value, q })).json();
      list.querySelector(`[data-saved="${CSS.escape(saved.name)}"]`)?.remove();
      list.append(filterElement(saved));
      toast('Filter saved');
    },
  });
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
