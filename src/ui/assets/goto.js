// Ctrl+K: one field to go to an event or token of the open run, a run by its id, a page, or a search.
import { base, h } from './dom.js';

/** Returns the destination of a text: `{event}`, `{token}`, `{href, label}`, or null for an empty text. `isRunOpen` is true if a run is open. Pure. */
export function destination(text, isRunOpen) {
  const wanted = text.trim();
  if (!wanted) return null;
  const [, kind, number] = /^(event|token|e|t)?\s*#?(\d{1,9})$/i.exec(wanted) ?? [];
  if (isRunOpen && number) return kind?.[0].toLowerCase() === 't' ? { token: Number(number) } : { event: Number(number) };
  if (/^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i.test(wanted)) return { href: `/runs/${wanted}`, label: 'open this run' };
  const page = ['runs', 'playground', 'mods', 'experiments', 'stats', 'docs'].find((name) => name === wanted.toLowerCase());
  if (page) return { href: `/${page}`, label: `open ${page}` };
  return { href: `/runs?${new URLSearchParams({ q: wanted })}`, label: 'search runs' };
}

let dialog = null;

/** Opens the dialog. `goInRun(place)` moves to an event or token of the open run; it is null if no run is open. */
export function openGoto(goInRun) {
  if (!dialog) {
    const box = h('input', { type: 'text', id: 'goto', 'aria-describedby': 'goto-hint', autocomplete: 'off', spellcheck: 'false', autofocus: true });
    const hint = h('p', { class: 'hint', id: 'goto-hint', role: 'status' });
    const describe = () => {
      const to = destination(box.value, Boolean(goInRun));
      hint.textContent = !to ? `${goInRun ? 'An event (“1207”), a token (“token 400”), ' : ''}a run’s id, a page, or words to search runs for.`
        : to.href ? `Enter: ${to.label}` : to.token === undefined ? `Enter: event ${to.event}` : `Enter: token ${to.token}`;
    };
    box.addEventListener('input', describe);
    dialog = h('dialog', { class: 'dialog goto' }, h('form', {
      method: 'dialog',
      onsubmit: () => {
        const to = destination(box.value, Boolean(goInRun));
        if (to?.href) location.assign(base + to.href);
        else if (to) goInRun(to);
      },
    }, h('label', { for: 'goto' }, 'Go to'), box, hint));
    dialog.addEventListener('click', (event) => { if (event.target === dialog) dialog.close(); });
    dialog.reset = () => { box.value = ''; describe(); };
    document.body.append(dialog);
  }
  dialog.reset();
  dialog.showModal();
}
