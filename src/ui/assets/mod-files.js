// The source of a mod in its editor: one text, or the files of a package, of which the editor shows one. Both are objects with
// the property `value` and the methods `replace(path, text)`, `mark(problems)` and `go({file, line})`; those of a package have
// `remove(path)`, too.
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
 * Returns the source of a package, whose `value` is `{path: text}`. Adds a list of the files to `bar`, and buttons that add and
 * remove files. `changed()` is called after a file was added or removed, and after `value` was set.
 */
export function packageFiles(bar, files, editor, { canSave, changed }) {
  let texts = new Map(Object.entries(files));
  /** Path of the shown file. */
  let path = null;
  let problems = [];
  const select = h('select', { onchange: () => showFile(select.value) });
  const newPathField = h('input', { placeholder: 'folder/name.py', 'aria-label': 'Path of the new file', pattern: '([A-Za-z_][A-Za-z0-9_]*/)*[A-Za-z_][A-Za-z0-9_]*\\.py', title: 'Python identifiers separated by /, and .py', maxlength: '200', autocomplete: 'off', spellcheck: 'false', autocapitalize: 'off' });
  const remove = h('button', { type: 'button', onclick: () => removeFile(path) }, 'Remove file');
  const add = h('button', { type: 'button', onclick: () => {
    const added = newPathField.value.trim();
    if (!added || !newPathField.reportValidity()) return newPathField.focus();
    if (!texts.has(added)) texts.set(added, '');
    newPathField.value = '';
    updateList();
    showFile(added);
    changed();
  } }, 'Add file');
  // Enter in the field adds the file; otherwise, it would save the mod.
  newPathField.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter') return;
    event.preventDefault();
    add.click();
  });
  bar.replaceChildren(h('label', {}, 'File ', select), ...(canSave ? [remove, newPathField, add] : []));

  function updateList() {
    select.replaceChildren(...[...texts.keys()].sort().map((name) => h('option', { value: name }, name)));
    remove.disabled = texts.size < 2;
  }

  function removeFile(removed) {
    readText();
    texts.delete(removed);
    if (path === removed) path = null;
    updateList();
    showFile(path ?? [...texts.keys()].sort()[0]);
    changed();
  }

  /** Reads the text of the shown file from the editor. */
  function readText() {
    if (path !== null) texts.set(path, editor.text);
  }

  function showFile(pathToShow) {
    readText();
    if (pathToShow !== path) editor.show(pathToShow, texts.get(pathToShow));
    path = pathToShow;
    select.value = path;
    markProblems();
  }

  const markProblems = () => editor.mark(problems.filter(({ file }) => file === path));

  updateList();
  showFile(select.value);
  return {
    get value() {
      readText();
      return Object.fromEntries([...texts].sort(([a], [b]) => (a < b ? -1 : 1)));
    },
    set value(next) {
      texts = new Map(Object.entries(next));
      path = null;
      editor.forget();
      updateList();
      showFile(select.value);
      changed();
    },
    /** Shows a file with another text; adds the file if it is missing. */
    replace(replaced, text) {
      if (!texts.has(replaced)) {
        texts.set(replaced, '');
        updateList();
      }
      showFile(replaced);
      editor.text = text;
    },
    /** Removes a file that only the editor has. */
    remove: removeFile,
    mark(found) {
      problems = found;
      markProblems();
    },
    go({ file, line }) {
      if (file && texts.has(file)) showFile(file);
      editor.go(line);
    },
  };
}
