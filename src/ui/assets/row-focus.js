// The keyboard focus in a list or table, which is on the links with `data-row`.

/** Returns the row that contains an element. */
const rowOf = (element) => element?.closest?.('tr, [data-run]');

/** Returns the links of the rows. */
export const rowLinks = (container) => [...container.querySelectorAll('[data-row]')];

/** Focuses the link of a row; an index out of range means the first or last row. Returns false if there are no rows. */
export function focusRow(container, index) {
  const links = rowLinks(container);
  const link = links.at(Math.max(0, Math.min(links.length - 1, index)));
  link?.focus();
  rowOf(link)?.scrollIntoView({ block: 'nearest' });
  return Boolean(link);
}

/** Moves the focus by a number of rows; without a focused row, to the first or last one. */
export function moveFocus(container, step) {
  const row = rowOf(document.activeElement);
  const index = rowLinks(container).findIndex((link) => rowOf(link) === row);
  return focusRow(container, index < 0 ? (step > 0 ? 0 : Infinity) : index + step);
}
