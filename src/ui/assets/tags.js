// The dialog that changes the tags of runs, and the links to a tag's runs.
import { base, fetchApi, h, toast } from './dom.js';

/** Returns the filter for the runs of a tag. */
const filter = (tag) => (/\s/.test(tag) ? `tag:"${tag}"` : `tag:${tag}`);

/** Returns the links of tags, as rendered by the server. */
export const links = (tags) => tags.map((tag) => h('a', { class: 'tag', href: `${base}/runs?${new URLSearchParams({ q: filter(tag) })}`, 'data-q': filter(tag) }, tag));

/** Returns the tags that an element shows. */
export const tagsIn = (element) => [...element.querySelectorAll('.tag')].map((link) => link.textContent);

/** Opens the dialog for runs `[{id, tags}]`. `changed(runs)` receives the saved tags, `[{run_id, tags}]`. */
export function editTags(runs, changed) {
  const counts = new Map();
  for (const tag of runs.flatMap((run) => run.tags)) counts.set(tag, (counts.get(tag) ?? 0) + 1);
  const field = h('input', { type: 'text', autocomplete: 'off', spellcheck: 'false', maxlength: '400', placeholder: 'interesting, to check' });
  const problem = h('p', { class: 'form-error', role: 'alert' });
  const kept = [...counts].map(([tag, count]) => {
    const check = h('input', { type: 'checkbox', value: tag });
    check.checked = true;
    // A tag of some of the runs is neither added nor removed until its checkbox is used.
    check.indeterminate = count < runs.length;
    return h('label', { class: 'check' }, check, tag);
  });
  const save = h('button', { value: 'save', class: 'primary' }, 'Save');
  const form = h('form', { method: 'dialog', class: 'dialog-form' },
    h('h2', { id: 'tags-title' }, runs.length === 1 ? 'Tags of this run' : `Tags of ${runs.length} runs`),
    kept.length ? h('fieldset', {}, h('legend', {}, 'Keep'), kept) : '',
    h('label', {}, 'Add, separated by commas', field),
    problem,
    h('p', { class: 'links' }, save, ' ', h('button', { value: 'cancel', formnovalidate: true }, 'Cancel')));
  const dialog = h('dialog', { class: 'dialog', 'data-tags-dialog': true, 'aria-labelledby': 'tags-title' }, form);
  form.addEventListener('submit', async (event) => {
    if (event.submitter?.value === 'cancel') return;
    event.preventDefault();
    const checkboxes = [...form.querySelectorAll('[type=checkbox]')].filter((check) => !check.indeterminate);
    const add = [...field.value.split(','), ...checkboxes.filter((check) => check.checked && counts.get(check.value) < runs.length).map((check) => check.value)];
    const change = {
      runs: runs.map((run) => run.id),
      add: add.map((tag) => tag.trim()).filter(Boolean),
      remove: checkboxes.filter((check) => !check.checked).map((check) => check.value),
    };
    save.disabled = true;
    problem.textContent = '';
    try {
      const response = await fetchApi('/api/v1/runs/tags', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(change) });
      changed((await response.json()).runs);
      dialog.close();
      toast('Tags saved');
    } catch (error) {
      problem.textContent = `Not saved: ${error.message}`;
    } finally {
      save.disabled = false;
    }
  });
  dialog.addEventListener('close', () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  field.focus();
}
