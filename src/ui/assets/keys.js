// The table of keyboard shortcuts, for the listeners and for the help.

/** Sections of rows `[keys, description, action, page]`. A key is `event.key`, with `Ctrl+` or `Shift+` before it, or a sequence such as `g r`. */
export const TABLE = [
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
    [['x'], 'select the row', 'pick', 'runs'],
    [['c'], 'compare the selected runs', 'compare', 'runs'],
    [['t'], 'tags of the selected runs', 'tags', 'runs'],
    [['e'], 'export the selected runs as JSON', 'export', 'runs'],
    [['Delete'], 'delete the selected runs', 'delete', 'runs'],
    [['z'], 'undo the last deletion', 'undo', 'runs'],
    [['n'], 'show new runs', 'showNew', 'runs'],
    [[']'], 'older', 'older', 'runs'],
    [['['], 'newest', 'newest', 'runs'],
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
  ['Replay: look', [
    [[' '], 'play, pause', 'play', 'replay'],
    [['+'], 'faster', 'faster', 'replay'],
    [['-'], 'slower', 'slower', 'replay'],
    [['1', '2', '3', '4', '5', '6'], 'color: surprise, entropy, rank, time, mods, plain', 'color', 'replay'],
    [['d'], 'show removed tokens', 'showRemoved', 'replay'],
    [['v'], 'show later tokens, dimmed', 'showLater', 'replay'],
    [['a'], 'attention', 'attention', 'replay'],
    [['w'], 'show the sampling stages of this token', 'stages', 'replay'],
    [['y'], 'copy a link to this event', 'copy', 'replay'],
    [['t'], 'tags of the run', 'tags', 'replay'],
    [['n'], 'note on the run or on the selected token', 'note', 'replay'],
    [['f'], 'continue in the playground from here', 'fork', 'replay'],
  ]],
  ['Compare', [
    [['ArrowRight'], 'next token on both sides', 'nextPair', 'compare'],
    [['ArrowLeft'], 'previous token on both sides', 'prevPair', 'compare'],
    [['.'], 'next difference', 'nextChange', 'compare'],
    [[','], 'previous difference', 'prevChange', 'compare'],
    [['o'], 'only differences', 'only', 'compare'],
  ]],
  ['Experiments', [
    [['j', 'ArrowDown'], 'next experiment or cell', 'nextRow', 'experiments'],
    [['k', 'ArrowUp'], 'previous experiment or cell', 'prevRow', 'experiments'],
    [['x'], 'select the cell', 'pick', 'experiments'],
    [['c'], 'compare the selected cells, or the focused one with the first mods and parameters', 'compare', 'experiments'],
    [['s'], 'score of the cell', 'score', 'experiments'],
    [['n'], 'new experiment', 'create', 'experiments'],
    [['Ctrl+Enter'], 'start the experiment', 'start', 'experimentForm'],
  ]],
  ['Playground', [
    [['Ctrl+Enter'], 'generate', 'generate', 'playground'],
    [['Ctrl+Shift+Enter'], 'candidates of the next token', 'computeNext', 'playground'],
  ]],
  ['Mod', [
    [['Ctrl+s'], 'save a new version', 'save', 'editor'],
  ]],
];

const STORAGE_KEY = 'thunder.keys';

/** Returns true if single-key shortcuts are enabled (WCAG 2.1.4 requires a way to disable them). */
export const enabled = () => localStorage.getItem(STORAGE_KEY) !== 'off';
export const setEnabled = (on) => (on ? localStorage.removeItem(STORAGE_KEY) : localStorage.setItem(STORAGE_KEY, 'off'));

/** Returns a pressed key in the notation of the table. */
export function nameOf(event) {
  const shifted = event.shiftKey && event.key.length > 1;
  return `${event.ctrlKey || event.metaKey ? 'Ctrl+' : ''}${shifted ? 'Shift+' : ''}${event.key}`;
}

/** Returns the display name of a key. */
export function label(key) {
  const names = { ArrowRight: '→', ArrowLeft: '←', ArrowUp: '↑', ArrowDown: '↓', Escape: 'Esc', ' ': 'Space' };
  return key.split('+').length > 1 && key.length > 1 ? key.split('+').map((k) => names[k] ?? k).join(' ') : names[key] ?? key;
}

/** Returns true if an element takes text, so that keys belong to it. */
const isTextField = (el) => el instanceof HTMLElement && (el.isContentEditable || el.matches('textarea, select, input:not([type=range], [type=checkbox], [type=radio])'));

/** Returns the action of a key on `pages`, or null. */
export function actionOf(key, pages) {
  for (const [, rows] of TABLE) {
    for (const [keys, , action, page] of rows) {
      if ((!page || pages.includes(page)) && keys.includes(key)) return action;
    }
  }
  return null;
}

/** Listens for the keys of `pages`; `act(action, key)` returns false if it did nothing. */
export function listen(pages, act) {
  let prefix = '';
  document.addEventListener('keydown', (event) => {
    if (event.defaultPrevented || event.isComposing || event.altKey) return;
    const key = nameOf(event);
    const inField = isTextField(event.target);
    if (key.startsWith('Ctrl+')) {
      if (document.querySelector('dialog[open]')) return;
      const action = actionOf(key, pages);
      if (action && act(action, key) !== false) event.preventDefault();
      return;
    }
    if (key !== 'Escape' && (inField || !enabled())) return;
    if (document.querySelector('dialog[open]')) return;
    // A focused control keeps the keys that it uses itself.
    if (event.target.matches?.('button, a, summary, [role=tab], input[type=checkbox]') && [' ', 'Enter'].includes(key)) return;
    if (event.target.matches?.('input[type=radio], [role=tab]') && key.startsWith('Arrow')) return;
    if (event.target.matches?.('input[type=range]:not([data-scrub])') && (key.startsWith('Arrow') || ['Home', 'End'].includes(key))) return;
    const name = prefix ? `${prefix} ${key}` : key;
    prefix = key === 'g' ? 'g' : '';
    const action = actionOf(name, pages);
    if (action && act(action, key) !== false) event.preventDefault();
  });
}
