// A grid of colored cells, of which one is described below it: the focused cell, or the one under the pointer.
import { h } from '../dom.js';

/** Returns the cell `[row, column]` to which a key moves in a grid of `rows` × `columns` cells, or null for other keys. Pure. */
export function cellAfterKey(key, [row, column], rows, columns) {
  const to = {
    ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
    Home: [row, 0], End: [row, columns - 1], PageUp: [0, column], PageDown: [rows - 1, column],
  }[key];
  return to ? [Math.max(0, Math.min(rows - 1, to[0])), Math.max(0, Math.min(columns - 1, to[1]))] : null;
}

export class Grid {
  el;
  /** The description. */
  facts = h('p', { class: 'hint' });
  #describe;
  #onSelect;
  #rows = [];
  #cells = [];
  /** Number of cells per row. */
  #columns = 0;
  /** Index of the cell that the Tab key focuses. Cells are counted row by row. */
  #tabStop = 0;

  /**
   * `name` is a CSS class, and `label` the label for screen readers. `describe(i)` returns the description of a cell. `onSelect(i)`
   * is called when the user clicks a cell or presses Enter.
   */
  constructor(name, label, describe, onSelect = () => {}) {
    this.el = h('div', { class: `heatmap ${name}`, role: 'grid', 'aria-label': label });
    this.#describe = describe;
    this.#onSelect = onSelect;
    this.el.addEventListener('keydown', (event) => this.#onKey(event));
    this.el.addEventListener('click', (event) => this.#select(event.target));
    this.el.addEventListener('focusin', (event) => this.#onFocus(event.target));
    this.el.addEventListener('pointerover', (event) => this.#showFacts(event.target));
    this.el.addEventListener('pointerleave', () => this.#showFacts(this.#cells[this.#tabStop]));
  }

  /** Shows a row of `columns` cells after each header. The cells stay, with the focus, if their numbers do not change. */
  setRows(headers, columns) {
    if (headers.length === this.#rows.length && columns === this.#columns) {
      this.#rows.forEach((row, i) => row.firstChild.replaceWith(headers[i]));
      return;
    }
    this.#columns = columns;
    this.#tabStop = 0;
    this.el.style.setProperty('--columns', columns);
    const newCell = () => h('span', { role: 'gridcell', tabindex: '-1' });
    this.#rows = headers.map((header) => h('div', { role: 'row' }, header, Array.from({ length: columns }, newCell)));
    this.#cells = this.#rows.flatMap((row) => [...row.children].slice(1));
    this.el.replaceChildren(...this.#rows);
  }

  /** Sets the class of each cell, `classOf(i)`, and marks the selected cell, if any. */
  update(classOf, selected = -1) {
    this.#cells.forEach((cell, i) => {
      const classes = classOf(i);
      if (cell.className !== classes) cell.className = classes;
      if ((i === selected) !== (cell.ariaSelected === 'true')) cell.ariaSelected = String(i === selected);
    });
    const moves = selected >= 0 && !this.el.contains(document.activeElement);
    this.#setTabStop(moves ? selected : this.#tabStop);
    this.#showFacts(this.#cells[this.#tabStop]);
  }

  /** Makes a cell the one that the Tab key focuses, and updates its description. */
  #setTabStop(i) {
    this.#cells[this.#tabStop].tabIndex = -1;
    this.#tabStop = i;
    this.#cells[i].tabIndex = 0;
    this.#cells[i].ariaLabel = this.#describe(i);
  }

  #onFocus(cell) {
    if (!this.#cells.includes(cell)) return;
    this.#setTabStop(this.#cells.indexOf(cell));
    this.#showFacts(cell);
  }

  #onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.role !== 'gridcell') return;
    if (event.key === 'Enter' || event.key === ' ') this.#select(event.target);
    else {
      const columns = this.#columns;
      const next = cellAfterKey(event.key, [Math.floor(this.#tabStop / columns), this.#tabStop % columns], this.#rows.length, columns);
      if (!next) return;
      this.#cells[next[0] * columns + next[1]].focus();
    }
    event.preventDefault();
  }

  #select(target) {
    const i = this.#cells.indexOf(target);
    if (i >= 0) this.#onSelect(i);
  }

  #showFacts(cell) {
    const i = this.#cells.indexOf(cell);
    if (i >= 0) this.facts.textContent = this.#describe(i);
  }
}
