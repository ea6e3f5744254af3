// Export of several runs: one file of JSON lines, or one HTML file for each run.
import { base, fetchApi, h, toast } from './dom.js';

/** Number of runs that are loaded at the same time. */
const PARALLEL = 4;

/** Downloads a file. */
function download(href, name) {
  const link = h('a', { href, download: name, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
}

/** Returns the JSON documents of runs, in the order of their ids. */
async function documents(ids, loaded) {
  const texts = Array(ids.length);
  let next = 0;
  let done = 0;
  const load = async () => {
    while (next < ids.length) {
      const number = next++;
      const response = await fetchApi(`/api/v1/runs/${encodeURIComponent(ids[number])}`);
      // A document on one line; the line end separates it from the next one.
      texts[number] = (await response.text()).replaceAll('\n', ' ');
      loaded(++done);
    }
  };
  await Promise.all(Array.from({ length: PARALLEL }, load));
  return texts;
}

/** Exports runs as `json` or `html`. */
export async function exportRuns(ids, format) {
  const sorted = [...ids].sort();
  try {
    if (format === 'html') {
      for (const id of sorted) download(`${base}/runs/${encodeURIComponent(id)}/export.html`, `${id}.html`);
    } else {
      const texts = await documents(sorted, (done) => toast(`Exporting ${done} of ${sorted.length} runs`));
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
