// The panel with the details of the current event: token, alternatives, sampling stages, attention, mods.
import { h, toast } from '../dom.js';
import { surprise } from './color.js';
import { requestDelay } from './events.js';
import { removal, stageList } from './funnel.js';
import { NEVER } from './rows.js';
import { show } from './glyphs.js';
import { SteeringField } from '../steering.js';
import { candidateTable, eventDetails, percent } from './candidates.js';

const MAX_CANDIDATES = 12;
const MAX_LOGS = 60;
const fixed = (x, digits = 2) => (x === null || x === undefined ? '–' : x.toFixed(digits));

export class Panel {
  #root;
  #run;
  #events;
  #go;
  #fork;
  #branch;
  #token = h('section');
  #alts = h('section', { hidden: true });
  #mods = h('section');
  #record = h('section', { hidden: true });
  /** True if all candidates are listed. */
  #all = false;
  /** Number of the newest request; the results of earlier ones are not shown. */
  #loadId = 0;
  #timer = null;
  /** Delays the first request, so that the text is usually shown before it is sent. */
  #delay = requestDelay(performance.now());
  /** Field for the control vectors of forks, or null if the server has none. */
  #steering = null;
  /** Reason why the run cannot be forked, or null. */
  refusal = null;
  /** Values of the form that starts several forks. */
  ways = { n: '4', seed: '' };

