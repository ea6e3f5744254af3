// The pages of the handbook: the search, and a copy button for each block of code.
import { fetchApi } from './api.js';
import { copyText, h } from './dom.js';
import { excerpt, search, splitMatches, words } from './docs-search.js';
import { listenForShortcuts } from './keys.js';

const searchBox = document.querySelector('[data-docs-search]');
const list = document.querySelector('[data-docs-found]');
const status = document.querySelector('[data-docs-status]');

/** Promise of the sections of all pages, or null before the first use. */
let sections = null;
let selectedIndex = 0;

/** Fetches the sections of all pages on first use. */
function loadSections() {
  sections ??= fetchApi('/docs/search.json').then((response) => response.json()).catch((error) => { sections = null; throw error; });
  return sections;
}

/** Returns the pieces of a text, with those that match one of `wanted` in `<mark>`. */
const highlighted = (text, wanted) => splitMatches(text, wanted).map(([piece, hit]) => (hit ? h('mark', {}, piece) : piece));

/** Selects a result by its index, which wraps around. */
function selectOption(index) {
  const options = list.children;
  if (!options.length) return;
  options[selectedIndex]?.setAttribute('aria-selected', 'false');
  selectedIndex = (index + options.length) % options.length;
  options[selectedIndex].setAttribute('aria-selected', 'true');
  options[selectedIndex].scrollIntoView({ block: 'nearest' });
  searchBox.setAttribute('aria-activedescendant', options[selectedIndex].id);
}

function closeResults() {
  list.hidden = true;
  list.replaceChildren();
  searchBox.setAttribute('aria-expanded', 'false');
  searchBox.removeAttribute('aria-activedescendant');
}

/** Returns the element of a found section. */
function option(section, index, wanted) {
  return h('li', { id: `docs-found-${index}`, role: 'option', 'aria-selected': 'false' },
    h('a', { href: `${section.slug}#${section.anchor}`, tabindex: '-1', onclick: closeResults },
      h('b', {}, highlighted(section.heading, wanted)), section.heading === section.page ? '' : ` · ${section.page}`,
      h('small', {}, highlighted(excerpt(section.text, wanted), wanted))));
}

/** Shows the sections that match the text of the search box. */
async function showResults() {
  const query = searchBox.value;
  const wanted = words(query);
  if (!wanted.length) {
    status.textContent = '';
    closeResults();
    return;
  }
  try {
    const found = search(await loadSections(), query);
    if (query !== searchBox.value) return;
    status.textContent = found.length ? `${found.length} section${found.length === 1 ? '' : 's'}` : 'Nothing found';
    list.replaceChildren(...found.map((section, i) => option(section, i, wanted)));
    if (!found.length) list.append(h('li', { class: 'hint', role: 'option', 'aria-selected': 'false' }, 'Nothing found'));
    list.hidden = false;
    searchBox.setAttribute('aria-expanded', 'true');
    selectedIndex = 0;
    if (found.length) selectOption(0);
  } catch (error) {
    list.replaceChildren(h('li', { class: 'err' }, error.message));
    list.hidden = false;
  }
}

searchBox.addEventListener('focus', () => loadSections().catch(() => { /* the search tries again and shows the error */ }));
searchBox.addEventListener('input', showResults);
searchBox.addEventListener('keydown', (event) => {
  if (event.key === 'ArrowDown') selectOption(selectedIndex + 1);
  else if (event.key === 'ArrowUp') selectOption(selectedIndex - 1);
  else if (event.key === 'Enter') list.querySelector('[aria-selected=true] a')?.click();
  else if (event.key === 'Escape') {
    searchBox.value = '';
    closeResults();
    searchBox.blur();
  } else return;
  event.preventDefault();
});
document.addEventListener('click', (event) => { if (!event.target.closest('.docs-search')) closeResults(); });

listenForShortcuts(['docs'], (action) => {
  if (action !== 'find') return false;
  searchBox.focus();
  searchBox.select();
  return true;
});

for (const pre of document.querySelectorAll('.docs-text pre')) {
  const text = pre.textContent.trimEnd();
  pre.tabIndex = 0;
  pre.append(h('button', { type: 'button', class: 'copy', onclick: () => copyText(text, 'block') }, 'Copy'));
}

const contents = document.querySelector('#docs-contents');
const current = contents.querySelector('[aria-current]');
// `scrollIntoView` would also scroll the page.
if (current && current.offsetTop > contents.clientHeight) contents.scrollTop = current.offsetTop - contents.clientHeight / 2;
contents.addEventListener('click', (event) => {
  if (event.target.closest('a') && contents.matches(':popover-open')) contents.hidePopover();
});
