// The `details` of events and actions, which have any form in traces of other engines. Thunder's form has the types of `Measurements`
// and `ActionDetails` in `src/events`; as there, details with a field of another type are ignored. Pure.

const isNumber = (value) => typeof value === 'number';
const isText = (value) => typeof value === 'string';
const isFlag = (value) => typeof value === 'boolean';
const isAny = () => true;
const isId = (value) => Number.isInteger(value) && value >= -(2 ** 31) && value < 2 ** 31;
const isUnsigned = (bits) => (value) => Number.isInteger(value) && value >= 0 && value < 2 ** bits;
const isCount = isUnsigned(32);
const isObject = (value) => value !== null && typeof value === 'object' && !Array.isArray(value);
const isListOf = (isEntry) => (value) => Array.isArray(value) && value.every(isEntry);

/** Returns a check that a field is absent or has a type. */
const optional = (isType) => (value) => value === undefined || isType(value);

/** Returns a check that a field is absent, null or has a type. */
const nullable = (isType) => (value) => value === undefined || value === null || isType(value);

/** Returns a check of the fields of an object; other fields may have any type. */
const isRecord = (fields) => {
  const checks = Object.entries(fields);
  return (value) => isObject(value) && checks.every(([name, isType]) => isType(value[name]));
};

const isSpan = isRecord({ role: isText, start: isCount, end: isCount });
const isTile = isRecord({ start: optional(isCount), columns: optional(isCount), rows: optional(isCount) });
const isImage = isRecord({
  sha256: optional(isText), media_type: optional(isText), bytes: optional(isUnsigned(64)), width: optional(isCount), height: optional(isCount),
  recorded: optional(isFlag), tiles: optional(isListOf(isTile)),
});
const isPrompt = isRecord({
  tokens: optional(isListOf(isId)), texts: optional(isListOf(isText)), spans: optional(isListOf(isSpan)), images: optional(isListOf(isImage)),
  conversation: isAny, tools: isAny, parameters: isAny,
});
const isToken = isRecord({ token: isId, text: optional(isText), logprob: nullable(isNumber), rank: nullable(isCount), entropy: nullable(isNumber) });
const isCandidates = isListOf(isRecord({ token: isId, text: optional(isText), prob: isNumber }));
const isLens = isRecord({ layers: optional(isListOf(isUnsigned(16))), logits: optional(isListOf(isListOf(isNumber))) });
const isRange = (value) => Array.isArray(value) && value.length === 2 && value.every(isCount);
const isMessage = isRecord({ role: isText, tokens: isCount, text: isText });

const isMeasurements = isRecord({
  position: nullable(isCount),
  prompt: nullable(isPrompt),
  tokens: optional(isListOf(isToken)),
  entropy: nullable(isNumber),
  model: optional(isCandidates),
  lens: nullable(isLens),
  after_mods: optional(isCandidates),
  after_sampler: optional(isCandidates),
  stages: optional(isListOf(isRecord({ name: isText, left: isCount }))),
  drafted: nullable(isId),
  redraws: optional(isCount),
  stopped_by: nullable(isText),
  evicted: nullable(isRecord({ ranges: optional(isListOf(isRange)), messages: optional(isListOf(isMessage)) })),
  note: nullable(isText),
  ends_generation: optional(isFlag),
  discarded: optional(isCount),
  elapsed_us: nullable(isUnsigned(64)),
});

/** Returns the measurements of Thunder's engine at an event, if any; empty for `details` of another form. */
export const measurementsOf = (event) => (isMeasurements(event?.details) ? event.details : {});

const isMod = isRecord({ name: isText, version: nullable(isText), origin: nullable(isText) });
const isVector = isRecord({ name: isText, scale: nullable(isNumber), layers: nullable(isListOf(isNumber)) });

/** Returns the parameters of a recorded prompt that the page shows: `mods` and `steering`, without entries of another form. */
export function parametersOf({ parameters }) {
  const listOf = (list, isEntry) => (Array.isArray(list) ? list.filter(isEntry) : []);
  return { mods: listOf(parameters?.mods, isMod), steering: listOf(parameters?.steering, isVector) };
}

const isActionDetails = isRecord({
  tokens: optional(isListOf(isId)), texts: optional(isListOf(isText)), removed: nullable(isCount), superseded: optional(isFlag),
  backtrack_steps: nullable(isId), token_count: nullable(Number.isSafeInteger), tokens_as_text: optional(isListOf(isText)),
});

/** Returns the details of an action in the form of Thunder or Quote, which are empty for another form. */
export function detailsOf({ details }) {
  const { tokens = [], texts = [], removed, superseded = false, backtrack_steps, token_count, tokens_as_text = [], tool_calls } = isActionDetails(details) ? details : {};
  return {
    tokens, texts, removed: removed ?? undefined, superseded,
    backtrack_steps: backtrack_steps ?? undefined, token_count: token_count ?? undefined, tokens_as_text, tool_calls,
  };
}

const isMovedList = isListOf(isRecord({ token: isId, text: optional(isText), before: nullable(isNumber), after: nullable(isNumber) }));

/** Returns the tokens whose probabilities an action changed most, `[{token, text, before, after}]`; empty if they were not recorded. */
export const movedOf = ({ details }) => (isMovedList(details?.moved) ? details.moved : []);
