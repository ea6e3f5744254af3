// The rows of the run list, as the server renders them.
import { base, fetchApi } from './api.js';
import { showLocalTime } from './shell.js';

/** Fetches the list again. Returns its rows by the ids of their runs. */
export async function fetchRows() {
  const response = await fetchApi(location.href.slice(location.origin.length + base.length), { headers: { 'X-Fragment': 'list' } });
  const page = document.createElement('div');
  page.innerHTML = await response.text();
  return new Map([...page.querySelectorAll('[data-run]')].map((row) => [row.dataset.run, row]));
}

/** Replaces a row by its newer version, and keeps its selection and focus. */
export function replaceRow(row, next) {
  next.querySelectorAll('time[datetime]').forEach(showLocalTime);
  if (row.isEqualNode(next)) return;
  next.querySelector('[data-select]').checked = row.querySelector('[data-select]').checked;
  const isFocused = row.querySelector('.run-text a') === document.activeElement;
  row.replaceWith(next);
  if (isFocused) next.querySelector('.run-text a').focus();
}

/** Returns the links of the rows to their runs. */
export const runLinks = (results) => [...results.querySelectorAll('.run-text a')];

/** Focuses the link of a row; an index out of range means the first or last row. Returns false if the list is empty. */
export function focusRow(results, index) {
  const links = runLinks(results);
  const link = links.at(Math.max(0, Math.min(links.length - 1, index)));
  link?.focus();
  link?.closest('.run').scrollIntoView({ block: 'nearest' });
  return Boolean(link);
}

/** Moves the focus by a number of rows; without a focused row, to the first or last one. */
export function moveFocus(results, step) {
  const row = document.activeElement?.closest('[data-run]');
  const index = runLinks(results).findIndex((link) => row?.contains(link));
  return focusRow(results, index < 0 ? (step > 0 ? 0 : Infinity) : index + step);
}

/** Replaces the list. The focus stays on its row; if that is gone, it moves to the next one that is left, or to the row at the same place. */
export function replaceResults(results, nodes) {
  const ids = [...results.querySelectorAll('[data-run]')].map((row) => row.dataset.run);
  const index = ids.indexOf(document.activeElement?.closest('[data-run]')?.dataset.run);
  results.replaceChildren(...nodes);
  if (index < 0) return;
  const all = runLinks(results);
  const links = new Map(all.map((link) => [link.closest('[data-run]').dataset.run, link]));
  const link = links.get(ids.slice(index).find((id) => links.has(id))) ?? all[index] ?? all.at(-1);
  link?.focus({ preventScroll: true });
}

/** Returns the number of runs in the list, or why it is empty, for screen readers. */
export function announcementOf(results) {
  const count = runLinks(results).length;
  const more = results.querySelector('[data-older]') ? ', and older ones' : '';
  return results.querySelector('.empty h2')?.textContent ?? `${count} run${count === 1 ? '' : 's'}${more}`;
}

/**
 * Returns true if a changed run that is not in the list may belong to it, and not to a page with older runs. Ids begin with the time
 * of creation.
 */
export const isNewRun = (id, results) => !results.querySelector('[data-older]') || id > (results.querySelector('[data-run]:last-child')?.dataset.run ?? '');
