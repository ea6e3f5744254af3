// The panel with the details of the current event: its token, alternatives, sampling stages, mod calls, and the record itself.
import { fact, h, replaceContent } from '../dom.js';
import { explainCandidates, percent } from './candidates.js';
import { surprise } from './color.js';
import { Loader } from './events.js';
import { candidateHead, outcome, probabilityCell, stageList } from './funnel.js';
import { displayText } from './glyphs.js';
import { Lens } from './lens.js';
import { modCalls } from './mod-calls.js';
import { NEVER } from './run-columns.js';

const MAX_CANDIDATES = 12;

export class Panel {
  #run;
  #events;
  #forks;
  #hooks;
  #tokenSection = h('section');
  /** The fields of the event, in the section of the token. */
  #eventFacts = h('dl', { class: 'token-facts event-facts' });
  #alternatives = h('section', { hidden: true });
  #lens = new Lens();
  #modSection = h('section');
  #recordSection = h('section', { hidden: true });
  /** The sections that show the details of an event, which are loaded. */
  #eventSections = [this.#alternatives, this.#lens.section, this.#modSection, this.#recordSection];
  /** True if all candidates are listed. */
  #showsAll = false;
  /** Loads the details of events. The first request is delayed, so that the text is usually shown before it is sent. */
  #loader = new Loader((e) => this.#load(e), performance.now());

