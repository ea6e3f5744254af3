// Converts the items of a live run to rows, in the same way as `src/trace/fold`, which explains the rules. The test cases in
// `fixtures/folds` test both. The columns are typed arrays that grow. Pure.

import { detailsOf, measurementsOf } from './details.js';
import { Step, labelOf, shorten } from './items.js';
import { QuoteActions, isQuote, listedTokens } from './quote.js';
import { EVENT_TYPES, FLAGS, NEVER } from './run-columns.js';
import { TokenSequence, placeholderText, specialFlag } from './sequence.js';

const nonNegative = (value) => Math.max(0, value ?? 0);

export class Fold extends TokenSequence {
  /** State of the newest step. */
  #step = new Step();
  #quote = new QuoteActions(this);
  /** First row of the newest `Added`. */
  #addedFrom = 0;
  /** First row since the newest `Added` that no exception has flagged. */
  #unflaggedFrom = 0;
  /** Type of the newest event. */
  #newest = null;
  /** Number of mod calls so far. */
  #calls = 0;
  /** Mod of the newest call. */
  #caller = '';
  /** Event type of the newest call. */
  #callType = null;
  /** `created_at` of the first event, in milliseconds. */
  #startedMs = undefined;
  /** Time of the newest token, in microseconds. */
  #tokenUs = undefined;
  #errors = 0;
  #actions = 0;
  #hasSpecifiedActions;

  /** If the actions have the fields of the `/ingest` specification, the names of Quote's fields in their details have no meaning. */
  constructor({ hasSpecifiedActions = false } = {}) {
    super();
    this.#hasSpecifiedActions = hasSpecifiedActions;
  }

  /** The counts that the run list shows. */
  get counters() {
    return {
      prompt_tokens: this.promptLength,
      tokens_out: this.answerLength,
      backtracked: this.backtrackedCount,
      forced: this.forcedCount,
      errors: this.#errors,
      actions: this.#actions,
    };
  }

  /** Applies the next item. */
  apply(item) {
    if (item.kind === 'event') this.#applyEvent(item);
    else if (item.kind === 'mod_call') this.#applyCall(item);
    else if (item.kind === 'mod_log') this.#addMark('log', item.log_message, item.mod_call_sequence);
    else if (item.kind === 'action') this.#applyAction(item);
  }

