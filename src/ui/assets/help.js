// The dialog with the keyboard shortcuts.
import { h } from './dom.js';
import { SHORTCUTS, setSingleKeysEnabled, singleKeysEnabled } from './keys.js';

/** The dialog, which is created when it is first opened. */
let dialog = null;

/** Returns the name of a key for the help. */
export function keyLabel(key) {
  const names = { ArrowRight: '→', ArrowLeft: '←', ArrowUp: '↑', ArrowDown: '↓', Escape: 'Esc', ' ': 'Space' };
  return key.split('+').length > 1 && key.length > 1 ? key.split('+').map((k) => names[k] ?? k).join(' ') : names[key] ?? key;
}

/** Returns the elements for the keys of a shortcut: all of them, or the first and the last one. */
function keyElements(keys) {
  const element = (key) => h('kbd', {}, keyLabel(key));
  if (keys.length > 2) return [element(keys[0]), '…', element(keys.at(-1))];
  return keys.flatMap((key, i) => [i ? ' ' : null, ...(key === ' ' ? [key] : key.split(' ')).map(element)]);
}

/** Opens the dialog. */
export function showHelp() {
  if (!dialog) {
    const toggle = h('input', { type: 'checkbox', onchange: (e) => setSingleKeysEnabled(e.target.checked) });
    toggle.checked = singleKeysEnabled();
    dialog = h('dialog', { class: 'dialog', 'aria-labelledby': 'help-title' },
      h('form', { method: 'dialog', class: 'dialog-head' },
        h('h2', { id: 'help-title' }, 'Keyboard'),
        h('label', { class: 'check' }, toggle, 'Single-key shortcuts'),
        h('button', { autofocus: true }, 'Close')),
      h('div', { class: 'keys' }, SHORTCUTS.map(([title, rows]) => [
        h('h3', {}, title),
        h('dl', {}, rows.map(([keys, description]) => h('div', {}, h('dt', {}, description), h('dd', {}, keyElements(keys))))),
      ])));
    document.body.append(dialog);
    dialog.addEventListener('click', (e) => { if (e.target === dialog) dialog.close(); });
  }
  dialog.showModal();
}
