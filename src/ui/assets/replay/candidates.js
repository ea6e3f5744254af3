// Computes the table of candidates of a step: the model's probabilities, the edits of mods, the sampling stages. Pure.

/** Returns the object `details` of an event; empty if the event has none. */
export const eventDetails = (event) => (event && typeof event.details === 'object' && event.details) || {};

/** Returns candidates in any known format as `[{token, text, prob}]`, highest first. */
export function candidates(list) {
  if (!Array.isArray(list)) return [];
  return list
    .filter((c) => c && typeof c === 'object')
    .map((c) => ({ token: c.token, text: c.text ?? c.token_str, prob: c.prob ?? Math.exp(c.logprob) }))
    .filter((c) => Number.isFinite(c.prob))
    .map(({ token, text, prob }) => ({ token, text: typeof text === 'string' ? text : `⟨${token}⟩`, unnamed: typeof text !== 'string', prob }))
    .sort((a, b) => b.prob - a.prob);
}

/** Stages that remove the least probable candidates and keep the order of the others. */
const BY_RANK = new Set(['top-k', 'top-p', 'min-p', 'top-n-sigma', 'temp', 'argmax']);
/** Stages that change the order of candidates and remove none. */
const REORDERING = new Set(['penalties', 'dry']);
/** Stages that keep the order of candidates. */
const ORDERED = new Set([...BY_RANK, 'grammar', 'typical', 'xtc']);

/**
 * Returns the indexes of the stages of which one removed a candidate; several if their counts do not determine it. `rank` is
 * its rank before the stages, and `isOrdered` is false if something else changed the order of candidates.
 */
export function removedBy(stages, rank, isOrdered = true) {
  const possible = [];
  // After a stage that may have removed any candidates, the current rank is unknown, but at most `rank`.
  let isExact = true;
  let before = Infinity;
  for (const [i, { name, left }] of stages.entries()) {
    if (!ORDERED.has(name)) isOrdered = false;
    const isByRank = isOrdered && BY_RANK.has(name);
    if (!REORDERING.has(name) && left < before && !(isByRank && rank <= left)) {
      possible.push(i);
      if (isByRank && isExact) break;
      isExact = false;
    }
    before = left;
  }
  return possible;
}

/** Returns true if the candidates that remain have the same order as before the stages. */
function isInOrder(after, base) {
  const before = new Map(base.map((c) => [c.token, c.prob]));
  const probs = after.map((c) => before.get(c.token)).filter((p) => p !== undefined);
  return probs.every((p, i) => i === 0 || p <= probs[i - 1] * 1.001);
}

/**
 * Returns the rows of the table for one step, whose `entries` are `{event, calls}`.
 * A row is `{token, text, model, mods, sampler, chosen, reason, byMod, removedBy}`; probabilities that were not recorded are null.
 * `removedBy` lists the indexes of the stages of which one removed the candidate: none if it was kept, or if nothing tells it.
 * `isPartial` is true if not all remaining candidates were recorded. `draft` is null or `{right, text}`: the draft token of speculative decoding, with its text if that is known.
 */
export function candidateTable(entries) {
  const last = (type) => entries.findLast((e) => e.event.event_type === type);
  const forward = last('ForwardPass');
  const sampled = last('Sampled');
  const model = candidates(eventDetails(forward?.event).model ?? forward?.event.top_tokens);
  const afterMods = candidates(eventDetails(sampled?.event).after_mods);
  const afterSampler = candidates(eventDetails(sampled?.event).after_sampler);
  const stages = Array.isArray(eventDetails(sampled?.event).stages) ? eventDetails(sampled.event).stages : [];
  const chosen = sampled?.event.sampled_token ?? null;
  const editingCall = entries.flatMap((e) => e.calls).find((c) => c.actions.some((a) => a.action_type === 'AdjustedLogits' && a.details?.superseded !== true));
  const moved = editingCall?.actions.flatMap((a) => (Array.isArray(a.details?.moved) ? a.details.moved : [])) ?? [];
  const base = afterMods.length ? afterMods : model;
  const rows = new Map();
  for (const [name, list] of [['model', model], ['mods', afterMods], ['sampler', afterSampler]]) {
    for (const c of list) {
      const row = rows.get(c.token) ?? { token: c.token, text: c.text, ...(c.unnamed && { unnamed: true }), model: null, mods: null, sampler: null };
      row[name] = c.prob;
      rows.set(c.token, row);
    }
  }
  const drawn = rows.get(chosen);
  if (drawn?.unnamed && sampled.event.token_text) Object.assign(drawn, { text: sampled.event.token_text, unnamed: false });
  if (chosen !== null && !rows.has(chosen)) {
    rows.set(chosen, { token: chosen, text: sampled.event.token_text ?? `⟨${chosen}⟩`, model: null, mods: null, sampler: null });
  }
  const drafted = eventDetails(sampled?.event).drafted ?? null;
  const draft = drafted === null ? null : { right: drafted === chosen, text: rows.get(drafted)?.text ?? `⟨${drafted}⟩` };
  const ranks = new Map(base.map((c, i) => [c.token, i + 1]));
  const isPartial = afterSampler.length > 0 && (stages.at(-1)?.left ?? 0) > afterSampler.length;
  const isOrdered = stages.some(({ name }) => !ORDERED.has(name)) || isInOrder(afterSampler, base);
  const out = [...rows.values()].map((row) => {
    const result = { ...row, chosen: row.token === chosen, reason: '', byMod: false, removedBy: [] };
    if (afterMods.length && row.model !== null && !(row.mods > 0)) {
      // A token that is missing from the candidates after mods is either improbable or masked; the action tells which.
      const after = moved.find((m) => m.token === row.token)?.after;
      result.reason = `${after !== undefined && after < 1e-6 ? 'masked' : 'lowered'} by ${editingCall?.call.mod_name ?? 'a mod'}`;
      result.byMod = true;
    } else if (afterSampler.length && row.sampler === null && stages.length) {
      const rank = ranks.get(row.token) ?? Infinity;
      // If candidates are missing in the record, only a rank below all that remain shows that this one was removed.
      if (!isPartial || (isOrdered && rank > stages.at(-1).left)) result.removedBy = removedBy(stages, rank, isOrdered);
      result.reason = [...new Set(result.removedBy.map((i) => stages[i].name))].join(' or ');
    }
    return result;
  });
  const best = (r) => Math.max(r.sampler ?? 0, r.mods ?? 0, r.model ?? 0);
  out.sort((a, b) => (b.model ?? -1) - (a.model ?? -1) || best(b) - best(a));
  const added = last('Added');
  return { rows: out, stages, draft, isSampled: Boolean(sampled), isForced: added?.event.forced === true, isPartial, hasMods: afterMods.length > 0, hasSampler: afterSampler.length > 0, entropy: eventDetails(forward?.event).entropy ?? null };
}

/** Formats a probability. */
export function percent(p) {
  if (p === null || p === undefined) return '';
  if (p >= 0.9995) return '100%';
  if (p >= 0.1) return `${(p * 100).toFixed(1)}%`;
  if (p >= 0.0001) return `${(p * 100).toFixed(2)}%`;
  return p > 0 ? '< 0.01%' : '0';
}
