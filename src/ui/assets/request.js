// Requests of the playground's form. Pure: `form` is plain data, the result is the request.

const NUMBERS = ['temperature', 'top_k', 'top_p', 'min_p', 'repeat_penalty', 'presence_penalty', 'frequency_penalty', 'seed', 'max_tokens'];

/**
 * Returns path and body for a form `{tab, messages, raw, numbers, stop, mods, attention, extra, model}`.
 * Empty numbers are left to the server; a mod's configuration must be JSON, else this throws and names the mod.
 */
export function requestOf(form) {
  const body = { model: form.model || undefined };
  if (form.tab === 'raw') body.prompt = form.raw;
  else body.messages = form.messages.filter(isWritten).map(({ role, content, more }) => ({ role, content: content === '' ? null : content, ...more }));
  for (const name of NUMBERS) {
    const text = String(form.numbers[name] ?? '').trim();
    if (text === '') continue;
    const value = Number(text);
    if (!Number.isFinite(value)) throw new Error(`${name} must be a number, not “${text}”.`);
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
        throw new Error(`The configuration of ${name} is not JSON: ${error.message}.`);
      }
    });
  }
  if (form.attention) body.attention = true;
  Object.assign(body, extraOf(form.extra ?? ''));
  body.stream = true;
  return { path: form.tab === 'raw' ? '/v1/completions' : '/v1/chat/completions', body };
}

/** Returns true for a message with text or with tool calls. */
const isWritten = ({ content, more }) => content !== '' || Boolean(more);

function extraOf(text) {
  if (!text.trim()) return {};
  let extra = null;
  try {
    extra = JSON.parse(text);
  } catch (error) {
    throw new Error(`The additional fields are not JSON: ${error.message}.`);
  }
  if (extra === null || typeof extra !== 'object' || Array.isArray(extra)) throw new Error('The additional fields must be a JSON object.');
  return extra;
}

/** Returns the reason why a form cannot be sent, or null. */
export function missing(form) {
  if (form.tab === 'raw') return form.raw ? null : 'Write some text for the model to continue.';
  return form.messages.some(isWritten) ? null : 'Write a message first.';
}

/** Returns the same request as a shell command. */
export function curlOf({ path, body }, origin) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl -N ${origin}${path} \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'`;
}

/** Returns the text of a message, whose content may be a list of parts. */
function textOf(content) {
  if (typeof content === 'string') return content;
  if (!Array.isArray(content)) return content ? JSON.stringify(content) : '';
  return content.every((part) => typeof part?.text === 'string') ? content.map((part) => part.text).join('\n') : JSON.stringify(content);
}

/** Returns the request parameters without a form field of their own. With `isFork`, parameters that only apply to a whole answer are omitted. */
export function further(prompt, isFork = false) {
  const p = prompt?.parameters ?? {};
  const biases = (p.sampling?.logit_bias ?? []).filter(([, bias]) => bias !== null || !p.limits?.ignore_eos);
  const all = {
    ...(prompt?.tools && { tools: prompt.tools }),
    // A ban is -Infinity, which JSON cannot represent.
    ...(biases.length && { logit_bias: biases.map(([token, bias]) => [token, bias ?? false]) }),
    ...p.request,
  };
  const kept = Object.entries(all).filter(([name]) => !isFork || ['logit_bias', 'ignore_eos'].includes(name));
  return kept.length ? JSON.stringify(Object.fromEntries(kept), null, 2) : '';
}

/** Returns the form of a recorded run from its Prefilled event. */
export function formOf(prompt, run) {
  const form = { numbers: {}, mods: [], extra: further(prompt) };
  const p = prompt?.parameters ?? {};
  const flat = { ...p, ...p.sampling, ...p.limits };
  for (const name of NUMBERS) if (Number.isFinite(flat[name])) form.numbers[name] = name === 'seed' ? flat[name] : Number(flat[name].toPrecision(6)); // recorded as f32
  if (typeof p.attention === 'boolean') form.attention = p.attention;
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
