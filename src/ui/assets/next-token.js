// Next-token mode of the playground: computes one token, shows its candidates, and appends the chosen one.
import { base, fetchApi, h } from './dom.js';
import { probabilityCell, removalReason, stageList } from './replay/funnel.js';
import { group } from './replay/events.js';
import { displayText } from './replay/glyphs.js';
import { candidateTable } from './replay/candidates.js';

const MAX_ROWS = 12;

/**
 * The token ids of the text, and the length of the text before each chosen token. The text is only tokenized again after the
 * user edits it, so that the model continues from exactly the chosen tokens. Pure.
 */
export class TokenChain {
  #ids = [];
  #text = null;
  #starts = [];

  /** Returns the ids of `text`, or null if it must be tokenized. */
  idsOf(text) { return text === this.#text ? [...this.#ids] : null; }

  /** Number of tokens that `undo` can remove. */
  get chosen() { return this.#starts.length; }

  /** Starts with a tokenized text. */
  start(text, ids) {
    this.#text = text;
    this.#ids = [...ids];
    this.#starts = [];
  }

  /** Appends a token and returns the new text. */
  append(token, text) {
    this.#starts.push(this.#text.length);
    this.#ids.push(token);
    this.#text += text;
    return this.#text;
  }

  /** Removes the token that was chosen last and returns the new text. */
  undo() {
    this.#ids.pop();
    this.#text = this.#text.slice(0, this.#starts.pop());
    return this.#text;
  }
}

/** Returns the stored entries of a run. */
async function entriesOf(id) {
  const text = await (await fetchApi(`/api/v1/runs/${encodeURIComponent(id)}/events`, { headers: { Accept: 'application/x-ndjson' } })).text();
  return [...group(text.split('\n').filter(Boolean).map((line) => JSON.parse(line))).values()];
}

export class NextToken {
  #box;
  #raw;
  #hooks;
  #chain = new TokenChain();
  #session = null;
  /** Number of the newest request; the results of earlier ones are not shown. */
  #loadId = 0;

  /** `box` shows the candidates, `raw` is the text area. `hooks.request(ids)` returns path and body of a request, `hooks.changed()` is called after a change of the text, and `hooks.fail(message)` shows an error. */
  constructor(box, raw, hooks) {
    this.#box = box;
    this.#raw = raw;
    this.#hooks = hooks;
  }

  /** Computes the next token of the text and shows its candidates. */
  async next() {
    this.#loadId += 1;
    const loadId = this.#loadId;
    this.#box.setAttribute('aria-busy', 'true');
    try {
      const text = this.#raw.value;
      if (!this.#chain.idsOf(text)) {
        const { tokens } = await this.#post('/tokenize', { content: text, add_special: true });
        this.#chain.start(text, tokens);
        this.#session = `next-token ${crypto.getRandomValues(new Uint32Array(2)).join('')}`;
      }
      const ids = this.#chain.idsOf(text);
      const { path, body } = this.#hooks.request(ids);
      const response = await this.#send(path, { ...body, session_id: this.#session, max_tokens: 1, stream: false });
      await response.text();
      const id = response.headers.get('x-thunder-run-id');
      const entries = await entriesOf(id);
      if (loadId === this.#loadId) this.#draw(id, candidateTable(entries), text);
    } finally {
      if (loadId === this.#loadId) this.#box.removeAttribute('aria-busy');
    }
  }

  /** Removes the candidates. */
  clear() {
    this.#loadId += 1;
    this.#box.removeAttribute('aria-busy');
    this.#box.replaceChildren();
  }

  #send(path, body) {
    return fetchApi(path, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body) });
  }

  async #post(path, body) { return (await this.#send(path, body)).json(); }

  #setText(text) {
    this.#raw.value = text;
    this.#raw.scrollTop = this.#raw.scrollHeight;
    this.#hooks.changed();
    this.next().catch((error) => this.#hooks.fail(error.message));
  }

  #draw(id, candidates, text) {
    const { rows, stages, hasMods, hasSampler } = candidates;
    const choose = (row) => {
      // If the text was edited, the candidates no longer belong to its end.
      if (this.#raw.value === text) this.#setText(this.#chain.append(row.token, row.unnamed ? '' : row.text));
      else this.clear();
    };
    const shown = rows.filter((row, i) => i < MAX_ROWS || row.chosen);
    const button = (row, i) => h('button', {
      type: 'button', class: 'plain', title: `Append token ${row.token}`, 'aria-label': `Append ${displayText(row.text)}`, 'data-choice': String(i + 1), onclick: () => choose(row),
    }, displayText(row.text));
    const table = h('table', { class: 'candidates' },
      h('caption', { class: 'visually-hidden' }, 'Candidates for the next token'),
      h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'next token'), h('th', { scope: 'col' }, 'model'),
        hasMods ? h('th', { scope: 'col' }, 'after mods') : null, hasSampler ? h('th', { scope: 'col' }, 'drawn from') : null,
        h('th', { scope: 'col' }, h('span', { class: 'visually-hidden' }, 'removed by')))),
      h('tbody', {}, shown.map((row, i) => h('tr', { class: row.chosen ? 'chosen' : null },
        h('th', { scope: 'row' }, button(row, i)), probabilityCell(row.model, '–'), hasMods ? probabilityCell(row.mods, '–') : null, hasSampler ? probabilityCell(row.sampler, '–') : null,
        h('td', { class: 'reason' }, removalReason(row, stages, 'drawn'))))));
    const undo = h('button', { type: 'button', disabled: this.#chain.chosen === 0, onclick: () => this.#setText(this.#chain.undo()) }, 'Undo');
    const session = new URLSearchParams({ q: `session:"${this.#session}"` });
    const focused = this.#box.contains(document.activeElement);
    this.#box.replaceChildren(h('h2', {}, 'Next token'), table,
      ...stageList(candidates),
      h('p', { class: 'links' }, undo, h('a', { href: `${base}/runs/${encodeURIComponent(id)}` }, 'this step'), h('a', { href: `${base}/runs?${session}` }, 'all steps')),
      h('p', { class: 'hint' }, 'Each step is a separate run of one token, so mods keep no state between steps.'));
    if (focused) this.#box.querySelector('.chosen button, [data-choice]')?.focus();
  }
}
