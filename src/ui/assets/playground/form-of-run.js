// The values of the playground's form for a recorded run.
import { fetchApi } from '../dom.js';
import { Run } from '../replay/run.js';
import { extraFields, formOf } from '../request.js';

/**
 * Loads a run and returns the values of its form, and its summary, which is null if it could not be loaded. If `at` is an event,
 * the form continues the text at that event, followed by `next`.
 */
export async function formOfRun(id, { at = null, next = '' } = {}) {
  const path = `/api/v1/runs/${encodeURIComponent(id)}`;
  const [summary, items] = await Promise.all([
    fetchApi(path).then((response) => response.json()).then(({ run }) => run).catch(() => null),
    fetchApi(`${path}/events?from=0&to=1`, { headers: { Accept: 'application/x-ndjson' } }).then((response) => response.text()),
  ]);
  const prefilled = items.split('\n').filter(Boolean).map((line) => JSON.parse(line)).find((item) => item.kind === 'event');
  const prompt = prefilled?.details?.prompt;
  const values = formOf(prompt, summary);
  if (at !== null) {
    const raw = (await textAt(path, at)) + next;
    Object.assign(values, { tab: 'raw', raw, tools: '', schema: '', extra: extraFields(prompt, true) });
  }
  return { values, summary };
}

/** Returns the text of a run at event `n`: prompt and answer. */
async function textAt(path, n) {
  const columns = await fetchApi(`${path}/columns`);
  const run = Run.stored(await columns.arrayBuffer());
  return run.sequence(n).map((row) => run.text(row)).join('');
}
