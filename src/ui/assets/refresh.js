// Updates parts of a page, which the server renders again. While an experiment runs, only the parts that changed are replaced, so
// that focus, selection and scroll position are kept; such a part is an element with `data-part`.
import { fetchUrl } from './api.js';
import { toast } from './dom.js';
import { showLocalTime } from './shell.js';

const INTERVAL_MS = 1000;

const FOCUSABLE = 'a[href], button, input';

/** Replaces the parts of `container` that differ in `next`, a newer version of it; or all its content if `next` has other parts. */
function update(container, next) {
  next.querySelectorAll('time[datetime]').forEach(showLocalTime);
  for (const box of next.querySelectorAll('[data-select]')) {
    const old = container.querySelector(`[data-select][value="${CSS.escape(box.value)}"]`);
    box.checked = Boolean(old?.checked);
  }
  const partNames = (root) => [...root.querySelectorAll('[data-part]')].map((part) => part.dataset.part).join('\n');
  if (partNames(container) !== partNames(next)) {
    container.replaceChildren(...next.childNodes);
    return;
  }
  for (const part of next.querySelectorAll('[data-part]')) {
    const old = container.querySelector(`[data-part="${CSS.escape(part.dataset.part)}"]`);
    if (old.isEqualNode(part)) continue;
    const focusedIndex = [...old.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement);
    old.replaceWith(part);
    if (focusedIndex >= 0) [...part.querySelectorAll(FOCUSABLE)][focusedIndex]?.focus();
  }
}

/** Replaces the element with a selector by its newer version, after the user has saved a change of it. */
export async function reloadElement(selector) {
  try {
    const response = await fetchUrl(location.href);
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
    const next = new DOMParser().parseFromString(await response.text(), 'text/html').querySelector(selector);
    next.querySelectorAll('time[datetime]').forEach(showLocalTime);
    document.querySelector(selector).replaceWith(next);
  } catch (error) {
    toast(`Saved, but the page could not be updated: ${error.message}`);
  }
}

/** Number of the newest request; the responses of earlier ones are older and discarded. */
let requestId = 0;

/** Loads the page again and updates `container`. `fragment` is the name of its template if the server can render it alone, or null. */
export async function refresh(container, fragment) {
  requestId += 1;
  const id = requestId;
  const response = await fetchUrl(location.href, { headers: fragment ? { 'X-Fragment': fragment } : {} });
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
  const next = document.createElement('div');
  const html = await response.text(); // the server's own escaped template, same origin
  if (id !== requestId) return;
  if (fragment) next.innerHTML = html;
  else {
    const page = new DOMParser().parseFromString(html, 'text/html');
    next.append(...page.querySelector('[data-list]').childNodes);
  }
  update(container, next);
}

/**
 * Refreshes `container` while `isRunning()` returns true and the page is visible, a second after the previous refresh.
 * `changed()` is called after each one.
 */
export async function refreshWhile(container, { fragment, isRunning, changed = () => {} }) {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
    if (document.hidden || !isRunning()) continue;
    try {
      await refresh(container, fragment);
      changed();
    } catch { /* the next refresh tries again */ }
  }
}

/** Moves the focus by a number of rows of a table. Returns false if the table has no rows. */
export function moveFocus(container, step) {
  const all = [...container.querySelectorAll('[data-row]')];
  if (!all.length) return false;
  const row = document.activeElement?.closest?.('tr');
  const current = all.findIndex((link) => link === document.activeElement || (row && link.closest('tr') === row));
  const next = current < 0 ? (step > 0 ? 0 : all.length - 1) : Math.max(0, Math.min(all.length - 1, current + step));
  all[next].focus();
  all[next].closest('tr').scrollIntoView({ block: 'nearest' });
  return true;
}
