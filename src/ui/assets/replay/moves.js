// Movements of the cursor by actions such as `nextToken`. Pure.
import { NEVER } from './run-columns.js';

/**
 * Returns the event to which an action moves the cursor from event `n`, a message if there is no such event, or undefined for
 * an action that does not move the cursor. From the last token, `nextToken` goes to the end of the run, and from the first one,
 * `prevToken` goes to event 0. A token is surprising if `surprise(row)` is at least `threshold`.
 */
export function targetOf(action, run, n, surprise, threshold) {
  const end = run.eventCount;
  if (action === 'first') return 0;
  if (action === 'last') return end;
  const step = action.startsWith('next') ? 1 : -1;
  /** Returns the nearest one of these events after or before `n`, or a message with their name. */
  const nearest = (events, name) => {
    const candidates = events.filter((e) => (step > 0 ? e > n : e < n));
    if (!candidates.length) return events.length ? `No ${name} ${step > 0 ? 'after' : 'before'} this.` : `No ${name} in this run.`;
    return candidates.reduce((a, b) => (Math.abs(b - n) < Math.abs(a - n) ? b : a));
  };
  const markEvents = (kind) => run.marks.filter((m) => m.kind === kind).map((m) => m.seq);
  const rows = () => Array.from({ length: run.count }, (_, i) => i);
  switch (/^(?:next|prev)(.*)/.exec(action)?.[1]) {
    case 'Token':
      for (let e = n + step; e >= 0 && e < end; e += step) if (run.type(e) === 'Added') return e;
      return step > 0 ? end : 0;
    case 'Event': return Math.max(0, Math.min(end, n + step));
    case 'Action': return nearest(markEvents('action'), 'mod action');
    case 'Error': return nearest(markEvents('error'), 'error');
    case 'Backtrack': return nearest(rows().map((i) => run.removedAt(i)).filter((e) => e !== NEVER).map((e) => e - 1), 'backtrack');
    case 'Surprise': return nearest(rows().filter((i) => !run.isPrompt(i) && (surprise(i) ?? 0) >= threshold).map((i) => run.addedAt(i)), 'surprising token');
    default: return undefined;
  }
}

/** Returns the event of a place: an `{event}`, or a `{token}` of the answer, counted from 1. */
export function eventOf({ event, token }, run) {
  if (token === undefined) return event;
  const rows = run.answer();
  return rows.length ? run.addedAt(rows[Math.max(0, Math.min(rows.length, token) - 1)]) : 0;
}
