// The run beside the form: its replay, and the line above it with a link to the run.
import { base } from '../api.js';
import { h } from '../dom.js';
import { Replay } from '../replay/replay.js';
import { registerRunNavigation } from '../shell.js';

export class RunView {
  #pane;
  #line;
  #hooks;
  /** The shown replay, or null. */
  #replay = null;
  /** Id of the shown run, or null. */
  #id = null;

  /**
   * `pane` is the element with the replay and the line. `hooks.onProblem(text)` shows a problem, and `hooks.onConnection(text, ok)`
   * is called when the connection to a live run is lost or restored.
   */
  constructor(pane, hooks) {
    this.#pane = pane;
    this.#line = pane.querySelector('[data-run-line]');
    this.#hooks = hooks;
  }

  /** Path of the page of the shown run, or null. */
  get path() { return this.#id && this.#pathOf(this.#id); }

  /** Performs an action of a shortcut in the replay. Returns false if there is no replay or no such action. */
  act(action, key) { return this.#replay ? this.#replay.act(action, key) : false; }

  /** Shows a run that has just started. `ended(summary)` is called at its end. The other options are those of `#show`. */
  showNew(id, { ended, ...options }) {
    this.#line.replaceChildren('recorded as ', this.#linkTo(id));
    if (this.#id) this.#line.append(' · ', h('a', { href: `${base}/compare?${new URLSearchParams({ a: this.#id, b: id })}` }, 'compare with the previous run'));
    this.#show(id, { ...options, isLive: true, state: { ...this.#replay?.state, at: null } }, ended);
    // On a small screen the run is below the form.
    if (this.#pane.getBoundingClientRect().top > innerHeight * 0.7) this.#pane.scrollIntoView({ block: 'start' });
  }

  /** Shows the run with whose settings the page was opened, at event `at`, or at its end if `at` is null. */
  showOriginal(id, { at, ...options }) {
    if (at === null) this.#line.replaceChildren('settings of ', this.#linkTo(id));
    else this.#line.replaceChildren(`the text at event ${at} of `, this.#linkTo(id, `?at=${at}`));
    this.#show(id, { ...options, state: { at } });
  }

  /** Shows the replay of a run. `vectors` are the control vectors of its model as JSON text, which is empty if it has none. */
  #show(id, { vectors, ...options }, ended) {
    this.#replay?.close();
    const root = this.#pane.querySelector('[data-replay]');
    root.classList.remove('idle');
    if (vectors) root.dataset.vectors = vectors;
    else delete root.dataset.vectors;
    const replay = new Replay(root, id, { ...options, hooks: { ended, connection: this.#hooks.onConnection } });
    this.#replay = replay;
    this.#id = id;
    registerRunNavigation((place) => replay.visit(place));
    replay.open().catch((error) => this.#hooks.onProblem(`Showing the run failed: ${error.message}.`));
  }

  #pathOf(id) { return `${base}/runs/${encodeURIComponent(id)}`; }

  #linkTo(id, query = '') { return h('a', { href: this.#pathOf(id) + query }, id); }
}
