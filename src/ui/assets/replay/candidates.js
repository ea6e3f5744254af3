// The candidates of a step: the model's probabilities, their changes by mods, and the sampling stages that removed some. Pure.
import { detailsOf, measurementsOf, movedOf } from './details.js';

/**
 * Returns recorded candidates in any known format as `[{token, text, unnamed, prob}]`, highest first. `unnamed` is true if the
 * text was not recorded; `text` is then a placeholder with the id.
 */
export function parseCandidates(list) {
  if (!Array.isArray(list)) return [];
  return list
    .filter((c) => c && typeof c === 'object')
    .map((c) => ({ token: c.token, text: c.text ?? c.token_str, prob: c.prob ?? Math.exp(c.logprob) }))
    .filter((c) => Number.isFinite(c.prob))
    .map(({ token, text, prob }) => ({ token, text: typeof text === 'string' ? text : `⟨${token}⟩`, unnamed: typeof text !== 'string', prob }))
    .sort((a, b) => b.prob - a.prob);
}

/** Stages that only remove the least probable candidates. */
const BY_RANK = new Set(['avoided', 'top-k', 'top-p', 'min-p', 'top-n-sigma', 'temp', 'argmax']);
/** Stages that change the order of candidates and remove none. */
const REORDERING = new Set(['penalties', 'dry']);
/** Stages that keep the order of the remaining candidates. */
const ORDER_KEEPING = new Set([...BY_RANK, 'grammar', 'typical', 'xtc']);

/**
 * Returns the index of the stage that removed a candidate, as a list. It has several indexes if the recorded numbers of
 * candidates do not tell which stage it was. `rank` is the rank of the candidate before the stages, and `isOrdered` is false if
 * something other than a stage changed the order of the candidates.
 */
export function removedBy(stages, rank, isOrdered = true) {
  const possible = [];
  // After a stage that may have removed any candidates, the rank of this one may be lower than `rank`.
  let isRankExact = true;
  let before = Infinity;
  for (const [i, { name, left }] of stages.entries()) {
    if (!ORDER_KEEPING.has(name)) isOrdered = false;
    const isByRank = isOrdered && BY_RANK.has(name);
    if (!REORDERING.has(name) && left < before && !(isByRank && rank <= left)) {
      possible.push(i);
      if (isByRank && isRankExact) break;
      isRankExact = false;
    }
    before = left;
  }
  return possible;
}

/** Returns true if the remaining candidates `after` the stages have the same order as `before` them. */
function isInOrder(after, before) {
  const probsBefore = new Map(before.map((c) => [c.token, c.prob]));
  const probs = after.map((c) => probsBefore.get(c.token)).filter((p) => p !== undefined);
  return probs.every((p, i) => i === 0 || p <= probs[i - 1] * 1.001);
}

/**
 * Returns the rows for the candidates in lists of `candidates`, by token: `{token, text, unnamed, model, mods, sampler}`. The
 * token that was drawn, if any, also has a row; `text` is its recorded text.
 */
function mergedRows(lists, drawn, text) {
  const rows = new Map();
  for (const [name, list] of Object.entries(lists)) {
    for (const c of list) {
      const row = rows.get(c.token) ?? { token: c.token, text: c.text, ...(c.unnamed && { unnamed: true }), model: null, mods: null, sampler: null };
      row[name] = c.prob;
      rows.set(c.token, row);
    }
  }
  const row = rows.get(drawn);
  if (row?.unnamed && text) Object.assign(row, { text, unnamed: false });
  if (drawn !== null && !row) rows.set(drawn, { token: drawn, text: text ?? `⟨${drawn}⟩`, model: null, mods: null, sampler: null });
  return rows;
}

