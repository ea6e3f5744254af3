// Request bodies of a mod's page. Pure.

/** Returns the upload of a mod: `text` as source, `name`, and the remaining fields of the last version. */
export function uploadOf(kept, name, text) {
  const rest = Object.fromEntries(Object.entries(kept).filter(([, value]) => value !== null));
  return { language: 'python', ...rest, name, source: text };
}
