// The list of runs: it is loaded for a filter and follows the server. Rows show the new status of their runs, and new runs are
// only announced, so that rows do not move.
import { base } from './api.js';
import { pageVisible } from './dom.js';
import { fetchFragment, loadFragment, replacePart } from './fragments.js';
import { PollDelay } from './poll-delay.js';
import { rowLinks } from './row-focus.js';

/** Minimum delay between a change on the server and the request that shows it. */
const MIN_DELAY_MS = 2000;

/** Returns the URL of the list with a filter. */
export const listUrl = (q) => `${base}/runs${q ? `?${new URLSearchParams({ q })}` : ''}`;

/** Fetches a list. Returns `{rows, hasOlder}`, with the rows by the ids of their runs, and whether there is a page with older runs. */
async function fetchRows(url) {
  const content = await loadFragment(url, 'list');
  const rows = new Map([...content.querySelectorAll('[data-run]')].map((row) => [row.dataset.run, row]));
  return { rows, hasOlder: Boolean(content.querySelector('[data-older]')) };
}

/** Returns a number of runs as text. */
export const runCount = (count) => `${count} run${count === 1 ? '' : 's'}`;

export class RunList {
  #results;
  #hooks;
  #loadedAt = Date.now();
  /** AbortController of the newest request for the list. */
  #request = null;
  #hasLoadFailed = false;
  /** Ids of runs that are not in the list because they started or changed after it was loaded. The filter may exclude them. */
  #changedRuns = new Set();
  /** For each request of the list in progress, a list of the changes since it was sent, which its response may lack. */
  #missedChanges = new Set();
  /** True if the next refresh has to show changes. */
  #isOutdated = false;
  #isRefreshing = false;
  /** Delay before the next refresh. */
  #delay = new PollDelay(MIN_DELAY_MS);

  /**
   * `results` is the element of `runs_list.html`. `hooks.loading(text)` is called with the duration of a request,
   * `hooks.loaded(url, isValid)` when its response is shown, `hooks.rowsChanged()` when rows may show another status, and
   * `hooks.newRuns(count, isMore)` with the number of runs that match the filter and are not in the list yet; `isMore` if there may
   * be more.
   */
  constructor(results, hooks) {
    this.#results = results;
    this.#hooks = hooks;
  }

  /** Time when the list was loaded or refreshed. */
  get loadedAt() { return this.#loadedAt; }

  /** True if the page shows an error instead of the result of the filter. */
  get #hasFilterError() { return Boolean(this.#results.querySelector('#filter-error:not([hidden])')); }

  /** Returns the row of a run, or null. */
  row(id) { return this.#results.querySelector(`[data-run="${CSS.escape(id)}"]`); }

  /** The number of runs in the list, or why it is empty, for screen readers. */
  get summary() {
    const count = rowLinks(this.#results).length;
    const more = this.#results.querySelector('[data-older]') ? ', and older ones' : '';
    return this.#results.querySelector('.empty h2')?.textContent ?? `${runCount(count)}${more}`;
  }

  get #rows() { return [...this.#results.querySelectorAll('[data-run]')]; }

  /** Loads the current list again. */
  reload() { return this.load(location.href, { updateUrl: false }); }

  /**
   * Shows the list of a URL. If its filter is invalid, the old rows remain, grayed out. With `isNewEntry`, Back returns to the
   * list that is shown now.
   */
  async load(url, { updateUrl = true, isNewEntry = false } = {}) {
    this.#request?.abort();
    this.#request = new AbortController();
    const { signal } = this.#request;
    const startedAt = performance.now();
    const showDuration = () => this.#hooks.loading(`${Math.round(performance.now() - startedAt)} ms`);
    this.#results.setAttribute('aria-busy', 'true');
    const timer = setInterval(showDuration, 100);
    try {
      await this.#withChanges(async (changes) => {
        const { response, content } = await fetchFragment(url, 'list', { signal });
        const error = content.querySelector('#filter-error:not([hidden])');
        if (error) this.#results.querySelector('#filter-error').replaceWith(error);
        else if (response.ok) this.#replaceAll(content.childNodes);
        else throw new Error(`${response.status} ${response.statusText}`);
        this.#results.classList.toggle('stale', Boolean(error));
        const isOther = new URL(url, location).href !== location.href;
        if (updateUrl) history[isNewEntry && isOther ? 'pushState' : 'replaceState'](null, '', url);
        this.#hooks.loaded(url, !error);
        if (!error) this.#showLoaded(changes);
        showDuration();
      });
    } catch (error) {
      if (signal.aborted) return;
      this.#hooks.loading('');
      this.#hasLoadFailed = true;
      const problem = this.#results.querySelector('#filter-error');
      problem.hidden = false;
      problem.textContent = `Loading the list failed: ${error.message}.`;
      this.#results.classList.add('stale');
    } finally {
      clearInterval(timer);
      if (this.#request?.signal === signal) this.#results.removeAttribute('aria-busy');
    }
  }

  /** Awaits `act(changes)`, whose argument gets the changes that arrive meanwhile. */
  async #withChanges(act) {
    const changes = [];
    this.#missedChanges.add(changes);
    try {
      await act(changes);
    } finally {
      this.#missedChanges.delete(changes);
    }
  }

  #showLoaded(changes) {
    // The request has ended, so a change may start the next one.
    this.#results.removeAttribute('aria-busy');
    this.#loadedAt = Date.now();
    this.#hasLoadFailed = false;
    this.#changedRuns.clear();
    this.#hooks.newRuns(0);
    this.#applyChanges(changes);
  }