  /** `go(n)` moves the cursor; `fork(n, text)` returns a URL of the playground or null; `branch(n, change, text)` starts forks of the run, and is null in an exported page. `vectors` are the server's control vectors, or null. */
  constructor(root, run, events, { go, fork, branch, vectors }) {
    this.#run = run;
    this.#events = events;
    this.#go = go;
    this.#fork = fork;
    this.#branch = branch;
    if (vectors) this.#steering = new SteeringField(vectors, 'Change steering');
    this.#root = root;
    root.replaceChildren(this.#token, this.#alts, this.#mods, this.#record);
  }

  /** Offers the run's control vectors for its forks. */
  offer(vectors) { this.#steering?.offer(vectors); }

  /** Adds a section of another module below the token. */
  put(section) { this.#token.after(section); }

  /** Shows event `e`, or null if there is none, and `row`: the selected row, or else the one that the event added, or null. */
  show(e, row) {
    this.#drawToken(e, row);
    this.#loadId += 1;
    clearTimeout(this.#timer);
    if (e === null) {
      this.#alts.hidden = true;
      this.#mods.hidden = true;
      this.#record.hidden = true;
      return;
    }
    const loadId = this.#loadId;
    const events = this.#run.stepEvents(e);
    if (events.every((seq) => this.#events.peek(seq))) {
      this.#drawStep(e, events.map((seq) => this.#events.peek(seq)));
      return;
    }
    this.#root.setAttribute('aria-busy', 'true');
    this.#timer = setTimeout(async () => {
      try {
        const entries = await this.#events.get(events[0], events.at(-1));
        if (loadId === this.#loadId) this.#drawStep(e, entries);
      } catch (error) {
        if (loadId !== this.#loadId) return;
        this.#alts.hidden = true;
        this.#record.hidden = true;
        this.#mods.hidden = false;
        this.#mods.replaceChildren(h('p', { class: 'err' }, `The details of this event could not be loaded: ${error.message}.`));
      } finally {
        if (loadId === this.#loadId) this.#root.removeAttribute('aria-busy');
      }
    }, this.#delay());
  }

  /** Scrolls to the candidates and their sampling stages. */
  showStages() {
    this.#alts.scrollIntoView({ block: 'nearest' });
  }

  #drawToken(e, row) {
    const run = this.#run;
    const events = e === null ? [] : run.stepEvents(e);
    const eventButtons = events.length ? h('div', { class: 'steps' }, events.map((seq) => h('button', {
      type: 'button', 'aria-pressed': String(seq === e), title: `Event ${seq}`, onclick: () => this.#go(seq),
    }, run.type(seq)))) : null;
    if (row === null) {
      this.#token.replaceChildren(eventButtons ?? '', h('p', { class: 'hint' }, e === null ? 'There are no events yet.' : `Event ${e}, step ${run.step(e)}: no token was added here.`));
      return;
    }
    const p = run.logprob(row);
    const s = surprise(run, row);
    const origin = run.isPrompt(row) ? 'prompt' : run.isForced(row) ? 'forced by a mod' : run.isStop(row) ? 'sampled, ends the run' : 'sampled';
    const fact = (name, value) => h('div', {}, h('dt', {}, name), h('dd', {}, value));
    this.#token.replaceChildren(eventButtons ?? '',
      h('div', { class: 'tok-head' }, h('span', { class: 'tok-glyph' }, show(run.text(row))), h('span', {}, origin)),
      h('dl', { class: 'tok-facts' },
        p === null ? null : fact('probability', percent(Math.exp(p))),
        s === null ? null : fact('surprise', `${fixed(s)} bit`),
        run.entropy(row) === null ? null : fact('entropy', `${fixed(run.entropy(row))} bit`),
        run.rank(row) === null ? null : fact('rank', String(run.rank(row))),
        fact('position', String(run.pos(row))),
        fact('token id', String(run.token(row))),
        run.isPrompt(row) || !run.isTimed ? null : fact('took', `${run.dt(row)} ms`),
        fact('added at', `event ${run.addedAt(row)}`),
        run.removedAt(row) === NEVER ? null : fact('removed at', `event ${run.removedAt(row) - 1}`)));
  }

  #drawStep(e, entries) {
    this.#root.removeAttribute('aria-busy');
    const here = entries.find(({ event }) => event.sequence_order === e);
    this.#drawFacts(here?.event);
    this.#drawAlternatives(entries);
    this.#drawMods(e, entries);
    this.#drawRecord(here);
  }

  /** Shows the fields of a Prefilled or ForwardPass event. */
  #drawFacts(event) {
    this.#token.querySelector('.given')?.remove();
    const facts = event?.event_type === 'Prefilled'
      ? [['prompt', event.prompt_length, 'tokens'], ['before the prompt', event.tokens_so_far_len || null, 'tokens'], ['maximum', event.max_steps, 'steps']]
      : event?.event_type === 'ForwardPass' && event.input_text ? [['input', show(event.input_text), '']] : [];
    const known = facts.filter(([, value]) => value !== undefined && value !== null);
    if (!known.length) return;
    this.#token.append(h('dl', { class: 'tok-facts given' }, known.map(([name, value, unit]) => h('div', { class: unit ? null : 'whole' },
      h('dt', {}, name), h('dd', {}, unit ? `${value} ${unit}` : h('code', {}, `…${value}`))))));
  }

  /** Shows the event and its calls as recorded JSON. */
  #drawRecord(entry) {
    this.#record.hidden = !entry;
    if (!entry) return;
    const whole = () => JSON.stringify({ event: entry.event, ...(entry.calls.length && { calls: entry.calls }) }, null, 2);
    const open = this.#record.querySelector('details')?.open;
    const details = h('details', { ontoggle: () => { if (details.open && details.children.length === 1) details.append(h('pre', { class: 'trace', tabindex: '0' }, whole())); } }, h('summary', { class: 'hint' }, 'As recorded'));
    details.open = Boolean(open);
    this.#record.replaceChildren(details);
  }

  #drawAlternatives(entries) {
    const candidates = candidateTable(entries);
    const { rows, stages, draft, hasMods, hasSampler } = candidates;
    this.#alts.hidden = rows.length === 0;
    if (!rows.length) return;
    const shown = this.#all ? rows : rows.filter((r, i) => i < MAX_CANDIDATES || r.chosen);
    const cell = (p, none) => {
      const td = h('td', { class: p === null ? 'hint' : 'bar-p' }, p === null ? none : percent(p));
      if (p !== null) td.style.setProperty('--p', p.toFixed(4));
      return td;
    };
    const forward = entries.findLast(({ event }) => event.event_type === 'ForwardPass')?.event.sequence_order;
    const start = (...change) => (this.refusal ? toast(`This run cannot be forked: ${this.refusal}.`) : this.#branch(forward, ...change));
    const disabled = this.refusal ? 'true' : null;
    const title = (text) => (this.refusal ? `Cannot be forked: ${this.refusal}` : text);
    const forkButton = (r) => (r.chosen || forward === undefined || !this.#branch ? null : h('button', {
      type: 'button', 'aria-disabled': disabled, title: title(`Fork this run with ${show(r.text)} here`), 'aria-label': `Fork this run with ${show(r.text)} here`,
      onclick: () => start({ token: r.token }, r.text),
    }, 'fork'));
    const tryLink = (r) => {
      const href = r.chosen || forward === undefined || r.unnamed ? null : this.#fork(forward, r.text);
      return href && h('a', { href, title: `Continue in the playground with ${show(r.text)} instead`, 'aria-label': `Continue with ${show(r.text)} in the playground` }, 'try');
    };
    const table = h('table', { class: 'alts' },
      h('caption', { class: 'vh' }, 'Candidates for this token'),
      h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'token'), h('th', { scope: 'col' }, 'model'),
        hasMods ? h('th', { scope: 'col' }, 'after mods') : null, hasSampler ? h('th', { scope: 'col' }, 'drawn from') : null,
        h('th', { scope: 'col' }, h('span', { class: 'vh' }, 'removed by')))),
      h('tbody', {}, shown.map((r) => h('tr', { class: r.chosen ? 'won' : hasSampler && r.sampler === null ? 'out' : null },
        h('th', { scope: 'row', title: `id ${r.token}` }, show(r.text)),
        cell(r.model, '·'), hasMods ? cell(r.mods, '–') : null, hasSampler ? cell(r.sampler, '–') : null,
        h('td', { class: r.byMod ? 'reason mod' : 'reason' }, removal(r, stages, '✓'), ' ', r.chosen ? null : h('span', { class: 'fork' }, forkButton(r), tryLink(r)))))));
    this.#alts.replaceChildren(h('h2', {}, 'Alternatives'), table,
      h('p', { class: 'links' }, forward === undefined || !this.#branch ? '' : this.#regenerate(start, disabled, title('Start runs that keep the tokens before this one and generate the others again')), rows.length > shown.length || this.#all ? h('button', { type: 'button', onclick: () => { this.#all = !this.#all; this.#drawAlternatives(entries); } }, this.#all ? 'Fewer' : `All ${rows.length}`) : ''),
      ...stageList(candidates),
      draft ? h('p', { class: 'hint' }, 'Draft: ', h('code', {}, show(draft.text)), draft.right ? ' matched, so this token needed no decode.' : ' did not match.') : '');
  }

  /** Draws the form that starts forks with new seeds or other control vectors. */
  #regenerate(start, disabled, title) {
    const { ways } = this;
    const steering = this.#steering;
    const field = (name, props) => h('input', { type: 'number', step: '1', ...props, value: ways[name], oninput: (event) => { ways[name] = event.target.value; } });
    const seedField = field('seed', { min: '0', max: '4294967295' });
    // The random numbers of a single branch with other control vectors are those of the run, so that only the vectors differ.
    const isContinued = () => Boolean(steering?.value) && Number(ways.n) === 1;
    const showDefault = () => { seedField.placeholder = isContinued() ? 'continue' : 'random'; };
    showDefault();
    return h('form', {
      class: 'ways', title, oninput: showDefault, onsubmit: (event) => {
        event.preventDefault();
        const n = Number(ways.n) || 1;
        const seed = ways.seed === '' ? null : Number(ways.seed);
        start({
          ...(n > 1 && { n }), ...(steering?.value && { steering: steering.value }),
          ...(seed !== null ? { seed } : n > 1 || isContinued() ? {} : { seed: crypto.getRandomValues(new Uint32Array(1))[0] }),
        });
      },
    }, h('button', { 'aria-disabled': disabled }, 'Regenerate'), h('label', {}, field('n', { min: '1', max: '64', required: true, 'aria-label': 'Number of branches' }), ' ways from here'),
    h('label', {}, 'seed ', seedField), steering?.element);
  }

  #drawMods(e, entries) {
    const calls = entries.flatMap(({ event, calls: list }) => list.map((c) => ({ ...c, event })));
    this.#mods.hidden = false;
    const here = calls.filter((c) => c.event.sequence_order === e);
    const rest = calls.filter((c) => c.event.sequence_order !== e && (c.logs.length || c.call.exception_occurred || c.actions.some((a) => a.action_type !== 'Noop')));
    const stopped = entries.map((x) => eventDetails(x.event).stopped_by).find(Boolean);
    this.#mods.replaceChildren(
      stopped ? h('p', {}, 'Stopped by ', h('code', {}, show(stopped))) : '',
      h('h2', {}, 'Mods at this event'),
      ...(here.length ? here.map((c) => this.#call(c)) : [h('p', { class: 'hint' }, 'No mod was called here.')]),
      ...(rest.length ? [h('h2', {}, 'Mods at other events of this step'), ...rest.map((c) => this.#call(c, true))] : []));
  }

  #call({ call, logs, actions, event }, isOtherEvent = false) {
    return h('div', { class: 'call' },
      h('div', { class: 'call-head' }, h('b', {}, call.mod_name),
        isOtherEvent ? h('button', { type: 'button', class: 'plain', onclick: () => this.#go(event.sequence_order) }, `${call.event_type} ${event.sequence_order}`) : h('span', { class: 'hint' }, call.event_type),
        Number.isFinite(call.execution_time_ms) ? h('span', { class: 'hint num' }, call.execution_time_ms < 1 ? `${Math.round(call.execution_time_ms * 1000)} µs` : `${call.execution_time_ms.toFixed(1)} ms`) : null),
      actions.map((a) => h('div', { class: `act${a.action_type === 'EmitError' ? ' bad' : ''}${a.details?.superseded ? ' lost' : ''}` }, ...this.#action(a))),
      this.#logs(logs),
      call.exception_occurred ? h('div', { class: 'act bad' }, call.exception_message ?? 'raised an exception',
        call.exception_traceback ? h('details', {}, h('summary', {}, 'Traceback'), h('pre', { class: 'trace', tabindex: '0' }, call.exception_traceback)) : null) : null);
  }

  #logs(logs, all = false) {
    const box = h('div', {}, (all ? logs : logs.slice(0, MAX_LOGS)).map((l) => h('div', { class: `log ${l.log_level ?? 'INFO'}` }, h('b', {}, `${(l.log_level ?? 'INFO').toLowerCase()} `), l.log_message)));
    if (!all && logs.length > MAX_LOGS) box.append(h('p', { class: 'links' }, h('button', { type: 'button', onclick: () => box.replaceWith(this.#logs(logs, true)) }, `All ${logs.length} lines`)));
    return box;
  }

  #action(a) {
    const d = a.details ?? {};
    const pieces = d.texts ?? d.tokens_as_text;
    const texts = Array.isArray(pieces) ? pieces.join('') : a.tokens_preview;
    const quote = (t) => (t ? [' ', h('code', {}, show(t.slice(0, 300)))] : []);
    const out = [];
    switch (a.action_type) {
      case 'Noop': out.push(h('span', { class: 'hint' }, 'no change')); break;
      case 'Backtrack': out.push(`Backtrack ${d.removed ?? a.backtrack_steps ?? ''}${d.clamped ? ` (requested ${a.backtrack_steps})` : ''}`, ...(a.backtrack_token_count ? [' and appended', ...quote(texts)] : [])); break;
      case 'ForceTokens': case 'ForceOutput': out.push(`${a.action_type} ${a.token_count ?? ''}`, ...quote(texts)); break;
      case 'AdjustedPrefill': out.push(`New prompt, ${a.new_length ?? '?'} tokens`, ...(a.adjusted_max_steps ? [`, maximum ${a.adjusted_max_steps} steps`] : [])); break;
      case 'AdjustedLogits': out.push(`Logits edited${Number.isFinite(a.temperature) ? `, temperature ${a.temperature}` : ''}`,
        ...(Array.isArray(d.moved) && d.moved.length ? [h('table', { class: 'alts' }, h('tbody', {}, d.moved.slice(0, 6).map((m) => h('tr', {}, h('th', { scope: 'row' }, show(m.text ?? `⟨${m.token}⟩`)), h('td', {}, percent(m.before)), h('td', {}, '→'), h('td', {}, percent(m.after))))))] : [])); break;
      case 'ToolCalls': out.push('Tool calls', h('pre', { class: 'trace', tabindex: '0' }, JSON.stringify(a.tool_calls ?? d, null, 2))); break;
      case 'EmitError': out.push(`Error: ${a.error_message ?? ''}`); break;
      default: out.push(a.action_type);
    }
    if (d.superseded) out.push(' (an earlier mod’s action won)');
    return out;
  }
}
