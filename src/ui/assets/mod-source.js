// The request body that saves or checks a mod. Pure.

/** Returns the body for a mod: its name, its source (a text, or texts by path), and all other fields of its previous version. */
export function uploadOf(previous, name, source) {
  const fields = Object.fromEntries(Object.entries(previous).filter(([, value]) => value !== null));
  return { language: 'python', ...fields, name, source };
}
