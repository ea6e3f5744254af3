// What a mod's page sends. Pure.

/** A mod as it is uploaded: `text` as its source, under `name`, the rest as its last version was sent. */
export function uploadOf(kept, name, text) {
  const rest = Object.fromEntries(Object.entries(kept).filter(([, value]) => value !== null));
  return { language: 'python', ...rest, name, source: text };
}