/**
 * Returns the candidates of a step with these entries, and what happened to them:
 *
 * - `rows`: `{token, text, model, mods, sampler, chosen, reason, byMod, removedBy}`. `model`, `mods` and `sampler` are the
 *   probabilities in the model's distribution, after the mods, and after the sampling stages; null if they were not recorded.
 *   `removedBy` is the result of `removedBy()`, or empty if the candidate was not removed or the record does not tell.
 * - `stages`: the sampling stages, `{name, left}`, with the number of candidates left after each.
 * - `draft`: the draft token of speculative decoding, `{isMatch, text}`, or null.
 * - `isSampled`, `isForced`: true if the token was drawn, or if a mod forced it.
 * - `isPartial`: true if only some of the remaining candidates were recorded.
 * - `hasMods`, `hasSampler`: true if rows have probabilities after the mods, and after the sampling stages.
 */
export function explainCandidates(entries) {
  const last = (type) => entries.findLast((e) => e.event.event_type === type);
  const forward = last('ForwardPass');
  const sampled = last('Sampled');
  const { model: measuredModel = [] } = measurementsOf(forward?.event);
  const measurements = measurementsOf(sampled?.event);
  const model = parseCandidates(measuredModel.length ? measuredModel : forward?.event.top_tokens);
  const afterMods = parseCandidates(measurements.after_mods);
  const afterSampler = parseCandidates(measurements.after_sampler);
  const { stages = [] } = measurements;
  const chosen = sampled?.event.sampled_token ?? null;
  const editingCall = entries.flatMap((e) => e.calls).find((c) => c.actions.some((a) => a.action_type === 'AdjustedLogits' && !detailsOf(a).superseded));
  const moved = editingCall?.actions.flatMap(movedOf) ?? [];
  const beforeStages = afterMods.length ? afterMods : model;
  const rows = mergedRows({ model, mods: afterMods, sampler: afterSampler }, chosen, sampled?.event.token_text);
  const drafted = measurements.drafted ?? null;
  const draft = drafted === null ? null : { isMatch: drafted === chosen, text: rows.get(drafted)?.text ?? `⟨${drafted}⟩` };
  const ranks = new Map(beforeStages.map((c, i) => [c.token, i + 1]));
  const isPartial = afterSampler.length > 0 && (stages.at(-1)?.left ?? 0) > afterSampler.length;
  // If a stage changes the order, `removedBy` knows.
  const isOrdered = stages.some(({ name }) => !ORDER_KEEPING.has(name)) || isInOrder(afterSampler, beforeStages);
  const explained = [...rows.values()].map((row) => {
    const result = { ...row, chosen: row.token === chosen, reason: '', byMod: false, removedBy: [] };
    if (afterMods.length && row.model !== null && !(row.mods > 0)) {
      // A token that is not among the candidates after the mods is masked or improbable; the action tells which.
      const after = moved.find((m) => m.token === row.token)?.after;
      result.reason = `${after !== undefined && after < 1e-6 ? 'masked' : 'lowered'} by ${editingCall?.call.mod_name ?? 'a mod'}`;
      result.byMod = true;
    } else if (afterSampler.length && row.sampler === null && stages.length) {
      const rank = ranks.get(row.token) ?? Infinity;
      // If only some of the remaining candidates were recorded, this one was certainly removed if its rank is too low.
      if (!isPartial || (isOrdered && rank > stages.at(-1).left)) result.removedBy = removedBy(stages, rank, isOrdered);
      result.reason = [...new Set(result.removedBy.map((i) => stages[i].name))].join(' or ');
    }
    return result;
  });
  const highest = (row) => Math.max(row.sampler ?? 0, row.mods ?? 0, row.model ?? 0);
  explained.sort((a, b) => (b.model ?? -1) - (a.model ?? -1) || highest(b) - highest(a));
  return {
    rows: explained, stages, draft, isSampled: Boolean(sampled), isForced: last('Added')?.event.forced === true, isPartial,
    hasMods: afterMods.length > 0, hasSampler: afterSampler.length > 0,
  };
}

/** Formats a probability. */
export function percent(p) {
  if (p === null || p === undefined) return '';
  if (p >= 0.9995) return '100%';
  if (p >= 0.1) return `${(p * 100).toFixed(1)}%`;
  if (p >= 0.0001) return `${(p * 100).toFixed(2)}%`;
  return p > 0 ? '< 0.01%' : '0';
}
