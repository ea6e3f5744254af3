// The controls that fork a run: with another candidate, with new seeds, or with other control vectors.
import { base, sendJson } from '../api.js';
import { h, toast } from '../dom.js';
import { SteeringField } from '../steering.js';
import { displayText } from './glyphs.js';

export class ForkControls {
  /** Reason why the run cannot be forked, or null. */
  notForkable = null;
  #path;
  #forked;
  /** Values of the form, which is drawn again for each event. */
  #values = { n: '4', seed: '' };
  /** Field for the control vectors of forks, or null if the server has none. */
  #steering = null;

  /**
   * `path` is that of the run's forks in the API. `forked(forks, change)` is called with started forks; without it, the first one is
   * opened. `vectors` are the server's control vectors, or null.
   */
  constructor(path, { forked, vectors }) {
    this.#path = path;
    this.#forked = forked;
    if (vectors) this.#steering = new SteeringField(vectors, 'Change steering');
  }

  /** Offers the run's control vectors for its forks. */
  offerVectors(vectors) { this.#steering?.offer(vectors); }

  /** Returns the button that starts a fork with another candidate at a ForwardPass. */
  button(row, forward) {
    const label = `Fork this run with ${displayText(row.text)} here`;
    const onclick = () => this.#fork(forward, this.#withSteering({ token: row.token }), row.text);
    return h('button', { type: 'button', ...this.#attributes(label), 'data-key': `fork ${row.token}`, 'aria-label': label, onclick }, 'fork');
  }

  /** Returns the form that starts forks with new seeds or other control vectors at a ForwardPass. */
  form(forward) {
    const values = this.#values;
    const steering = this.#steering;
    const field = (name, props) => h('input', { type: 'number', step: '1', 'data-key': name, ...props, value: values[name], oninput: (event) => { values[name] = event.target.value; } });
    const { title, ...disabled } = this.#attributes('Start runs that keep the tokens before this one and generate the others again');
    const seedField = field('seed', { min: '0', max: '4294967295' });
    // A single fork with other control vectors continues the random numbers of the run, so that only the vectors differ.
    const continuesSeed = () => Boolean(steering?.value) && Number(values.n) === 1;
    const showDefaultSeed = () => { seedField.placeholder = continuesSeed() ? 'continue' : 'random'; };
    showDefaultSeed();
    const onsubmit = (event) => {
      event.preventDefault();
      const n = Number(values.n) || 1;
      const change = this.#withSteering(n > 1 ? { n } : {});
      if (values.seed !== '') change.seed = Number(values.seed);
      // Without a seed, a single fork would repeat the run, and several forks get random seeds from the server.
      else if (n === 1 && !continuesSeed()) [change.seed] = crypto.getRandomValues(new Uint32Array(1));
      this.#fork(forward, change);
    };
    return h('form', { class: 'regenerate', title, oninput: showDefaultSeed, onsubmit },
      h('button', { ...disabled, 'data-key': 'regenerate' }, 'Regenerate'),
      h('label', {}, field('n', { min: '1', max: '64', required: true, 'aria-label': 'Number of branches' }), ' branches from here'),
      h('label', {}, 'seed ', seedField),
      steering?.element);
  }

  /** Returns the attributes of an element that forks the run: its title, or the reason why the run cannot be forked. */
  #attributes(title) {
    return this.notForkable ? { title: `Cannot be forked: ${this.notForkable}`, 'aria-disabled': 'true' } : { title };
  }

  /** Adds the selected control vectors to a change of the run, if they differ from the run's. */
  #withSteering(change) {
    const steering = this.#steering?.value;
    return steering ? { ...change, steering } : change;
  }

  /** Starts forks of the run at the step of event `n`. `text` is that of a changed token. */
  async #fork(n, change, text) {
    if (this.notForkable) {
      toast(`This run cannot be forked: ${this.notForkable}.`);
      return;
    }
    try {
      const forks = await (await sendJson(this.#path, { at: { event: n }, ...change })).json();
      if (this.#forked) this.#forked(forks, { ...change, ...(text !== undefined && { text }) });
      else location.assign(`${base}/runs/${encodeURIComponent(forks.runs[0].run_id)}`);
    } catch (error) {
      toast(`Not forked: ${error.message}`);
    }
  }
}
