// The bundled sample run, which the demo model generated with a mod. It is stored by `/ingest`, like a run of another engine.
import { base, fetchUrl, sendJson } from './api.js';
import { toast } from './dom.js';

/** Returns the document with a new id and with times as if the run had just started. Pure. */
export function asNewRun(text, id, now) {
  const start = Date.parse(JSON.parse(text).request.created_at);
  const shift = (time) => new Date(Date.parse(time) - start + now).toISOString();
  const document = JSON.parse(text, (key, value) => (['created_at', 'completed_at'].includes(key) && value ? shift(value) : value));
  document.request.request_id = id;
  return document;
}

/** Stores the sample run and opens its replay. */
export async function openSample(button) {
  button.disabled = true;
  try {
    const response = await fetchUrl(new URL('./sample-run.json', import.meta.url));
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
    const id = `sample-${Date.now().toString(36)}`;
    const document = asNewRun(await response.text(), id, Date.now());
    await sendJson('/ingest', document);
    location.assign(`${base}/runs/${id}`);
  } catch (error) {
    toast(`The sample run was not stored: ${error.message}`);
    button.disabled = false;
  }
}
