// The list of deletions that can still be undone, shown above the run list, also after a reload.
import { fetchApi, h, toast } from './dom.js';

const PATH = '/api/v1/deletions';
const runs = (count) => `${count} run${count === 1 ? '' : 's'}`;

export class Deletions {
  #place;
  #changed;
  #pending = [];
  #timer = 0;

  /** `changed()` is called after runs were deleted or restored. */
  constructor(place, changed) {
    this.#place = place;
    this.#changed = changed;
    fetchApi(PATH).then(async (response) => {
      for (const deletion of (await response.json()).deletions) this.#show(deletion);
    }).catch(() => { /* the list shows that the server is unreachable */ });
  }

  /** Deletes runs. */
  async add(ids) {
    try {
      const response = await fetchApi(PATH, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ runs: ids }) });
      this.#show(await response.json());
      this.#changed();
    } catch (error) {
      toast(`Not deleted: ${error.message}`);
    }
  }

  /** Undoes the last deletion. */
  undoLast() {
    const last = this.#pending.at(-1);
    if (last) this.#undo(last);
    else toast('No deletion can be undone');
  }

  async #undo(entry) {
    entry.button.disabled = true;
    try {
      const response = await fetchApi(`${PATH}/${entry.id}`, { method: 'DELETE' });
      toast(`${runs((await response.json()).runs.length)} restored`);
      this.#changed();
    } catch (error) {
      toast(error.status === 404 ? 'This deletion can no longer be undone' : `Not undone: ${error.message}`);
      if (error.status !== 404) {
        entry.button.disabled = false;
        return;
      }
    }
    this.#hide(entry);
  }

  #show({ deletion_id: id, runs: count, remaining_ms: remaining }) {
    const left = h('span', { class: 'hint num', 'aria-hidden': true });
    const button = h('button', { type: 'button', title: 'Undo (z)' }, 'Undo');
    const line = h('div', { class: 'links' }, `${runs(count)} deleted.`, ' ', button, ' ', left);
    const entry = { id, until: performance.now() + remaining, line, left, button };
    button.addEventListener('click', () => this.#undo(entry));
    this.#pending.push(entry);
    this.#place.append(line);
    this.#place.hidden = false;
    this.#tick();
  }

  #hide(entry) {
    this.#pending = this.#pending.filter((other) => other !== entry);
    entry.line.remove();
    this.#place.hidden = this.#pending.length === 0;
  }

  /** Updates the remaining times every second. */
  #tick() {
    clearTimeout(this.#timer);
    for (const entry of [...this.#pending]) {
      const seconds = Math.ceil((entry.until - performance.now()) / 1000);
      if (seconds > 0) entry.left.textContent = `${seconds} s`;
      else this.#hide(entry);
    }
    if (this.#pending.length) this.#timer = setTimeout(() => this.#tick(), 1000);
  }
}
