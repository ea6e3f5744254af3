// Request bodies of a mod's page. Pure.

/** Returns the upload of a mod: `source` (a text, or texts by path), `name`, and the remaining fields of the last version. */
export function uploadOf(previous, name, source) {
  const rest = Object.fromEntries(Object.entries(previous).filter(([, value]) => value !== null));
  return { language: 'python', ...rest, name, source };
}
