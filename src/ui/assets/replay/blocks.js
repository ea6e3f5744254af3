// Roles of prompt positions, and division of the text into blocks. Pure.

/**
 * Labels of prompt positions, `[{role, dim}]`, from the spans of the Prefilled event. Text of the chat template is dim:
 * up to its first line end it belongs to the preceding message, and the rest to the following one.
 */
export function roles(length, spans, texts) {
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
    let cut = i;
    if (before) {
      for (let k = i; k < end; k += 1) {
        if ((texts[k] ?? '').endsWith('\n')) {
          cut = k + 1;
          break;
        }
      }
    }
    for (let k = i; k < end; k += 1) out[k].role = k < cut ? before : after;
    i = end;
  }
  return out;
}

/** Maximum rows of a block of text. */
export const MAX_BLOCK_ROWS = 1024;

/** Returns true if a block of text may end after this row: at the end of a line from 128 rows on, of a sentence from 512 rows on, and always at the maximum. */
export const mayEndBlock = (rows, text) => rows >= MAX_BLOCK_ROWS || (rows >= 512 && /[.!?…。！？]["'”’)]*$/.test(text)) || (rows >= 128 && text.endsWith('\n'));
