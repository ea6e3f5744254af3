// Elements for the mod calls of an event: their actions, log lines and exceptions.
import { h, replaceContent } from '../dom.js';
import { percent } from './candidates.js';
import { detailsOf, measurementsOf, movedOf } from './details.js';
import { displayText } from './glyphs.js';

const MAX_LOG_LINES = 60;
/** Maximum tokens that are listed for an edit of logits. */
const MAX_MOVED = 6;

/** Returns the text of a duration in milliseconds; null if it is unknown or negative. Pure. */
export function durationText(ms) {
  if (!Number.isFinite(ms) || ms < 0) return null;
  return ms < 1 ? `${Math.round(ms * 1000)} µs` : `${ms.toFixed(1)} ms`;
}

/**
 * Returns elements for the mod calls at event `e`, and for those with an effect at other events of its step. `entries` are those of the
 * step, and `go(n)` moves the cursor.
 */
export function modCalls(e, entries, go) {
  const calls = entries.flatMap(({ event, calls: list }) => list.map((call) => ({ ...call, event })));
  const hasEffect = ({ call, logs, actions }) => logs.length || call.exception_occurred || actions.some((action) => action.action_type !== 'Noop');
  const callsHere = calls.filter(({ event }) => event.sequence_order === e);
  const otherCalls = calls.filter((call) => call.event.sequence_order !== e && hasEffect(call));
  const stoppedBy = entries.map(({ event }) => measurementsOf(event).stopped_by).find(Boolean);
  return [
    stoppedBy ? h('p', {}, 'Stopped by ', h('code', {}, displayText(stoppedBy))) : '',
    h('h2', {}, 'Mods at this event'),
    ...(callsHere.length ? callsHere.map((call) => modCall(call, eventType(call))) : [h('p', { class: 'hint' }, 'No mod was called here.')]),
    ...(otherCalls.length ? [h('h2', {}, 'Mods at other events of this step'), ...otherCalls.map((call) => modCall(call, eventButton(call, go)))] : []),
  ];
}

const eventType = ({ call }) => h('span', { class: 'hint' }, call.event_type);

const eventButton = ({ call, event: { sequence_order: seq } }, go) => h('button', { type: 'button', class: 'plain', onclick: () => go(seq) }, `${call.event_type} ${seq}`);

/** Returns the element of a mod call: its mod, the element of its event, duration, actions, log lines and exception. */
function modCall({ call, logs, actions }, eventElement) {
  const duration = durationText(call.execution_time_ms);
  return h('div', { class: 'call' },
    h('div', { class: 'call-head' },
      h('b', {}, call.mod_name),
      eventElement,
      duration && h('span', { class: 'hint num' }, duration)),
    actions.map((action) => h('div', { class: `action${action.action_type === 'EmitError' ? ' failed' : ''}${detailsOf(action).superseded ? ' superseded' : ''}` }, ...actionContent(action))),
    logLines(logs),
    call.exception_occurred ? h('div', { class: 'action failed' }, call.exception_message ?? 'raised an exception',
      call.exception_traceback ? h('details', {}, h('summary', {}, 'Traceback'), h('pre', { class: 'trace', tabindex: '0' }, call.exception_traceback)) : null) : null);
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
  if (detailsOf(action).superseded) content.push(' (an earlier mod’s action won)');
  return content;
}

/** Returns the texts and elements that describe an action. */
function actionDescription(action) {
  const { texts, tokens_as_text: quoteTexts, removed } = detailsOf(action);
  const pieces = texts.length ? texts : quoteTexts;
  const text = pieces.length ? pieces.join('') : action.tokens_preview;
  const quotedText = text ? [' ', h('code', {}, displayText(text.slice(0, 300)))] : [];
  switch (action.action_type) {
    case 'Noop': return [h('span', { class: 'hint' }, 'no change')];
    case 'Backtrack': {
      const requested = action.details?.clamped === true ? ` (requested ${action.backtrack_steps})` : '';
      const appended = action.backtrack_token_count ? [' and appended', ...quotedText] : [];
      return [`Backtrack ${removed ?? action.backtrack_steps ?? ''}${requested}`, ...appended];
    }
    case 'ForceTokens': case 'ForceOutput': return [`${action.action_type} ${action.token_count ?? ''}`, ...quotedText];
    case 'AdjustedPrefill': {
      const maxSteps = action.adjusted_max_steps ? `, maximum ${action.adjusted_max_steps} steps` : '';
      return [`New prompt, ${action.new_length ?? '?'} tokens${maxSteps}`];
    }
    case 'AdjustedLogits': {
      const temperature = Number.isFinite(action.temperature) ? `, temperature ${action.temperature}` : '';
      return [`Logits edited${temperature}`, ...movedTokens(movedOf(action))];
    }
    case 'ToolCalls': return ['Tool calls', h('pre', { class: 'trace', tabindex: '0' }, JSON.stringify(action.tool_calls ?? action.details ?? {}, null, 2))];
    case 'EmitError': return [`Error: ${action.error_message ?? ''}`];
    default: return [action.action_type];
  }
}

/** Returns a table of the tokens whose probabilities changed most, as a list, which is empty if they were not recorded. */
function movedTokens(moved) {
  if (!moved.length) return [];
  const row = ({ token, text, before, after }) => h('tr', {},
    h('th', { scope: 'row' }, displayText(text ?? `⟨${token}⟩`)), h('td', {}, percent(before)), h('td', {}, '→'), h('td', {}, percent(after)));
  return [h('table', { class: 'candidates' }, h('tbody', {}, moved.slice(0, MAX_MOVED).map(row)))];
}
