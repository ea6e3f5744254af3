// Parts of pages that the server renders again. Elements are replaced only if they changed, so that focus, selection and scroll
// position are kept.
import { fetchUrl } from './api.js';
import { h, pageVisible, toast } from './dom.js';
import { PollDelay } from './poll-delay.js';
import { showLocalTime } from './shell.js';

/** Delay between two refreshes. */
const MIN_DELAY_MS = 1000;

const FOCUSABLE = 'a[href], button, input';

/** Returns the error of a failed response. */
const errorOf = ({ status, statusText }) => Object.assign(new Error(`${status} ${statusText}`), { status });

/** Fetches a part of a page, which is rendered alone. Returns `{response, content}`, with an element that contains the part. */
export async function fetchFragment(url, name, { signal } = {}) {
  const response = await fetchUrl(url, { headers: { 'X-Fragment': name }, signal });
  const content = document.createElement('div');
  content.innerHTML = await response.text(); // the server's own escaped template, same origin
  content.querySelectorAll('time[datetime]').forEach(showLocalTime);
  return { response, content };
}

/** Like `fetchFragment`, but returns only the element, and throws an error with `status` if the request fails. */
export async function loadFragment(url, name) {
  const { response, content } = await fetchFragment(url, name);
  if (!response.ok) throw errorOf(response);
  return content;
}

/** Checks the checkboxes of `next` that are checked in `old`, an earlier version. */
function keepSelection(old, next) {
  for (const box of next.querySelectorAll('[data-select]')) {
    box.checked = Boolean(old.querySelector(`[data-select][value="${CSS.escape(box.value)}"]`)?.checked);
  }
}

/** Returns a function that moves the focus, if it is in `old` now, to the same place in `next`, a newer version. */
function rememberFocus(old) {
  const index = [...old.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement);
  return (next) => { if (index >= 0) [...next.querySelectorAll(FOCUSABLE)][index]?.focus(); };
}

/** Replaces an element by a newer version, and keeps its selection and focus. */
export function replacePart(old, next) {
  if (old.isEqualNode(next)) return;
  keepSelection(old, next);
  const restoreFocus = rememberFocus(old);
  old.replaceWith(next);
  restoreFocus(next);
}

/** Replaces the elements with `data-part` of `container` by those of `next`, or all content if `next` has other parts. */
function replaceParts(container, next) {
  const partNames = (root) => [...root.querySelectorAll('[data-part]')].map((part) => part.dataset.part).join('\n');
  if (partNames(container) !== partNames(next)) {
    keepSelection(container, next);
    container.replaceChildren(...next.childNodes);
    return;
  }
  for (const part of next.querySelectorAll('[data-part]')) {
    replacePart(container.querySelector(`[data-part="${CSS.escape(part.dataset.part)}"]`), part);
  }
}

/**
 * Replaces the contents of the elements with these selectors by newer versions. `changed()` is called before the focus is moved to its
 * place in them. `event` is the beginning of the error message.
 */
export async function reloadContents(selectors, event, changed) {
  try {
    const response = await fetchUrl(location.href);
    if (!response.ok) throw errorOf(response);
    const page = new DOMParser().parseFromString(await response.text(), 'text/html');
    page.querySelectorAll('time[datetime]').forEach(showLocalTime);
    const restorers = [];
    for (const selector of selectors) {
      const [old, next] = [document, page].map((root) => root.querySelector(selector));
      if (old.isEqualNode(next)) continue;
      const restoreFocus = rememberFocus(old);
      old.hidden = next.hidden;
      old.replaceChildren(...next.childNodes);
      restorers.push(() => restoreFocus(old));
    }
    changed();
    for (const restore of restorers) restore();
  } catch (error) {
    toast(`${event}, but the page could not be updated: ${error.message}`);
  }
}

/** An element whose content is a part of the page that changes while something runs. */
export class LiveFragment {
  #container;
  #name;
  #changed;
  /** Number of the newest request; the responses of earlier ones are older and discarded. */
  #requestId = 0;

  /** `name` is the one of the part, and `changed()` is called after each refresh. */
  constructor(container, name, changed = () => {}) {
    this.#container = container;
    this.#name = name;
    this.#changed = changed;
  }

  /** Loads the part again and shows it. */
  async refresh() {
    this.#requestId += 1;
    const id = this.#requestId;
    const next = await loadFragment(location.href, this.#name);
    if (id !== this.#requestId) return;
    replaceParts(this.#container, next);
    this.#changed();
  }

  /**
   * Refreshes the part while `isRunning()` returns true and the page is visible. After errors, the page says so, and the next
   * refresh follows later; after a refusal, there is none.
   */
  async follow(isRunning) {
    const notice = h('p', { class: 'banner warn', role: 'status', hidden: true });
    this.#container.before(notice);
    const show = (text) => {
      notice.hidden = !text;
      notice.textContent = text;
    };
    let delay = new PollDelay(MIN_DELAY_MS);
    for (;;) {
      await delay.elapse();
      await pageVisible();
      if (!isRunning()) {
        delay = new PollDelay(MIN_DELAY_MS);
        continue;
      }
      const startedAt = performance.now();
      try {
        await this.refresh();
        show('');
        delay.answered(startedAt);
      } catch (error) {
        // The login has expired, or the experiment was removed.
        if (error.status >= 400 && error.status < 500) {
          show(`This page is no longer updated: ${error.message}. Reload it to continue.`);
          return;
        }
        delay.failed();
        show(`The page could not be updated: ${error.message}. It tries again in ${Math.round(delay.ms / 1000)} s.`);
      }
    }
  }
}