  /** Replaces the list. The focus stays on its row; if that is gone, it moves to the next one that is left, or to the row at the same place. */
  #replaceAll(nodes) {
    const ids = this.#rows.map((row) => row.dataset.run);
    const index = ids.indexOf(document.activeElement?.closest('[data-run]')?.dataset.run);
    this.#results.replaceChildren(...nodes);
    if (index < 0) return;
    const all = rowLinks(this.#results);
    const links = new Map(all.map((link) => [link.closest('[data-run]').dataset.run, link]));
    const link = links.get(ids.slice(index).find((id) => links.has(id))) ?? all[index] ?? all.at(-1);
    link?.focus({ preventScroll: true });
  }

  /** Shows a change that the server reports: `{run_id, status}`, `{run}`, or an empty object if the server dropped some changes. */
  change(change) {
    for (const changes of this.#missedChanges) changes.push(change);
    this.#applyChanges([change]);
  }

  #applyChanges(changes) {
    for (const change of changes) {
      const id = change.run_id ?? change.run?.run_id;
      const status = change.status ?? change.run?.status;
      const row = id && this.row(id);
      if (!id) this.#isOutdated = true;
      else if (!row) {
        if (!this.#isNew(id)) continue;
        this.#changedRuns.add(id);
        this.#isOutdated = true;
      }
      // The row may be newer than the change.
      else if (row.dataset.status === 'running' && status !== 'running') {
        const cell = row.querySelector('.run-status');
        cell.textContent = status;
        cell.className = `run-status status-${status}`;
        row.dataset.status = status;
        this.#isOutdated = true;
      }
    }
    this.#hooks.rowsChanged();
    const isEmptyState = !this.#results.querySelector('.runs') && !this.#hasFilterError && !location.search;
    // A load would cancel the one in progress, which may be that of a filter.
    const isLoading = this.#results.hasAttribute('aria-busy');
    if (isEmptyState && this.#changedRuns.size && !isLoading) this.load(listUrl('')); // replaces the empty state with the list
    else this.#refreshLater();
  }

  /** Returns true if a changed run that is not in the list may belong to it, and not to a page with older runs. Ids begin with the time of creation. */
  #isNew(id) { return !this.#results.querySelector('[data-older]') || id > (this.#rows.at(-1)?.dataset.run ?? ''); }

  /** Refreshes the list a while after changes, and again after those that follow. */
  async #refreshLater() {
    if (this.#isRefreshing) return;
    this.#isRefreshing = true;
    while (this.#isOutdated) {
      await this.#delay.elapse();
      await pageVisible();
      this.#isOutdated = false;
      await this.refresh();
    }
    this.#isRefreshing = false;
  }

  /**
   * Updates the rows and counts new runs. If the connection was lost before, the list is loaded completely if a row is no
   * longer in it.
   */
  async refresh({ isReconnected = false } = {}) {
    if (this.#hasLoadFailed && isReconnected) {
      this.reload();
      return;
    }
    if (this.#hasFilterError) return;
    const before = this.#request;
    const { href } = location;
    const query = new URL(href).searchParams;
    const isOlderPage = query.has('before');
    await this.#withChanges(async (changes) => {
      const startedAt = performance.now();
      let current;
      let newest;
      try {
        current = await fetchRows(href);
        newest = isOlderPage ? await fetchRows(listUrl(query.get('q'))) : current;
        this.#delay.answered(startedAt);
      } catch (error) {
        if (error.status && isReconnected) {
          this.reload();
          return;
        }
        this.#delay.failed();
        this.#isOutdated = true;
        this.#refreshLater();
        return;
      }
      // A newer request loads the list.
      if (this.#request !== before) return;
      const rows = this.#rows;
      const isGone = (row) => !current.rows.has(row.dataset.run);
      // An older request can have replaced the list by that of another filter meanwhile.
      const isOther = location.href !== href;
      if (isReconnected && (isOther || (!rows.length && current.rows.size) || rows.some(isGone))) {
        this.reload();
        return;
      }
      this.#isOutdated ||= isOther;
      if (isOther) return;
      const shown = new Set(rows.map((row) => row.dataset.run));
      const added = [...newest.rows.keys()].filter((id) => !shown.has(id) && this.#isNew(id) && (!isOlderPage || this.#changedRuns.has(id)));
      const isMore = added.length === newest.rows.size && newest.hasOlder;
      for (const row of rows) if (!isGone(row)) replacePart(row, current.rows.get(row.dataset.run));
      this.#loadedAt = Date.now();
      this.#hooks.newRuns(added.length, isMore);
      this.#applyChanges(changes);
    });
  }
}
