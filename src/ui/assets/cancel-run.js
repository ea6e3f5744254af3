// The request that cancels a run.
import { fetchApi, runPath } from './api.js';

/** Cancels a run. Returns false if it is not active any more. */
export async function cancelRun(id) {
  try {
    await fetchApi(`${runPath(id)}/cancel`, { method: 'POST' });
    return true;
  } catch (error) {
    if (error.status === 409) return false;
    throw error;
  }
}