  /**
   * `hooks.go(n)` moves the cursor. `hooks.playgroundUrl(n, text)` returns the URL of the playground that continues the run at event
   * `n`, or null. `forks` are the `ForkControls` of the run, or null in an exported page.
   */
  constructor(root, run, events, forks, hooks) {
    this.#run = run;
    this.#events = events;
    this.#forks = forks;
    this.#hooks = hooks;
    root.replaceChildren(this.#tokenSection, ...this.#eventSections);
    // Inert sections would lose the focus.
    const ignoreIfBusy = (event) => {
      if (!event.currentTarget.ariaBusy) return;
      event.preventDefault();
      event.stopPropagation();
    };
    for (const section of this.#eventSections) for (const type of ['click', 'submit']) section.addEventListener(type, ignoreIfBusy, true);
  }

  /** Adds a section of another part below the token. */
  addSection(section) { this.#tokenSection.after(section); }

  /** While the details of an event are loaded, the sections below its token are those of an earlier event, and cannot be used. */
  #setBusy(isBusy) {
    for (const section of this.#eventSections) section.ariaBusy = isBusy ? 'true' : null;
  }

  /** Shows event `e`, or null if there is none, and a row: the selected one, or else the one that the event added, or null. */
  show(e, row) {
    this.#drawToken(e, row);
    this.#drawEventFacts(null);
    this.#loader.cancel();
    if (e === null) {
      this.#setBusy(false);
      this.#drawAlternatives([]);
      this.#modSection.hidden = true;
      this.#recordSection.hidden = true;
      return;
    }
    const loaded = this.#run.stepEvents(e).map((seq) => this.#events.peek(seq));
    if (loaded.every(Boolean)) {
      this.#drawEvent(e, loaded);
      return;
    }
    this.#setBusy(true);
    this.#loader.request(e);
  }

  /** Loads and shows the details of event `e`. */
  async #load(e) {
    const events = this.#run.stepEvents(e);
    try {
      const entries = await this.#events.get(events[0], events.at(-1));
      if (this.#loader.target === e) this.#drawEvent(e, entries);
    } catch (error) {
      if (this.#loader.target !== e) return;
      this.#setBusy(false);
      this.#drawAlternatives([]);
      this.#recordSection.hidden = true;
      this.#modSection.hidden = false;
      this.#modSection.replaceChildren(h('p', { class: 'err' }, `The details of this event could not be loaded: ${error.message}.`));
    }
  }

  /** Scrolls to the candidates and their sampling stages. */
  showStages() {
    this.#alternatives.scrollIntoView({ block: 'nearest' });
  }

  #drawToken(e, row) {
    const run = this.#run;
    const events = e === null ? [] : run.stepEvents(e);
    const eventButtons = events.length ? h('div', { class: 'steps' }, events.map((seq) => h('button', {
      type: 'button', 'aria-pressed': String(seq === e), title: `Event ${seq}`, onclick: () => this.#hooks.go(seq),
    }, run.type(seq)))) : null;
    if (row === null) {
      replaceContent(this.#tokenSection, () => [eventButtons ?? '', h('p', { class: 'hint' }, e === null ? 'There are no events yet.' : `Event ${e}, step ${run.step(e)}: no token was added here.`), this.#eventFacts]);
      return;
    }
    const logprob = run.logprob(row);
    const bits = surprise(run, row);
    const origin = run.isPrompt(row) ? 'prompt' : run.isForced(row) ? 'forced by a mod' : run.isStop(row) ? 'sampled, ends the run' : 'sampled';
    replaceContent(this.#tokenSection, () => [
      eventButtons ?? '',
      h('div', { class: 'token-head' }, h('span', { class: 'token-text' }, displayText(run.text(row))), h('span', {}, origin)),
      h('dl', { class: 'token-facts' },
        logprob === null ? null : fact('probability', percent(Math.exp(logprob))),
        bits === null ? null : fact('surprise', `${bits.toFixed(2)} bit`),
        run.entropy(row) === null ? null : fact('entropy', `${run.entropy(row).toFixed(2)} bit`),
        run.rank(row) === null ? null : fact('rank', String(run.rank(row))),
        fact('position', String(run.pos(row))),
        fact('token id', String(run.token(row))),
        run.isPrompt(row) || !run.isTimed ? null : fact('took', `${run.dt(row).toFixed(run.dt(row) < 10 ? 1 : 0)} ms`),
        fact('added at', `event ${run.addedAt(row)}`),
        run.removedAt(row) === NEVER ? null : fact('removed at', `event ${run.removedAt(row) - 1}`)),
      this.#eventFacts,
    ]);
  }

  /** Draws the details of event `e`; `entries` are those of its step. */
  #drawEvent(e, entries) {
    this.#setBusy(false);
    const entry = entries.find(({ event }) => event.sequence_order === e);
    this.#drawEventFacts(entry?.event);
    this.#drawAlternatives(entries);
    this.#modSection.hidden = false;
    replaceContent(this.#modSection, () => modCalls(e, entries, this.#hooks.go));
    this.#drawRecord(entry);
  }

  /** Draws the fields of a Prefilled or ForwardPass event; other events have none. */
  #drawEventFacts(event) {
    const facts = event?.event_type === 'Prefilled'
      ? [['prompt', event.prompt_length, 'tokens'], ['before the prompt', event.tokens_so_far_len || null, 'tokens'], ['maximum', event.max_steps, 'steps']]
      : event?.event_type === 'ForwardPass' && event.input_text ? [['input', displayText(event.input_text), '']] : [];
    const recorded = facts.filter(([, value]) => value !== undefined && value !== null);
    this.#eventFacts.hidden = !recorded.length;
    this.#eventFacts.replaceChildren(...recorded.map(([name, value, unit]) => (unit
      ? fact(name, `${value} ${value === 1 ? unit.slice(0, -1) : unit}`)
      : fact(name, h('code', {}, `…${value}`), { class: 'whole-row' }))));
  }

  /** Draws the recorded JSON of the event and its calls, which is formatted when the user opens it. */
  #drawRecord(entry) {
    this.#recordSection.hidden = !entry;
    if (!entry) return;
    const json = () => JSON.stringify({ event: entry.event, ...(entry.calls.length && { calls: entry.calls }) }, null, 2);
    const wasOpen = Boolean(this.#recordSection.querySelector('details')?.open);
    const showJson = () => {
      if (details.open && details.children.length === 1) details.append(h('pre', { class: 'trace', tabindex: '0' }, json()));
    };
    const details = h('details', { ontoggle: showJson }, h('summary', { class: 'hint' }, 'As recorded'));
    details.open = wasOpen;
    replaceContent(this.#recordSection, () => [details]);
  }

  /** Draws the candidates of the step, with links and buttons that continue with another one, and their logits by layer. */
  #drawAlternatives(entries) {
    const candidates = explainCandidates(entries);
    const { rows, draft } = candidates;
    const shown = this.#showsAll ? rows : rows.filter((row, i) => i < MAX_CANDIDATES || row.chosen);
    const event = entries.findLast((entry) => entry.event.event_type === 'ForwardPass')?.event;
    this.#lens.show(event, shown);
    this.#alternatives.hidden = rows.length === 0;
    if (!rows.length) return;
    const forward = event?.sequence_order;
    const toggle = () => { this.#showsAll = !this.#showsAll; this.#drawAlternatives(entries); };
    replaceContent(this.#alternatives, () => [
      h('h2', {}, 'Candidates'),
      this.#alternativesTable(shown, candidates, forward),
      h('p', { class: 'links' },
        forward === undefined ? null : this.#forks?.form(forward),
        rows.length > shown.length || this.#showsAll ? h('button', { type: 'button', 'data-key': 'toggle', onclick: toggle }, this.#showsAll ? 'Fewer' : `All ${rows.length}`) : null),
      ...stageList(candidates),
      draft ? h('p', { class: 'hint' }, 'Draft: ', h('code', {}, displayText(draft.text)), draft.isMatch ? ' matched, so this token needed no decode.' : ' did not match.') : '',
    ]);
  }

  /** Returns the table of candidates; `forward` is the ForwardPass of the step, if it was recorded. */
  #alternativesTable(rows, candidates, forward) {
    const { stages, hasMods, hasSampler } = candidates;
    const tableRow = (row) => h('tr', { class: row.chosen ? 'chosen' : hasSampler && row.sampler === null ? 'eliminated' : null },
      h('th', { scope: 'row', title: `${displayText(row.text)}, id ${row.token}` }, displayText(row.text)),
      probabilityCell(row.model, '·'), hasMods && probabilityCell(row.mods, '–'), hasSampler && probabilityCell(row.sampler, '–'),
      h('td', { class: row.byMod ? 'reason mod' : 'reason' }, outcome(row, stages, '✓'), ' ', row.chosen || forward === undefined ? null
        : h('span', { class: 'fork' }, this.#forks?.button(row, forward), this.#playgroundLink(row, forward))));
    return h('table', { class: 'candidates' },
      h('caption', { class: 'visually-hidden' }, 'Candidates for this token'),
      candidateHead(candidates, 'token'),
      h('tbody', {}, rows.map(tableRow)));
  }

  /** Returns the link that continues the text with another candidate in the playground. */
  #playgroundLink(row, forward) {
    const href = row.unnamed ? null : this.#hooks.playgroundUrl(forward, row.text);
    const text = displayText(row.text);
    return href && h('a', { href, 'data-key': `try ${row.token}`, title: `Continue in the playground with ${text} instead`, 'aria-label': `Continue with ${text} in the playground` }, 'try');
  }
}