  #applyEvent(event) {
    const seq = this.eventCount;
    const measurements = measurementsOf(event);
    const us = this.#timeUs(event, measurements);
    this.appendEvent(EVENT_TYPES.indexOf(event.event_type), nonNegative(event.step), us === undefined ? 0 : Math.min(NEVER, Math.floor(us / 1000)));
    this.#newest = event.event_type;
    this.#quote.onEvent(event);
    if (measurements.evicted) this.#applyEviction(measurements.evicted, event.event_type);
    if (event.event_type === 'Prefilled') {
      this.#step = new Step();
      this.#tokenUs = us;
      const { tokens = [], texts = [] } = measurements.prompt ?? {};
      // Details of another engine may have a prompt without tokens.
      if (tokens.length) this.replacePrompt(tokens, texts, seq);
      else this.replaceByUnknownPrompt(nonNegative(event.prompt_length), seq);
    } else if (event.event_type === 'ForwardPass') {
      this.#step.begin(event, measurements);
    } else if (event.event_type === 'Sampled') {
      this.#step.recordSampled(event, measurements);
    } else {
      const known = us !== undefined && this.#tokenUs !== undefined;
      const dt = known ? Math.min(NEVER, Math.max(0, us - this.#tokenUs)) : 0;
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
    this.#unflaggedFrom = this.count;
    // As after an action, from the next event on.
    this.removeGenerated(seq + 1, nonNegative(measurements.discarded));
    const forced = event.forced === true;
    const tokenMeasurements = measurements.tokens ?? [];
    const drawn = this.#step.drawn?.step === event.step ? this.#step.drawn : null;
    let tokens = listedTokens(event);
    if (!tokens && tokenMeasurements.length) tokens = tokenMeasurements.map((measurement) => measurement.token);
    if (!tokens) {
      const count = nonNegative(event.added_token_count ?? (drawn ? 1 : 0));
      tokens = Array(this.reservePlaceholders(count) ? count : 0).fill(drawn?.token ?? -1);
    }
    const origin = forced ? FLAGS.forced | FLAGS.touched : FLAGS.sampled;
    const pending = this.#step.pending;
    this.#step.pending = 0;
    tokens.forEach((token, index) => {
      const draw = drawn && (drawn.token === undefined || drawn.token === token) ? drawn : null;
      const measurement = tokenMeasurements[index]?.token === token ? tokenMeasurements[index] : null;
      const text = measurement ? measurement.text ?? '' : (draw && this.#step.takeText()) ?? this.#quote.textOf(token) ?? placeholderText(token);
      const sampledDraw = forced ? null : draw;
      this.append(token, text, seq, origin | pending | specialFlag(text), index === 0 ? dt : 0, {
        logprob: measurement?.logprob ?? sampledDraw?.logprob,
        rank: measurement?.rank ?? sampledDraw?.rank,
        entropy: measurement?.entropy ?? sampledDraw?.entropy,
      });
    });
    if (forced) this.forcedCount += tokens.length;
    if (!tokens.length) return;
    if (!tokenMeasurements.length) this.assumeEnd();
    if (measurements.ends_generation === true) this.flags[this.count - 1] |= FLAGS.stop | FLAGS.special;
    else if (typeof measurements.stopped_by === 'string') this.flags[this.count - 1] |= FLAGS.stop;
  }

  #applyCall(call) {
    this.#calls += 1;
    this.#callType = call.event_type;
    this.#caller = call.mod_name;
    if (!call.exception_occurred) return;
    this.#errors += 1;
    this.#addMark('error', call.exception_message ?? 'exception', call.index ?? this.#calls - 1);
    if (this.#newest === 'ForwardPass' || this.#newest === 'Sampled') this.#step.pending |= FLAGS.error;
    else if (this.#newest === 'Added') {
      for (; this.#unflaggedFrom < this.count; this.#unflaggedFrom += 1) this.flags[this.#unflaggedFrom] |= FLAGS.error;
    }
  }

  /**
   * Marks an eviction from a full context. The rows stay visible, because they are part of the prompt and the answer. The prompt of
   * a Prefilled event is already without the evicted tokens.
   */
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
    this.#actions += 1;
    const suffix = details.superseded ? ' (superseded)' : '';
    this.#addMark('action', labelOf(action, details) + suffix, action.mod_call_sequence);
    if (details.superseded || this.#newest === null) return;
    if (!this.#hasSpecifiedActions && isQuote(type, details)) {
      this.#quote.apply(type, details, { newest: this.#newest, callType: this.#callType, addedFrom: this.#addedFrom, step: this.#step });
      return;
    }
    // The changes of an action are visible from the event after it.
    const after = this.eventCount;
    if (type === 'AdjustedLogits') {
      this.#step.pending |= FLAGS.touched;
    } else if (type === 'Backtrack') {
      // The steps of the mod include a drawn token, which is not appended yet.
      const drawn = this.#newest === 'Sampled' ? 1 : 0;
      this.backtrack(details.removed ?? nonNegative(action.backtrack_steps) - drawn, after);
    } else if (type === 'ForceOutput' || type === 'ToolCalls') {
      this.removeGenerated(after);
    } else if (type === 'AdjustedPrefill') {
      this.#adjustPrefill(action, details, after);
    } else if (type === 'EmitError') {
      this.#errors += 1;
      this.flagLast(FLAGS.touched | FLAGS.error);
    }
  }

  #adjustPrefill(action, { tokens, texts }, after) {
    if (tokens.length) {
      this.replacePrompt(tokens, texts, after, FLAGS.touched);
      return;
    }
    const length = nonNegative(action.new_length ?? (action.new_prompt === undefined ? 0 : 1));
    if (this.reservePlaceholders(length)) {
      const placeholders = Array.from({ length }, (_, i) => (i === 0 ? action.new_prompt ?? '' : ''));
      this.replacePrompt(Array(length).fill(-1), placeholders, after, FLAGS.touched);
    } else {
      this.replaceByUnknownPrompt(length, after);
    }
  }
}
