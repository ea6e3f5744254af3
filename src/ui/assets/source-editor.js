// An editor for Python source: CodeMirror with the colors of the style sheet.
import {
  EditorState, EditorView, HighlightStyle, bracketMatching, defaultKeymap, drawSelection, highlightActiveLine,
  highlightActiveLineGutter, highlightSelectionMatches, highlightSpecialChars, history, historyKeymap, indentOnInput,
  indentUnit, indentWithTab, keymap, lineNumbers, lintGutter, lintKeymap, pythonLanguage, search, searchKeymap,
  setDiagnostics, syntaxHighlighting, tags,
} from './vendor/codemirror-6/codemirror.js';

const highlightStyle = HighlightStyle.define([
  { tag: [tags.keyword, tags.controlKeyword, tags.definitionKeyword, tags.moduleKeyword, tags.operatorKeyword], color: 'var(--forced)' },
  { tag: [tags.string, tags.special(tags.string)], color: 'var(--ok)' },
  { tag: [tags.number, tags.bool, tags.null], color: 'var(--warn)' },
  { tag: tags.comment, color: 'var(--soft)', fontStyle: 'italic' },
  { tag: [tags.function(tags.definition(tags.variableName)), tags.definition(tags.className)], color: 'var(--accent)', fontWeight: '600' },
  { tag: [tags.meta, tags.function(tags.variableName)], color: 'var(--accent)' },
]);

const theme = EditorView.theme({
  '&': { color: 'var(--ink)', backgroundColor: 'var(--bg)', fontSize: '13px' },
  '&.cm-focused': { outline: 'none' },
  '.cm-scroller': { fontFamily: 'var(--mono)', lineHeight: '1.6' },
  '.cm-content, .cm-gutter': { minHeight: '300px' },
  '.cm-content': { caretColor: 'var(--ink)', padding: '8px 0' },
  '.cm-cursor, .cm-dropCursor': { borderLeftColor: 'var(--ink)' },
  '.cm-gutters': { backgroundColor: 'var(--raise)', color: 'var(--ghost)', borderRight: '1px solid var(--line)' },
  '.cm-activeLine': { backgroundColor: 'color-mix(in srgb, var(--accent) 6%, transparent)' },
  '.cm-activeLineGutter': { backgroundColor: 'var(--sink)', color: 'var(--ink)' },
  '&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground': { backgroundColor: 'light-dark(#bcd9f5, #2b4f78)' },
  '&.cm-focused .cm-matchingBracket': { backgroundColor: 'var(--sink)', outline: '1px solid var(--line-strong)' },
  '.cm-selectionMatch, .cm-searchMatch': { backgroundColor: 'var(--b2)' },
  '.cm-searchMatch-selected': { backgroundColor: 'var(--b5)' },
  '.cm-panels': { backgroundColor: 'var(--raise)', color: 'var(--ink)' },
  '.cm-panels.cm-panels-bottom': { borderTop: '1px solid var(--line)' },
  '.cm-panel.cm-search': { padding: '6px 8px', fontFamily: 'var(--sans)' },
  '.cm-panel.cm-search label': { fontSize: '12px' },
  '.cm-textfield': { backgroundColor: 'var(--bg)', border: '1px solid var(--line-strong)', borderRadius: '6px', fontSize: '13px' },
  '.cm-button': { backgroundImage: 'none', backgroundColor: 'var(--bg)', border: '1px solid var(--line)', borderRadius: '6px', fontSize: '12px' },
  '.cm-tooltip': { backgroundColor: 'var(--bg)', border: '1px solid var(--line-strong)', borderRadius: '6px', maxWidth: 'min(520px, 90vw)' },
  '.cm-diagnostic': { fontFamily: 'var(--sans)', whiteSpace: 'pre-wrap', overflowWrap: 'anywhere' },
  '.cm-diagnostic-error': { borderLeftColor: 'var(--danger)' },
  '.cm-lintRange-error': { backgroundImage: 'none', textDecoration: 'underline wavy var(--danger) 1px', textUnderlineOffset: '3px' },
  '.cm-lintPoint:after': { borderBottomColor: 'var(--danger)' },
});

/**
 * Replaces the selection with typed text. If Chromium did this itself, it would keep the style of the replaced text as an
 * inline style, which the content security policy forbids.
 */
const replaceSelection = EditorView.domEventHandlers({
  beforeinput(event, view) {
    if (event.inputType !== 'insertText' || event.data === null || view.composing || view.state.readOnly || view.state.selection.main.empty) return false;
    view.dispatch(view.state.replaceSelection(event.data), { userEvent: 'input.type', scrollIntoView: true });
    return true;
  },
});

const baseExtensions = (nonce, label) => [
  EditorView.cspNonce.of(nonce),
  // Without a tabindex, accessibility checkers do not know that the text is focusable.
  EditorView.contentAttributes.of({ 'aria-label': label, tabindex: '0', spellcheck: 'false', autocorrect: 'off', autocapitalize: 'off' }),
  lineNumbers(), highlightSpecialChars(), drawSelection(), bracketMatching(), highlightSelectionMatches(),
  pythonLanguage, syntaxHighlighting(highlightStyle), theme, search(),
];

/**
 * Creates an editor in `parent`. Its property `text` can be read and set. `mark(problems)` shows `{line, message}` at their
 * lines, and `go(line)` moves to a line. `show(key, text)` shows another text with its own undo history and selection, which
 * are kept until `forget()`. `changed()` is called after each change of the text.
 */
export function createEditor(parent, { text, nonce, readonly, label, changed }) {
  const extensions = [
    baseExtensions(nonce, label),
    replaceSelection, history(), indentOnInput(), indentUnit.of('    '), lintGutter(),
    readonly ? EditorState.readOnly.of(true) : [highlightActiveLine(), highlightActiveLineGutter(), keymap.of([indentWithTab])],
    keymap.of([...historyKeymap, ...searchKeymap, ...lintKeymap, ...defaultKeymap]),
    EditorView.updateListener.of((update) => { if (update.docChanged) changed(); }),
  ];
  const editor = new EditorView({ parent, doc: text, extensions });
  /** States of texts that are not shown, by key. */
  const states = new Map();
  let shownKey = null;
  /** Returns a line by its number from 1; one out of range means the first or last line. */
  const lineAt = (number) => editor.state.doc.line(Math.max(1, Math.min(number, editor.state.doc.lines)));
  return {
    get text() { return editor.state.doc.toString(); },
    set text(next) { editor.dispatch({ changes: { from: 0, to: editor.state.doc.length, insert: next } }); },
    show(key, doc) {
      if (shownKey !== null) states.set(shownKey, editor.state);
      const state = states.get(key);
      editor.setState(state?.doc.toString() === doc ? state : EditorState.create({ doc, extensions }));
      shownKey = key;
    },
    forget() {
      states.clear();
      shownKey = null;
    },
    mark(problems) {
      const diagnostics = problems.filter(({ line }) => line).map(({ line, message }) => {
        const { from, to, text: lineText } = lineAt(line);
        const indentation = lineText.length - lineText.trimStart().length;
        return { from: from + indentation, to, severity: 'error', message };
      });
      editor.dispatch(setDiagnostics(editor.state, diagnostics));
    },
    go(line) {
      editor.dispatch({ selection: { anchor: lineAt(line).from }, scrollIntoView: true });
      editor.focus();
    },
  };
}
