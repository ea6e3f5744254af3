// The source of a mod in the editor: one text, or the files of a package, of which one is displayed.
import { h } from './dom.js';

/** Returns the source of a mod that is one text. */
export function singleFile(editor) {
  return {
    get value() { return editor.text; },
    set value(text) { editor.text = text; },
    replace: (_, text) => { editor.text = text; },
    mark: (problems) => editor.mark(problems),
    go: ({ line }) => editor.go(line),
  };
}

/**
 * Returns the source of a package, `{path: text}`. `bar` gets a list of the files, and buttons that add and remove files.
 * `changed()` is called after a file was added or removed, and after the source was replaced.
 */
export function packageFiles(bar, files, editor, { canSave, changed }) {
  let texts = new Map(Object.entries(files));
  let path = null;
  let problems = [];
  const select = h('select', { onchange: () => show(select.value) });
  const newPath = h('input', { placeholder: 'folder/name.py', 'aria-label': 'Path of the new file', pattern: '([A-Za-z_][A-Za-z0-9_]*/)*[A-Za-z_][A-Za-z0-9_]*\\.py', title: 'Python identifiers separated by /, and .py', maxlength: '200', autocomplete: 'off', spellcheck: 'false', autocapitalize: 'off' });
  const remove = h('button', { type: 'button', onclick: () => {
    texts.delete(path);
    path = null;
    list();
    show([...texts.keys()].sort()[0]);
    changed();
  } }, 'Remove file');
  const add = h('button', { type: 'button', onclick: () => {
    const next = newPath.value.trim();
    if (!next || !newPath.reportValidity()) return newPath.focus();
    if (!texts.has(next)) texts.set(next, '');
    newPath.value = '';
    list();
    show(next);
    changed();
  } }, 'Add file');
  // Enter in the field adds the file and does not save the mod.
  newPath.addEventListener('keydown', (event) => { if (event.key === 'Enter') { event.preventDefault(); add.click(); } });
  bar.replaceChildren(h('label', {}, 'File ', select), ...(canSave ? [remove, newPath, add] : []));

  function list() {
    select.replaceChildren(...[...texts.keys()].sort().map((name) => h('option', { value: name }, name)));
    remove.disabled = texts.size < 2;
  }

  /** Stores the text of the displayed file. */
  function keep() {
    if (path !== null) texts.set(path, editor.text);
  }

  function show(next) {
    keep();
    if (next !== path) editor.show(next, texts.get(next));
    path = next;
    select.value = next;
    mark();
  }

  const mark = () => editor.mark(problems.filter(({ file }) => file === path));

  list();
  show(select.value);
  return {
    get value() {
      keep();
      return Object.fromEntries([...texts].sort(([a], [b]) => (a < b ? -1 : 1)));
    },
    set value(next) {
      texts = new Map(Object.entries(next));
      path = null;
      editor.forget();
      list();
      show(select.value);
      changed();
    },
    /** Shows a file with another text; adds the file if it is missing. */
    replace(name, text) {
      if (!texts.has(name)) {
        texts.set(name, '');
        list();
      }
      show(name);
      editor.text = text;
    },
    mark(found) {
      problems = found;
      mark();
    },
    go({ file, line }) {
      if (file && texts.has(file)) show(file);
      editor.go(line);
    },
  };
}
