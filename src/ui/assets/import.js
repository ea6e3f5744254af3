// Import of exported runs: posts the documents of files that the user chooses, or drops on the run list, to `/ingest`.
import { fetchApi } from './api.js';
import { h } from './dom.js';

/** Returns the reason why a document cannot be imported, or ''. Pure. */
export function importProblem(text) {
  try {
    const body = JSON.parse(text);
    if (body && typeof body === 'object' && !Array.isArray(body) && body.request) return '';
    return 'it is not an exported run: the field "request" is missing';
  } catch (error) {
    return /^\s*</.test(text) ? 'it is an HTML file; export the run as JSON to import it' : `it is not JSON: ${error.message}`;
  }
}

/** Returns the documents of a file, one, or one per line of a file of JSON lines, as `{text, line}` with the number of the line. Pure. */
export function documentsIn(name, text) {
  const texts = name.endsWith('.jsonl') ? text.split('\n') : [text];
  return texts.map((text, i) => ({ text, line: i + 1 })).filter(({ text }) => text.trim());
}

/** Describes the result for a file of `total` runs, of which `stored` were imported. `problem` is an empty text or the error of the next run. Pure. */
export function resultText(name, stored, total, problem) {
  if (!problem) return `${name}: ${total > 1 ? `${total} runs ` : ''}imported`;
  return stored ? `${name}: only ${stored} of ${total} runs imported: ${problem}` : `${name} was not imported: ${problem}`;
}

/** Posts the documents of files. `show(lines, isDone)` is called with one line of text per file. Returns the number of imported runs. */
async function importFiles(files, show) {
  const lines = [];
  let stored = 0;
  for (const file of files) {
    show([...lines, `${file.name}: importing…`], false);
    let [total, storedOfFile, line, problem] = [1, 0, 1, ''];
    try {
      const documents = documentsIn(file.name, await file.text());
      total = documents.length;
      if (!total) problem = 'it is empty';
      for (const { text, line: number } of documents) {
        line = number;
        problem = importProblem(text);
        if (problem) break;
        await fetchApi('/ingest', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: text });
        storedOfFile += 1;
      }
    } catch (error) {
      problem = error.message;
    }
    if (problem && total > 1) problem = `line ${line}: ${problem}`;
    lines.push(resultText(file.name, storedOfFile, total, problem));
    stored += storedOfFile;
  }
  show(lines, true);
  return stored;
}

/** Imports files that are chosen with `button` or dropped on the page, and shows the results in `status`. `done()` is called if a run was imported. */
export function listenForFiles(button, status, done) {
  const input = h('input', { type: 'file', multiple: true, accept: '.json,.jsonl,application/json', hidden: true });
  button.after(input);
  const show = (lines, isDone) => {
    status.hidden = false;
    status.setAttribute('aria-busy', String(!isDone));
    status.replaceChildren(...lines.map((line) => h('div', {}, line)));
  };
  const importAll = async (files) => {
    if (files.length && await importFiles(files, show)) done();
  };
  button.addEventListener('click', () => input.click());
  input.addEventListener('change', async () => {
    await importAll([...input.files]);
    input.value = '';
  });
  const hasFiles = (event) => event.dataTransfer?.types.includes('Files');
  document.addEventListener('dragover', (event) => { if (hasFiles(event)) event.preventDefault(); });
  document.addEventListener('drop', (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    importAll([...event.dataTransfer.files]);
  });
}
