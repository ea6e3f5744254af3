// Code of every page: theme, help, global shortcuts, and times in the user's time zone.
import { base, copyText, h } from './dom.js';
import { openGoto } from './goto.js';
import { SHORTCUTS, singleKeysEnabled, keyLabel, listenForShortcuts, setSingleKeysEnabled } from './keys.js';

const THEMES = ['system', 'light', 'dark'];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.querySelector('[data-theme-name]').textContent = theme;
  document.querySelector('[data-theme-button]').title = `Theme: ${theme}`;
  document.cookie = `thunder_theme=${theme}; path=/; max-age=31536000; samesite=lax`;
  document.dispatchEvent(new CustomEvent('theme'));
}

document.querySelector('[data-theme-button]').addEventListener('click', () => {
  const now = THEMES.indexOf(document.documentElement.dataset.theme);
  setTheme(THEMES[(now + 1) % THEMES.length]);
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => document.dispatchEvent(new CustomEvent('theme')));

let help = null;

function showHelp() {
  if (!help) {
    const toggle = h('input', { type: 'checkbox', onchange: (e) => setSingleKeysEnabled(e.target.checked) });
    toggle.checked = singleKeysEnabled();
    help = h('dialog', { class: 'dialog', 'aria-labelledby': 'help-title' },
      h('form', { method: 'dialog', class: 'dialog-head' },
        h('h2', { id: 'help-title' }, 'Keyboard'),
        h('label', { class: 'check' }, toggle, 'Single-key shortcuts'),
        h('button', { autofocus: true }, 'Close')),
      h('div', { class: 'keys' }, SHORTCUTS.map(([title, rows]) => [
        h('h3', {}, title),
        h('dl', {}, rows.map(([keys, what]) => h('div', {},
          h('dt', {}, what),
          h('dd', {}, (keys.length > 2 ? [h('kbd', {}, keys[0]), '…', h('kbd', {}, keys.at(-1))] : keys.flatMap((k, i) => [i ? ' ' : null, ...(k === ' ' ? [k] : k.split(' ')).map((part) => h('kbd', {}, keyLabel(part)))])))))),
      ])));
    document.body.append(help);
    help.addEventListener('click', (e) => { if (e.target === help) help.close(); });
  }
  help.showModal();
}

document.querySelector('[data-help-button]').addEventListener('click', showHelp);

listenForShortcuts(['anywhere'], (action) => {
  if (action === 'help') showHelp();
  else if (action === 'goto') openGoto(goInRun);
  else if (action === 'goRuns') location.assign(`${base}/runs`);
  else if (action === 'goPlayground') location.assign(`${base}/playground`);
  else if (action === 'goMods') location.assign(`${base}/mods`);
  else if (action === 'goExperiments') location.assign(`${base}/experiments`);
  else if (action === 'goStats') location.assign(`${base}/stats`);
  else if (action === 'goDocs') location.assign(`${base}/docs`);
  else return false;
  return true;
});

let goInRun = null;

/** Registers the function with which Ctrl+K moves to an event or token of the open run. */
export const registerRunNavigation = (go) => { goInRun = go; };

// On a narrow screen, the navigation scrolls.
const here = document.querySelector('.bar nav [aria-current]');
if (here) here.parentElement.scrollLeft = here.offsetLeft - here.parentElement.offsetLeft - 40;

// The first formatter takes long to create, so the page waits until it is idle. Safari has no idle callbacks.
(globalThis.requestIdleCallback ?? setTimeout)(() => document.querySelectorAll('time[datetime]').forEach(showLocalTime), { timeout: 500 });

for (const pre of document.querySelectorAll('pre.curl')) {
  const command = pre.textContent.trim();
  pre.append(h('button', { type: 'button', class: 'copy', onclick: () => copyText(command, 'command') }, 'Copy'));
}

const FORMATS = {
  clock: { hour: '2-digit', minute: '2-digit', second: '2-digit', hour12: false },
  day: { day: 'numeric', month: 'short' },
  dayAndYear: { day: 'numeric', month: 'short', year: 'numeric' },
};
const formatters = {};

/** Formats a date in one of `FORMATS`; each formatter is created once. */
function format(name, at) {
  formatters[name] ??= new Intl.DateTimeFormat([], FORMATS[name]);
  return formatters[name].format(at);
}

/** Shows a time in the user's time zone; the server writes UTC. */
export function showLocalTime(el) {
  const at = new Date(el.dateTime);
  if (Number.isNaN(at.getTime())) return;
  const today = new Date().toDateString() === at.toDateString();
  const clock = format('clock', at);
  const day = format(at.getFullYear() === new Date().getFullYear() ? 'day' : 'dayAndYear', at);
  el.textContent = today ? clock : `${clock}\n${day}`;
  el.title = at.toString();
}
