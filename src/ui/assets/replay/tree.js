// The family of a run: order, descriptions and statistics. Pure.
import { NEVER } from './rows.js';
import { displayText } from './glyphs.js';

/** Returns the members depth first, each with its `depth`, which is 0 for a fork whose parent is missing. */
export function order(members) {
  const children = new Map();
  const known = new Set(members.map((m) => m.run_id));
  for (const m of members) {
    const parent = known.has(m.parent?.run_id) ? m.parent.run_id : null;
    children.set(parent, [...(children.get(parent) ?? []), m]);
  }
  const out = [];
  const visit = (m, depth) => {
    out.push({ ...m, depth });
    for (const child of children.get(m.run_id) ?? []) visit(child, depth + 1);
  };
  for (const m of children.get(null) ?? []) visit(m, 0);
  return out;
}

const plain = (value) => (typeof value === 'string' ? value : JSON.stringify(value));

/** Describes the control vectors of a run. */
export const steeringText = (vectors) => (vectors.length ? `steering ${vectors.map((v) => `${v.name} ${v.scale ?? 1}`).join(', ')}` : 'no steering');

/** Describes the change of a fork. */
export function changeOf(member) {
  const { parent } = member;
  if (!parent) return 'original';
  const c = parent.change ?? {};
  const parts = [];
  if (typeof c.text === 'string') parts.push(`“${displayText(c.text)}”`);
  for (const [name, value] of Object.entries(c.sampling ?? {})) parts.push(`${name.replaceAll('_', ' ')} ${plain(value)}`);
  if (Array.isArray(c.mods)) parts.push(c.mods.length ? `mods ${c.mods.map((m) => m?.name ?? plain(m)).join(', ')}` : 'no mods');
  if (Array.isArray(c.steering)) parts.push(steeringText(c.steering));
  if (c.seed) parts.push(`seed ${member.seed}`);
  return parts.join(', ') || 'unchanged';
}

/** Returns the id of the member `step` places after `id`, and continues at the start after the end; null in a family of one. */
export function neighbor(ordered, id, step) {
  const at = ordered.findIndex((m) => m.run_id === id);
  if (at < 0 || ordered.length < 2) return null;
  return ordered[(at + step + ordered.length) % ordered.length].run_id;
}

/** Returns the rows of the final answer that were added at event `from` or later. */
export function rowsSince(run, from = 0) {
  const rows = [];
  for (let i = 0; i < run.count; i += 1) if (!run.isPrompt(i) && run.removedAt(i) === NEVER && run.addedAt(i) >= from) rows.push(i);
  return rows;
}

/** Returns statistics of rows: numbers of tokens, means, and the most surprising row. */
export function statistics(run, rows) {
  const out = { tokens: rows.length, forced: 0, measured: 0, mean: null, perplexity: null, entropy: null, peak: null, ms: null };
  let logprobSum = 0;
  let entropyCount = 0;
  let entropySum = 0;
  let time = 0;
  for (const i of rows) {
    if (run.isForced(i)) out.forced += 1;
    time += run.dt(i);
    const p = run.logprob(i);
    if (p !== null) {
      logprobSum += p;
      out.measured += 1;
      if (out.peak === null || p < run.logprob(out.peak)) out.peak = i;
    }
    if (run.entropy(i) !== null) {
      entropySum += run.entropy(i);
      entropyCount += 1;
    }
  }
  if (out.measured) {
    out.mean = logprobSum / out.measured;
    out.perplexity = Math.exp(-out.mean);
  }
  if (entropyCount) out.entropy = entropySum / entropyCount;
  if (rows.length && run.isTimed) out.ms = time / rows.length;
  return out;
}
