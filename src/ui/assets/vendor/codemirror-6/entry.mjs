export { EditorState, Compartment } from '@codemirror/state';
export { EditorView, keymap, lineNumbers, highlightActiveLine, highlightActiveLineGutter, highlightSpecialChars, drawSelection, rectangularSelection } from '@codemirror/view';
export { defaultKeymap, history, historyKeymap, indentWithTab } from '@codemirror/commands';
export { HighlightStyle, syntaxHighlighting, indentUnit, indentOnInput, bracketMatching, foldGutter, foldKeymap } from '@codemirror/language';
export { search, searchKeymap, highlightSelectionMatches } from '@codemirror/search';
export { setDiagnostics, lintGutter, lintKeymap } from '@codemirror/lint';
export { pythonLanguage } from '@codemirror/lang-python';
export { tags } from '@lezer/highlight';
