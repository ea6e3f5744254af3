// Converts the items of a live run to rows, in the same way as `src/trace/fold`, which explains the rules. The test cases in
// `fixtures/folds` test both. The columns are typed arrays that grow. Pure.

import { Step, detailsOf, isQuote, labelOf, listedTokens, measurementsOf } from './items.js';
import { COLUMNS, EVENT_COLUMNS, EVENT_TYPES, FLAGS, NEVER, Rows, SCALE, UNKNOWN } from './rows.js';

/** Largest stored logprob or entropy; the next larger number is `UNKNOWN`. */
const MAX_QUANTIZED = 65_534;
/** Maximum rows for tokens that a trace counts but does not list. */
const MAX_PLACEHOLDER_ROWS = 65_536;
/** Maximum characters of a label, and of a text that several tokens share. */
const MAX_LABEL_CHARS = 80;
const SPECIAL_NAMES = new Set([
  '<s>', '</s>', '<bos>', '<eos>', '<pad>', '<unk>', '<mask>', '<start_of_turn>', '<end_of_turn>', '[INST]', '[/INST]',
  '<|>',
]);

/** Returns the stored value of an entropy or of a negated logprob. */
const quantize = (value) =>
  value === undefined ? UNKNOWN : Math.min(MAX_QUANTIZED, Math.max(0, Math.round(Math.fround(value) * SCALE)));
const nonNegative = (value) => Math.max(0, value ?? 0);
/** Returns the text of a token whose text is unknown. */
const placeholderText = (token) => (token < 0 ? '⟨?⟩' : `⟨${token}⟩`);

/** Returns `FLAGS.special` if a text looks like that of a special token, else 0. */
function specialFlag(text) {
  const isBetween = (open, close) => text.startsWith(open) && text.endsWith(close);
  return isBetween('<|', '|>') || isBetween('<｜', '｜>') || SPECIAL_NAMES.has(text) ? FLAGS.special : 0;
}

/** Limits the length of a label. */
function shorten(text) {
  return text.length <= MAX_LABEL_CHARS ? text : Array.from(text).slice(0, MAX_LABEL_CHARS).join('');
}

/** Returns the text of a drawn token for a row. A long text is returned only once: a trace may list the token without limit. */
function takeText(drawn) {
  const { text } = drawn;
  if (text !== undefined && shorten(text) !== text) drawn.text = undefined;
  return text;
}

/** The rows of a run that grows item by item. */
export class RunState extends Rows {
  /** Indexes of texts in `strings`. */
  #textIndexes = new Map();
  /** Visible rows, in order of position. */
  #alive = [];
  /** Number of prompt rows in `#alive`. */
  #promptRows = 0;
  /** Length of the prompt if its tokens are unknown. */
  #base = 0;
  /** State of the newest step. */
  #step = new Step();
  /** First row of the newest `Added`. */
  #addedFrom = 0;
  /** Type of the newest event. */
  #newest = null;
  /** Number of mod calls so far. */
  #calls = 0;
  /** Mod of the newest call. */
  #caller = '';
  /** Event type of the newest call. */
  #calledAt = null;
  /** True if the newest event is an `Added`, and further tokens come from Quote's queue: see `src/trace/fold/quote.rs`. */
  #isQueued = false;
  /** Texts of tokens that actions mention. */
  #texts = new Map();
  /** The newest row, if only its text suggests that it ends the generation. */
  #assumedEnd = null;
  /** `created_at` of the first event, in milliseconds. */
  #startedMs = undefined;
  /** Time of the newest token, in microseconds. */
  #tokenUs = undefined;
  #placeholderRows = 0;
  #counters = { backtracked: 0, forced: 0, errors: 0, actions: 0 };

  constructor() {
    super();
    for (const [name, Type] of Object.entries({ ...COLUMNS, ...EVENT_COLUMNS })) this[name] = new Type(256);
  }

