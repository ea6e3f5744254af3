// What the playground offers while it is empty: requests that show at once what can be seen and changed.
import { h } from './dom.js';

const SCHEMA = { type: 'object', properties: { name: { type: 'string' }, age: { type: 'integer' } }, required: ['name', 'age'] };

/** How all of them are drawn, so that everybody sees the same answer from the same model. */
const NUMBERS = { temperature: '0.8', top_k: '40', top_p: '0.95', min_p: '0.05', repeat_penalty: '1', presence_penalty: '0', frequency_penalty: '0', seed: '1', max_tokens: '200' };

/** Requests in the form's own fields; `needs` is a mod, or attention. The words of the first stand in any English story. */
export const STARTERS = [
  { title: 'A story without two words', text: 'ban-phrases takes “the” and “and” back as they appear', needs: 'ban-phrases', content: 'Tell me a short story about a girl and a cat.', mods: [{ name: 'ban-phrases', config: { phrases: ['the', 'and'], whole_words: true } }] },
  { title: 'An answer that is JSON', text: 'json-schema leaves no other way', needs: 'json-schema', content: 'Who are you? Give a name and an age.', mods: [{ name: 'json-schema', config: { schema: SCHEMA } }] },
  { title: 'What it looks at', text: 'attention of every step, over the text: press a', needs: 'attention', content: 'Why is the sky blue?', mods: [], attention: true },
];

/** Buttons for the starters that this server can do; `start(form)` hears of the chosen one. */
export function starters(offered, start) {
  const known = STARTERS.filter(({ needs }) => offered.includes(needs));
  if (!known.length) return null;
  return h('div', { class: 'starters', role: 'group', 'aria-label': 'Try one of these' }, known.map(({ title, text, content, mods, attention = false }) => h('button', {
    type: 'button',
    onclick: () => start({ tab: 'chat', messages: [{ role: 'user', content }], mods: mods.map(({ name, config }) => ({ name, config: JSON.stringify(config) })), numbers: NUMBERS, stop: '', extra: '', attention }),
  }, h('b', {}, title), h('span', { class: 'hint' }, text))));
}
