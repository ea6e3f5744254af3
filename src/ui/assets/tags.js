// Tags of runs: their links, and the dialog that changes them.
import { base, sendJson } from './api.js';
import { openSaveDialog } from './dialogs.js';
import { h, toast } from './dom.js';

/** Returns the filter of the run list for the runs with a tag. */
const filter = (tag) => (/\s/.test(tag) ? `tag:"${tag}"` : `tag:${tag}`);

/** Returns the links of tags to the runs with them, like those that the server renders. */
export const tagLinks = (tags) => tags.map((tag) => h('a', { class: 'tag', href: `${base}/runs?${new URLSearchParams({ q: filter(tag) })}`, 'data-q': filter(tag) }, tag));

/** Returns the tags that an element shows. */
export const tagsIn = (element) => [...element.querySelectorAll('.tag')].map((link) => link.textContent);

/** Opens the dialog for runs `[{id, tags}]`. `changed(runs)` receives the saved tags, `[{run_id, tags}]`. */
export function editTags(runs, changed) {
  /** Number of runs with each tag. */
  const counts = new Map();
  for (const tag of runs.flatMap((run) => run.tags)) counts.set(tag, (counts.get(tag) ?? 0) + 1);
  const field = h('input', { type: 'text', autocomplete: 'off', spellcheck: 'false', maxlength: '400', autofocus: true, placeholder: 'interesting, to check' });
  const checkboxes = [...counts].map(([tag, count]) => {
    const checkbox = h('input', { type: 'checkbox', value: tag });
    checkbox.checked = true;
    // A tag that only some of the runs have is left as it is, unless the user clicks its checkbox.
    checkbox.indeterminate = count < runs.length;
    return checkbox;
  });
  openSaveDialog({
    name: 'tags',
    title: runs.length === 1 ? 'Tags of this run' : `Tags of ${runs.length} runs`,
    fields: [
      checkboxes.length ? h('fieldset', {}, h('legend', {}, 'Keep'), checkboxes.map((checkbox) => h('label', { class: 'check' }, checkbox, checkbox.value))) : '',
      h('label', {}, 'Add, separated by commas', field),
    ],
    save: async () => {
      const decided = checkboxes.filter((checkbox) => !checkbox.indeterminate);
      const missing = decided.filter((checkbox) => checkbox.checked && counts.get(checkbox.value) < runs.length);
      const change = {
        runs: runs.map((run) => run.id),
        add: [...field.value.split(',').map((tag) => tag.trim()).filter(Boolean), ...missing.map((checkbox) => checkbox.value)],
        remove: decided.filter((checkbox) => !checkbox.checked).map((checkbox) => checkbox.value),
      };
      const response = await sendJson('/api/v1/runs/tags', change);
      changed((await response.json()).runs);
      toast('Tags saved');
    },
  });
}
