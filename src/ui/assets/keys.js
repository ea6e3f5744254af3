// Keyboard shortcuts: their table, which the help shows, and the listener of the pages.

/**
 * Sections of rows `[keys, description, action, page]`; a row without a page applies to all pages. A key is named like
 * `event.key`, with the prefix `Ctrl+` or `Shift+` if needed; `g r` means `g` and then `r`.
 */
export const SHORTCUTS = [
  ['Anywhere', [
    [['?'], 'this help', 'help'],
    [['/'], 'filter runs, find in a run, search the handbook', 'find'],
    [['Ctrl+k'], 'go to an event, a token, a run, a page', 'goto'],
    [['g r'], 'runs', 'goRuns'],
    [['g p'], 'playground', 'goPlayground'],
    [['g m'], 'mods', 'goMods'],
    [['g e'], 'experiments', 'goExperiments'],
    [['g s'], 'statistics', 'goStats'],
    [['g d'], 'handbook', 'goDocs'],
    [['Escape'], 'close, clear, stop generating', 'escape'],
  ]],
  ['Runs', [
    [['j', 'ArrowDown'], 'next row', 'nextRow', 'runs'],
    [['k', 'ArrowUp'], 'previous row', 'prevRow', 'runs'],
    [['o'], 'open in a new tab (Enter opens here)', 'openTab', 'runs'],
    [['Home'], 'first row', 'firstRow', 'runs'],
    [['End'], 'last row', 'lastRow', 'runs'],
    [['1', '2', '3', '4', '5'], 'built-in views', 'view', 'runs'],
    [['s'], 'save the filter under a name', 'saveFilter', 'runs'],
    [['x'], 'select the row', 'select', 'runs'],
    [['c'], 'compare the selected runs', 'compare', 'runs'],
    [['t'], 'edit the tags of the selected runs', 'tags', 'runs'],
    [['e'], 'export the selected runs as JSON', 'export', 'runs'],
    [['C'], 'cancel the active ones of the selected runs', 'cancel', 'runs'],
    [['Delete'], 'delete the selected runs', 'delete', 'runs'],
    [['z'], 'undo the last deletion', 'undo', 'runs'],
    [['n'], 'show new runs', 'showNew', 'runs'],
    [[']'], 'older runs', 'older', 'runs'],
    [['['], 'newest runs', 'newest', 'runs'],
    [['y'], 'copy a link to this list', 'copy', 'runs'],
  ]],
  ['Replay: move', [
    [['ArrowRight'], 'next token', 'nextToken', 'replay'],
    [['ArrowLeft'], 'previous token', 'prevToken', 'replay'],
    [['Shift+ArrowRight'], 'next event', 'nextEvent', 'replay'],
    [['Shift+ArrowLeft'], 'previous event', 'prevEvent', 'replay'],
    [['.'], 'next mod action', 'nextAction', 'replay'],
    [[','], 'previous mod action', 'prevAction', 'replay'],
    [['b'], 'next backtrack', 'nextBacktrack', 'replay'],
    [['B'], 'previous backtrack', 'prevBacktrack', 'replay'],
    [['s'], 'next surprise (4 bit or more)', 'nextSurprise', 'replay'],
    [['S'], 'previous surprise', 'prevSurprise', 'replay'],
    [['e'], 'next error', 'nextError', 'replay'],
    [['E'], 'previous error', 'prevError', 'replay'],
    [['Home'], 'first event', 'first', 'replay'],
    [['End'], 'last event; follow a live run', 'last', 'replay'],
    [['j'], 'next run of the list', 'nextRun', 'replay'],
    [['k'], 'previous run of the list', 'prevRun', 'replay'],
    [[']'], 'next branch of this run', 'nextBranch', 'replay'],
    [['['], 'previous branch', 'prevBranch', 'replay'],
  ]],
  ['Replay: view', [
    [[' '], 'play, pause', 'play', 'replay'],
    [['+'], 'faster', 'faster', 'replay'],
    [['-'], 'slower', 'slower', 'replay'],
    [['1', '2', '3', '4', '5', '6'], 'color: surprise, entropy, rank, time, mods, plain', 'color', 'replay'],
    [['d'], 'show removed tokens', 'showRemoved', 'replay'],
    [['v'], 'show later tokens, dimmed', 'showLater', 'replay'],
    [['a'], 'show attention', 'attention', 'replay'],
    [['w'], 'show the sampling stages of this token', 'stages', 'replay'],
    [['y'], 'copy a link to this event', 'copy', 'replay'],
    [['t'], 'edit the tags of the run', 'tags', 'replay'],
    [['n'], 'edit the note on the run or on the selected token', 'note', 'replay'],
    [['C'], 'cancel the run, if it is active', 'cancel', 'replay'],
    [['f'], 'continue in the playground from here', 'openPlayground', 'replay'],
  ]],
  ['Compare', [
    [['ArrowRight'], 'next token on both sides', 'nextPair', 'compare'],
    [['ArrowLeft'], 'previous token on both sides', 'prevPair', 'compare'],
    [['.'], 'next difference', 'nextDifference', 'compare'],
    [[','], 'previous difference', 'prevDifference', 'compare'],
    [['o'], 'show only differences', 'onlyDifferences', 'compare'],
  ]],
  ['Experiments', [
    [['j', 'ArrowDown'], 'next experiment or cell', 'nextRow', 'experiments'],
    [['k', 'ArrowUp'], 'previous experiment or cell', 'prevRow', 'experiments'],
    [['x'], 'select the cell', 'select', 'experiments'],
    [['c'], 'compare the selected cells, or the focused cell with the one of the first mods and parameters', 'compare', 'experiments'],
    [['s'], 'edit the score of the cell', 'score', 'experiments'],
    [['n'], 'new experiment', 'create', 'experiments'],
    [['Ctrl+Enter'], 'start the experiment', 'start', 'experimentForm'],
  ]],
  ['Playground', [
    [['Ctrl+Enter'], 'generate', 'generate', 'playground'],
    [['Ctrl+Shift+Enter'], 'show the candidates of the next token', 'computeNext', 'playground'],
  ]],
  ['Mod editor', [
    [['Ctrl+s'], 'save a new version', 'save', 'editor'],
  ]],
];

