// The page with the list of runs: filters it while the user types, and announces new runs without moving rows.
import { base } from './api.js';
import { cancelRun } from './cancel-run.js';
import { copyText, singleFlight, toast } from './dom.js';
import { listenForFiles } from './import.js';
import { follow } from './sse.js';
import { listenForShortcuts } from './keys.js';
import { focusRow, moveFocus, rowLinks } from './row-focus.js';
import { listUrl, runCount, RunList } from './run-list.js';

const filterBox = document.querySelector('#q');
const results = document.querySelector('[data-results]');
const loadTime = document.querySelector('[data-load-time]');
const newRunsButton = document.querySelector('[data-new-runs]');
const age = document.querySelector('[data-age]');
const liveText = document.querySelector('[data-live-text]');
const liveDot = document.querySelector('[data-live-dot]');
const saveButton = document.querySelector('[data-save-filter]');
const announcer = document.querySelector('[data-announce]');

/** Returns the filter in the URL of a list. */
const filterOf = (url) => new URL(url, location).searchParams.get('q') ?? '';

/** Query of the list that is shown, or that Back or Forward requested. */
let shownQuery = location.search;

const list = new RunList(results, {
  loading: (text) => { loadTime.textContent = text; },
  loaded: (url, isValid) => {
    if (isValid) {
      announcer.textContent = list.summary;
      clearSelection();
      filterBox.removeAttribute('aria-invalid');
    } else {
      filterBox.setAttribute('aria-invalid', 'true');
    }
    shownQuery = new URL(url, location).search;
    const q = filterOf(url);
    for (const view of document.querySelectorAll('.views a')) {
      if (view.dataset.q === q) view.setAttribute('aria-current', 'true');
      else view.removeAttribute('aria-current');
    }
    saveButton.hidden = !q || !isValid;
  },
  rowsChanged: showSelection,
  newRuns: (count, isMore) => {
    newRunsButton.hidden = count === 0;
    newRunsButton.textContent = `${count}${isMore ? '+' : ''} new run${count === 1 ? '' : 's'} — show (n)`;
  },
});

let typingTimer = 0;
filterBox.addEventListener('input', () => {
  clearTimeout(typingTimer);
  typingTimer = setTimeout(() => list.load(listUrl(filterBox.value.trim())), 220);
});
filterBox.form.addEventListener('submit', (event) => {
  event.preventDefault();
  clearTimeout(typingTimer);
  list.load(listUrl(filterBox.value.trim()));
});

document.addEventListener('click', async (event) => {
  if (event.target.matches('[data-sample]')) {
    const { openSample } = await import('./sample.js');
    openSample(event.target);
    return;
  }
  const link = event.target.closest('a[data-q], a[data-row]');
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
  if (link.matches('[data-row]')) {
    // After Back, the focus is on this row again.
    history.replaceState({ run: link.closest('[data-run]').dataset.run }, '');
    return;
  }
  event.preventDefault();
  clearTimeout(typingTimer);
  filterBox.value = link.dataset.q;
  list.load(listUrl(link.dataset.q), { isNewEntry: true });
});
list.row(history.state?.run ?? '')?.querySelector('[data-row]')?.focus({ preventScroll: true });
addEventListener('popstate', () => {
  // The address of a part of the page changed.
  if (location.search === shownQuery) return;
  shownQuery = location.search;
  clearTimeout(typingTimer);
  filterBox.value = filterOf(location.href);
  list.reload();
});

function showNewRuns() {
  if (newRunsButton.hidden) return false;
  // The button disappears, so the focus moves to the newest run.
  const hasFocus = newRunsButton === document.activeElement;
  list.load(listUrl(filterBox.value.trim())).then(() => { if (hasFocus) focusRow(results, 0); });
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
    if (ok) list.refresh({ isReconnected: true });
    liveDot.className = `dot ${ok ? 'on' : 'off'}`;
    liveText.textContent = ok ? 'live' : text;
  },
  onEvent: ({ event, data }) => {
    let change = {};
    if (event !== 'missed') {
      try { change = JSON.parse(data); } catch { return; }
    }
    list.change(change);
  },
});
addEventListener('pagehide', () => pageClosed.abort());
// The browser restored the page after Back, without its connection.
addEventListener('pageshow', ({ persisted }) => { if (persisted) location.reload(); });

listenForFiles(document.querySelector('[data-import]'), document.querySelector('[data-imported]'), () => list.reload());

setInterval(() => {
  const s = Math.round((Date.now() - list.loadedAt) / 1000);
  age.textContent = s < 2 ? 'updated just now' : `updated ${s < 90 ? `${s} s` : `${Math.round(s / 60)} min`} ago`;
}, 1000);

// Selected runs can be compared (the oldest one is A), tagged, exported, cancelled and deleted.
/** The bar with the actions for the selected runs. */
const bulk = document.querySelector('[data-bulk]');
const selected = new Set();

/** Returns those of the runs that the list shows as active. */
const activeRuns = (ids) => ids.filter((id) => list.row(id)?.dataset.status === 'running');

function showSelection() {
  bulk.hidden = selected.size === 0;
  if (bulk.hidden) closeMenu();
  bulk.querySelector('[data-bulk-text]').textContent = selected.size > 1 ? `${selected.size} runs selected` : '1 run selected; select another one to compare';
  const cancelButton = bulk.querySelector('[data-bulk-cancel]');
  const isCancellable = activeRuns([...selected]).length > 0;
  // A hidden button cannot have the focus.
  if (!isCancellable && cancelButton === document.activeElement) menu.querySelector('summary').focus();
  cancelButton.hidden = !isCancellable;
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

/** Cancels the active ones of the runs. */
const cancelRuns = singleFlight(async (ids) => {
  const outcomes = await Promise.allSettled(activeRuns(ids).map(cancelRun));
  const failures = outcomes.filter(({ status }) => status === 'rejected');
  const countOf = (isCancelled) => outcomes.filter(({ value }) => value === isCancelled).length;
  const parts = [
    ['cancelled', countOf(true)],
    ['ended before', countOf(false)],
    [`not cancelled: ${failures[0]?.reason.message}`, failures.length],
  ];
  toast(parts.filter(([, count]) => count).map(([text, count]) => `${runCount(count)} ${text}`).join(', ') || 'None of these runs is active');
});
bulk.querySelector('[data-bulk-cancel]').addEventListener('click', () => withSelected(cancelRuns));

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
  () => list.reload(),
  () => focusRow(results, 0),
));
const remove = async (ids) => (await deletions).add(ids);
bulk.querySelector('[data-bulk-delete]').addEventListener('click', () => withSelected(remove));

/** Opens the dialog for the tags of runs. */
const editTags = singleFlight(async (ids) => {
  const tags = await import('./tags.js');
  tags.editTags(ids.map((id) => ({ id, tags: tags.tagsIn(list.row(id)) })), (runs) => {
    for (const run of runs) {
      const meta = list.row(run.run_id)?.querySelector('.run-meta');
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
      if (!rowLinks(results).includes(document.activeElement)) return false;
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
    case 'cancel': return withSelected(cancelRuns);
    case 'delete': return withSelected(remove);
    case 'saveFilter':
      if (saveButton.hidden) return false;
      saveCurrentFilter();
      return true;
    case 'undo': deletions.then((pending) => pending.undoLast()); return true;
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
