// The section below the text of a run: a tree of the branches in its family, which is updated while some are active, and
// statistics of the run. The family of a run is its forks, the runs from which it was forked, and their forks.
import { base, fetchApi, runPath } from '../api.js';
import { fact, h, pageVisible, toast } from '../dom.js';
import { PollDelay } from '../poll-delay.js';
import { MODES } from './color.js';
import { appendText, displayText } from './glyphs.js';
import { Run } from './run.js';
import { changeOf, neighbor, rowsSince, sortFamily, statistics } from './tree.js';

/** Delay between two updates of active branches. */
const MIN_DELAY_MS = 1500;
/** Maximum tokens of a branch that are shown. */
const MAX_SHOWN_TOKENS = 160;
/** Maximum number of branches whose tokens are loaded. */
const MAX_LOADED_BRANCHES = 48;
/** Maximum number of tokens of a branch whose tokens are loaded. */
const MAX_TOKENS = 4000;

/** Formats a number; the minus sign has the width of a digit, and a number that is rounded to zero has none. */
function fixed(x, digits = 2) {
  if (x === null || x === undefined) return '–';
  const text = x.toFixed(digits);
  return text.replace('-', Number(text) === 0 ? '' : '−');
}

export class Family {
  section = h('section', { class: 'branches', 'aria-label': 'Branches and statistics' });
  #id;
  #hooks;
  #list = h('ol', { class: 'branch-list' });
  #head = h('h2');
  #stats = h('dl', { class: 'token-facts' });
  /** The runs of the family, depth first, as in the response of the API. */
  #members = [];
  /** Members for started forks that the API does not return yet. */
  #started = [];
  /** Elements of the branches by run id: `{row, text, facts, button}`. */
  #elements = new Map();
  /** Loaded runs that have ended, by id. */
  #runs = new Map();
  /** Number of the newest load; earlier ones are not continued. */
  #loadId = 0;
  /** Reason why the page's run cannot be forked, or null. */
  #notForkable = null;
  /** Id of the branch beside the text, or null. */
  #besideId = null;

