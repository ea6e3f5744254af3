// Deletions that can still be undone: a line for each above the run list, also after a reload of the page.
import { fetchApi, sendJson } from './api.js';
import { h, toast } from './dom.js';
import { runCount } from './run-list.js';

const PATH = '/api/v1/deletions';

export class Deletions {
  #container;
  #changed;
  #leave;
  /** The shown deletions, oldest first: `{id, until, line, countdown, button, isUndoing}`. */
  #pending = [];
  #timer = 0;

  /** `changed()` is called after runs were deleted or restored, and `leave()` when the last line disappears while it has the focus. */
  constructor(container, changed, leave) {
    this.#container = container;
    this.#changed = changed;
    this.#leave = leave;
    fetchApi(PATH).then(async (response) => {
      for (const deletion of (await response.json()).deletions) this.#show(deletion);
    }).catch(() => { /* the list shows that the server is unreachable */ });
  }

  /** Deletes runs. */
  async add(ids) {
    try {
      const response = await sendJson(PATH, { runs: ids });
      this.#show(await response.json());
      this.#changed();
    } catch (error) {
      toast(`Not deleted: ${error.message}`);
    }
  }

  /** Undoes the last deletion that is not being undone. */
  undoLast() {
    const last = this.#pending.findLast(({ isUndoing }) => !isUndoing);
    if (last) this.#undo(last);
    else toast('No deletion can be undone');
  }

  async #undo(entry) {
    if (entry.isUndoing) return;
    // A disabled button would lose the focus.
    entry.isUndoing = true;
    try {
      const response = await fetchApi(`${PATH}/${entry.id}`, { method: 'DELETE' });
      toast(`${runCount((await response.json()).runs.length)} restored`);
      this.#changed();
    } catch (error) {
      toast(error.status === 404 ? 'This deletion can no longer be undone' : `Not undone: ${error.message}`);
      if (error.status !== 404) {
        entry.isUndoing = false;
        return;
      }
    }
    this.#remove(entry);
  }

  #show({ deletion_id: id, runs: count, remaining_ms: remaining }) {
    const countdown = h('span', { class: 'hint num', 'aria-hidden': 'true' });
    const button = h('button', { type: 'button', title: 'Undo (z)' }, 'Undo');
    const line = h('div', { class: 'links' }, `${runCount(count)} deleted.`, ' ', button, ' ', countdown);
    const entry = { id, until: performance.now() + remaining, line, countdown, button };
    button.addEventListener('click', () => this.#undo(entry));
    this.#pending.push(entry);
    this.#container.append(line);
    this.#container.hidden = false;
    this.#updateCountdowns();
  }

  #remove(entry) {
    this.#pending = this.#pending.filter((other) => other !== entry);
    const hasFocus = entry.line.contains(document.activeElement);
    entry.line.remove();
    this.#container.hidden = this.#pending.length === 0;
    if (!hasFocus) return;
    if (this.#pending.length) this.#pending.at(-1).button.focus();
    else this.#leave();
  }

  /** Updates the countdowns every second. */
  #updateCountdowns() {
    clearTimeout(this.#timer);
    for (const entry of [...this.#pending]) {
      const seconds = Math.ceil((entry.until - performance.now()) / 1000);
      if (seconds > 0) entry.countdown.textContent = `${seconds} s`;
      else this.#remove(entry);
    }
    if (this.#pending.length) this.#timer = setTimeout(() => this.#updateCountdowns(), 1000);
  }
}
