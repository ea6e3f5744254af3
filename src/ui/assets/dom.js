// DOM helpers that all pages share. Text always becomes text nodes, never markup.

/** Prefix of every path of this server; usually empty. */
export const base = globalThis.document?.documentElement?.dataset?.base ?? '';

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
 * Replaces the content of an element by the list that `build()` returns. If the focused element is not in it anymore, the focus
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

/** Calls `fetch`. If the server is unreachable, the error has the same message in all browsers. */
export async function fetchUrl(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    throw error.name === 'AbortError' ? error : new Error('the server is unreachable');
  }
}

/** Calls `fetch` for a path of this server. Throws an error with the server's message if the request fails. */
export async function fetchApi(path, options = {}) {
  const response = await fetchUrl(base + path, { ...options, headers: { 'X-Requested-By': 'dashboard', ...options.headers } });
  if (response.ok || response.status === 304) return response;
  throw await errorOf(response);
}

/** Sends a body as JSON to a path of this server, like `fetchApi`. */
export const sendJson = (path, body, options) => fetchApi(path, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body), ...options });

/**
 * Calls `save()` when the form in a dialog is submitted, except by its button `cancel`, and closes the dialog. If `save` throws
 * an error, the form shows it and stays open.
 */
export function saveOnSubmit(form, save) {
  const button = form.querySelector('.primary');
  const problem = form.querySelector('[role=alert]');
  form.addEventListener('submit', async (event) => {
    if (event.submitter?.value === 'cancel') return;
    event.preventDefault();
    button.disabled = true;
    problem.textContent = '';
    try {
      await save();
      form.closest('dialog').close();
    } catch (error) {
      problem.textContent = `Not saved: ${error.message}`;
    } finally {
      button.disabled = false;
    }
  });
}

/** Returns a function that calls `start`, and ignores further calls until the promise of the first one is settled. */
export function singleFlight(start) {
  let pending = null;
  return (...args) => { pending ??= start(...args).finally(() => { pending = null; }); };
}

/** Waits until the browser has painted a frame. */
export const nextFrame = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));

/** Returns an Error with the server's message for a failed response. */
export async function errorOf(response) {
  const text = await response.text().catch(() => '');
  let message = `${response.status} ${response.statusText}`;
  let pointer = null;
  try {
    const body = JSON.parse(text);
    pointer = body.pointer ?? null;
    message = body.error?.message ?? body.detail?.msg ?? body.detail ?? body.title ?? message;
    if (body.request_id) message += ` (request ${body.request_id})`;
  } catch { /* not JSON: the status line is the message */ }
  return Object.assign(new Error(message), { status: response.status, pointer });
}

/** Colors of the current theme by the name of their CSS variable. */
const colors = new Map();
globalThis.document?.addEventListener('theme', () => colors.clear());

/** Returns the colors of CSS variables, by their names, for drawing on a canvas. The browser resolves `light-dark()`. */
export function palette(names) {
  const unresolved = names.filter((name) => !colors.has(name));
  if (unresolved.length) {
    const probe = h('i', { class: 'visually-hidden' });
    document.body.append(probe);
    for (const name of unresolved) {
      probe.style.color = `var(--${name})`;
      colors.set(name, getComputedStyle(probe).color);
    }
    probe.remove();
  }
  return Object.fromEntries(names.map((name) => [name, colors.get(name)]));
}

/**
 * Clears a canvas and adapts its resolution to its size on the page and to the screen. Returns its context, which draws in CSS
 * pixels, with the width and height, or null if the canvas is hidden.
 */
export function prepareCanvas(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return null;
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const [deviceWidth, deviceHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
  // Setting the size causes a new layout of the page, even if the value is the same.
  if (canvas.width !== deviceWidth) canvas.width = deviceWidth;
  if (canvas.height !== deviceHeight) canvas.height = deviceHeight;
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/**
 * Calls `draw` in the next frame when the size of `box` or the theme has changed, and when the returned function is called.
 * `draw` is not called before the browser has laid out `box`, so it does not delay the first frame of the page. After
 * `signal` aborts, it is not called anymore.
 */
export function scheduleDrawing(box, draw, signal) {
  let hasLayout = false;
  let frame = 0;
  const redraw = () => {
    if (hasLayout && !signal.aborted) frame ||= requestAnimationFrame(() => { frame = 0; draw(); });
  };
  const observer = new ResizeObserver(() => { hasLayout = true; redraw(); });
  observer.observe(box);
  document.addEventListener('theme', redraw, { signal });
  signal.addEventListener('abort', () => { observer.disconnect(); cancelAnimationFrame(frame); });
  return redraw;
}
