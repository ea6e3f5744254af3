// The branches of a run below its text: the tree of its family, with active branches updated, and statistics of the run. One
// branch can be shown beside the text.
import { base, fetchApi, h, toast } from '../dom.js';
import { MODES } from './color.js';
import { appendText } from './glyphs.js';
import { Run } from './run.js';
import { changeOf, neighbor, order, rowsSince, statistics } from './tree.js';

const POLL_MS = 250;
const MAX_SHOWN_TOKENS = 160;
/** Maximum branches whose tokens are loaded, and tokens of such a branch. */
const MAX_LOADED = 48;
const MAX_TOKENS = 4000;

const fixed = (x, digits = 2) => (x === null || x === undefined ? '–' : x.toFixed(digits).replace('-', '−'));

export class Family {
  section = h('section', { class: 'branches', 'aria-label': 'Branches and statistics' });
  #id;
  #hooks;
  #list = h('ol', { class: 'branch-list' });
  #head = h('h2');
  #stats = h('dl', { class: 'token-facts' });
  #members = [];
  #started = [];
  #rows = new Map();
  #runs = new Map();
  #timer = 0;
  #loadId = 0;
  #besideId = null;

  /** `hooks`: `urlOf(member)` of a branch's page, `go(row)`, `refused(reason)`, `beside(member)` shows a branch beside the text, or closes it if `member` is null, `changed()`. */
  constructor(id, hooks) {
    this.#id = id;
    this.#hooks = hooks;
    this.section.append(h('div', { class: 'branch-tree' }, this.#head, this.#list), h('div', { class: 'branch-stats' }, h('h2', {}, 'This run'), this.#stats));
  }

  get isLoaded() { return this.#members.length > 0; }

  /** Loads the family and shows it. */
  async load() {
    try {
      const family = await (await fetchApi(`/api/v1/runs/${encodeURIComponent(this.#id)}/family`)).json();
      this.#started = this.#started.filter((m) => !family.runs.some((known) => known.run_id === m.run_id));
      this.#members = order([...family.runs, ...this.#started]);
      this.#hooks.refused(family.not_forkable);
      const count = this.#members.length;
      this.section.classList.toggle('single', count < 2);
      this.#head.textContent = count < 2 ? 'Branches' : `Branches (${count}${family.truncated ? ', more in the list' : ''}), ] next, [ previous`;
      this.#list.replaceChildren(...(count < 2
        ? [h('li', { class: 'hint' }, family.not_forkable ? `This run cannot be forked: ${family.not_forkable}.` : 'None yet. Select a step, then click “fork” next to a candidate, or “Regenerate”.')]
        : this.#members.map((m) => this.#row(m))));
      this.section.querySelector('[aria-current]')?.scrollIntoView({ block: 'nearest' });
    } catch (error) {
      this.#head.textContent = 'Branches';
      this.#list.replaceChildren(h('li', { class: 'err' }, `The branches could not be loaded: ${error.message}.`));
      return;
    }
    this.#loadTokens();
  }

  /** Shows started forks; a single fork also beside the text. */
  async forked({ parent, step, event, runs }, change) {
    const seeded = 'seed' in change || runs.length > 1;
    // The response of the server may not contain new runs yet.
    this.#started.push(...runs.map(({ run_id, seed }) => ({
      run_id, seed, status: 'running', finish_reason: null, completion_tokens: 0, mean_logprob: null, output_preview: '',
      parent: { run_id: parent, step, sequence_order: event, change: { ...change, seed: seeded && 'new' } },
    })));
    await this.load();
    if (runs.length === 1) this.beside(runs[0].run_id);
    else toast(`${runs.length} branches started`);
  }

  /** Shows statistics of the page's run. */
  summarize(run) {
    const rows = rowsSince(run);
    const s = statistics(run, rows);
    const fact = (name, value) => h('div', {}, h('dt', {}, name), h('dd', {}, value));
    this.#stats.replaceChildren(fact('tokens', String(s.tokens)),
      fact('removed', String(Array.from({ length: run.count }, (_, i) => i).filter((i) => !run.isPrompt(i)).length - s.tokens)),
      fact('forced', String(s.forced)),
      fact('mean ln p', fixed(s.mean)), fact('perplexity', fixed(s.perplexity)), fact('mean entropy', s.entropy === null ? '–' : `${fixed(s.entropy)} bit`),
      fact('per token', s.ms === null ? '–' : `${fixed(s.ms, s.ms < 10 ? 1 : 0)} ms`),
      s.peak === null ? '' : fact('most surprising', h('button', { type: 'button', class: 'plain', onclick: () => this.#hooks.go(s.peak) }, tokenCode(run.text(s.peak)), ` ${fixed(-run.logprob(s.peak) * Math.LOG2E, 1)} bit`)));
  }

  /** Returns the URL of the branch `step` places after this run. */
  next(step) {
    const id = neighbor(this.#members, this.#id, step);
    return id && this.#hooks.urlOf(this.#members.find((m) => m.run_id === id));
  }

  /** Shows a branch in a second replay beside the text; the same branch again closes it. */
  beside(id) {
    const member = this.#besideId === id ? null : this.#members.find((m) => m.run_id === id && id !== this.#id);
    this.#besideId = member?.run_id ?? null;
    this.#hooks.beside(member ?? null);
    for (const [other, row] of this.#rows) row.button?.setAttribute('aria-pressed', String(other === this.#besideId));
    this.#hooks.changed();
  }

  #row(m) {
    const here = m.run_id === this.#id;
    const text = h('span', { class: 'branch-text' }, m.output_preview);
    const facts = h('span', { class: 'branch-facts num' });
    const button = here ? null : h('button', { type: 'button', 'aria-pressed': String(m.run_id === this.#besideId), title: 'Show this branch beside the text', onclick: () => this.beside(m.run_id) }, 'Beside');
    const row = h('li', { 'data-branch': m.run_id, 'data-status': m.status, 'aria-current': here ? 'true' : null },
      h('a', { class: 'branch-change', href: this.#hooks.urlOf(m) }, changeOf(m), m.parent ? h('small', {}, ` at step ${m.parent.step}`) : ''), facts,
      here ? null : h('span', { class: 'branch-actions' }, button, h('a', { href: `${base}/compare?${new URLSearchParams({ a: this.#id, b: m.run_id })}` }, 'Compare')), text);
    row.style.setProperty('--depth', String(Math.min(m.depth, 8)));
    this.#rows.set(m.run_id, { row, text, facts, button });
    this.#facts(m);
    if (this.#runs.has(m.run_id)) this.#paint(m, this.#runs.get(m.run_id));
    return row;
  }

  #facts(m, tokens = m.completion_tokens, mean = m.mean_logprob) {
    const { facts, row } = this.#rows.get(m.run_id);
    row.dataset.status = m.status;
    facts.textContent = [`${tokens} tok`, mean === null ? null : `ln p ${fixed(mean)}`, m.status === 'running' ? 'running' : m.finish_reason ?? m.status].filter(Boolean).join(' · ');
  }

  /** Shows the tokens after the fork, colored by surprise. */
  #paint(m, run) {
    const rows = rowsSince(run, m.parent?.sequence_order ?? 0);
    this.#facts(m, rowsSince(run).filter((i) => !run.isStop(i)).length, statistics(run, rowsSince(run)).mean);
    const { text } = this.#rows.get(m.run_id);
    text.replaceChildren(m.parent && rows[0] > 0 ? '… ' : '', ...rows.slice(0, MAX_SHOWN_TOKENS).map((i) => {
      const bucket = MODES[0].bucket(run, i);
      const span = h('span', { class: `token${run.isForced(i) ? ' forced' : ''}${bucket >= 0 ? ` b${bucket}` : ''}` });
      appendText(span, run.text(i));
      return span;
    }), rows.length > MAX_SHOWN_TOKENS ? ' …' : '');
  }

  /** Loads the tokens of the branches, repeatedly for active ones. */
  async #loadTokens() {
    clearTimeout(this.#timer);
    this.#loadId += 1;
    const loadId = this.#loadId;
    const outdated = this.#members.slice(0, MAX_LOADED).filter((m) => this.#members.length > 1 && m.completion_tokens <= MAX_TOKENS && (m.status === 'running' || !this.#runs.has(m.run_id)));
    for (const m of outdated) {
      try {
        const path = `/api/v1/runs/${encodeURIComponent(m.run_id)}`;
        const run = Run.stored(await (await fetchApi(`${path}/columns`)).arrayBuffer());
        if (loadId !== this.#loadId) return;
        this.#paint(m, run);
        if (m.status !== 'running') this.#runs.set(m.run_id, run);
      } catch { /* the row does not change */ }
    }
    if (!this.#members.some((m) => m.status === 'running')) return;
    this.#timer = setTimeout(async () => {
      try {
        const family = await (await fetchApi(`/api/v1/runs/${encodeURIComponent(this.#id)}/family`)).json();
        for (const fresh of family.runs) {
          const m = this.#members.find((other) => other.run_id === fresh.run_id);
          if (m) Object.assign(m, fresh);
          else return this.load();
          this.#facts(m);
        }
      } catch { /* the next poll tries again */ }
      return this.#loadTokens();
    }, POLL_MS);
  }
}

function tokenCode(text) {
  const code = h('code');
  appendText(code, text);
  return code;
}
