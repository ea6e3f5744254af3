// The panel with the details of the current event: its token, alternatives, sampling stages, mod calls, and the record itself.
import { base, fact, h, replaceContent, sendJson, toast } from '../dom.js';
import { SteeringField } from '../steering.js';
import { candidateTable, eventDetails, percent } from './candidates.js';
import { surprise } from './color.js';
import { Loader } from './events.js';
import { outcome, probabilityCell, stageList } from './funnel.js';
import { displayText } from './glyphs.js';
import { Lens } from './lens.js';
import { NEVER } from './rows.js';

const MAX_CANDIDATES = 12;
const MAX_LOG_LINES = 60;
/** Maximum tokens that are listed for an edit of logits. */
const MAX_MOVED = 6;
const duration = (ms) => (ms < 1 ? `${Math.round(ms * 1000)} µs` : `${ms.toFixed(1)} ms`);

export class Panel {
  #run;
  #events;
  #hooks;
  #tokenSection = h('section');
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
  /** Reason why the run cannot be forked, or null. */
  notForkable = null;
  /** Values of the form that starts several forks, which is drawn again for each event. */
  #regenerateValues = { n: '4', seed: '' };
  /** Field for the control vectors of forks, or null if the server has none. */
  #steering = null;

  /**
   * `hooks.go(n)` moves the cursor. `hooks.playgroundUrl(n, text)` returns the URL of the playground that continues the run at event
   * `n`, or null. `hooks.forksPath` is the path of the run's forks in the API, or null in an exported page. `hooks.forked(forks, change)`
   * is called with started forks; without it, the first one is opened. `vectors` are the server's control vectors, or null.
   */
  constructor(root, run, events, { vectors, ...hooks }) {
    this.#run = run;
    this.#events = events;
    this.#hooks = hooks;
    if (vectors) this.#steering = new SteeringField(vectors, 'Change steering');
    root.replaceChildren(this.#tokenSection, ...this.#eventSections);
    // Inert sections would lose the focus.
    const ignoreIfBusy = (event) => {
      if (!event.currentTarget.ariaBusy) return;
      event.preventDefault();
      event.stopPropagation();
    };
    for (const section of this.#eventSections) for (const type of ['click', 'submit']) section.addEventListener(type, ignoreIfBusy, true);
  }

  /** Offers the run's control vectors for its forks. */
  offerVectors(vectors) { this.#steering?.offer(vectors); }

  /** Adds a section of another part below the token. */
  addSection(section) { this.#tokenSection.after(section); }

  /** While the details of an event are loaded, the sections below its token are those of an earlier event, and cannot be used. */
  #setBusy(isBusy) {
    for (const section of this.#eventSections) section.ariaBusy = isBusy ? 'true' : null;
  }

  /** Shows event `e`, or null if there is none, and a row: the selected one, or else the one that the event added, or null. */
  show(e, row) {
    this.#drawToken(e, row);
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
      replaceContent(this.#tokenSection, () => [eventButtons ?? '', h('p', { class: 'hint' }, e === null ? 'There are no events yet.' : `Event ${e}, step ${run.step(e)}: no token was added here.`)]);
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
        run.isPrompt(row) || !run.isTimed ? null : fact('took', `${run.dt(row)} ms`),
        fact('added at', `event ${run.addedAt(row)}`),
        run.removedAt(row) === NEVER ? null : fact('removed at', `event ${run.removedAt(row) - 1}`)),
    ]);
  }

  /** Draws the details of event `e`; `entries` are those of its step. */
  #drawEvent(e, entries) {
    this.#setBusy(false);
    const entry = entries.find(({ event }) => event.sequence_order === e);
    this.#drawEventFacts(entry?.event);
    this.#drawAlternatives(entries);
    this.#drawModCalls(e, entries);
    this.#drawRecord(entry);
  }

  /** Draws the fields of a Prefilled or ForwardPass event. */
  #drawEventFacts(event) {
    this.#tokenSection.querySelector('.event-facts')?.remove();
    const facts = event?.event_type === 'Prefilled'
      ? [['prompt', event.prompt_length, 'tokens'], ['before the prompt', event.tokens_so_far_len || null, 'tokens'], ['maximum', event.max_steps, 'steps']]
      : event?.event_type === 'ForwardPass' && event.input_text ? [['input', displayText(event.input_text), '']] : [];
    const recorded = facts.filter(([, value]) => value !== undefined && value !== null);
    if (!recorded.length) return;
    this.#tokenSection.append(h('dl', { class: 'token-facts event-facts' }, recorded.map(([name, value, unit]) => (unit
      ? fact(name, `${value} ${unit}`)
      : fact(name, h('code', {}, `…${value}`), { class: 'whole-row' })))));
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
    const table = candidateTable(entries);
    const { rows, draft } = table;
    const shown = this.#showsAll ? rows : rows.filter((row, i) => i < MAX_CANDIDATES || row.chosen);
    const event = entries.findLast((entry) => entry.event.event_type === 'ForwardPass')?.event;
    this.#lens.show(event, shown);
    this.#alternatives.hidden = rows.length === 0;
    if (!rows.length) return;
    const forward = event?.sequence_order;
    const toggle = () => { this.#showsAll = !this.#showsAll; this.#drawAlternatives(entries); };
    replaceContent(this.#alternatives, () => [
      h('h2', {}, 'Alternatives'),
      this.#alternativesTable(shown, table, forward),
      h('p', { class: 'links' },
        forward === undefined || !this.#hooks.forksPath ? null : this.#regenerateForm(forward),
        rows.length > shown.length || this.#showsAll ? h('button', { type: 'button', 'data-key': 'toggle', onclick: toggle }, this.#showsAll ? 'Fewer' : `All ${rows.length}`) : null),
      ...stageList(table),
      draft ? h('p', { class: 'hint' }, 'Draft: ', h('code', {}, displayText(draft.text)), draft.isMatch ? ' matched, so this token needed no decode.' : ' did not match.') : '',
    ]);
  }

  /** Returns the table of candidates; `forward` is the ForwardPass of the step, if it was recorded. */
  #alternativesTable(rows, { stages, hasMods, hasSampler }, forward) {
    const tableRow = (row) => h('tr', { class: row.chosen ? 'chosen' : hasSampler && row.sampler === null ? 'eliminated' : null },
      h('th', { scope: 'row', title: `id ${row.token}` }, displayText(row.text)),
      probabilityCell(row.model, '·'), hasMods && probabilityCell(row.mods, '–'), hasSampler && probabilityCell(row.sampler, '–'),
      h('td', { class: row.byMod ? 'reason mod' : 'reason' }, outcome(row, stages, '✓'), ' ', row.chosen || forward === undefined ? null
        : h('span', { class: 'fork' }, this.#forkButton(row, forward), this.#playgroundLink(row, forward))));
    return h('table', { class: 'candidates' },
      h('caption', { class: 'visually-hidden' }, 'Candidates for this token'),
      h('thead', {}, h('tr', {},
        h('th', { scope: 'col' }, 'token'), h('th', { scope: 'col' }, 'model'),
        hasMods && h('th', { scope: 'col' }, 'after mods'), hasSampler && h('th', { scope: 'col' }, 'drawn from'),
        h('th', { scope: 'col' }, h('span', { class: 'visually-hidden' }, 'removed by')))),
      h('tbody', {}, rows.map(tableRow)));
  }

  /** Returns the button that starts a fork with another candidate. */
  #forkButton(row, forward) {
    if (!this.#hooks.forksPath) return null;
    const label = `Fork this run with ${displayText(row.text)} here`;
    const onclick = () => this.#fork(forward, this.#withSteering({ token: row.token }), row.text);
    return h('button', { type: 'button', ...this.#forkAttributes(label), 'data-key': `fork ${row.token}`, 'aria-label': label, onclick }, 'fork');
  }

  /** Returns the link that continues the text with another candidate in the playground. */
  #playgroundLink(row, forward) {
    const href = row.unnamed ? null : this.#hooks.playgroundUrl(forward, row.text);
    const text = displayText(row.text);
    return href && h('a', { href, 'data-key': `try ${row.token}`, title: `Continue in the playground with ${text} instead`, 'aria-label': `Continue with ${text} in the playground` }, 'try');
  }

  /** Returns the attributes of an element that forks the run: its title, or the reason why the run cannot be forked. */
  #forkAttributes(title) {
    return this.notForkable ? { title: `Cannot be forked: ${this.notForkable}`, 'aria-disabled': 'true' } : { title };
  }

  /** Adds the selected control vectors to a change of the run, if they differ from the run's. */
  #withSteering(change) {
    const steering = this.#steering?.value;
    return steering ? { ...change, steering } : change;
  }

  /** Starts forks of the run at the step of event `n`. `text` is that of a changed token. */
  async #fork(n, change, text) {
    if (this.notForkable) {
      toast(`This run cannot be forked: ${this.notForkable}.`);
      return;
    }
    try {
      const forks = await (await sendJson(this.#hooks.forksPath, { at: { event: n }, ...change })).json();
      if (this.#hooks.forked) this.#hooks.forked(forks, { ...change, ...(text !== undefined && { text }) });
      else location.assign(`${base}/runs/${encodeURIComponent(forks.runs[0].run_id)}`);
    } catch (error) {
      toast(`Not forked: ${error.message}`);
    }
  }

  /** Returns the form that starts forks with new seeds or other control vectors at a ForwardPass. */
  #regenerateForm(forward) {
    const values = this.#regenerateValues;
    const steering = this.#steering;
    const field = (name, props) => h('input', { type: 'number', step: '1', 'data-key': name, ...props, value: values[name], oninput: (event) => { values[name] = event.target.value; } });
    const { title, ...disabled } = this.#forkAttributes('Start runs that keep the tokens before this one and generate the others again');
    const seedField = field('seed', { min: '0', max: '4294967295' });
    // A single fork with other control vectors continues the random numbers of the run, so that only the vectors differ.
    const continuesSeed = () => Boolean(steering?.value) && Number(values.n) === 1;
    const showDefaultSeed = () => { seedField.placeholder = continuesSeed() ? 'continue' : 'random'; };
    showDefaultSeed();
    const onsubmit = (event) => {
      event.preventDefault();
      const n = Number(values.n) || 1;
      const change = this.#withSteering(n > 1 ? { n } : {});
      if (values.seed !== '') change.seed = Number(values.seed);
      // Without a seed, a single fork would repeat the run, and several forks get random seeds from the server.
      else if (n === 1 && !continuesSeed()) [change.seed] = crypto.getRandomValues(new Uint32Array(1));
      this.#fork(forward, change);
    };
    return h('form', { class: 'regenerate', title, oninput: showDefaultSeed, onsubmit },
      h('button', { ...disabled, 'data-key': 'regenerate' }, 'Regenerate'),
      h('label', {}, field('n', { min: '1', max: '64', required: true, 'aria-label': 'Number of branches' }), ' branches from here'),
      h('label', {}, 'seed ', seedField),
      steering?.element);
  }

  /** Draws the mod calls at event `e`, and those with an effect at other events of its step. */
  #drawModCalls(e, entries) {
    const calls = entries.flatMap(({ event, calls: list }) => list.map((call) => ({ ...call, event })));
    const hasEffect = ({ call, logs, actions }) => logs.length || call.exception_occurred || actions.some((action) => action.action_type !== 'Noop');
    const callsHere = calls.filter(({ event }) => event.sequence_order === e);
    const otherCalls = calls.filter((call) => call.event.sequence_order !== e && hasEffect(call));
    const stoppedBy = entries.map(({ event }) => eventDetails(event).stopped_by).find(Boolean);
    this.#modSection.hidden = false;
    replaceContent(this.#modSection, () => [
      stoppedBy ? h('p', {}, 'Stopped by ', h('code', {}, displayText(stoppedBy))) : '',
      h('h2', {}, 'Mods at this event'),
      ...(callsHere.length ? callsHere.map((call) => this.#modCall(call)) : [h('p', { class: 'hint' }, 'No mod was called here.')]),
      ...(otherCalls.length ? [h('h2', {}, 'Mods at other events of this step'), ...otherCalls.map((call) => this.#modCall(call, true))] : []),
    ]);
  }

  /** Returns the element of a mod call: its mod, duration, actions, log lines and exception. */
  #modCall({ call, logs, actions, event }, isOtherEvent = false) {
    const ms = call.execution_time_ms;
    return h('div', { class: 'call' },
      h('div', { class: 'call-head' },
        h('b', {}, call.mod_name),
        isOtherEvent ? h('button', { type: 'button', class: 'plain', onclick: () => this.#hooks.go(event.sequence_order) }, `${call.event_type} ${event.sequence_order}`) : h('span', { class: 'hint' }, call.event_type),
        Number.isFinite(ms) ? h('span', { class: 'hint num' }, duration(ms)) : null),
      actions.map((action) => h('div', { class: `action${action.action_type === 'EmitError' ? ' failed' : ''}${action.details?.superseded ? ' superseded' : ''}` }, ...actionContent(action))),
      logLines(logs),
      call.exception_occurred ? h('div', { class: 'action failed' }, call.exception_message ?? 'raised an exception',
        call.exception_traceback ? h('details', {}, h('summary', {}, 'Traceback'), h('pre', { class: 'trace', tabindex: '0' }, call.exception_traceback)) : null) : null);
  }
}

/** Returns the element with log lines: the first ones, and a button that shows all. */
function logLines(logs) {
  const line = ({ log_level, log_message: message }) => {
    const level = log_level ?? 'INFO';
    return h('div', { class: `log ${level}` }, h('b', {}, `${level.toLowerCase()} `), message);
  };
  const box = h('div', {}, logs.slice(0, MAX_LOG_LINES).map(line));
  if (logs.length > MAX_LOG_LINES) {
    box.append(h('p', { class: 'links' }, h('button', { type: 'button', onclick: () => replaceContent(box, () => logs.map(line)) }, `All ${logs.length} lines`)));
  }
  return box;
}

/** Returns the description of an action, with a remark if another action superseded it. */
function actionContent(action) {
  const content = actionDescription(action);
  if (action.details?.superseded) content.push(' (an earlier mod’s action won)');
  return content;
}

/** Returns the texts and elements that describe an action. */
function actionDescription(action) {
  const details = action.details ?? {};
  const pieces = details.texts ?? details.tokens_as_text;
  const text = Array.isArray(pieces) ? pieces.join('') : action.tokens_preview;
  const quotedText = text ? [' ', h('code', {}, displayText(text.slice(0, 300)))] : [];
  switch (action.action_type) {
    case 'Noop': return [h('span', { class: 'hint' }, 'no change')];
    case 'Backtrack': {
      const requested = details.clamped ? ` (requested ${action.backtrack_steps})` : '';
      const appended = action.backtrack_token_count ? [' and appended', ...quotedText] : [];
      return [`Backtrack ${details.removed ?? action.backtrack_steps ?? ''}${requested}`, ...appended];
    }
    case 'ForceTokens': case 'ForceOutput': return [`${action.action_type} ${action.token_count ?? ''}`, ...quotedText];
    case 'AdjustedPrefill': {
      const maxSteps = action.adjusted_max_steps ? `, maximum ${action.adjusted_max_steps} steps` : '';
      return [`New prompt, ${action.new_length ?? '?'} tokens${maxSteps}`];
    }
    case 'AdjustedLogits': {
      const temperature = Number.isFinite(action.temperature) ? `, temperature ${action.temperature}` : '';
      return [`Logits edited${temperature}`, ...movedTokens(details.moved)];
    }
    case 'ToolCalls': return ['Tool calls', h('pre', { class: 'trace', tabindex: '0' }, JSON.stringify(action.tool_calls ?? details, null, 2))];
    case 'EmitError': return [`Error: ${action.error_message ?? ''}`];
    default: return [action.action_type];
  }
}

/** Returns a table of the tokens whose probabilities changed most, as a list, which is empty if they were not recorded. */
function movedTokens(moved) {
  if (!Array.isArray(moved) || !moved.length) return [];
  const row = ({ token, text, before, after }) => h('tr', {},
    h('th', { scope: 'row' }, displayText(text ?? `⟨${token}⟩`)), h('td', {}, percent(before)), h('td', {}, '→'), h('td', {}, percent(after)));
  return [h('table', { class: 'candidates' }, h('tbody', {}, moved.slice(0, MAX_MOVED).map(row)))];
}
