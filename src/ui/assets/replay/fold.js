// Items to token instances: the browser's twin of src/trace/fold. fixtures/folds holds both to the same results.
// Pure: no DOM, no clock. Rows live in growing typed arrays, in the numbers that the columns carry.

import { COLUMNS, EVENT_COLUMNS, NEVER, Rows, SCALE, UNKNOWN } from './rows.js';

const KINDS = ['Prefilled', 'ForwardPass', 'Sampled', 'Added'];

const FLAGS = { prompt: 1, forced: 2, stop: 4, special: 8, touched: 16, error: 32, sampled: 64 };

const MOST = 65_534;
const MOST_INVENTED = 65_536;
const MOST_LABEL = 80;
const SPECIAL_NAMES = new Set([
  '<s>', '</s>', '<bos>', '<eos>', '<pad>', '<unk>', '<mask>', '<start_of_turn>', '<end_of_turn>', '[INST]', '[/INST]',
  '<|>',
]);

const isNumber = (value) => typeof value === 'number';
const isId = (value) => Number.isInteger(value);
const quantise = (value) =>
  value === undefined ? UNKNOWN : Math.min(MOST, Math.max(0, Math.round(Math.fround(value) * SCALE)));
const natural = (value) => Math.max(0, value ?? 0);
const nameless = (token) => (token < 0 ? '⟨?⟩' : `⟨${token}⟩`);

function special(text) {
  const barred = (open, close) => text.startsWith(open) && text.endsWith(close);
  return barred('<|', '|>') || barred('<｜', '｜>') || SPECIAL_NAMES.has(text) ? FLAGS.special : 0;
}

function cut(text) {
  return text.length <= MOST_LABEL ? text : Array.from(text).slice(0, MOST_LABEL).join('');
}

/** What our engine measured at an event; empty for the `details` of somebody else's. */
function measuredOf(event) {
  const d = event.details;
  if (d === null || typeof d !== 'object' || Array.isArray(d)) return {};
  const tokens = d.tokens === undefined ? [] : d.tokens;
  if (!Array.isArray(tokens) || !tokens.every((t) => t && isId(t.token))) return {};
  return { ...d, tokens };
}

/** The part of an action's `details` that our engine writes. */
function ownDetails(action) {
  const d = action.details;
  const none = { tokens: [], texts: [], removed: undefined, superseded: false };
  if (d === undefined || d === null || typeof d !== 'object' || Array.isArray(d)) return none;
  const { tokens = [], texts = [], removed = undefined, superseded = false } = d;
  const fits = Array.isArray(tokens) && tokens.every(isId)
    && Array.isArray(texts) && texts.every((text) => typeof text === 'string')
    && (removed === undefined || removed === null || (isId(removed) && removed >= 0))
    && typeof superseded === 'boolean';
  return fits ? { tokens, texts, removed: removed ?? undefined, superseded } : none;
}

/** `top_tokens` in the form that the specification shows; anything else is passed over. */
function candidatesOf(top) {
  const fits = Array.isArray(top) && top.every((c) => c && isId(c.token) && isNumber(c.prob));
  return fits ? top : [];
}

/** What one step shows before its tokens are appended. */
class Step {
  pending = 0;
  entropy = undefined;
  candidates = [];
  drawn = null;

  begin(event, measured) {
    this.pending = 0;
    this.drawn = null;
    this.entropy = measured.entropy ?? undefined;
    this.candidates = measured.model?.length ? [] : candidatesOf(event.top_tokens);
  }

  sampled(event, measured) {
    const measure = measured.tokens?.[0];
    const token = event.sampled_token ?? measure?.token;
    const candidate = this.candidates.find((c) => c.token === token && c.prob > 0);
    const above = (prob) => this.candidates.filter((c) => c.prob > prob).length;
    this.drawn = {
      step: event.step,
      token,
      text: event.token_text ?? (measure && (measure.text ?? '')),
      logprob: measure?.logprob ?? (candidate && Math.min(0, Math.log(candidate.prob))),
      rank: measure?.rank ?? (candidate && 1 + above(candidate.prob)),
      entropy: measure?.entropy ?? this.entropy,
    };
  }
}

/** A run that grows item by item. */
export class RunState extends Rows {
  #known = new Map();
  #alive = [];
  #promptRows = 0;
  #base = 0;
  #step = new Step();
  #addedFrom = 0;
  #newest = null;
  #calls = 0;
  #caller = '';
  #beganMs = undefined;
  #tokenUs = undefined;
  #invented = 0;
  #counters = { backtracked: 0, forced: 0, errors: 0, actions: 0 };

  constructor() {
    super();
    for (const [name, Type] of Object.entries({ ...COLUMNS, ...EVENT_COLUMNS })) this[name] = new Type(256);
  }

  /** Counts as the run list shows them. */
  get counters() {
    const last = this.#alive.at(-1);
    const ended = last !== undefined && this.#endsGeneration(last) ? 1 : 0;
    return {
      prompt_tokens: this.#base + this.#promptRows,
      tokens_out: this.#alive.length - this.#promptRows - ended,
      ...this.#counters,
    };
  }

