// Cursor movements of keyboard actions. Pure.
import { NEVER } from './rows.js';

/**
 * Returns the target event of an action, or undefined if the action does not move the cursor. If there is no such event,
 * returns a message; the keys of tokens go to the first event or the end of the run instead.
 */
export function targetOf(action, run, n, surprise, threshold) {
  const end = run.eventCount;
  const nearest = (test, dir) => {
    for (let e = n + dir; e >= 0 && e < end; e += dir) if (test(e)) return e;
    return dir > 0 ? end : 0;
  };
  const next = (list, dir, name) => {
    const candidates = list.filter((e) => (dir > 0 ? e > n : e < n));
    if (!candidates.length) return list.length ? `No ${name} ${dir > 0 ? 'after' : 'before'} this.` : `No ${name} in this run.`;
    return dir > 0 ? Math.min(...candidates) : Math.max(...candidates);
  };
  const marks = (kind) => run.marks.filter((m) => m.kind === kind).map((m) => m.seq);
  const removals = () => {
    const all = new Set();
    for (let i = 0; i < run.count; i += 1) if (run.removedAt(i) !== NEVER) all.add(run.removedAt(i) - 1);
    return [...all];
  };
  const surprises = () => {
    const all = [];
    for (let i = 0; i < run.count; i += 1) if (!run.isPrompt(i) && (surprise(i) ?? 0) >= threshold) all.push(run.addedAt(i));
    return all;
  };
  switch (action) {
    case 'first': return 0;
    case 'last': return end;
    case 'nextToken': return nearest((e) => run.type(e) === 'Added', 1);
    case 'prevToken': return nearest((e) => run.type(e) === 'Added', -1);
    case 'nextEvent': return Math.min(end, n + 1);
    case 'prevEvent': return Math.max(0, n - 1);
    case 'nextAction': return next(marks('action'), 1, 'mod action');
    case 'prevAction': return next(marks('action'), -1, 'mod action');
    case 'nextError': return next(marks('error'), 1, 'error');
    case 'prevError': return next(marks('error'), -1, 'error');
    case 'nextBacktrack': return next(removals(), 1, 'backtrack');
    case 'prevBacktrack': return next(removals(), -1, 'backtrack');
    case 'nextSurprise': return next(surprises(), 1, 'surprising token');
    case 'prevSurprise': return next(surprises(), -1, 'surprising token');
    default: return undefined;
  }
}
