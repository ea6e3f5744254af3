// Where an action of the keyboard moves the cursor. Pure.
import { NEVER } from './branches.js';

/** The event to go to; null when there is none further; undefined when the action does not move. */
export function stepping(action, run, n, surprise, threshold) {
  const end = run.eventCount;
  const events = (test, dir) => {
    for (let e = n + dir; e >= 0 && e < end; e += dir) if (test(e)) return e;
    return dir > 0 ? end : 0;
  };
  const next = (list, dir) => {
    const ahead = list.filter((e) => (dir > 0 ? e > n : e < n));
    if (!ahead.length) return null;
    return dir > 0 ? Math.min(...ahead) : Math.max(...ahead);
  };
  const marks = (kind) => run.marks.filter((m) => m.kind === kind).map((m) => m.seq);
  const deaths = () => {
    const all = new Set();
    for (let i = 0; i < run.count; i += 1) if (run.died(i) !== NEVER) all.add(run.died(i) - 1);
    return [...all];
  };
  const surprises = () => {
    const all = [];
    for (let i = 0; i < run.count; i += 1) if (!run.isPrompt(i) && (surprise(i) ?? 0) >= threshold) all.push(run.born(i));
    return all;
  };
  switch (action) {
    case 'first': return 0;
    case 'last': return end;
    case 'nextToken': return events((e) => run.kind(e) === 3, 1);
    case 'prevToken': return events((e) => run.kind(e) === 3, -1);
    case 'nextEvent': return Math.min(end, n + 1);
    case 'prevEvent': return Math.max(0, n - 1);
    case 'nextAction': return next(marks('action'), 1);
    case 'prevAction': return next(marks('action'), -1);
    case 'nextError': return next(marks('error'), 1);
    case 'prevError': return next(marks('error'), -1);
    case 'nextBacktrack': return next(deaths(), 1);
    case 'prevBacktrack': return next(deaths(), -1);
    case 'nextSurprise': return next(surprises(), 1);
    case 'prevSurprise': return next(surprises(), -1);
    default: return undefined;
  }
}
