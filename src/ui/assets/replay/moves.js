// Movements of the cursor by actions such as `nextToken`. Pure.
import { NEVER } from './rows.js';

/**
 * Returns the event to which an action moves the cursor from event `n`, a message if there is no such event, or undefined for
 * an action that does not move the cursor. From the last token, `nextToken` goes to the end of the run, and from the first one,
 * `prevToken` goes to event 0. A token is surprising if `surprise(row)` is at least `threshold`.
 */
export function targetOf(action, run, n, surprise, threshold) {
  const end = run.eventCount;
  const nearestAdded = (step) => {
    for (let e = n + step; e >= 0 && e < end; e += step) if (run.type(e) === 'Added') return e;
    return step > 0 ? end : 0;
  };
  /** Returns the nearest one of these events after or before `n`, or a message with their name. */
  const nearest = (events, step, name) => {
    const candidates = events.filter((e) => (step > 0 ? e > n : e < n));
    if (!candidates.length) return events.length ? `No ${name} ${step > 0 ? 'after' : 'before'} this.` : `No ${name} in this run.`;
    return step > 0 ? Math.min(...candidates) : Math.max(...candidates);
  };
  const markEvents = (kind) => run.marks.filter((m) => m.kind === kind).map((m) => m.seq);
  const removalEvents = () => {
    const all = new Set();
    for (let i = 0; i < run.count; i += 1) if (run.removedAt(i) !== NEVER) all.add(run.removedAt(i) - 1);
    return [...all];
  };
  const surprisingEvents = () => {
    const all = [];
    for (let i = 0; i < run.count; i += 1) if (!run.isPrompt(i) && (surprise(i) ?? 0) >= threshold) all.push(run.addedAt(i));
    return all;
  };
  switch (action) {
    case 'first': return 0;
    case 'last': return end;
    case 'nextToken': return nearestAdded(1);
    case 'prevToken': return nearestAdded(-1);
    case 'nextEvent': return Math.min(end, n + 1);
    case 'prevEvent': return Math.max(0, n - 1);
    case 'nextAction': return nearest(markEvents('action'), 1, 'mod action');
    case 'prevAction': return nearest(markEvents('action'), -1, 'mod action');
    case 'nextError': return nearest(markEvents('error'), 1, 'error');
    case 'prevError': return nearest(markEvents('error'), -1, 'error');
    case 'nextBacktrack': return nearest(removalEvents(), 1, 'backtrack');
    case 'prevBacktrack': return nearest(removalEvents(), -1, 'backtrack');
    case 'nextSurprise': return nearest(surprisingEvents(), 1, 'surprising token');
    case 'prevSurprise': return nearest(surprisingEvents(), -1, 'surprising token');
    default: return undefined;
  }
}
