// Actions of Quote's traces, as in `src/trace/fold/quote.rs`, which explains the rules. Pure.
import { FLAGS } from './run-columns.js';
import { shorten } from './items.js';

/** Returns true if an action has Quote's form. */
export function isQuote(type, details) {
  if (type === 'Backtrack') return details.backtrack_steps !== undefined;
  if (type === 'ToolCalls') return typeof details.tool_calls === 'string';
  if (!['AdjustedPrefill', 'ForceTokens', 'ForceOutput'].includes(type)) return false;
  return details.token_count !== undefined || details.tokens_as_text.length > 0;
}

/** Returns the tokens that an `Added` event lists. Quote may append queued tokens to the list; they are left out. */
export function listedTokens({ added_tokens: tokens, added_token_count: count, forced }) {
  return tokens && forced === true && count >= 1 && count < tokens.length ? tokens.slice(0, count) : tokens;
}

/** Applies actions in Quote's form to a `TokenSequence`. */
export class QuoteActions {
  #sequence;
  /** True if the newest event is an `Added`, and further tokens come from Quote's queue. */
  #isQueued = false;
  /** Texts of tokens that actions mention. */
  #texts = new Map();

  constructor(sequence) {
    this.#sequence = sequence;
  }

  /** Returns the text of a token that an action mentioned, if any. */
  textOf(token) { return this.#texts.get(token); }

  /** Follows an event. */
  onEvent(event) {
    this.#isQueued = event.event_type === 'Added' && event.forced === true;
  }

  /**
   * Applies an action. `newest` is the type of the newest event, `callType` the one of the event of the mod call, `addedFrom` the first row
   * of the newest `Added`, and `step` the newest `Step`.
   */
  apply(type, { tokens, tokens_as_text: texts, backtrack_steps: steps, tool_calls: calls }, { newest, callType, addedFrom, step }) {
    tokens.forEach((token, i) => {
      if (texts[i] !== undefined && shorten(texts[i]) === texts[i]) this.#texts.set(token, texts[i]);
    });
    const sequence = this.#sequence;
    const after = sequence.eventCount;
    // The visible rows of the newest `Added`, if the action is at that event.
    const added = callType === 'Added' && newest === 'Added' ? sequence.generatedSince(addedFrom) : null;
    if (type === 'AdjustedPrefill') {
      if (newest === 'Prefilled') sequence.replacePrompt(tokens, texts, after, FLAGS.touched);
    } else if (type === 'ForceTokens') {
      if (callType === 'Prefilled' || step.forced) return;
      step.forced = true;
      if (added) this.#forceAfterAdded(added, tokens, texts);
    } else if (type === 'Backtrack') {
      if (callType === 'Prefilled') return;
      if (added) this.#backtrackAtAdded(added, Math.max(0, steps - 1), tokens, texts);
      else sequence.backtrack(Math.max(0, steps) + (tokens.length ? 1 : 0) - (callType === 'Sampled' ? 1 : 0), after);
    } else {
      sequence.removeGenerated(after);
      if (type === 'ForceOutput') sequence.appendForced(tokens, texts, after);
      else sequence.appendForced([-1], [calls], after);
    }
  }

  /** Appends the tokens that a `ForceTokens` at `Added` forces. Quote may list the added tokens before them. */
  #forceAfterAdded(added, tokens, texts) {
    const sequence = this.#sequence;
    const from = tokens.length >= added.length && added.every((row, i) => sequence.token[row] === tokens[i]) ? added.length : 0;
    sequence.appendForced(tokens.slice(from), texts.slice(from), sequence.eventCount);
    this.#isQueued = true;
  }

  /** Removes `before` tokens before the added one at `Added`, and the added one itself if `tokens` replace it. Queued tokens remain. */
  #backtrackAtAdded(added, before, tokens, texts) {
    const sequence = this.#sequence;
    const replaces = tokens.length > 0;
    if (this.#isQueued) sequence.backtrackBefore(added, before, sequence.eventCount);
    else sequence.backtrack(before + (replaces ? 1 : 0), sequence.eventCount);
    if (replaces) sequence.appendForced(tokens, texts, sequence.eventCount);
    this.#isQueued ||= replaces;
  }
}
