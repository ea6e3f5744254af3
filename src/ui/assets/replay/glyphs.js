// Display of token texts, which are untrusted: the names of characters that are invisible or reorder text are shown instead.

// Controls (C0 and C1) except tab and line feed, bidirectional controls, zero-width characters, separators, and tags.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

/** Matches printable ASCII texts, which are frequent and have no such characters. */
const PRINTABLE_ASCII = /^[\t\n -~]+$/;

/** Returns the name of a character, such as `U+200D`; for a control, its symbol, such as `␇`. */
const characterName = (c) => {
  const code = c.codePointAt(0);
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  return code === 127 ? '␡' : `U+${code.toString(16).toUpperCase().padStart(4, '0')}`;
};

/** Splits a text into pieces: `{text}`, and `{name}` for a character whose name is shown instead. */
export function pieces(text) {
  // Joiners and variation selectors are part of other characters, so they are only shown by name if they are alone.
  if (/^[\u200c\u200d\ufe0e\ufe0f]+$/u.test(text)) return [...text].map((c) => ({ name: characterName(c) }));
  const out = [];
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > from) out.push({ text: text.slice(from, match.index) });
    out.push({ name: characterName(match[0]) });
    from = match.index + match[0].length;
  }
  if (from < text.length) out.push({ text: text.slice(from) });
  return out;
}

/** Returns the text of a token on one line, with visible line ends and visible spaces at its ends, to show it outside of the text of a run. */
export function displayText(text) {
  if (text === '') return '∅';
  return pieces(text).map((piece) => piece.name ?? piece.text.replaceAll('\n', '↵').replaceAll('\t', '⇥').replace(/^ | $/g, '␣')).join('');
}

/** Appends the text of a token to an element, with names of characters in `<u>`. */
export function appendText(el, text) {
  for (const piece of PRINTABLE_ASCII.test(text) ? [{ text }] : pieces(text)) {
    if (piece.name === undefined) el.append(piece.text);
    else {
      const u = document.createElement('u');
      u.textContent = piece.name;
      el.append(u);
    }
  }
}
