// Conversion between the playground's form, requests of the API and recorded runs. A form is plain data:
// `{tab, messages, raw, numbers, stop, mods, attention, lens, steering, tools, schema, extra, model}`; `raw` is text or token ids,
// `steering` is null or a list of control vectors, and an empty `model` is the default of the server. Pure.

/** Name of the schema in requests. The API requires one, but the server does not use it. */
const SCHEMA_NAME = 'answer';

const NUMBERS = ['temperature', 'top_k', 'top_p', 'min_p', 'repeat_penalty', 'presence_penalty', 'frequency_penalty', 'seed', 'max_tokens'];

/**
 * Returns path and body of the request for a form. Empty numbers are omitted, so that the server's defaults apply. Throws an
 * error that names the field if a number or JSON text is invalid.
 */
export function requestOf(form) {
  const body = { model: form.model || undefined };
  if (form.tab === 'raw') body.prompt = form.raw;
  else body.messages = form.messages.filter(hasContent).map(({ role, content, more }) => ({ role, content: content === '' ? null : content, ...more }));
  for (const name of NUMBERS) {
    const text = String(form.numbers[name] ?? '').trim();
    if (text === '') continue;
    const value = Number(text);
    if (!Number.isFinite(value)) throw new Error(`${name} must be a number, got “${text}”.`);
    body[name] = value;
  }
  const stop = form.stop.split('\n').filter(Boolean);
  if (stop.length) body.stop = stop;
  if (form.mods.length) {
    body.mods = form.mods.map(({ name, config }) => {
      if (!config.trim()) return { name };
      try {
        return { name, config: JSON.parse(config) };
      } catch (error) {
        throw new Error(`The configuration of ${name} must be JSON: ${error.message}.`);
      }
    });
  }
  if (form.attention) body.attention = true;
  if (form.lens) body.lens = true;
  if (form.steering) body.steering = form.steering;
  const tools = jsonOf(form.tools, 'The tools');
  if (tools !== null) {
    if (!Array.isArray(tools)) throw new Error('The tools must be a JSON array.');
    // The chat template renders tools; a raw text has no template.
    if (tools.length && form.tab !== 'raw') body.tools = tools;
  }
  const schema = objectOf(form.schema, 'The JSON schema');
  if (schema) body.response_format = { type: 'json_schema', json_schema: { name: SCHEMA_NAME, schema } };
  Object.assign(body, objectOf(form.extra, 'The additional fields'));
  body.stream = true;
  return { path: form.tab === 'raw' ? '/v1/completions' : '/v1/chat/completions', body };
}

/** Returns true for a message with text or with tool calls. */
const hasContent = ({ content, more }) => content !== '' || Boolean(more);