  /** Text of the generated tokens that stand, without an end-of-generation token. */
  get answer() {
    return this.#alive.slice(this.#promptRows).filter((i) => !this.#endsGeneration(i)).map((i) => this.text(i)).join('');
  }

  /** Takes the next item. */
  apply(item) {
    if (item.kind === 'event') this.#event(item);
    else if (item.kind === 'mod_call') this.#call(item);
    else if (item.kind === 'mod_log') this.#mark('log', item.log_message, item.mod_call_sequence);
    else if (item.kind === 'action') this.#action(item);
  }

  #endsGeneration(i) {
    const both = FLAGS.stop | FLAGS.special;
    return (this.flags[i] & both) === both;
  }

  #event(event) {
    const seq = this.eventCount;
    const measured = measuredOf(event);
    const us = this.#timeUs(event, measured);
    this.#grow(EVENT_COLUMNS, seq);
    this.kinds[seq] = KINDS.indexOf(event.event_type);
    this.steps[seq] = natural(event.step);
    this.times[seq] = us === undefined ? 0 : Math.min(NEVER, Math.floor(us / 1000));
    this.eventCount += 1;
    this.#newest = event.event_type;
    if (measured.evicted) this.#evicted(measured.evicted);
    if (event.event_type === 'Prefilled') {
      this.#step = new Step();
      this.#tokenUs = us;
      this.#replacePrompt(measured.prompt?.tokens ?? [], measured.prompt?.texts ?? [], seq, 0);
      if (!measured.prompt) this.#base = natural(event.prompt_length);
    } else if (event.event_type === 'ForwardPass') {
      this.#step.begin(event, measured);
    } else if (event.event_type === 'Sampled') {
      this.#step.sampled(event, measured);
    } else {
      const known = us !== undefined && this.#tokenUs !== undefined;
      const dt = known ? Math.min(UNKNOWN, Math.floor(Math.max(0, us - this.#tokenUs) / 1000)) : 0;
      this.#tokenUs = us ?? this.#tokenUs;
      this.#added(event, measured, seq, dt);
    }
  }

  /** Microseconds since the run began. */
  #timeUs(event, measured) {
    const wall = event.created_at === undefined ? undefined : Date.parse(event.created_at);
    this.#beganMs ??= wall;
    return measured.elapsed_us ?? (wall === undefined ? undefined : 1000 * Math.max(0, wall - this.#beganMs));
  }

  #added(event, measured, seq, dt) {
    this.#addedFrom = this.count;
    const forced = event.forced === true;
    const measures = measured.tokens ?? [];
    const drawn = this.#step.drawn?.step === event.step ? this.#step.drawn : null;
    let tokens = event.added_tokens;
    if (!tokens && measures.length) tokens = measures.map((measure) => measure.token);
    if (!tokens) {
      const count = this.#invent(natural(event.added_token_count ?? (drawn ? 1 : 0)));
      tokens = Array(count ?? 0).fill(drawn?.token ?? -1);
    }
    const shared = cut(drawn?.text ?? '') === (drawn?.text ?? '');
    const origin = forced ? FLAGS.forced | FLAGS.touched : FLAGS.sampled;
    const pending = this.#step.pending;
    this.#step.pending = 0;
    tokens.forEach((token, index) => {
      const draw = drawn && (drawn.token === undefined || drawn.token === token) ? drawn : null;
      const measure = measures[index]?.token === token ? measures[index] : null;
      const drawnText = shared || index === 0 ? draw?.text : undefined;
      const text = measure ? measure.text ?? '' : drawnText ?? nameless(token);
      const known = forced ? null : draw;
      const logprob = measure?.logprob ?? known?.logprob;
      this.#append(token, text, seq, origin | pending | special(text), index === 0 ? dt : 0, {
        logprob: logprob === undefined ? undefined : -logprob,
        rank: measure?.rank ?? known?.rank,
        entropy: measure?.entropy ?? known?.entropy,
      });
    });
    if (forced) this.#counters.forced += tokens.length;
    if (!tokens.length) return;
    if (measured.ends_generation === true) this.flags[this.count - 1] |= FLAGS.stop | FLAGS.special;
    else if (typeof measured.stopped_by === 'string') this.flags[this.count - 1] |= FLAGS.stop;
  }

  #append(token, text, seq, flags, dt, { logprob, rank, entropy } = {}) {
    const i = this.count;
    this.#grow(COLUMNS, i);
    this.textIndex[i] = this.#intern(text);
    this.token[i] = token;
    this.pos[i] = this.#base + this.#alive.length;
    this.born[i] = seq;
    this.died[i] = NEVER;
    this.logprobs[i] = quantise(logprob);
    this.entropies[i] = quantise(entropy);
    this.rank[i] = Math.min(UNKNOWN, rank ?? 0);
    this.flags[i] = flags;
    this.dt[i] = dt;
    this.#alive.push(i);
    this.count += 1;
  }

  #intern(text) {
    let index = this.#known.get(text);
    if (index === undefined) {
      index = this.strings.push(text) - 1;
      this.#known.set(text, index);
    }
    return index;
  }

  #grow(columns, index) {
    for (const name of Object.keys(columns)) {
      const old = this[name];
      if (index < old.length) continue;
      this[name] = new columns[name](Math.max(256, 2 * old.length));
      this[name].set(old);
    }
  }

  /** Ends the last `count` rows that stand; they are gone from event `seq` on. */
  #end(count, seq) {
    for (const i of this.#alive.splice(this.#alive.length - count, count)) {
      this.died[i] = seq;
      this.flags[i] |= FLAGS.touched;
    }
  }

  #replacePrompt(tokens, texts, seq, extra) {
    this.#end(this.#alive.length, seq);
    this.#base = 0;
    tokens.forEach((token, index) => {
      const text = texts[index] ?? nameless(token);
      this.#append(token, text, seq, FLAGS.prompt | extra | special(text), 0);
    });
    this.#promptRows = tokens.length;
  }

  /** Takes `count` rows out of the allowance for tokens that a trace only counts, if it lasts. */
  #invent(count) {
    if (this.#invented + count > MOST_INVENTED) return null;
    this.#invented += count;
    return count;
  }

  #call(call) {
    this.#calls += 1;
    this.#caller = call.mod_name;
    if (!call.exception_occurred) return;
    this.#counters.errors += 1;
    this.#mark('error', call.exception_message ?? 'exception', call.index ?? this.#calls - 1);
    if (this.#newest === 'ForwardPass' || this.#newest === 'Sampled') this.#step.pending |= FLAGS.error;
    else if (this.#newest === 'Added') {
      for (let i = this.#addedFrom; i < this.count; i += 1) this.flags[i] |= FLAGS.error;
    }
  }

  /** What went because the context was full. The rows stay where they were: they are what was read and said. */
  #evicted({ ranges = [], messages = [] }) {
    const tokens = ranges.reduce((sum, [start, end]) => sum + Math.max(0, end - start), 0);
    const who = messages.length ? ` (${messages.map((message) => message.role).join(', ')})` : '';
    this.#mark('log', `context full: ${tokens} tokens dropped${who}`, this.#calls, 'engine');
  }

  #mark(kind, label, callIndex, by = this.#caller) {
    const seq = Math.max(0, this.eventCount - 1);
    this.marks.push({ seq, kind, mod_name: cut(by), label: cut(label), call_index: callIndex });
  }

  #action(action) {
    const type = action.action_type;
    if (type === 'Noop') return;
    const details = ownDetails(action);
    this.#counters.actions += 1;
    const suffix = details.superseded ? ' (superseded)' : '';
    this.#mark('action', label(action, details) + suffix, action.mod_call_sequence);
    if (details.superseded || this.#newest === null) return;
    const after = this.eventCount;
    const generated = this.#alive.length - this.#promptRows;
    if (type === 'AdjustedLogits') {
      this.#step.pending |= FLAGS.touched;
    } else if (type === 'Backtrack') {
      // A token that was only drawn counts for the mod, and was never appended.
      const drawn = this.#newest === 'Sampled' ? 1 : 0;
      const removed = Math.min(generated, details.removed ?? natural(natural(action.backtrack_steps) - drawn));
      this.#end(removed, after);
      this.#counters.backtracked += removed;
    } else if (type === 'ForceOutput') {
      this.#end(generated, after);
    } else if (type === 'AdjustedPrefill') {
      this.#adjustPrefill(action, details, after);
    } else if (type === 'ToolCalls') {
      this.#touchLast(FLAGS.touched);
    } else if (type === 'EmitError') {
      this.#counters.errors += 1;
      this.#touchLast(FLAGS.touched | FLAGS.error);
    }
  }

  #adjustPrefill(action, details, after) {
    if (details.tokens.length) {
      this.#replacePrompt(details.tokens, details.texts, after, FLAGS.touched);
      return;
    }
    const length = natural(action.new_length ?? (action.new_prompt === undefined ? 0 : 1));
    if (this.#invent(length) === null) {
      this.#replacePrompt([], [], after, 0);
      this.#base = length;
      return;
    }
    const texts = Array.from({ length }, (_, i) => (i === 0 ? action.new_prompt ?? '' : ''));
    this.#replacePrompt(Array(length).fill(-1), texts, after, FLAGS.touched);
  }

  /** Flags the last generated token that stands. */
  #touchLast(bits) {
    if (this.#alive.length > this.#promptRows) this.flags[this.#alive.at(-1)] |= bits;
  }
}

function label(action, details) {
  const type = action.action_type;
  let count;
  if (type === 'Backtrack') count = action.backtrack_steps ?? details.removed;
  else if (type === 'ForceTokens' || type === 'ForceOutput') count = action.token_count ?? details.tokens.length;
  else if (type === 'AdjustedPrefill') count = action.new_length ?? details.tokens.length;
  if (count !== undefined) return `${type} ${count}`;
  return action.error_message === undefined ? type : `${type}: ${action.error_message}`;
}
