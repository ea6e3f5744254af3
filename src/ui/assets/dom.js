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
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    toast(`${what} copied`);
  } catch {
    // Clipboard access needs a secure context or a permission. Without it, the user copies manually.
    window.prompt(`Copy ${what}:`, text);
  }
}

/** Calls `fetch`. If the server is unreachable, the error has the same message in all browsers. */
export async function reach(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    throw error.name === 'AbortError' ? error : new Error('the server is unreachable');
  }
}

/** Calls `fetch` for a path of this server with the login cookie. Fails with the server's error message. */
export async function ask(path, options = {}) {
  const response = await reach(base + path, { ...options, headers: { 'X-Requested-By': 'dashboard', ...options.headers } });
  if (response.ok || response.status === 304) return response;
  throw await problem(response);
}

/** Turns a failed response into an Error with the server's message. */
export async function problem(response) {
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

/** Returns the style sheet's colours for a canvas; the browser resolves `light-dark()`. */
export function palette(names) {
  const probe = h('i', { class: 'vh' });
  document.body.append(probe);
  const out = {};
  for (const name of names) {
    probe.style.color = `var(--${name})`;
    out[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return out;
}

/** Resizes a canvas to its box, in device pixels. Returns `{g, w, h}`: the context and the size in CSS pixels, or null if the canvas is hidden. */
export function surface(canvas) {
  const { clientWidth: w, clientHeight: hgt } = canvas;
  if (!w || !hgt) return null;
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  canvas.width = Math.round(w * ratio);
  canvas.height = Math.round(hgt * ratio);
  const g = canvas.getContext('2d');
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { g, w, h: hgt };
}
