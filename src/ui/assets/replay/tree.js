// The family of a run: order of its members, descriptions of forks, and statistics. Pure.
import { NEVER } from './run-columns.js';
import { displayText } from './glyphs.js';

/** Returns the members of a family depth first, each with its `depth`. A fork whose parent is missing has depth 0. */
export function sortFamily(members) {
  const children = new Map();
  const known = new Set(members.map((m) => m.run_id));
  for (const m of members) {
    const parent = known.has(m.parent?.run_id) ? m.parent.run_id : null;
    children.set(parent, [...(children.get(parent) ?? []), m]);
  }
  const ordered = [];
  const visit = (m, depth) => {
    ordered.push({ ...m, depth });
    for (const child of children.get(m.run_id) ?? []) visit(child, depth + 1);
  };
  for (const m of children.get(null) ?? []) visit(m, 0);
  return ordered;
}

const valueText = (value) => (typeof value === 'string' ? value : JSON.stringify(value));

/** Describes the control vectors of a fork. */
const steeringText = (vectors) => (vectors.length ? `steering ${vectors.map((v) => `${v.name} ${v.scale ?? 1}`).join(', ')}` : 'no steering');

/** Describes what distinguishes a fork from its parent. */
export function changeOf(member) {
  const { parent } = member;
  if (!parent) return 'original';
  const { text, sampling, mods, steering, seed } = parent.change ?? {};
  const parts = [];
  if (typeof text === 'string') parts.push(`“${displayText(text)}”`);
  for (const [name, value] of Object.entries(sampling ?? {})) parts.push(`${name.replaceAll('_', ' ')} ${valueText(value)}`);
  if (Array.isArray(mods)) parts.push(mods.length ? `mods ${mods.map((m) => m?.name ?? valueText(m)).join(', ')}` : 'no mods');
  if (Array.isArray(steering)) parts.push(steeringText(steering));
  if (seed) parts.push(`seed ${member.seed}`);
  return parts.join(', ') || 'unchanged';
}

/** Returns the id of the member that is `step` places after `id`, where the first one follows the last one. Null in a family of one. */
export function neighbor(ordered, id, step) {
  const index = ordered.findIndex((m) => m.run_id === id);
  if (index < 0 || ordered.length < 2) return null;
  return ordered[(index + step + ordered.length) % ordered.length].run_id;
}

/** Returns the rows of the final answer that were added at event `from` or later. */
export function rowsSince(run, from = 0) {
  const rows = [];
  for (let i = 0; i < run.count; i += 1) if (!run.isPrompt(i) && run.removedAt(i) === NEVER && run.addedAt(i) >= from) rows.push(i);
  return rows;
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const mean = (numbers) => (numbers.length ? sum(numbers) / numbers.length : null);

/** Returns statistics of rows. Means are null if nothing was measured; `mostSurprising` is a row. `tokens` is their number without an end-of-generation token. */
export function statistics(run, rows) {
  const measured = rows.filter((i) => run.logprob(i) !== null);
  const meanLogprob = mean(measured.map((i) => run.logprob(i)));
  return {
    tokens: rows.filter((i) => !run.endsGeneration(i)).length,
    forced: rows.filter((i) => run.isForced(i)).length,
    meanLogprob,
    perplexity: meanLogprob === null ? null : Math.exp(-meanLogprob),
    meanEntropy: mean(rows.map((i) => run.entropy(i)).filter((entropy) => entropy !== null)),
    mostSurprising: measured.length ? measured.reduce((most, i) => (run.logprob(i) < run.logprob(most) ? i : most)) : null,
    msPerToken: run.isTimed ? mean(rows.map((i) => run.dt(i))) : null,
  };
}