const STORAGE_KEY = 'thunder.keys';

/** Returns true if shortcuts without Ctrl are enabled (WCAG 2.1.4 requires a way to disable them). */
export const singleKeysEnabled = () => localStorage.getItem(STORAGE_KEY) !== 'off';
export const setSingleKeysEnabled = (on) => (on ? localStorage.removeItem(STORAGE_KEY) : localStorage.setItem(STORAGE_KEY, 'off'));

/**
 * Returns the name of a pressed key in the table, or null if it is pressed with Alt. AltGr, which Windows reports as Ctrl and Alt,
 * and Option, which types brackets on some keyboards, are part of the typed character.
 */
export function keyOf(event) {
  const isAltGraph = Boolean(event.getModifierState?.('AltGraph'));
  const isCtrl = !isAltGraph && (event.ctrlKey || event.metaKey);
  if (event.altKey && !isAltGraph && (isCtrl || !['[', ']'].includes(event.key))) return null;
  const shifted = event.shiftKey && event.key.length > 1;
  return `${isCtrl ? 'Ctrl+' : ''}${shifted ? 'Shift+' : ''}${event.key}`;
}

/** Returns true if a user can type into an element, so that it needs the keys itself. */
const isTextField = (el) => el instanceof HTMLElement && (el.isContentEditable || el.matches('textarea, select, input:not([type=range], [type=checkbox], [type=radio])'));

/** Regions that can have the focus so that their content can be scrolled by the keyboard. */
const SCROLLABLE = ':is(pre, ul, .scroll, .table-box)[tabindex="0"]';

/** Returns true if an element that is not a text field uses a key itself. */
function usesKey(el, key) {
  if (!(el instanceof Element)) return false;
  const isHorizontal = ['ArrowLeft', 'ArrowRight'].includes(key);
  const isMovement = isHorizontal || ['ArrowUp', 'ArrowDown', 'Home', 'End'].includes(key);
  if (el.matches('button, a, summary, [role=tab], input[type=checkbox], input[type=radio]:not(:checked)') && [' ', 'Enter'].includes(key)) return true;
  if (el.matches('input[type=radio], [role=tab]') && key.startsWith('Arrow')) return true;
  if (el.matches(SCROLLABLE) && (isMovement || key === ' ')) return isHorizontal ? el.scrollWidth > el.clientWidth : el.scrollHeight > el.clientHeight;
  return el.matches('input[type=range]:not([data-slider])') && isMovement;
}

/** Returns the action of a key on one of `pages`, or null. */
export function actionOf(key, pages) {
  for (const [, rows] of SHORTCUTS) {
    for (const [keys, , action, page] of rows) {
      if ((!page || pages.includes(page)) && keys.includes(key)) return action;
    }
  }
  return null;
}

/** Calls `act(action, key)` when a shortcut of `pages` is pressed. It returns false to leave the key to the browser. */
export function listenForShortcuts(pages, act) {
  let prefix = '';
  document.addEventListener('keydown', (event) => {
    if (event.defaultPrevented || event.isComposing || document.querySelector('dialog[open]')) return;
    const key = keyOf(event);
    if (key === null) return;
    let name = key;
    if (!key.startsWith('Ctrl+')) {
      if (key !== 'Escape' && (isTextField(event.target) || !singleKeysEnabled())) return;
      if (usesKey(event.target, key)) return;
      if (prefix) name = `${prefix} ${key}`;
      prefix = key === 'g' ? 'g' : '';
    }
    const action = actionOf(name, pages);
    if (action && act(action, key) !== false) event.preventDefault();
  });
}
