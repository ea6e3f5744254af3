// Requests to this server.

/** Prefix of every path of this server; usually empty. */
export const base = globalThis.document?.documentElement?.dataset?.base ?? '';

/** Returns the path of a run in the API. */
export const runPath = (id) => `/api/v1/runs/${encodeURIComponent(id)}`;

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
  const response = await fetchUrl(base + path, options);
  if (response.ok || response.status === 304) return response;
  throw await errorOf(response);
}

/** Sends a body as JSON to a path of this server, like `fetchApi`. */
export const sendJson = (path, body, options) => fetchApi(path, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body), ...options });

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
