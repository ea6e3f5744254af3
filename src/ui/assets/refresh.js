// Parts of a page that the server renders again while an experiment runs. Only parts that changed are replaced, so that
// focus, selection and scroll position are kept.
import { fetchUrl } from './dom.js';
import { showLocalTime } from './shell.js';

/** Time between two requests in ms. */
const INTERVAL_MS = 1000;

const FOCUSABLE = 'a[href], button, input';

/** Replaces the parts of `place` that differ from those of `next`, or all content if `next` has other parts. */
export function update(place, next) {
  next.querySelectorAll('time[datetime]').forEach(showLocalTime);
  for (const box of next.querySelectorAll('[data-select]')) {
    const old = place.querySelector(`[data-select][value="${CSS.escape(box.value)}"]`);
    box.checked = Boolean(old?.checked);
  }
  const keys = (root) => [...root.querySelectorAll('[data-part]')].map((part) => part.dataset.part);
  const [before, after] = [keys(place), keys(next)];
  if (before.join('\n') !== after.join('\n')) {
    place.replaceChildren(...next.childNodes);
    return;
  }
  for (const part of next.querySelectorAll('[data-part]')) {
    const old = place.querySelector(`[data-part="${CSS.escape(part.dataset.part)}"]`);
    if (old.isEqualNode(part)) continue;
    const focused = [...old.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement);
    old.replaceWith(part);
    if (focused >= 0) [...part.querySelectorAll(FOCUSABLE)][focused]?.focus();
  }
}

/** Loads the page again; `fragment` is the name of the part that the server renders alone, or null for the whole page. */
export async function refresh(place, fragment) {
  const response = await fetchUrl(location.href, { headers: fragment ? { 'X-Fragment': fragment } : {} });
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
  const next = document.createElement('div');
  const html = await response.text(); // the server's own escaped template, same origin
  if (fragment) next.innerHTML = html;
  else {
    const page = new DOMParser().parseFromString(html, 'text/html');
    next.append(...page.querySelector('[data-list]').childNodes);
  }
  update(place, next);
}

/** Refreshes a place every second while `isRunning()` and while the page is visible. */
export function refreshWhile(place, { fragment, isRunning, changed = () => {} }) {
  setInterval(async () => {
    if (document.hidden || !isRunning()) return;
    try {
      await refresh(place, fragment);
      changed();
    } catch { /* the next refresh tries again */ }
  }, INTERVAL_MS);
}

/** Moves the focus by a number of rows. */
export function moveFocus(place, step) {
  const all = [...place.querySelectorAll('[data-row]')];
  if (!all.length) return false;
  const row = document.activeElement?.closest?.('tr');
  const at = all.findIndex((link) => link === document.activeElement || (row && link.closest('tr') === row));
  const to = at < 0 ? (step > 0 ? 0 : all.length - 1) : Math.max(0, Math.min(all.length - 1, at + step));
  all[to].focus();
  all[to].closest('tr').scrollIntoView({ block: 'nearest' });
  return true;
}
