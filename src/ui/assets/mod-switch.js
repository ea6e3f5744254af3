// Buttons that disable and enable mods.
import { fetchApi } from './api.js';
import { toast } from './dom.js';

for (const button of document.querySelectorAll('[data-switch]')) {
  button.hidden = false;
  button.addEventListener('click', async () => {
    const { switch: name, to } = button.dataset;
    button.disabled = true;
    try {
      await fetchApi(`/v1/mods/${encodeURIComponent(name)}/${to}`, { method: 'POST' });
      location.reload();
    } catch (error) {
      button.disabled = false;
      toast(`Not changed: ${error.message}`);
    }
  });
}
