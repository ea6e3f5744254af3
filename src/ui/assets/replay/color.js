// Modes that color tokens by a metric, the scale of their buckets, and the controls that select a mode.
import { h } from '../dom.js';

const BITS_PER_NAT = Math.LOG2E;

/** Returns the bucket of a value: the number of edges that it reaches. */
function bucketOf(edges, value) {
  let bucket = 0;
  while (bucket < edges.length && value >= edges[bucket]) bucket += 1;
  return bucket;
}

/** Returns the surprise of a row in bits, or null if it was not measured. */
export const surprise = (run, i) => (run.logprob(i) === null ? null : Math.max(0, -run.logprob(i) * BITS_PER_NAT));

/** Returns a mode. `edges` are those of its buckets, and `value(run, row)` returns a number, or null for no color. */
const mode = (name, unit, edges, value) => ({
  id: name.toLowerCase(), name, unit, edges,
  bucket: (run, i) => (value(run, i) === null ? -1 : bucketOf(edges, value(run, i))),
});
const none = () => null;

/** The modes, in the order of the keys 1 to 6. `bucket(run, row)` returns 0–7, or -1 for no color. `mods` has no buckets: it marks the tokens that mods touched. */
export const MODES = [
  mode('Surprise', 'bit', [0.1, 0.5, 1, 2, 4, 6, 9], surprise),
  mode('Entropy', 'bit', [0.1, 0.5, 1, 2, 3, 5, 7], (run, i) => run.entropy(i)),
  mode('Rank', '', [2, 3, 4, 6, 11, 51, 501], (run, i) => run.rank(i)),
  mode('Time', 'ms', [1, 3, 10, 30, 100, 300, 1000], (run, i) => (run.isPrompt(i) ? null : run.dt(i))),
  mode('Mods', '', [], none),
  mode('Plain', '', [], none),
];

/** Returns the bucket 0–7 of a value on a square-root scale from 0 to `peak`. */
export const bucketOfShare = (value, peak) => (peak > 0 ? Math.min(7, Math.floor(Math.sqrt(Math.max(0, value) / peak) * 7.999)) : 0);

/** Minimum surprise, in bits, of a token to which the keys `s` and `S` move. */
export const MIN_SURPRISE = 4;

/** Returns the legend of a mode: the buckets with their lowest values, `[{bucket, from}]`. */
export const legendOf = (mode) => (mode.edges.length ? [0, ...mode.edges].map((from, bucket) => ({ bucket, from })) : []);

/** The controls that select a mode, the colors of the text, and their legend. */
export class Coloring {
  #legend;
  #text;
  #run;
  /** Radio buttons of the modes. */
  #inputs;

  /** `name` is the name of the radio buttons. `onChoose(id)` is called with the mode that the user selects. */
  constructor(controls, legendBox, run, text, { name, onChoose }) {
    this.#legend = legendBox;
    this.#run = run;
    this.#text = text;
    this.#inputs = MODES.map(({ id }) => h('input', { type: 'radio', name, value: id, onchange: () => onChoose(id) }));
    controls.replaceChildren(h('legend', { class: 'visually-hidden' }, 'Color by'),
      ...MODES.map((mode, i) => h('label', { title: `${mode.name} (${i + 1})` }, this.#inputs[i], mode.name)));
  }

  /** Colors the text by attention if it is shown and `attention` is loaded, or else by the mode with this id. */
  show(id, isAttentionShown, attention) {
    // While attention is shown, no mode is selected.
    for (const input of this.#inputs) input.checked = input.value === id && !isAttentionShown;
    const run = this.#run;
    const shading = attention?.shading;
    const selected = MODES.find((m) => m.id === id) ?? MODES[0];
    if (shading) this.#text.colorBy(shading, attention.showsLaterSteps);
    else if (selected.id === 'mods') this.#text.colorBy((i) => (run.isTouched(i) || run.isForced(i) ? 'touched' : -1));
    else this.#text.colorBy((i) => selected.bucket(run, i));
    this.#legend.replaceChildren(...(shading
      ? [h('span', {}, 'attention, less'), ...Array.from({ length: 8 }, (_, bucket) => h('i', { class: `b${bucket}` }, '\u00a0')), h('span', {}, 'more')]
      : [...legendOf(selected).map(({ bucket, from }) => h('i', { class: `b${bucket}` }, String(from))), selected.unit ? h('span', {}, selected.unit) : '']));
  }
}
