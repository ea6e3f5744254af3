// The handbook's pages: search, and a copy button for each block of code.
import { copyText, fetchApi, h } from './dom.js';
import { excerpt, search, splitMatches, words } from './docs-search.js';
import { listenForShortcuts } from './keys.js';

const box = document.querySelector('[data-docs-search]');
const list = document.querySelector('[data-docs-found]');
const status = document.querySelector('[data-docs-status]');

let index = null;
let selectedOption = 0;

/** Fetches the sections of all pages, once. */
function load() {
  index ??= fetchApi('/docs/search.json').then((response) => response.json()).catch((error) => { index = null; throw error; });
  return index;
}

/** Returns a text in which these words are highlighted. */
const highlighted = (text, wanted) => splitMatches(text, wanted).map(([piece, hit]) => (hit ? h('mark', {}, piece) : piece));

function selectOption(at) {
  const options = list.children;
  if (!options.length) return;
  options[selectedOption]?.setAttribute('aria-selected', 'false');
  selectedOption = (at + options.length) % options.length;
  options[selectedOption].setAttribute('aria-selected', 'true');
  options[selectedOption].scrollIntoView({ block: 'nearest' });
  box.setAttribute('aria-activedescendant', options[selectedOption].id);
}

function close() {
  list.hidden = true;
  list.replaceChildren();
  box.setAttribute('aria-expanded', 'false');
  box.removeAttribute('aria-activedescendant');
}

async function show() {
  const query = box.value;
  const wanted = words(query);
  if (!wanted.length) { status.textContent = ''; return close(); }
  let entries;
  try {
    entries = await load();
  } catch (error) {
    list.replaceChildren(h('li', { class: 'err' }, error.message));
    list.hidden = false;
    return undefined;
  }
  if (query !== box.value) return undefined;
  const found = search(entries, query);
  status.textContent = found.length ? `${found.length} section${found.length === 1 ? '' : 's'}` : 'Nothing found';
  list.replaceChildren(...(found.length ? found.map((entry, i) => h('li', { id: `docs-found-${i}`, role: 'option', 'aria-selected': 'false' },
    h('a', { href: `${entry.slug}#${entry.anchor}`, tabindex: '-1', onclick: close },
      h('b', {}, highlighted(entry.heading, wanted)), entry.heading === entry.page ? '' : ` · ${entry.page}`,
      h('small', {}, highlighted(excerpt(entry.text, wanted), wanted))))) : [h('li', { class: 'hint', role: 'option', 'aria-selected': 'false' }, 'Nothing found')]));
  list.hidden = false;
  box.setAttribute('aria-expanded', 'true');
  selectedOption = 0;
  if (found.length) selectOption(0);
  return undefined;
}

box.addEventListener('focus', () => load().catch(() => {}));
box.addEventListener('input', show);
box.addEventListener('keydown', (event) => {
  if (event.key === 'ArrowDown') selectOption(selectedOption + 1);
  else if (event.key === 'ArrowUp') selectOption(selectedOption - 1);
  else if (event.key === 'Enter') list.querySelector('[aria-selected=true] a')?.click();
  else if (event.key === 'Escape') { box.value = ''; close(); box.blur(); }
  else return;
  event.preventDefault();
});
document.addEventListener('click', (event) => { if (!event.target.closest('.docs-search')) close(); });

listenForShortcuts(['docs'], (action) => {
  if (action !== 'find') return false;
  box.focus();
  box.select();
  return true;
});

for (const pre of document.querySelectorAll('.docs-text pre')) {
  const text = pre.textContent.trimEnd();
  pre.tabIndex = 0;
  pre.append(h('button', { type: 'button', class: 'copy', onclick: () => copyText(text, 'block') }, 'Copy'));
}

const contents = document.querySelector('#docs-contents');
const current = contents.querySelector('[aria-current]');
// Only the list is scrolled, not the page.
if (current && current.offsetTop > contents.clientHeight) contents.scrollTop = current.offsetTop - contents.clientHeight / 2;
contents.addEventListener('click', (event) => { if (event.target.closest('a') && contents.matches(':popover-open')) contents.hidePopover(); });
