// Code of every page: theme, help, global shortcuts, and times in the user's time zone.
import { base } from './api.js';
import { copyText, h, toast } from './dom.js';
import { openGoto } from './goto.js';
import { listenForShortcuts } from './keys.js';

const THEMES = ['system', 'light', 'dark'];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.querySelector('[data-theme-name]').textContent = theme;
  document.querySelector('[data-theme-button]').title = `Theme: ${theme}`;
  document.cookie = `thunder_theme=${theme}; path=/; max-age=31536000; samesite=lax`;
  document.dispatchEvent(new CustomEvent('theme'));
}

document.querySelector('[data-theme-button]').addEventListener('click', () => {
  const current = THEMES.indexOf(document.documentElement.dataset.theme);
  setTheme(THEMES[(current + 1) % THEMES.length]);
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => document.dispatchEvent(new CustomEvent('theme')));

/** Opens the dialog with the keyboard shortcuts. Its code is loaded on first use. */
const showHelp = () => import('./help.js').then((help) => help.showHelp()).catch((error) => toast(`The help could not be loaded: ${error.message}`));

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

/** Moves to an `{event}` or `{token}` of the open run; null if the page shows none. */
let goInRun = null;

/** Sets the function with which Ctrl+K moves to an `{event}` or `{token}` of the open run. */
export const registerRunNavigation = (go) => { goInRun = go; };

// Creating the first formatter is slow, so times are formatted when the page is idle. Safari has no idle callbacks.
(globalThis.requestIdleCallback ?? setTimeout)(() => document.querySelectorAll('time[datetime]').forEach(showLocalTime), { timeout: 500 });

// A click outside of a menu closes it. A dialog that the menu opened returns the focus to its button there.
document.addEventListener('click', ({ target }) => {
  if (target.closest('dialog')) return;
  for (const menu of document.querySelectorAll('details.more[open]')) if (!menu.contains(target)) menu.open = false;
});

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
function format(name, date) {
  formatters[name] ??= new Intl.DateTimeFormat([], FORMATS[name]);
  return formatters[name].format(date);
}

/** Shows a time in the user's time zone; the server writes UTC. */
export function showLocalTime(el) {
  const date = new Date(el.dateTime);
  if (Number.isNaN(date.getTime())) return;
  const isToday = new Date().toDateString() === date.toDateString();
  const clock = format('clock', date);
  const day = format(date.getFullYear() === new Date().getFullYear() ? 'day' : 'dayAndYear', date);
  el.textContent = isToday ? clock : `${clock}\n${day}`;
  el.title = date.toString();
}