  /**
   * `hooks.urlOf(member)` returns the URL of a branch's page, `hooks.select(row)` selects a token, and
   * `hooks.showBeside(member)` shows a branch beside the text, or none if `member` is null. `hooks.notForkable(reason)` is called
   * with the reason why the run cannot be forked, or null.
   */
  constructor(id, hooks) {
    this.#id = id;
    this.#hooks = hooks;
    this.section.append(h('div', { class: 'branch-tree' }, this.#head, this.#list), h('div', { class: 'branch-stats' }, h('h2', {}, 'This run'), this.#stats));
  }

  get isLoaded() { return this.#members.length > 0; }

  async #fetch(query = '') { return (await fetchApi(`${runPath(this.#id)}/family${query}`)).json(); }

  /** Loads the family, shows it, and follows it. */
  async load() {
    try {
      await this.#showTree();
    } catch (error) {
      this.#head.textContent = 'Branches';
      this.#list.replaceChildren(h('li', { class: 'err' }, `The branches could not be loaded: ${error.message}.`));
      return;
    }
    this.#follow();
  }

  /** Loads the family and shows it. */
  async #showTree() {
    const family = await this.#fetch();
    this.#started = this.#started.filter((m) => !family.runs.some((known) => known.run_id === m.run_id));
    this.#members = sortFamily([...family.runs, ...this.#started]);
    this.#notForkable = family.not_forkable;
    this.#hooks.notForkable(this.#notForkable);
    const count = this.#members.length;
    this.section.classList.toggle('single', count < 2);
    this.#head.textContent = count < 2 ? 'Branches' : `Branches (${count}${family.truncated ? ', more in the list' : ''}); keys: ] next, [ previous`;
    this.#list.replaceChildren(...(count < 2
      ? [h('li', { class: 'hint' }, this.#notForkable ? `This run cannot be forked: ${this.#notForkable}.` : 'None yet. Select a step, then click “fork” next to a candidate, or “Regenerate”.')]
      : this.#members.map((member) => this.#branchRow(member))));
    const current = this.#list.querySelector('[aria-current]');
    if (!current) return;
    // One of them scrolls, depending on the width. `scrollIntoView` would also scroll the page on small screens.
    for (const box of [this.#list, this.section]) box.scrollTop += Math.max(0, current.getBoundingClientRect().bottom - box.getBoundingClientRect().bottom);
  }

  /** Shows started forks, whose data are a response of the API. A single fork is also shown beside the text. */
  async forked({ parent, step, event, runs }, change) {
    const hasNewSeed = 'seed' in change || runs.length > 1;
    // The family in the next response of the API may not contain the new runs yet.
    this.#started.push(...runs.map(({ run_id, seed }) => ({
      run_id, seed, status: 'running', finish_reason: null, completion_tokens: 0, mean_logprob: null, output_preview: '',
      parent: { run_id: parent, step, sequence_order: event, change: { ...change, seed: hasNewSeed && 'new' } },
    })));
    await this.load();
    if (runs.length === 1) this.showBeside(runs[0].run_id);
    else toast(`${runs.length} branches started`);
  }

  /** Shows statistics of the page's run. */
  summarize(run) {
    const rows = rowsSince(run);
    const stats = statistics(run, rows);
    const addedCount = Array.from({ length: run.count }, (_, i) => i).filter((i) => !run.isPrompt(i)).length;
    const { msPerToken, mostSurprising } = stats;
    this.#stats.replaceChildren(
      fact('tokens', String(stats.tokens)),
      fact('removed', String(addedCount - rows.length)),
      fact('forced', String(stats.forced)),
      fact('mean ln p', fixed(stats.meanLogprob)),
      fact('perplexity', fixed(stats.perplexity)),
      fact('mean entropy', stats.meanEntropy === null ? '–' : `${fixed(stats.meanEntropy)} bit`),
      fact('per token', msPerToken === null ? '–' : `${fixed(msPerToken, msPerToken < 10 ? 1 : 0)} ms`));
    if (mostSurprising === null) return;
    const bits = fixed(-run.logprob(mostSurprising) * Math.LOG2E, 1);
    this.#stats.append(fact('most surprising', h('button', { type: 'button', class: 'plain', onclick: () => this.#hooks.select(mostSurprising) },
      h('code', {}, displayText(run.text(mostSurprising))), ` ${bits} bit`)));
  }

  /** Returns the URL of the branch that is `step` places after this run, or null if there is no other branch. */
  urlOfNext(step) {
    const id = neighbor(this.#members, this.#id, step);
    return id && this.#hooks.urlOf(this.#members.find((m) => m.run_id === id));
  }

  /** Shows a branch beside the text instead of the one before. If it is shown already, or if `id` is null, none is shown. */
  showBeside(id) {
    const member = this.#besideId === id ? null : this.#members.find((m) => m.run_id === id && id !== this.#id);
    this.#besideId = member?.run_id ?? null;
    this.#hooks.showBeside(member ?? null);
    for (const [other, { button }] of this.#elements) button?.setAttribute('aria-pressed', String(other === this.#besideId));
  }

  /** Returns the row of a branch in the tree. */
  #branchRow(member) {
    const { run_id: id, parent } = member;
    const isThisRun = id === this.#id;
    const text = h('span', { class: 'branch-text' }, member.output_preview);
    const facts = h('span', { class: 'branch-facts num' });
    const button = isThisRun ? null : h('button', {
      type: 'button', 'aria-pressed': String(id === this.#besideId), title: 'Show this branch beside the text', onclick: () => this.showBeside(id),
    }, 'Beside');
    const compareLink = h('a', { href: `${base}/compare?${new URLSearchParams({ a: this.#id, b: id })}` }, 'Compare');
    const row = h('li', { 'data-branch': id, 'data-status': member.status, 'aria-current': isThisRun ? 'true' : null },
      h('a', { class: 'branch-change', href: this.#hooks.urlOf(member) }, changeOf(member), parent ? h('small', {}, ` at step ${parent.step}`) : ''),
      facts, isThisRun ? null : h('span', { class: 'branch-actions' }, button, compareLink), text);
    row.style.setProperty('--depth', String(Math.min(member.depth, 8)));
    this.#elements.set(id, { row, text, facts, button });
    this.#showFacts(member);
    if (this.#runs.has(id)) this.#showTokens(member, this.#runs.get(id));
    return row;
  }

  #showFacts(member, tokens = member.completion_tokens) {
    const { mean_logprob: meanLogprob } = member;
    const { facts, row } = this.#elements.get(member.run_id) ?? {};
    if (!row) return; // a run without branches
    row.dataset.status = member.status;
    const state = member.status === 'running' ? 'running' : member.finish_reason ?? member.status;
    facts.textContent = [`${tokens} tok`, meanLogprob === null ? null : `ln p ${fixed(meanLogprob)}`, state].filter(Boolean).join(' · ');
  }

  /** Shows the tokens of a branch after its fork, colored by surprise. */
  #showTokens(member, run) {
    const { parent } = member;
    const rows = rowsSince(run, parent?.sequence_order ?? 0);
    const { tokens, meanLogprob } = statistics(run, rowsSince(run));
    member.mean_logprob = meanLogprob;
    this.#showFacts(member, tokens);
    const { text } = this.#elements.get(member.run_id);
    text.replaceChildren(parent && rows[0] > 0 ? '… ' : '', ...rows.slice(0, MAX_SHOWN_TOKENS).map((i) => {
      const bucket = MODES[0].bucket(run, i);
      const span = h('span', { class: `token${run.isForced(i) ? ' forced' : ''}${bucket >= 0 ? ` b${bucket}` : ''}` });
      appendText(span, run.text(i));
      return span;
    }), rows.length > MAX_SHOWN_TOKENS ? ' …' : '');
  }

  /** True for a branch whose tokens are loaded. */
  #isShown(member) {
    return this.#members.length > 1 && this.#members.indexOf(member) < MAX_LOADED_BRANCHES && member.completion_tokens <= MAX_TOKENS;
  }

  /** Loads the tokens of branches that are active or not loaded yet, unless a newer load has started. */
  async #loadTokens(loadId) {
    for (const m of this.#members.filter((one) => this.#isShown(one) && (one.status === 'running' || !this.#runs.has(one.run_id)))) {
      try {
        const run = await Run.load(m.run_id);
        if (loadId !== this.#loadId) return;
        this.#showTokens(m, run);
        if (m.status !== 'running') this.#runs.set(m.run_id, run);
      } catch { /* the row remains as it is */ }
    }
  }

  /** Updates the branches. Returns false if the tree must be drawn again, because a branch is new or the run can now be forked. */
  async #update() {
    const meanOf = this.#members.filter((m) => m.status === 'running' && !this.#isShown(m) && this.#members.length > 1).map((m) => m.run_id);
    const family = await this.#fetch(`?${new URLSearchParams({ mean_of: meanOf.join(',') })}`);
    if (family.not_forkable !== this.#notForkable) return false;
    for (const fresh of family.runs) {
      const m = this.#members.find((other) => other.run_id === fresh.run_id);
      if (!m) return false;
      Object.assign(m, fresh, { mean_logprob: fresh.mean_logprob ?? m.mean_logprob });
      if (!this.#isShown(m)) this.#showFacts(m);
    }
    return true;
  }

  /** True while the family can change in a way that the page shows: a single run only shows why it cannot be forked. */
  get #isChanging() {
    return this.#members.some((m) => m.status === 'running') && (this.#members.length > 1 || this.#notForkable !== null);
  }

  /** Loads the tokens of the branches, and updates them while some are active and the page is visible. */
  async #follow() {
    this.#loadId += 1;
    const loadId = this.#loadId;
    await this.#loadTokens(loadId);
    const delay = new PollDelay(MIN_DELAY_MS);
    while (loadId === this.#loadId && this.#isChanging) {
      await delay.elapse();
      await pageVisible();
      if (loadId !== this.#loadId) return;
      const startedAt = performance.now();
      try {
        const isCurrent = await this.#update();
        if (loadId !== this.#loadId) return;
        if (!isCurrent) await this.#showTree();
      } catch (error) {
        // The run was deleted, or the login has expired.
        if (error.status >= 400 && error.status < 500) return;
        delay.failed();
        continue;
      }
      await this.#loadTokens(loadId);
      delay.answered(startedAt);
    }
  }
}
