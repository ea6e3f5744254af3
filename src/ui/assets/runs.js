// The page with the list of runs: filters it while the user types, and announces new runs without moving rows.
import { base, fetchUrl } from './api.js';
import { copyText, singleFlight } from './dom.js';
import { listenForFiles } from './import.js';
import { follow } from './sse.js';
import { listenForShortcuts } from './keys.js';
import { announcementOf, fetchRows, focusRow, isNewRun, moveFocus, replaceResults, replaceRow, runLinks } from './run-rows.js';
import { showLocalTime } from './shell.js';

const filterBox = document.querySelector('#q');
const results = document.querySelector('[data-results]');
const loadTime = document.querySelector('[data-load-time]');
const newRunsButton = document.querySelector('[data-new-runs]');
const age = document.querySelector('[data-age]');
const liveText = document.querySelector('[data-live-text]');
const liveDot = document.querySelector('[data-live-dot]');
const saveButton = document.querySelector('[data-save-filter]');
const announcer = document.querySelector('[data-announce]');

let loadedAt = Date.now();
/** AbortController of the newest request for the list. */
let request = null;
let hasLoadFailed = false;
/** Ids of runs that are not in the list because they started or changed after it was loaded. */
const newRuns = new Set();
/** True if the server dropped notifications about changes, so the list may lack some of them. */
let isOutdated = false;
/** For each request of the list in progress, a list of the changes since it was sent, which its response may lack. */
const missedChanges = new Set();

/** Shows the list of a URL. If its filter is invalid, the old rows remain, grayed out. */
async function load(url, { updateUrl = true } = {}) {
  request?.abort();
  request = new AbortController();
  const { signal } = request;
  const changes = [];
  missedChanges.add(changes);
  const startedAt = performance.now();
  const showDuration = () => { loadTime.textContent = `${Math.round(performance.now() - startedAt)} ms`; };
  results.setAttribute('aria-busy', 'true');
  const timer = setInterval(showDuration, 100);
  try {
    const response = await fetchUrl(url, { headers: { 'X-Fragment': 'list' }, signal });
    const next = document.createElement('div');
    next.innerHTML = await response.text(); // the server's own escaped template, same origin
    const error = next.querySelector('#filter-error');
    if (error && !error.hidden) {
      results.querySelector('#filter-error').replaceWith(error);
      results.classList.add('stale');
      filterBox.setAttribute('aria-invalid', 'true');
    } else if (response.ok) {
      replaceResults(results, next.childNodes);
      announcer.textContent = announcementOf(results);
      clearSelection();
      results.classList.remove('stale');
      filterBox.removeAttribute('aria-invalid');
      results.querySelectorAll('time[datetime]').forEach(showLocalTime);
      loadedAt = Date.now();
      hasLoadFailed = false;
      newRuns.clear();
      isOutdated = false;
      applyChanges(changes);
    } else throw new Error(`${response.status} ${response.statusText}`);
    if (updateUrl) history.replaceState(null, '', url);
    const q = new URL(url, location).searchParams.get('q') ?? '';
    for (const view of document.querySelectorAll('.views a')) {
      if (view.dataset.q === q) view.setAttribute('aria-current', 'true');
      else view.removeAttribute('aria-current');
    }
    saveButton.hidden = !q || results.classList.contains('stale');
    showDuration();
  } catch (error) {
    if (signal.aborted) return;
    loadTime.textContent = '';
    hasLoadFailed = true;
    const problem = results.querySelector('#filter-error');
    problem.hidden = false;
    problem.textContent = `Loading the list failed: ${error.message}.`;
    results.classList.add('stale');
  } finally {
    clearInterval(timer);
    missedChanges.delete(changes);
    if (request?.signal === signal) results.removeAttribute('aria-busy');
  }
}

/** Returns the URL of the list with a filter. */
const listUrl = (q) => `${base}/runs${q ? `?${new URLSearchParams({ q })}` : ''}`;

let typingTimer = 0;
filterBox.addEventListener('input', () => {
  clearTimeout(typingTimer);
  typingTimer = setTimeout(() => load(listUrl(filterBox.value.trim())), 220);
});
filterBox.form.addEventListener('submit', (event) => {
  event.preventDefault();
  clearTimeout(typingTimer);
  load(listUrl(filterBox.value.trim()));
});

document.addEventListener('click', async (event) => {
  if (event.target.matches('[data-sample]')) {
    const { openSample } = await import('./sample.js');
    openSample(event.target);
    return;
  }
  const link = event.target.closest('a[data-q]');
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
  event.preventDefault();
  filterBox.value = link.dataset.q;
  load(listUrl(link.dataset.q));
});

// Changes since the list was loaded: a button announces new runs, and the rows of the list show the new status of their
// runs.

function updateNewRunsButton() {
  newRunsButton.hidden = newRuns.size === 0 && !isOutdated;
  newRunsButton.textContent = isOutdated ? 'The list has changed — show (n)' : `${newRuns.size} new run${newRuns.size === 1 ? '' : 's'} — show (n)`;
}

