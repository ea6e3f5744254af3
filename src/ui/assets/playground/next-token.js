// The next-token mode of the playground: computes one token, shows its candidates, and appends the one that the user chooses.
import { base, sendJson } from '../api.js';
import { h } from '../dom.js';
import { requestOf } from './request.js';
import { candidateHead, outcome, probabilityCell, stageList } from '../replay/funnel.js';
import { fetchItems, group } from '../replay/events.js';
import { displayText } from '../replay/glyphs.js';
import { explainCandidates } from '../replay/candidates.js';

const MAX_ROWS = 12;

/**
 * A text with its token ids, to which chosen tokens are appended. The text is only tokenized again after the user edits it or
 * selects another model, so that the model continues from exactly the chosen tokens. Pure.
 */
export class TokenChain {
  #ids = [];
  #text = null;
  #model = null;
  /** Length of the text before each chosen token. */
  #starts = [];

  /** Returns the ids of `text`, or null if it is another text or for another model, so that it must be tokenized. */
  idsOf(text, model) { return text === this.#text && model === this.#model ? [...this.#ids] : null; }

  /** Number of chosen tokens, which `undo()` can remove. */
  get chosenCount() { return this.#starts.length; }

  /** Starts again with a text that was tokenized for a model. */
  start(text, ids, model) {
    this.#text = text;
    this.#model = model;
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

  /** Removes the token that was chosen last, if any, and returns the new text. */
  undo() {
    if (!this.chosenCount) return this.#text;
    this.#ids.pop();
    this.#text = this.#text.slice(0, this.#starts.pop());
    return this.#text;
  }
}

export class NextToken {
  #box;
  #form;
  #onError;
  #chain = new TokenChain();
  /** Id that the runs of one chain share, so that the run list can show them together. */
  #sessionId = null;
  /** Number of the newest request; the results of earlier ones are not shown. */
  #loadId = 0;

  /**
   * Shows the candidates in `box`. `form.value` has the raw text and the parameters, `form.showText(text)` changes the text, and
   * `onError(message)` shows an error.
   */
  constructor(box, form, onError) {
    this.#box = box;
    this.#form = form;
    this.#onError = onError;
    // During a request, the candidates are those of the text before it. Disabled buttons would lose the focus.
    box.addEventListener('click', (event) => { if (box.ariaBusy) event.stopPropagation(); }, true);
  }

  /** Computes the next token of the text and shows its candidates. */
  async next() {
    this.#loadId += 1;
    const loadId = this.#loadId;
    this.#box.setAttribute('aria-busy', 'true');
    try {
      const text = this.#form.value.raw;
      const { model } = this.#request(text).body;
      if (!this.#chain.idsOf(text, model)) {
        const { tokens } = await (await sendJson('/tokenize', { model, content: text, add_special: true })).json();
        // A newer request may have tokenized another text.
        if (loadId !== this.#loadId) return;
        this.#chain.start(text, tokens, model);
        this.#sessionId = `next-token ${crypto.getRandomValues(new Uint32Array(2)).join('')}`;
      }
      const { path, body } = this.#request(this.#chain.idsOf(text, model));
      const response = await sendJson(path, { ...body, session_id: this.#sessionId, max_tokens: 1, stream: false });
      await response.text();
      const id = response.headers.get('x-thunder-run-id');
      const entries = [...group(await fetchItems(id)).values()];
      if (loadId === this.#loadId) this.#draw(id, explainCandidates(entries), text);
    } finally {
      if (loadId === this.#loadId) this.#box.removeAttribute('aria-busy');
    }
  }

  /** Removes the candidates, because they no longer belong to the text. */
  clear() {
    this.#loadId += 1;
    this.#box.removeAttribute('aria-busy');
    this.#box.replaceChildren();
  }

  /** Returns path and body of the request that continues a text or a list of tokens. */
  #request(raw) { return requestOf({ ...this.#form.value, tab: 'raw', raw }); }

  #setText(text) {
    this.#form.showText(text);
    this.next().catch((error) => this.#onError(error.message));
  }

  /** Shows the candidates of run `id`, which computed the token after `text`. */
  #draw(id, candidates, text) {
    const { rows, stages, hasMods, hasSampler } = candidates;
    const choose = (row) => {
      // If the text was edited, the candidates no longer belong to its end.
      if (this.#form.value.raw === text) this.#setText(this.#chain.append(row.token, row.unnamed ? '' : row.text));
      else this.clear();
    };
    const shown = rows.filter((row, i) => i < MAX_ROWS || row.chosen);
    const button = (row, i) => h('button', {
      type: 'button', class: 'plain', title: `Append token ${row.token}`, 'aria-label': `Append ${displayText(row.text)}`,
      'data-choice': String(i + 1), onclick: () => choose(row),
    }, displayText(row.text));
    const tableRow = (row, i) => h('tr', { class: row.chosen ? 'chosen' : null },
      h('th', { scope: 'row' }, button(row, i)),
      probabilityCell(row.model, '–'), hasMods && probabilityCell(row.mods, '–'), hasSampler && probabilityCell(row.sampler, '–'),
      h('td', { class: 'reason' }, outcome(row, stages, 'drawn')));
    const table = h('table', { class: 'candidates' },
      h('caption', { class: 'visually-hidden' }, 'Candidates for the next token'),
      candidateHead(candidates, 'next token'),
      h('tbody', {}, shown.map(tableRow)));
    const undo = h('button', { type: 'button', disabled: this.#chain.chosenCount === 0, onclick: () => this.#setText(this.#chain.undo()) }, 'Undo');
    const session = new URLSearchParams({ q: `session:"${this.#sessionId}"` });
    const hadFocus = this.#box.contains(document.activeElement);
    this.#box.replaceChildren(h('h2', {}, 'Next token'), table,
      ...stageList(candidates),
      h('p', { class: 'links' }, undo, h('a', { href: `${base}/runs/${encodeURIComponent(id)}` }, 'this step'), h('a', { href: `${base}/runs?${session}` }, 'all steps')),
      h('p', { class: 'hint' }, 'Each step is a separate run of one token, so mods keep no state between steps.'));
    if (hadFocus) this.#box.querySelector('.chosen button, [data-choice]')?.focus();
  }
}
