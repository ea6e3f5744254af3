// DOM helpers that all pages share. Text always becomes text nodes, never markup.

/** Prefix of every path of this server; usually empty. */
export const base = globalThis.document?.documentElement?.dataset?.base ?? '';

/** Creates an element. `props`: attributes; `on…` are listeners; `null` and `false` are omitted. */
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

/** Shows a short notification, also to screen readers. */
export function toast(text) {
  const el = document.querySelector('[data-toast]');
  if (!el) return;
  el.textContent = text;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => { el.textContent = ''; }, 3500);
}

/** Copies text and confirms it. */
export async function copyText(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    toast(`${what} copied`);
  } catch {
    // Clipboard access needs a secure context or a permission. Without it, the user copies manually.
    window.prompt(`Copy ${what}:`, text);
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

/** Calls `fetch` for a path of this server with the login cookie. Fails with the server's error message. */
export async function fetchApi(path, options = {}) {
  const response = await fetchUrl(base + path, { ...options, headers: { 'X-Requested-By': 'dashboard', ...options.headers } });
  if (response.ok || response.status === 304) return response;
  throw await errorOf(response);
}

/** Turns a failed response into an Error with the server's message. */
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

const colors = new Map();
globalThis.document?.addEventListener('theme', () => colors.clear());

/** Returns the style sheet's colors for a canvas; the browser resolves `light-dark()`. */
export function palette(names) {
  const unknown = names.filter((name) => !colors.has(name));
  if (unknown.length) {
    const probe = h('i', { class: 'visually-hidden' });
    document.body.append(probe);
    for (const name of unknown) {
      probe.style.color = `var(--${name})`;
      colors.set(name, getComputedStyle(probe).color);
    }
    probe.remove();
  }
  return Object.fromEntries(names.map((name) => [name, colors.get(name)]));
}

/** Sets the size of a canvas to that of its box in device pixels, and clears it. Returns the context in CSS pixels, or null if the canvas is hidden. */
export function prepareCanvas(canvas) {
  const { clientWidth: w, clientHeight: hgt } = canvas;
  if (!w || !hgt) return null;
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  // Setting the size lays out the page again, even if the value is the same.
  const [width, height] = [Math.round(w * ratio), Math.round(hgt * ratio)];
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const g = canvas.getContext('2d');
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, w, hgt);
  return { g, w, h: hgt };
}

/**
 * Calls `draw` in the frame after `box` got its first size, its size or the theme changed, or the returned function was
 * called, until the signal aborts. So a drawing never delays the first frame of the page.
 */
export function scheduleDrawing(box, draw, signal) {
  let isSized = false;
  let frame = 0;
  const redraw = () => {
    if (isSized && !signal.aborted) frame ||= requestAnimationFrame(() => { frame = 0; draw(); });
  };
  const observer = new ResizeObserver(() => { isSized = true; redraw(); });
  observer.observe(box);
  document.addEventListener('theme', redraw, { signal });
  signal.addEventListener('abort', () => { observer.disconnect(); cancelAnimationFrame(frame); });
  return redraw;
}
