// Token text is untrusted: characters that would be invisible, or reorder the line, are shown by name instead.

// C0 and C1 controls except tab and line feed, bidirectional controls, zero-width characters, separators, tags.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

/** Frequent texts without such characters. */
const PLAIN = /^[\t\n -~]+$/;

const name = (c) => {
  const code = c.codePointAt(0);
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  return code === 127 ? '␡' : `U+${code.toString(16).toUpperCase().padStart(4, '0')}`;
};

/** Splits text into pieces `{text}` and `{mark}`; a mark is the name of a character that must have no effect. */
export function pieces(text) {
  if (/^[\u200c\u200d\ufe0e\ufe0f]+$/u.test(text)) return [...text].map((c) => ({ mark: name(c) }));
  const out = [];
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > from) out.push({ text: text.slice(from, match.index) });
    out.push({ mark: name(match[0]) });
    from = match.index + match[0].length;
  }
  if (from < text.length) out.push({ text: text.slice(from) });
  return out;
}

/** Returns the text of a token on one line, with visible spaces and line ends, for places outside of the answer. */
export function displayText(text) {
  if (text === '') return '∅';
  return pieces(text).map((p) => p.mark ?? p.text.replaceAll('\n', '↵').replaceAll('\t', '⇥').replace(/^ | $/g, '␣')).join('');
}

/** Puts text into an element as text nodes, with marked characters in `<u>`. */
export function appendText(el, text) {
  for (const part of PLAIN.test(text) ? [{ text }] : pieces(text)) {
    if (part.mark === undefined) el.append(part.text);
    else {
      const u = document.createElement('u');
      u.textContent = part.mark;
      el.append(u);
    }
  }
}
