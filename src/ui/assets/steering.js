// The field for the control vectors of a request.
import { h } from './dom.js';

export class SteeringField {
  element;
  /** Names of the server's control vectors, its number of layers, and the default range of layers. */
  #known;
  #changed;
  #checkbox = h('input', { type: 'checkbox' });
  #rows = h('div');
  #body;

  /** `known` is `{names, layers, default_layers}`. `changed()` is called after a click that changes the value. */
  constructor(known, label, changed = () => {}) {
    this.#known = known;
    this.#changed = changed;
    const add = () => {
      this.#addRow().querySelector('select').focus();
      changed();
    };
    this.#body = h('fieldset', {},
      h('legend', { class: 'visually-hidden' }, 'Control vectors'),
      this.#rows,
      h('p', { class: 'links' },
        known.names.length ? h('button', { type: 'button', onclick: add }, 'Add control vector') : null,
        h('span', { class: 'hint' }, 'Without a control vector, steering is off.')));
    this.element = h('div', { class: 'steering' }, h('label', { class: 'check' }, this.#checkbox, label), this.#body);
    this.#checkbox.addEventListener('input', () => {
      if (this.#checkbox.checked && known.names.length && !this.#rows.children.length) this.#addRow();
      this.#updateBody();
    });
    this.value = null;
  }

  /** The field `steering` of a request, or null if the request omits it. */
  get value() { return this.#checkbox.checked ? [...this.#rows.children].map((row) => row._read()) : null; }

  set value(vectors) {
    this.offer(vectors ?? []);
    this.#checkbox.checked = vectors !== null;
    this.#updateBody();
  }

  /** Fills the rows without checking the check box. */
  offer(vectors) {
    this.#rows.replaceChildren();
    for (const vector of vectors) this.#addRow(vector);
  }

  /** Shows the rows if the check box is checked. */
  #updateBody() {
    const { checked } = this.#checkbox;
    this.#body.hidden = !checked;
    this.#body.disabled = !checked;
  }

  /** Adds a row for a control vector and returns it. */
  #addRow({ name = this.#known.names[0], scale = 1, layers = this.#known.default_layers, fingerprint } = {}) {
    const lastLayer = this.#known.layers - 1;
    const names = [...new Set([...this.#known.names, name])];
    const select = h('select', { 'aria-label': 'Control vector' }, names.map((one) => h('option', { value: one }, one)));
    select.value = name;
    const number = (label, value, props) => h('input', { type: 'number', 'aria-label': label, required: true, value, ...props });
    const scaleField = number('Scale', scale, { min: '-1000', max: '1000', step: 'any' });
    const layerFields = ['First layer', 'Last layer'].map((label, i) => number(label, layers[i], { min: '0', max: lastLayer < 0 ? null : lastLayer, step: '1' }));
    const remove = () => {
      const next = row.nextElementSibling ?? row.previousElementSibling ?? this.#body;
      row.remove();
      next.querySelector('button')?.focus();
      this.#changed();
    };
    const row = h('div', { role: 'group', 'aria-label': name },
      select,
      h('label', {}, 'scale ', scaleField),
      h('span', {}, 'layers ', layerFields[0], ' – ', layerFields[1]),
      h('button', { type: 'button', title: 'Remove', onclick: remove }, '✕', h('span', { class: 'visually-hidden' }, ' Remove control vector')));
    select.addEventListener('input', () => row.setAttribute('aria-label', select.value));
    row._read = () => ({
      name: select.value,
      scale: Number(scaleField.value),
      layers: layerFields.map((input) => Number(input.value)),
      // The fingerprint of a recorded vector is only valid for its name.
      ...(fingerprint && select.value === name && { fingerprint }),
    });
    this.#rows.append(row);
    return row;
  }
}
