// Trace of another engine: known tokens, a backtrack, forced tokens, an exception, logs, hostile text.

const PROMPT = ['Why', ' is', ' the', ' sky', ' blue', '?'];
const ANSWER = ['The', ' sky', ' is', ' the', ' ocean', ' blue', ' because', ' <img', ' src=x', '\u202eevil', '.', ' Air', ' scatters', ' light', '.'];

/** Returns the document for `POST /ingest`, with `steps` steps. `ANSWER` is repeated if it has fewer tokens. */
export function document(requestId, steps = ANSWER.length) {
  const events = [];
  const modCalls = [];
  const modLogs = [];
  const actions = [];
  const add = (event) => events.push({ sequence_order: events.length, ...event }) - 1;
  const call = (seq, fields = {}) => {
    const event = events[seq];
    return modCalls.push({ event_sequence_order: seq, mod_name: 'no-ocean', event_type: event.event_type, step: event.step, execution_time_ms: 0.04, exception_occurred: false, ...fields }) - 1;
  };
  const tokens = PROMPT.map((_, i) => i + 1);
  add({ event_type: 'Prefilled', step: 0, prompt_length: PROMPT.length, tokens_so_far_len: 0, max_steps: 999, details: { position: 0, prompt: { tokens, texts: PROMPT, spans: [{ role: 'user', start: 0, end: PROMPT.length }] }, elapsed_us: 500 } });
  let step = 0;
  let position = PROMPT.length;
  const put = (text, { prob = 0.9, forced = false } = {}) => {
    step += 1;
    const token = 100 + text.length * 7 + text.charCodeAt(text.length - 1) % 50;
    const elapsed = 1000 + step * 20000;
    const measure = { token, text, logprob: Math.log(prob), rank: prob > 0.5 ? 1 : 4, entropy: prob > 0.5 ? 0.5 : 3 };
    const model = [{ token, text, prob }, { token: 7, text: ' sea', prob: (1 - prob) * 0.6 }, { token: 8, text: ' air', prob: (1 - prob) * 0.2 }].sort((a, b) => b.prob - a.prob);
    add({ event_type: 'ForwardPass', step, top_tokens: model, details: { position, entropy: measure.entropy, model, elapsed_us: elapsed } });
    if (!forced) add({ event_type: 'Sampled', step, sampled_token: token, token_text: text, details: { position, tokens: [measure], after_sampler: [{ token, text, prob: 1 }], stages: [{ name: 'top-k', left: 3 }, { name: 'min-p', left: 1 }], elapsed_us: elapsed + 100 } });
    position += 1;
    return add({ event_type: 'Added', step, added_tokens: [token], added_token_count: 1, forced, details: { position: position - 1, tokens: [measure], elapsed_us: elapsed + 200 } });
  };
  for (let k = 0; step < steps; k += 1) {
    const at = put(ANSWER[k % ANSWER.length], { prob: k % 5 === 2 ? 0.03 : 0.9, forced: k % ANSWER.length === 11 });
    if (k % ANSWER.length === 4) {
      const index = call(at);
      modLogs.push({ mod_call_sequence: index, mod_name: 'no-ocean', log_message: 'saw "ocean", going back <b>two</b>', log_level: 'INFO' });
      actions.push({ mod_call_sequence: index, action_type: 'Backtrack', action_order: 0, backtrack_steps: 2, backtrack_token_count: 0, details: { removed: 2 } });
      position -= 2;
    }
    if (k % ANSWER.length === 8) {
      call(at, { mod_name: 'watcher', exception_occurred: true, exception_message: "KeyError: 'colour'", exception_traceback: 'Traceback (most recent call last):\n  File "watcher.py", line 12\nKeyError: \'colour\'' });
    }
  }
  return {
    request: { request_id: requestId, created_at: new Date().toISOString(), completed_at: new Date(Date.now() + 2000).toISOString(), model: 'sample-model', max_tokens: 99, temperature: 0.7 },
    events, mod_calls: modCalls, mod_logs: modLogs, actions,
  };
}
