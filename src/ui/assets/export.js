// Export of several runs: one file of JSON lines, or one HTML file for each run.
import { base, fetchApi, runPath } from './api.js';
import { h, toast } from './dom.js';

const MAX_PARALLEL_REQUESTS = 4;

/** Downloads a file. */
function download(href, name) {
  const link = h('a', { href, download: name, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
}

/** Returns the JSON documents of runs in the order of `ids`. `onProgress(count)` is called after each of them. */
async function fetchDocuments(ids, onProgress) {
  const texts = Array(ids.length);
  let next = 0;
  let done = 0;
  const load = async () => {
    while (next < ids.length) {
      const index = next;
      next += 1;
      const response = await fetchApi(runPath(ids[index]));
      // Each document is one line of the exported file.
      texts[index] = (await response.text()).replaceAll('\n', ' ');
      done += 1;
      onProgress(done);
    }
  };
  await Promise.all(Array.from({ length: MAX_PARALLEL_REQUESTS }, load));
  return texts;
}

/** Downloads runs as `json` (one file) or `html` (one file for each run). */
export async function exportRuns(ids, format) {
  const sorted = [...ids].sort();
  try {
    if (format === 'html') {
      for (const id of sorted) download(`${base}/runs/${encodeURIComponent(id)}/export.html`, `${id}.html`);
    } else {
      const texts = await fetchDocuments(sorted, (done) => toast(`Exporting ${done} of ${sorted.length} runs`));
      const isOne = texts.length === 1;
      const url = URL.createObjectURL(new Blob(texts.map((text) => `${text}\n`), { type: isOne ? 'application/json' : 'application/jsonl' }));
      download(url, isOne ? `${sorted[0]}.json` : 'runs.jsonl');
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
    }
    toast(`${sorted.length} run${sorted.length === 1 ? '' : 's'} exported`);
  } catch (error) {
    toast(`Not exported: ${error.message}`);
  }
}
