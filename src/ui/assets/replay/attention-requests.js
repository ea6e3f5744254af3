// Requests for the attention of a run.
import { fetchApi, runPath } from '../api.js';

/** Returns the query parameters of the API for a view such as `mean`, `layer:3` or `head:3:5`. Pure. */
export function viewQuery(name) {
  const [view, layer, head] = name.split(':');
  return { view, ...(layer !== undefined && { layer }), ...(head !== undefined && { head }) };
}

/** Loads the attention of a run for these query parameters. */
export async function fetchAttention(id, query, signal) {
  const response = await fetchApi(`${runPath(id)}/attention?${new URLSearchParams(query)}`, { signal });
  return (await response.json()).attention;
}
