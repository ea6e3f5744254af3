// The few lines of DOM work that every page shares. Text always becomes text nodes, never markup.

/** What stands before every path of this server; mostly nothing. */
export const base = globalThis.document?.documentElement?.dataset?.base ?? '';

/** Creates an element. `props`: attributes; `on…` are listeners; `null` and `false` are left out. */
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

/** Says something in passing, to eyes and to screen readers. */
export function toast(text) {
  const el = document.querySelector('[data-toast]');
  if (!el) return;
  el.textContent = text;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => { el.textContent = ''; }, 3500);
}

/** Copies text and says so. */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    toast(`${what} copied`);
  } catch {
    // Clipboard access needs a secure context or a permission: let the person copy by hand.
    window.prompt(`Copy ${what}:`, text);
  }
}

/** `fetch`, with the browser's several words for a server that does not answer made one. */
export async function reach(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    throw error.name === 'AbortError' ? error : new Error('the server cannot be reached');
  }
}

/** `fetch` of a path of this server: the session's cookie goes along. Fails with the server's own words. */
export async function ask(path, options = {}) {
  const response = await reach(base + path, { ...options, headers: { 'X-Requested-By': 'dashboard', ...options.headers } });
  if (response.ok || response.status === 304) return response;
  throw await problem(response);
}

/** Turns a failed response into an Error with the server's message. */
export async function problem(response) {
  const text = await response.text().catch(() => '');
  let message = `${response.status} ${response.statusText}`;
  try {
    const body = JSON.parse(text);
    message = body.error?.message ?? body.detail?.msg ?? body.detail ?? body.title ?? message;
    if (body.request_id) message += ` (request ${body.request_id})`;
  } catch { /* not JSON: the status line stands */ }
  return Object.assign(new Error(message), { status: response.status });
}

/** The colours of the style sheet as canvas can use them; `light-dark()` is resolved by the browser. */
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

/** Sizes a canvas to its box in device pixels; answers the context in CSS pixels, or null while it is not shown. */
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
