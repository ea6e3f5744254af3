// Starter requests that the empty playground offers.
import { h } from './dom.js';

const SCHEMA = { type: 'object', properties: { name: { type: 'string' }, age: { type: 'integer' } }, required: ['name', 'age'] };

/** Sampling parameters of all starters, with a fixed seed, so that a model always gives the same answer. */
const NUMBERS = { temperature: '0.8', top_k: '40', top_p: '0.95', min_p: '0.05', repeat_penalty: '1', presence_penalty: '0', frequency_penalty: '0', seed: '1', max_tokens: '200' };

/** Starter requests as values of the form; `needs` is a mod or `attention`. The banned words of the first one occur in any English story. */
export const STARTERS = [
  { title: 'A story without two words', text: 'ban-phrases removes “the” and “and” as they appear', needs: 'ban-phrases', content: 'Tell me a short story about a girl and a cat.', mods: [{ name: 'ban-phrases', config: { phrases: ['the', 'and'], whole_words: true } }] },
  { title: 'An answer that is JSON', text: 'json-schema allows nothing else', needs: 'json-schema', content: 'Who are you? Give a name and an age.', mods: [{ name: 'json-schema', config: { schema: SCHEMA } }] },
  { title: 'Attention of the model', text: 'attention of every step, over the text: press a', needs: 'attention', content: 'Why is the sky blue?', mods: [], attention: true },
];

/** Returns buttons for the starters that this server supports; `start(form)` receives the chosen one. */
export function starters(offered, start) {
  const known = STARTERS.filter(({ needs }) => offered.includes(needs));
  if (!known.length) return null;
  return h('div', { class: 'starters', role: 'group', 'aria-label': 'Try one of these' }, known.map(({ title, text, content, mods, attention = false }) => h('button', {
    type: 'button',
    onclick: () => start({ tab: 'chat', messages: [{ role: 'user', content }], mods: mods.map(({ name, config }) => ({ name, config: JSON.stringify(config) })), numbers: NUMBERS, stop: '', tools: '', schema: '', extra: '', attention }),
  }, h('b', {}, title), h('span', { class: 'hint' }, text))));
}
