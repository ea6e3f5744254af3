// The values of the playground's form, kept for the next visit.

const STORAGE_KEY = 'thunder.playground';

/** Returns the values of the last visit, or an empty object. */
export function loadForm() {
  try {
    return JSON.parse(localStorage.getItem(STORAGE_KEY)) ?? {};
  } catch {
    return {};
  }
}

/** Stores the values, unless the browser blocks its storage or the storage is full. */
export function storeForm(values) {
  try {
    localStorage.setItem(STORAGE_KEY, JSON.stringify(values));
  } catch { /* The form works without it. */ }
}
