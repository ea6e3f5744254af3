// The actions on the page of a run that cancel or delete it. Their code is loaded on first use.
import { base, sendJson } from '../api.js';
import { cancelRun } from '../cancel-run.js';
import { openConfirmDialog } from '../dialogs.js';
import { toast } from '../dom.js';

/** Maximum time in which a cancelled run ends and its end is stored. */
const END_TIMEOUT_MS = 10_000;
/** Delay between two requests to delete a run that is still active. */
const RETRY_DELAY_MS = 100;

/** Cancels the run if it is active. */
async function cancel(id, isActive) {
  try {
    toast(isActive() && await cancelRun(id) ? 'Run cancelled' : 'The run has ended');
  } catch (error) {
    toast(`Not cancelled: ${error.message}`);
  }
}

/** Requests the deletion of the run. A run is active until its end is stored, so a refusal because of that is not final at once. */
async function sendDeletion(id) {
  const giveUpAt = performance.now() + END_TIMEOUT_MS;
  for (;;) {
    try {
      return await sendJson('/api/v1/deletions', { runs: [id] });
    } catch (error) {
      if (error.status !== 409 || performance.now() > giveUpAt) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_DELAY_MS));
  }
}

/** Deletes the run if the user confirms it, and opens the list. An active run is cancelled first. */
async function deleteRun(id, isActive) {
  const dialog = document.querySelector('[data-delete-dialog]');
  dialog.querySelector('[data-active]').hidden = !isActive();
  dialog.querySelector('[value=delete]').textContent = isActive() ? 'Cancel and delete' : 'Delete';
  if (!await openConfirmDialog(dialog, 'delete')) return;
  try {
    if (isActive()) await cancelRun(id);
    await sendDeletion(id);
    const q = new URL(location).searchParams.get('q');
    location.assign(`${base}/runs${q === null ? '' : `?${new URLSearchParams({ q })}`}`);
  } catch (error) {
    toast(`Not deleted: ${error.message}`);
  }
}

/** The actions by their names on the page. Each gets the id of the run and a function that returns true while it is active. */
export const runActions = { cancel, delete: deleteRun };
