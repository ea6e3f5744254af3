// Division of a run's text into parts by the roles of the prompt's messages, and into blocks. Pure.

/**
 * Returns the roles of the positions of a prompt, `[{role, dim}]`. `spans` are the recorded spans of the messages, and `texts`
 * the texts of the tokens. The text of the chat template between two messages is dim; up to its first line end it belongs to
 * the message before it, and its last line to the one after it. Lines between them, such as definitions of tools and messages
 * without content, have the role `template`. The rest of the text before the answer belongs to the answer.
 */
export function rolesOf(length, spans, texts) {
  const out = Array.from({ length }, () => ({ role: 'prompt', dim: false }));
  if (!spans?.length) return out;
  for (const { role, start, end } of spans) {
    for (let i = start; i < Math.min(end, length); i += 1) out[i] = { role, dim: role === 'template' };
  }
  let before = '';
  for (let i = 0; i < length; ) {
    if (!out[i].dim) {
      before = out[i].role;
      i += 1;
      continue;
    }
    let end = i;
    while (end < length && out[end].dim) end += 1;
    const after = end < length ? out[end].role : 'answer';
    let split = i;
    if (before) {
      for (let k = i; k < end; k += 1) {
        if ((texts[k] ?? '').endsWith('\n')) {
          split = k + 1;
          break;
        }
      }
    }
    const last = after === 'answer' ? split : lastLine(texts, split, end);
    for (let k = i; k < end; k += 1) out[k].role = k < split ? before : k < last ? 'template' : after;
    i = end;
  }
  return out;
}

/** Returns the index of the token that begins the last line with text in `start..end`, or `start` if there is none. */
function lastLine(texts, start, end) {
  let line = start;
  let isLineStart = true;
  let hasText = false;
  for (let k = start; k < end; k += 1) {
    const text = texts[k] ?? '';
    if (isLineStart && text.trim()) {
      if (hasText) line = k;
      hasText = true;
      isLineStart = false;
    }
    if (text.endsWith('\n')) isLineStart = true;
  }
  return line;
}

const ANSWER = { role: 'answer', dim: false };
const PROMPT = { role: 'prompt', dim: false };
const NEW_PROMPT = { role: 'new prompt', dim: false };

/** Returns the role of row `i` of a run. `prompt` is the recorded one, `{addedAt, roles}` with its event and the result of `rolesOf`, or null. */
export function roleOf(run, prompt, i) {
  if (!run.isPrompt(i)) return ANSWER;
  if (prompt && run.addedAt(i) > prompt.addedAt) return NEW_PROMPT;
  return prompt?.roles[run.pos(i)] ?? PROMPT;
}

/** Maximum rows of a block. */
export const MAX_BLOCK_ROWS = 1024;

/**
 * Returns true if a block may end after its last row, whose text is `text`: after a line end if the block has 128 rows or more,
 * after the end of a sentence if it has 512 rows or more, and always if it has the maximum.
 */
export const mayEndBlock = (rows, text) => rows >= MAX_BLOCK_ROWS
  || (rows >= 512 && /[.!?…。！？]["'”’)]*$/.test(text))
  || (rows >= 128 && text.endsWith('\n'));
