// The rows of the run list, as the server renders them.
import { base, fetchApi } from './dom.js';
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
