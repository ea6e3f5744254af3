// Starters: example requests that the empty playground offers.
import { h } from '../dom.js';

const SCHEMA = { type: 'object', properties: { name: { type: 'string' }, age: { type: 'integer' } }, required: ['name', 'age'] };

/** Sampling parameters of all starters, with a fixed seed, so that a model always gives the same answer. */
const NUMBERS = { temperature: '0.8', top_k: '40', top_p: '0.95', min_p: '0.05', repeat_penalty: '1', presence_penalty: '0', frequency_penalty: '0', seed: '1', max_tokens: '200' };

/**
 * The starters; `needs` is the mod that a starter uses, or `attention`. Nearly every English story contains the banned words of the first
 * one, so that its replay shows a backtrack.
 */
const STARTERS = [
  { title: 'A story without two words', text: 'ban-phrases removes “the” and “and” as they appear', needs: 'ban-phrases', content: 'Tell me a short story about a girl and a cat.', mods: [{ name: 'ban-phrases', config: { phrases: ['the', 'and'], whole_words: true } }] },
  { title: 'An answer that is JSON', text: 'json-schema allows nothing else', needs: 'json-schema', content: 'Who are you? Give a name and an age.', mods: [{ name: 'json-schema', config: { schema: SCHEMA } }] },
  { title: 'Attention of the model', text: 'press a to see the attention of each step in the text', needs: 'attention', content: 'Why is the sky blue?', mods: [], attention: true },
];

/** Returns the values of the playground's form for a starter. */
function formOf({ content, mods, attention = false }) {
  return {
    tab: 'chat', messages: [{ role: 'user', content }], numbers: NUMBERS, stop: '', tools: '', schema: '', extra: '', attention,
    mods: mods.map(({ name, config }) => ({ name, config: JSON.stringify(config) })),
  };
}

/**
 * Returns an element with a button for each starter whose mod (or `attention`) is in `available`, or null if there is none.
 * `start(form)` is called with the chosen one.
 */
export function starterButtons(available, start) {
  const usable = STARTERS.filter(({ needs }) => available.includes(needs));
  if (!usable.length) return null;
  const button = (starter) => h('button', { type: 'button', onclick: () => start(formOf(starter)) },
    h('b', {}, starter.title), h('span', { class: 'hint' }, starter.text));
  return h('div', { class: 'starters', role: 'group', 'aria-label': 'Try one of these' }, usable.map(button));
}