function showNewRuns() {
  if (newRunsButton.hidden) return false;
  // The button disappears, so the focus moves to the newest run.
  const hasFocus = newRunsButton === document.activeElement;
  load(listUrl(filterBox.value.trim())).then(() => { if (hasFocus) focusRow(results, 0); });
  return true;
}
newRunsButton.addEventListener('click', showNewRuns);

const pageClosed = new AbortController();
follow('/api/v1/runs/live', {
  signal: pageClosed.signal,
  onState: (text, ok, status) => {
    // A restarted server may require a new login, and its login page redirects to this page.
    if (status === 401) location.reload();
    // The server does not repeat changes from the time before the connection.
    if (ok) refresh();
    liveDot.className = `dot ${ok ? 'on' : 'off'}`;
    liveText.textContent = ok ? 'live' : text;
  },
  onEvent: ({ event, data }) => {
    let change = {};
    if (event !== 'missed') {
      try { change = JSON.parse(data); } catch { return; }
    }
    for (const changes of missedChanges) changes.push(change);
    applyChanges([change]);
  },
});

/** Returns true if the page shows an error instead of the result of the filter. */
const hasFilterError = () => Boolean(results.querySelector('#filter-error:not([hidden])'));

/** Shows changes: the new status of a run, or a change without a run if the server dropped some. */
function applyChanges(changes) {
  for (const change of changes) {
    const id = change.run_id ?? change.run?.run_id;
    const status = change.status ?? change.run?.status;
    const row = id && results.querySelector(`[data-run="${CSS.escape(id)}"]`);
    if (!id) isOutdated = true;
    else if (!row) {
      if (isNewRun(id, results)) newRuns.add(id);
    }
    // The row may be newer than the change.
    else if (row.dataset.status === 'running' && status !== 'running') {
      const cell = row.querySelector('.run-status');
      cell.textContent = status;
      cell.className = `run-status status-${status}`;
      row.dataset.status = status;
      refreshRow(row, id);
    }
  }
  if (newRuns.size && !results.querySelector('.runs') && !hasFilterError() && !filterBox.value) load(listUrl('')); // replaces the empty state with the list
  else updateNewRunsButton();
}
addEventListener('pagehide', () => pageClosed.abort());
// The browser restored the page after Back, without its connection.
addEventListener('pageshow', ({ persisted }) => { if (persisted) location.reload(); });

/** Shows the final numbers in the row of a run that has just ended. */
async function refreshRow(row, id) {
  try {
    const next = (await fetchRows()).get(id);
    if (next) replaceRow(row, next);
  } catch { /* the row keeps its old numbers; the next load corrects it */ }
}

/** Updates the list after the connection is established: in place, or completely if a row is not in it anymore. */
async function refresh() {
  if (hasFilterError() && !hasLoadFailed) return;
  const before = request;
  const { href } = location;
  const changes = [];
  missedChanges.add(changes);
  let current = null;
  try {
    if (!hasLoadFailed) current = await fetchRows();
  } catch (error) {
    // The connection is lost, so this is called again.
    if (!error.status) return;
  } finally {
    missedChanges.delete(changes);
  }
  // A newer request loads the list.
  if (request !== before) return;
  const rows = [...results.querySelectorAll('[data-run]')];
  // An older request can have replaced the list by that of another filter meanwhile.
  if (!current || location.href !== href || (!rows.length && current.size) || rows.some((row) => !current.has(row.dataset.run))) {
    load(location.href, { updateUrl: false });
    return;
  }
  for (const row of rows) {
    replaceRow(row, current.get(row.dataset.run));
    current.delete(row.dataset.run);
  }
  for (const id of current.keys()) newRuns.add(id);
  loadedAt = Date.now();
  applyChanges(changes);
}

listenForFiles(document.querySelector('[data-import]'), document.querySelector('[data-imported]'), () => load(location.href, { updateUrl: false }));

setInterval(() => {
  const s = Math.round((Date.now() - loadedAt) / 1000);
  age.textContent = s < 2 ? 'updated just now' : `updated ${s < 90 ? `${s} s` : `${Math.round(s / 60)} min`} ago`;
}, 1000);

// Selected runs can be compared (the oldest one is A), tagged, exported and deleted.
/** The bar with the actions for the selected runs. */
const bulk = document.querySelector('[data-bulk]');
const selected = new Set();

function showSelection() {
  bulk.hidden = selected.size === 0;
  if (bulk.hidden) closeMenu();
  bulk.querySelector('[data-bulk-text]').textContent = selected.size > 1 ? `${selected.size} runs selected` : '1 run selected; select another one to compare';
  const link = bulk.querySelector('[data-bulk-compare]');
  link.hidden = selected.size < 2;
  const [a, b, ...others] = [...selected].sort();
  if (b) link.href = `${base}/compare?${new URLSearchParams({ a, b, ...(others.length && { with: [b, ...others].join(',') }) })}`;
}

function setSelected(id, on) {
  if (on) selected.add(id);
  else selected.delete(id);
  showSelection();
}

