// Parts of items that the fold needs: the drawn token of a step, and labels of actions. Pure.

/** Maximum characters of a label, and of a text that several tokens share. */
const MAX_LABEL_CHARS = 80;
/** Maximum Sampled events that look up their token in the candidates of one ForwardPass. */
const MAX_LOOKUPS = 16;

const isNumber = (value) => typeof value === 'number';
const isId = (value) => Number.isInteger(value);

/** Limits the length of a label. */
export function shorten(text) {
  return text.length <= MAX_LABEL_CHARS ? text : Array.from(text).slice(0, MAX_LABEL_CHARS).join('');
}

/** Returns the candidates in `top_tokens`, in the form of the ingest API or of Quote; other forms are ignored. */
function candidatesOf(top) {
  const isKnownForm = Array.isArray(top) && top.every((c) => c && isId(c.token) && (isNumber(c.prob) || isNumber(c.logprob)));
  return isKnownForm ? top.map(({ token, prob, logprob }) => (isNumber(prob)
    ? { token, sortKey: prob, logprob: prob > 0 ? Math.min(0, Math.log(prob)) : undefined }
    : { token, sortKey: logprob, logprob: Math.min(0, logprob) })) : [];
}

/** State of one step before its tokens are appended. */
export class Step {
  /** Flags for the tokens that the step will append. */
  pending = 0;
  /** True after a mod forced tokens. */
  forced = false;
  entropy = undefined;
  candidates = [];
  /** Number of lookups in the candidates. */
  lookups = 0;
  /** The token of the Sampled event, or null. */
  drawn = null;

  begin(event, measurements) {
    this.pending = 0;
    this.forced = false;
    this.drawn = null;
    this.lookups = 0;
    this.entropy = measurements.entropy ?? undefined;
    this.candidates = measurements.model?.length ? [] : candidatesOf(event.top_tokens);
  }

  recordSampled(event, measurements) {
    this.lookups += 1;
    if (this.lookups > MAX_LOOKUPS) this.candidates = [];
    const measurement = measurements.tokens?.[0];
    const token = event.sampled_token ?? measurement?.token;
    const candidate = this.candidates.find((c) => c.token === token && c.logprob !== undefined);
    const rankOf = ({ sortKey }) => 1 + this.candidates.filter((other) => other.sortKey > sortKey).length;
    this.drawn = {
      step: event.step,
      token,
      text: event.token_text ?? (measurement && (measurement.text ?? '')),
      logprob: measurement?.logprob ?? candidate?.logprob,
      rank: measurement?.rank ?? (candidate && rankOf(candidate)),
      entropy: measurement?.entropy ?? this.entropy,
    };
  }

  /** Returns the text of the drawn token for a row. A long text is returned only once: a trace may list the token without limit. */
  takeText() {
    const { text } = this.drawn;
    if (text !== undefined && shorten(text) !== text) this.drawn.text = undefined;
    return text;
  }
}

/** Returns the label of an action's mark. */
export function labelOf(action, details) {
  const type = action.action_type;
  let count;
  if (type === 'Backtrack') count = action.backtrack_steps ?? details.backtrack_steps ?? details.removed;
  else if (type === 'ForceTokens' || type === 'ForceOutput') count = action.token_count ?? details.tokens.length;
  else if (type === 'AdjustedPrefill') count = action.new_length ?? details.tokens.length;
  if (count !== undefined) return `${type} ${count}`;
  return action.error_message === undefined ? type : `${type}: ${action.error_message}`;
}