/** Returns the value of a JSON text, or null if the text is empty. `name` is the name of the field in errors. */
function jsonOf(text, name) {
  if (!text?.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} must be JSON: ${error.message}.`);
  }
}

/** Returns the object of a JSON text, or null if the text is empty. */
function objectOf(text, name) {
  const value = jsonOf(text, name);
  if (text?.trim() && (value === null || typeof value !== 'object' || Array.isArray(value))) throw new Error(`${name} must be a JSON object.`);
  return value;
}

/** Returns a message that says which input a form lacks, or null if it can be sent. */
export function missingInput(form) {
  if (form.tab === 'raw') return form.raw ? null : 'Write some text for the model to continue.';
  return form.messages.some(hasContent) ? null : 'Write a message first.';
}

/** Returns a request as a shell command. `keyVariable` is the variable of the environment with the key, or empty. */
export function curlOf({ path, body }, origin, keyVariable) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = keyVariable ? ` \\\n  -H "Authorization: Bearer $${keyVariable}"` : '';
  return `curl -N ${origin}${path}${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'`;
}

/** Returns the text of a message, whose content may be a list of parts. */
function textOf(content) {
  if (typeof content === 'string') return content;
  if (!Array.isArray(content)) return content ? JSON.stringify(content) : '';
  return content.every((part) => typeof part?.text === 'string') ? content.map((part) => part.text).join('\n') : JSON.stringify(content);
}

/** Returns the schema of a response format if the form's field can represent it, else null. */
function schemaOf(format) {
  if (format?.type !== 'json_schema') return null;
  const { name, schema, ...others } = format.json_schema ?? {};
  return name === SCHEMA_NAME && schema && Object.keys(others).length === 0 ? schema : null;
}

/**
 * Returns, as JSON text, the recorded parameters of a run that have no field of their own in the form. `prompt` is the one of
 * its Prefilled event. If `isFork`, parameters that apply to a whole answer, such as `tool_choice`, are omitted.
 */
export function extraFields(prompt, isFork = false) {
  const p = prompt?.parameters ?? {};
  // With `ignore_eos`, the server itself bans the tokens that end the generation.
  const biases = (p.sampling?.logit_bias ?? []).filter(([, bias]) => bias !== null || !p.limits?.ignore_eos);
  const all = {
    // A ban is -Infinity, which JSON cannot represent.
    ...(biases.length && { logit_bias: biases.map(([token, bias]) => [token, bias ?? false]) }),
    ...(p.lora && { lora: p.lora }),
    ...p.request,
  };
  if (schemaOf(all.response_format)) delete all.response_format;
  const kept = Object.entries(all).filter(([name]) => !isFork || ['logit_bias', 'ignore_eos', 'lora'].includes(name));
  return kept.length ? JSON.stringify(Object.fromEntries(kept), null, 2) : '';
}

/** Returns the form of a recorded run: from the prompt of its Prefilled event, or else from its summary. Either may be null. */
export function formOf(prompt, run) {
  const form = { numbers: {}, mods: [], extra: extraFields(prompt) };
  // Other engines record no parameters.
  const p = prompt?.parameters ?? { temperature: run?.temperature, max_tokens: run?.max_tokens, seed: run?.seed };
  const schema = schemaOf(p.request?.response_format);
  form.tools = prompt?.tools ? JSON.stringify(prompt.tools, null, 2) : '';
  form.schema = schema ? JSON.stringify(schema, null, 2) : '';
  const flat = { ...p, ...p.sampling, ...p.limits };
  for (const name of NUMBERS) {
    const value = flat[name];
    // Numbers except the seed are recorded as 32-bit floats, so 0.1 would become 0.10000000149.
    if (Number.isFinite(value)) form.numbers[name] = name === 'seed' ? value : Number(value.toPrecision(6));
  }
  if (typeof p.attention === 'boolean') form.attention = p.attention;
  form.lens = p.lens === true;
  form.steering = p.steering ?? null;
  form.model = p.model?.name ?? run?.model ?? '';
  if (Array.isArray(flat.stop)) form.stop = flat.stop.join('\n');
  const mods = Array.isArray(flat.mods) ? flat.mods : run?.mods ?? [];
  form.mods = mods.map((m) => (typeof m === 'string' ? { name: m, config: '' } : { name: m.name, config: m.config ? JSON.stringify(m.config) : '' }));
  if (Array.isArray(prompt?.conversation)) {
    form.tab = 'chat';
    form.messages = prompt.conversation.map(({ role = 'user', content, ...more }) => ({ role, content: textOf(content), ...(Object.keys(more).length && { more }) }));
  } else if (prompt?.texts) {
    form.tab = 'raw';
    form.raw = prompt.texts.join('');
  }
  return form;
}

/** Returns the values of a form as text, by the names of the fields. */
function displayedValues(form) {
  const json = (text) => { try { return JSON.stringify(JSON.parse(text)); } catch { return text; } };
  const text = (value) => (value === undefined || value === null ? '' : String(value));
  const messages = (form.messages ?? []).filter(hasContent).map(({ role, content }) => `${role}: ${content}`);
  return {
    model: text(form.model),
    ...Object.fromEntries(NUMBERS.map((name) => [name.replace('_', ' '), text(form.numbers?.[name])])),
    'stop strings': text(form.stop),
    mods: (form.mods ?? []).map(({ name, config }) => `${name}${config?.trim() ? ` ${json(config)}` : ''}`).join(', '),
    attention: form.attention ? 'captured' : '',
    'logit lens': form.lens ? 'recorded' : '',
    steering: form.steering ? form.steering.map(({ name, scale, layers }) => `${name} ${scale}, layers ${layers.join('–')}`).join('; ') || 'off' : '',
    tools: json(text(form.tools)),
    'JSON schema': json(text(form.schema)),
    'additional fields': json(text(form.extra)),
    prompt: form.tab === 'raw' ? text(form.raw) : messages.join('\n'),
  };
}

/** Returns `{name, before, after}` for each field of a form that differs from the original form. */
export function differences(original, form) {
  const before = displayedValues(original);
  const after = displayedValues(form);
  const same = (a, b) => a === b || (a !== '' && b !== '' && Number(a) === Number(b));
  return Object.keys(after).filter((name) => !same(before[name], after[name])).map((name) => ({ name, before: before[name], after: after[name] }));
}