results.addEventListener('change', (event) => {
  if (event.target.matches('[data-select]')) setSelected(event.target.value, event.target.checked);
});

function clearSelection() {
  selected.clear();
  results.querySelectorAll('[data-select]:checked').forEach((checkbox) => { checkbox.checked = false; });
  showSelection();
}
bulk.querySelector('[data-bulk-clear]').addEventListener('click', clearSelection);

/** Returns the ids of the selected runs, or if none is selected, of the focused one. */
function selectedRuns() {
  const focused = document.activeElement?.closest?.('[data-run]')?.dataset.run;
  return selected.size ? [...selected] : focused ? [focused] : [];
}

/** Calls `act(ids)` with the ids of `selectedRuns()`. Returns false if there are none. */
function withSelected(act) {
  const ids = selectedRuns();
  if (ids.length) act(ids);
  return ids.length > 0;
}

/** The menu of export formats. */
const menu = bulk.querySelector('details');

/** Closes the menu of export formats. Returns false if it was closed already. */
function closeMenu() {
  const wasOpen = menu.open;
  menu.open = false;
  return wasOpen;
}

async function exportAs(format, ids) {
  closeMenu();
  const { exportRuns } = await import('./export.js');
  exportRuns(ids, format);
}
for (const button of bulk.querySelectorAll('[data-bulk-export]')) {
  button.addEventListener('click', () => withSelected((ids) => exportAs(button.dataset.bulkExport, ids)));
}

// The current filter can be saved under a name.
const filters = document.querySelector('[data-filters]');
const saveCurrentFilter = singleFlight(async () => {
  const { saveFilter } = await import('./filters.js');
  saveFilter(filterBox.value.trim(), filters);
});
saveButton.addEventListener('click', saveCurrentFilter);
filters.addEventListener('click', async (event) => {
  if (!event.target.matches('[data-remove-filter]')) return;
  const { removeFilter } = await import('./filters.js');
  removeFilter(event.target.parentElement);
});

/** The deletions that can be undone; their code is loaded after the list. */
const deletions = import('./deletions.js').then(({ Deletions }) => new Deletions(
  document.querySelector('[data-deletions]'),
  () => load(location.href, { updateUrl: false }),
  () => focusRow(results, 0),
));
const remove = async (ids) => (await deletions).add(ids);
bulk.querySelector('[data-bulk-delete]').addEventListener('click', () => withSelected(remove));

/** Opens the dialog for the tags of runs. */
const editTags = singleFlight(async (ids) => {
  const row = (id) => results.querySelector(`[data-run="${CSS.escape(id)}"]`);
  const tags = await import('./tags.js');
  tags.editTags(ids.map((id) => ({ id, tags: tags.tagsIn(row(id)) })), (runs) => {
    for (const run of runs) {
      const meta = row(run.run_id)?.querySelector('.run-meta');
      meta?.querySelectorAll('.tag').forEach((link) => link.remove());
      meta?.append(...tags.tagLinks(run.tags));
    }
  });
});
bulk.querySelector('[data-bulk-tags]').addEventListener('click', () => withSelected(editTags));

/** Clicks the element with a selector. Returns false if the page has none. */
function click(selector) {
  const element = document.querySelector(selector);
  element?.click();
  return Boolean(element);
}

listenForShortcuts(['runs'], (action, key) => {
  switch (action) {
    case 'find': filterBox.focus(); filterBox.select(); return true;
    case 'nextRow': return moveFocus(results, 1);
    case 'prevRow': return moveFocus(results, -1);
    case 'firstRow': return focusRow(results, 0);
    case 'lastRow': return focusRow(results, Infinity);
    case 'openTab':
      if (!runLinks(results).includes(document.activeElement)) return false;
      window.open(document.activeElement.href, '_blank', 'noopener');
      return true;
    case 'view': document.querySelectorAll('.views a')[Number(key) - 1]?.click(); return true;
    case 'select': {
      const checkbox = document.activeElement?.closest?.('.run')?.querySelector('[data-select]');
      if (!checkbox) return false;
      checkbox.checked = !checkbox.checked;
      setSelected(checkbox.value, checkbox.checked);
      return true;
    }
    case 'compare':
      if (selected.size < 2) return false;
      bulk.querySelector('[data-bulk-compare]').click();
      return true;
    case 'tags': return withSelected(editTags);
    case 'delete': return withSelected(remove);
    case 'saveFilter':
      if (saveButton.hidden) return false;
      saveCurrentFilter();
      return true;
    case 'undo': deletions.then((list) => list.undoLast()); return true;
    case 'export': return withSelected((ids) => exportAs('json', ids));
    case 'showNew': return showNewRuns();
    case 'newest': return click('.pager a:not([rel])');
    case 'older': return click('[data-older]');
    case 'copy': copyText(location.href, 'link'); return true;
    case 'escape':
      if (closeMenu()) menu.querySelector('summary').focus();
      else if (document.activeElement === filterBox) filterBox.blur();
      else if (selected.size) clearSelection();
      else document.activeElement?.blur?.();
      return true;
    default: return false;
  }
});
