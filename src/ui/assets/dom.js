// DOM helpers that all pages share. Text always becomes text nodes, never markup.

/**
 * Creates an element. `props` are its attributes, and its event listeners (`onclick`). Attributes and children that are
 * `null`, `undefined` or `false` are omitted.
 */
export function h(tag, props, ...children) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) el.addEventListener(name.slice(2), value);
    else if (name === 'value') el.value = value;
    else el.setAttribute(name, value === true ? '' : value);
  }
  el.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return el;
}

/**
 * Replaces the content of an element by the list that `build()` returns. If the focused element is no longer in it, the focus
 * moves to the one with the same `data-key`; without a key, to the one with the same index among those without a key; or else
 * to `el`.
 */
export function replaceContent(el, build) {
  const focused = document.activeElement;
  const similar = () => [...el.querySelectorAll('a[href], button, input, select, summary, [tabindex]')]
    .filter(({ dataset: { key } }) => key === focused?.dataset.key);
  const index = similar().indexOf(focused);
  el.replaceChildren(...build());
  if (index < 0) return;
  const next = el.contains(focused) ? focused : similar()[index] ?? similar().at(-1) ?? el;
  if (next === el) el.tabIndex = -1;
  next.focus({ preventScroll: true });
}

/** Returns an entry of a list of facts, a `dl`. */
export const fact = (name, value, props) => h('div', props, h('dt', {}, name), h('dd', {}, value));

let toastTimer = 0;

/** Shows a short notification, also to screen readers. */
export function toast(text) {
  const el = document.querySelector('[data-toast]');
  if (!el) return;
  el.textContent = text;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { el.textContent = ''; }, 3500);
}

/** Copies text to the clipboard. `name` says in the notification what was copied, such as “link”. */
export async function copyText(text, name) {
  try {
    await navigator.clipboard.writeText(text);
    toast(`${name} copied`);
  } catch {
    // Clipboard access needs a secure context or a permission. Without it, the user copies manually.
    window.prompt(`Copy ${name}:`, text);
  }
}

/** Returns a function that calls `start`, and ignores further calls until the promise of the first one is settled. */
export function singleFlight(start) {
  let pending = null;
  return (...args) => { pending ??= start(...args).finally(() => { pending = null; }); };
}

/** Waits until the page is visible. */
export async function pageVisible() {
  while (document.hidden) await new Promise((resolve) => document.addEventListener('visibilitychange', resolve, { once: true }));
}

/** Waits until the browser has painted a frame. */
export const nextFrame = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
