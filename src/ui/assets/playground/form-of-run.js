// The values of the playground's form for a recorded run.
import { fetchApi, runPath } from '../api.js';
import { fetchItems } from '../replay/events.js';
import { Run } from '../replay/run.js';
import { extraFields, formOf } from './request.js';

/**
 * Loads a run and returns the values of its form, and its summary, which is null if it could not be loaded. If `at` is an event,
 * the form continues the text at that event, followed by `next`.
 */
export async function formOfRun(id, { at = null, next = '' } = {}) {
  const [summary, items] = await Promise.all([
    fetchApi(runPath(id)).then((response) => response.json()).then(({ run }) => run).catch(() => null),
    fetchItems(id, { from: 0, to: 1 }),
  ]);
  const prompt = items.find((item) => item.kind === 'event')?.details?.prompt;
  const values = formOf(prompt, summary);
  if (at !== null) {
    const raw = (await textAt(id, at)) + next;
    Object.assign(values, { tab: 'raw', raw, tools: '', schema: '', extra: extraFields(prompt, true) });
  }
  return { values, summary };
}

/** Returns the text of a run at event `n`: prompt and answer. */
async function textAt(id, n) {
  const run = await Run.load(id);
  return run.sequence(n).map((row) => run.text(row)).join('');
}