  /** Returns the counts that the run list shows. */
  get counters() {
    const last = this.#alive.at(-1);
    const ended = last !== undefined && this.#endsGeneration(last) ? 1 : 0;
    return {
      prompt_tokens: this.#base + this.#promptRows,
      tokens_out: this.#alive.length - this.#promptRows - ended,
      ...this.#counters,
    };
  }

  /** Text of the current generated tokens, without an end-of-generation token. */
  get answer() {
    return this.#alive.slice(this.#promptRows).filter((i) => !this.#endsGeneration(i)).map((i) => this.text(i)).join('');
  }

  /** Applies the next item. */
  apply(item) {
    if (item.kind === 'event') this.#applyEvent(item);
    else if (item.kind === 'mod_call') this.#applyCall(item);
    else if (item.kind === 'mod_log') this.#addMark('log', item.log_message, item.mod_call_sequence);
    else if (item.kind === 'action') this.#applyAction(item);
  }

  #endsGeneration(i) {
    const flags = FLAGS.stop | FLAGS.special;
    return (this.flags[i] & flags) === flags;
  }

  #applyEvent(event) {
    const seq = this.eventCount;
    const measurements = measurementsOf(event);
    const us = this.#timeUs(event, measurements);
    this.#grow(EVENT_COLUMNS, seq);
    this.kinds[seq] = EVENT_TYPES.indexOf(event.event_type);
    this.steps[seq] = nonNegative(event.step);
    this.times[seq] = us === undefined ? 0 : Math.min(NEVER, Math.floor(us / 1000));
    this.eventCount += 1;
    this.#newest = event.event_type;
    this.#isQueued = event.event_type === 'Added' && event.forced === true;
    if (measurements.evicted) this.#applyEviction(measurements.evicted, event.event_type);
    if (event.event_type === 'Prefilled') {
      this.#step = new Step();
      this.#tokenUs = us;
      this.#replacePrompt(measurements.prompt?.tokens ?? [], measurements.prompt?.texts ?? [], seq, 0);
      if (!measurements.prompt) this.#base = nonNegative(event.prompt_length);
    } else if (event.event_type === 'ForwardPass') {
      this.#step.begin(event, measurements);
    } else if (event.event_type === 'Sampled') {
      this.#step.sampled(event, measurements);
    } else {
      const known = us !== undefined && this.#tokenUs !== undefined;
      const dt = known ? Math.min(UNKNOWN, Math.floor(Math.max(0, us - this.#tokenUs) / 1000)) : 0;
      this.#tokenUs = us ?? this.#tokenUs;
      this.#applyAdded(event, measurements, seq, dt);
    }
  }

  /** Returns the microseconds since the start of the run, or undefined. */
  #timeUs(event, measurements) {
    const createdMs = event.created_at === undefined ? undefined : Date.parse(event.created_at);
    this.#startedMs ??= createdMs;
    return measurements.elapsed_us ?? (createdMs === undefined ? undefined : 1000 * Math.max(0, createdMs - this.#startedMs));
  }

  #applyAdded(event, measurements, seq, dt) {
    this.#addedFrom = this.count;
    const forced = event.forced === true;
    const tokenMeasurements = measurements.tokens ?? [];
    const drawn = this.#step.drawn?.step === event.step ? this.#step.drawn : null;
    let tokens = listedTokens(event);
    if (!tokens && tokenMeasurements.length) tokens = tokenMeasurements.map((measurement) => measurement.token);
    if (!tokens) {
      const count = this.#reservePlaceholders(nonNegative(event.added_token_count ?? (drawn ? 1 : 0)));
      tokens = Array(count ?? 0).fill(drawn?.token ?? -1);
    }
    const origin = forced ? FLAGS.forced | FLAGS.touched : FLAGS.sampled;
    const pending = this.#step.pending;
    this.#step.pending = 0;
    tokens.forEach((token, index) => {
      const draw = drawn && (drawn.token === undefined || drawn.token === token) ? drawn : null;
      const measurement = tokenMeasurements[index]?.token === token ? tokenMeasurements[index] : null;
      const text = measurement ? measurement.text ?? '' : (draw && takeText(draw)) ?? this.#texts.get(token) ?? placeholderText(token);
      const sampledDraw = forced ? null : draw;
      const logprob = measurement?.logprob ?? sampledDraw?.logprob;
      this.#append(token, text, seq, origin | pending | specialFlag(text), index === 0 ? dt : 0, {
        logprob: logprob === undefined ? undefined : -logprob,
        rank: measurement?.rank ?? sampledDraw?.rank,
        entropy: measurement?.entropy ?? sampledDraw?.entropy,
      });
    });
    if (forced) this.#counters.forced += tokens.length;
    if (!tokens.length) return;
    if (!tokenMeasurements.length) this.#assumeEnd();
    if (measurements.ends_generation === true) this.flags[this.count - 1] |= FLAGS.stop | FLAGS.special;
    else if (typeof measurements.stopped_by === 'string') this.flags[this.count - 1] |= FLAGS.stop;
  }

  /** Assumes that a special token ends the generation while it is the newest token. Traces of other engines do not tell. */
  #assumeEnd() {
    const i = this.count - 1;
    if (i < 0 || (this.flags[i] & (FLAGS.special | FLAGS.prompt)) !== FLAGS.special) return;
    this.flags[i] |= FLAGS.stop;
    this.#assumedEnd = i;
  }

  #append(token, text, seq, flags, dt, { logprob, rank, entropy } = {}) {
    const i = this.count;
    if (this.#assumedEnd !== null) this.flags[this.#assumedEnd] &= ~FLAGS.stop;
    this.#assumedEnd = null;
    this.#grow(COLUMNS, i);
    this.textIndex[i] = this.#intern(text);
    this.token[i] = token;
    this.pos[i] = this.#base + this.#alive.length;
    this.addedAt[i] = seq;
    this.removedAt[i] = NEVER;
    this.logprobs[i] = quantize(logprob);
    this.entropies[i] = quantize(entropy);
    this.rank[i] = Math.min(UNKNOWN, rank ?? 0);
    this.flags[i] = flags;
    this.dt[i] = dt;
    this.#alive.push(i);
    this.count += 1;
  }

  #intern(text) {
    let index = this.#textIndexes.get(text);
    if (index === undefined) {
      index = this.strings.push(text) - 1;
      this.#textIndexes.set(text, index);
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

  /** Removes the last `count` visible rows: they are not visible at event `seq` and later. */
  #removeLast(count, seq) {
    for (const i of this.#alive.splice(this.#alive.length - count, count)) {
      this.removedAt[i] = seq;
      this.flags[i] |= FLAGS.touched;
    }
  }

  #replacePrompt(tokens, texts, seq, extraFlags) {
    this.#removeLast(this.#alive.length, seq);
    this.#base = 0;
    tokens.forEach((token, index) => {
      const text = texts[index] ?? placeholderText(token);
      this.#append(token, text, seq, FLAGS.prompt | extraFlags | specialFlag(text), 0);
    });
    this.#promptRows = tokens.length;
  }

  /** Reserves `count` placeholder rows. Returns `count`, or null if there would be too many. */
  #reservePlaceholders(count) {
    if (this.#placeholderRows + count > MAX_PLACEHOLDER_ROWS) return null;
    this.#placeholderRows += count;
    return count;
  }

  #applyCall(call) {
    this.#calls += 1;
    this.#calledAt = call.event_type;
    this.#caller = call.mod_name;
    if (!call.exception_occurred) return;
    this.#counters.errors += 1;
    this.#addMark('error', call.exception_message ?? 'exception', call.index ?? this.#calls - 1);
    if (this.#newest === 'ForwardPass' || this.#newest === 'Sampled') this.#step.pending |= FLAGS.error;
    else if (this.#newest === 'Added') {
      for (let i = this.#addedFrom; i < this.count; i += 1) this.flags[i] |= FLAGS.error;
    }
  }

  /** Marks an eviction from a full context. The rows stay visible, because they are part of the prompt and the answer. The prompt of a Prefilled event is already without the evicted tokens. */
  #applyEviction({ ranges = [], messages = [] }, type) {
    const tokens = ranges.reduce((sum, [start, end]) => sum + Math.max(0, end - start), 0);
    const roles = messages.length ? ` (${messages.map((message) => message.role).join(', ')})` : '';
    this.#addMark('log', `context full: ${tokens} tokens dropped${roles}`, this.#calls, 'engine');
    if (type !== 'Prefilled' && ranges.length) this.marks.at(-1).evicted = ranges;
  }

  #addMark(kind, label, callIndex, by = this.#caller) {
    const seq = Math.max(0, this.eventCount - 1);
    this.marks.push({ seq, kind, mod_name: shorten(by), label: shorten(label), call_index: callIndex });
  }

  #applyAction(action) {
    const type = action.action_type;
    if (type === 'Noop') return;
    const details = detailsOf(action);
    this.#counters.actions += 1;
    const suffix = details.superseded ? ' (superseded)' : '';
    this.#addMark('action', labelOf(action, details) + suffix, action.mod_call_sequence);
    if (details.superseded || this.#newest === null) return;
    if (isQuote(type, details)) {
      this.#applyQuoteAction(type, details);
      return;
    }
    // The changes of an action are visible from the event after it.
    const after = this.eventCount;
    const generated = this.#alive.length - this.#promptRows;
    if (type === 'AdjustedLogits') {
      this.#step.pending |= FLAGS.touched;
    } else if (type === 'Backtrack') {
      // The steps of the mod include a drawn token, which is not appended yet.
      const drawn = this.#newest === 'Sampled' ? 1 : 0;
      const removed = Math.min(generated, details.removed ?? nonNegative(nonNegative(action.backtrack_steps) - drawn));
      this.#removeLast(removed, after);
      this.#counters.backtracked += removed;
    } else if (type === 'ForceOutput') {
      this.#removeLast(generated, after);
    } else if (type === 'AdjustedPrefill') {
      this.#applyAdjustedPrefill(action, details, after);
    } else if (type === 'ToolCalls') {
      this.#flagLast(FLAGS.touched);
    } else if (type === 'EmitError') {
      this.#counters.errors += 1;
      this.#flagLast(FLAGS.touched | FLAGS.error);
    }
  }

  /** Applies an action of a trace of Quote: see `src/trace/fold/quote.rs`. */
  #applyQuoteAction(type, { tokens, tokens_as_text: texts, backtrack_steps: steps, tool_calls: calls }) {
    tokens.forEach((token, i) => {
      if (texts[i] !== undefined && shorten(texts[i]) === texts[i]) this.#texts.set(token, texts[i]);
    });
    const after = this.eventCount;
    const atPrefilled = this.#calledAt === 'Prefilled';
    if (type === 'AdjustedPrefill') {
      if (this.#newest === 'Prefilled') this.#replacePrompt(tokens, texts, after, FLAGS.touched);
    } else if (type === 'ForceTokens') {
      if (atPrefilled || this.#step.forced) return;
      this.#step.forced = true;
      if (this.#atAdded) this.#forceAfterAdded(tokens, texts, after);
    } else if (type === 'Backtrack') {
      if (!atPrefilled) this.#applyQuoteBacktrack(nonNegative(steps), tokens, texts, after);
    } else if (type === 'ForceOutput') {
      this.#replaceAnswer(tokens, texts, after);
    } else {
      this.#replaceAnswer([-1], [calls], after);
    }
  }

  get #atAdded() {
    return this.#calledAt === 'Added' && this.#newest === 'Added';
  }

  /** Returns the number of visible rows since the newest `Added`. */
  #addedCount() {
    let from = this.#alive.length;
    while (from > this.#promptRows && this.#alive[from - 1] >= this.#addedFrom) from -= 1;
    return this.#alive.length - from;
  }

  /** Appends the tokens that a `ForceTokens` at `Added` forces. Quote may list the added tokens before them. */
  #forceAfterAdded(tokens, texts, after) {
    const count = this.#addedCount();
    const added = count ? this.#alive.slice(-count) : [];
    const from = tokens.length >= count && added.every((row, i) => this.token[row] === tokens[i]) ? count : 0;
    this.#appendForced(tokens.slice(from), texts.slice(from), after);
    this.#isQueued = true;
  }

  /** Applies a `Backtrack`. How many tokens it removes depends on the event, and on whether `tokens` replace them: see `src/trace/fold/quote.rs`. */
  #applyQuoteBacktrack(steps, tokens, texts, after) {
    const replaces = tokens.length > 0;
    if (!this.#atAdded) {
      const sampled = this.#calledAt === 'Sampled' ? 1 : 0;
      this.#removeGenerated(replaces ? steps + 1 - sampled : steps - sampled, after);
      return;
    }
    const before = nonNegative(steps - 1);
    if (this.#isQueued) this.#removeBeforeQueued(before, after);
    else this.#removeGenerated(before + (replaces ? 1 : 0), after);
    if (replaces) this.#appendForced(tokens, texts, after);
    this.#isQueued ||= replaces;
  }

  #removeGenerated(count, after) {
    const removed = Math.min(nonNegative(count), this.#alive.length - this.#promptRows);
    this.#removeLast(removed, after);
    this.#counters.backtracked += removed;
  }

  /** Removes generated rows before those of the newest `Added`, which are removed too and appended again. */
  #removeBeforeQueued(count, after) {
    const queued = this.#addedCount();
    const removed = Math.min(count, this.#alive.length - this.#promptRows - queued);
    if (removed === 0 || this.#reservePlaceholders(queued) === null) return;
    const moved = queued ? this.#alive.slice(-queued) : [];
    const kept = moved.map((i) => [this.token[i], this.text(i), this.flags[i], this.dt[i], this.logprobs[i], this.rank[i], this.entropies[i]]);
    this.#removeLast(removed + queued, after);
    for (const [token, text, flags, dt, logprob, rank, entropy] of kept) {
      this.#append(token, text, after, flags, dt);
      const i = this.count - 1;
      [this.logprobs[i], this.rank[i], this.entropies[i]] = [logprob, rank, entropy];
    }
    this.#counters.backtracked += removed;
  }

  #replaceAnswer(tokens, texts, after) {
    this.#removeLast(this.#alive.length - this.#promptRows, after);
    this.#appendForced(tokens, texts, after);
  }

  #appendForced(tokens, texts, after) {
    tokens.forEach((token, i) => {
      const text = texts[i] ?? placeholderText(token);
      this.#append(token, text, after, FLAGS.forced | FLAGS.touched | specialFlag(text), 0);
    });
    this.#counters.forced += tokens.length;
    this.#assumeEnd();
  }

  #applyAdjustedPrefill(action, details, after) {
    if (details.tokens.length) {
      this.#replacePrompt(details.tokens, details.texts, after, FLAGS.touched);
      return;
    }
    const length = nonNegative(action.new_length ?? (action.new_prompt === undefined ? 0 : 1));
    if (this.#reservePlaceholders(length) === null) {
      this.#replacePrompt([], [], after, 0);
      this.#base = length;
      return;
    }
    const texts = Array.from({ length }, (_, i) => (i === 0 ? action.new_prompt ?? '' : ''));
    this.#replacePrompt(Array(length).fill(-1), texts, after, FLAGS.touched);
  }

  /** Adds flags to the last generated token. */
  #flagLast(flags) {
    if (this.#alive.length > this.#promptRows) this.flags[this.#alive.at(-1)] |= flags;
  }
}
