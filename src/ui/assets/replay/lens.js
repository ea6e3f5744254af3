// The logit lens of a step: the logits that each layer gives the recorded candidates.
import { h } from '../dom.js';
import { percent } from './candidates.js';
import { bucketOfShare } from './color.js';
import { measurementsOf } from './details.js';
import { displayText } from './glyphs.js';
import { Grid } from './grid.js';

/** Maximum number of layers and of candidates, because an ingested run may have any number. */
const MAX_LENGTH = 512;

const isList = (list, isValid) => Array.isArray(list) && list.length > 0 && list.length <= MAX_LENGTH && list.every(isValid);

/**
 * Returns the lens of a ForwardPass event: `layers` are the numbers of the layers, and `cells` has, for each token, a list with its
 * `{logit, share, rank}` in each layer. Shares are the softmax over the candidates of the model. Null without a valid lens. Pure.
 */
export function lensOf(event) {
  const { model = event?.top_tokens } = measurementsOf(event);
  const { layers, logits } = event?.details?.lens ?? {};
  if (!isList(layers, Number.isInteger) || !isList(logits, (row) => isList(row, Number.isFinite) && row.length === logits[0].length)) return null;
  const tokens = Array.isArray(model) ? model.slice(0, logits[0].length) : [];
  if (!isList(tokens, Boolean) || tokens.length !== logits[0].length || logits.length !== layers.length) return null;
  const numbers = logits.map((row) => {
    const max = Math.max(...row);
    const weights = row.map((logit) => Math.exp(logit - max));
    const sum = weights.reduce((a, b) => a + b);
    return row.map((logit, i) => ({ logit, share: weights[i] / sum, rank: 1 + row.filter((other) => other > logit).length }));
  });
  const cells = new Map(tokens.map(({ token }, i) => [token, numbers.map((layer) => layer[i])]));
  return { layers, cells };
}

/** Returns the end of a sentence on a token: the layers in which it is the highest candidate. `cells` are those of the token, if any. Pure. */
export function summary(layers, cells) {
  if (!cells) return 'is not among the candidates of the model.';
  const from = cells.findLastIndex(({ rank }) => rank > 1) + 1;
  const earlier = cells.slice(0, -1).filter(({ rank }) => rank === 1).length;
  if (from === layers.length) return `has rank ${cells.at(-1).rank} in the last layer, and is the highest candidate in ${earlier || 'none'} of the layers before it.`;
  if (from && !earlier) return 'is not the highest candidate before the last layer.';
  return `is the highest candidate ${from ? `from layer ${layers[from]} on` : 'in all layers'}.`;
}

const nameOf = ({ text, chosen }) => `${displayText(text)}${chosen ? ' ✓' : ''}`;

export class Lens {
  section = h('section', { hidden: true });
  #summary = h('p');
  #legend = h('p', { class: 'hint' });
  #axis = h('div', { role: 'row' });
  #grid = new Grid('lens', 'Candidates down, layers across', (i) => this.#cells[i].text);
  /** The cells of all rows, with their descriptions. */
  #cells = [];

  constructor() {
    this.section.append(h('h2', {}, 'Layers'), this.#summary, this.#grid.el, this.#grid.facts, this.#legend);
  }

  /** Shows the lens of a ForwardPass event, if it has one, for these rows of `explainCandidates`. */
  show(event, rows) {
    const { layers, cells } = lensOf(event) ?? {};
    const shown = rows.filter(({ token }) => cells?.has(token));
    this.section.hidden = !shown.length;
    if (!shown.length) return;
    const chosen = rows.find((row) => row.chosen);
    this.#summary.replaceChildren(...(chosen ? [h('code', {}, displayText(chosen.text)), ` ${summary(layers, cells.get(chosen.token))}`] : []));
    this.#legend.textContent = `Columns: layers. Shade: share among the ${cells.size} recorded candidates (softmax). Frame: highest of the layer.`;
    this.#cells = shown.flatMap((row) => cells.get(row.token).map(({ logit, share, rank }, i) => ({
      classes: `b${bucketOfShare(share, 1)}${rank > 1 ? '' : ' framed'}`,
      text: `${nameOf(row)} · layer ${layers[i]}: logit ${logit.toFixed(2)}, share ${percent(share)}, rank ${rank} of ${cells.size}`,
    })));
    this.#grid.setRows(shown.map((row) => h('div', { role: 'rowheader', class: row.chosen && 'chosen' }, nameOf(row))), layers.length);
    const interval = [1, 2, 5].find((every) => layers.length <= 10 * every) ?? 10;
    this.#axis.replaceChildren(h('div', { role: 'columnheader', 'aria-label': 'Candidate' }),
      ...layers.map((layer, i) => h('div', { role: 'columnheader', 'aria-label': `Layer ${layer}` }, i % interval ? '' : layer)));
    this.#grid.el.prepend(this.#axis);
    this.#grid.update((i) => this.#cells[i].classes);
  }
}
