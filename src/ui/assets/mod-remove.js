// The button that removes a mod, on its page.
import { base, fetchApi } from './api.js';
import { openConfirmDialog } from './dialogs.js';
import { toast } from './dom.js';

const button = document.querySelector('[data-remove]');
button.hidden = false;
button.addEventListener('click', async () => {
  if (!await openConfirmDialog(document.querySelector('[data-remove-dialog]'), 'remove')) return;
  button.disabled = true;
  try {
    await fetchApi(`/v1/mods/${encodeURIComponent(button.dataset.remove)}`, { method: 'DELETE' });
    location.assign(`${base}/mods`);
  } catch (error) {
    button.disabled = false;
    toast(`Not removed: ${error.message}`);
  }
});
