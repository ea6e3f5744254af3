// The dialog of Ctrl+K, which goes to an event or token of the open run, to a run, to a page, or to a search for runs.
import { base } from './api.js';
import { h } from './dom.js';

/** Paths of the pages by the names that the dialog knows. */
const PAGES = {
  runs: '/runs',
  playground: '/playground',
  mods: '/mods',
  experiments: '/experiments',
  stats: '/stats',
  statistics: '/stats',
  docs: '/docs',
  handbook: '/docs',
  api: '/docs/reference',
};

/** Returns the destination that a text names: `{event}` or `{token}` if a run is open, `{href, label}`, or null for an empty text. Pure. */
export function destination(text, isRunOpen) {
  const wanted = text.trim();
  if (!wanted) return null;
  const [, kind, number] = /^(event|token|e|t)?\s*#?(\d{1,9})$/i.exec(wanted) ?? [];
  if (isRunOpen && number) return kind?.[0].toLowerCase() === 't' ? { token: Number(number) } : { event: Number(number) };
  if (/^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i.test(wanted)) return { href: `/runs/${wanted}`, label: 'open this run' };
  const page = wanted.toLowerCase();
  if (Object.hasOwn(PAGES, page)) return { href: PAGES[page], label: `open ${page}` };
  return { href: `/runs?${new URLSearchParams({ q: wanted })}`, label: 'search runs' };
}

let dialog = null;
/** Moves to an event or token of the open run; null if no run is open. */
let goInRun = null;

/** Opens the dialog. `go(place)` moves to an event or token of the open run; it is null if no run is open. */
export function openGoto(go) {
  goInRun = go;
  if (!dialog) {
    const field = h('input', { type: 'text', id: 'goto', 'aria-describedby': 'goto-hint', autocomplete: 'off', spellcheck: 'false', autofocus: true });
    const hint = h('p', { class: 'hint', id: 'goto-hint', role: 'status' });
    const describe = () => {
      const to = destination(field.value, Boolean(goInRun));
      if (!to) hint.textContent = `${goInRun ? 'An event (“1207”), a token (“token 400”), a' : 'A'} run’s id, a page, or words to search runs for.`;
      else hint.textContent = `Enter: ${to.label ?? (to.token === undefined ? `event ${to.event}` : `token ${to.token}`)}`;
    };
    field.addEventListener('input', describe);
    dialog = h('dialog', { class: 'dialog goto', 'aria-label': 'Go to' }, h('form', {
      method: 'dialog',
      onsubmit: () => {
        const to = destination(field.value, Boolean(goInRun));
        if (to?.href) location.assign(base + to.href);
        else if (to) goInRun(to);
      },
    }, h('label', { for: 'goto' }, 'Go to'), field, hint));
    dialog.addEventListener('click', (event) => { if (event.target === dialog) dialog.close(); });
    dialog.reset = () => { field.value = ''; describe(); };
    document.body.append(dialog);
  }
  dialog.reset();
  dialog.showModal();
}
