// Rows of the lists in the playground's form.

/** Removes a row. The focus moves to the button of a neighbor that removes it, or to `addButton`. */
export function removeRow(row, addButton) {
  const neighbor = row.nextElementSibling ?? row.previousElementSibling;
  (neighbor?.querySelector('[title^=Remove]') ?? addButton).focus();
  row.remove();
}
