// The field for the control vectors of a request.
import { h } from './dom.js';

export class SteeringField {
  element;
  #known;
  #changed;
  #box = h('input', { type: 'checkbox' });
  #rows = h('div');
  #body;

  /** `known`: names of the server's control vectors, its number of layers and the default range of layers. `changed()` is called after a click that changes the value. */
  constructor(known, label, changed = () => {}) {
    this.#known = known;
    this.#changed = changed;
    const add = () => {
      this.#add().querySelector('select').focus();
      changed();
    };
    this.#body = h('fieldset', {}, h('legend', { class: 'vh' }, 'Control vectors'), this.#rows,
      h('p', { class: 'links' }, known.names.length ? h('button', { type: 'button', onclick: add }, 'Add control vector') : null, h('span', { class: 'hint' }, 'Without a control vector, steering is off.')));
    this.element = h('div', { class: 'steering' }, h('label', { class: 'check' }, this.#box, label), this.#body);
    this.#box.addEventListener('input', () => {
      if (this.#box.checked && known.names.length && !this.#rows.children.length) this.#add();
      this.#show();
    });
    this.value = null;
  }

  /** The field `steering` of a request, or null if the request omits it. */
  get value() { return this.#box.checked ? [...this.#rows.children].map((row) => row._read()) : null; }

  set value(vectors) {
    this.offer(vectors ?? []);
    this.#box.checked = vectors !== null;
    this.#show();
  }

  /** Fills the rows without selecting them. */
  offer(vectors) {
    this.#rows.replaceChildren();
    for (const vector of vectors) this.#add(vector);
  }

  #show() {
    const { checked } = this.#box;
    this.#body.hidden = !checked;
    this.#body.disabled = !checked;
  }

  #add({ name = this.#known.names[0], scale = 1, layers = this.#known.default_layers, fingerprint } = {}) {
    const last = this.#known.layers - 1;
    const select = h('select', { 'aria-label': 'Control vector' }, [...new Set([...this.#known.names, name])].map((other) => h('option', { value: other }, other)));
    select.value = name;
    const number = (label, value, props) => h('input', { type: 'number', 'aria-label': label, required: true, value, ...props });
    const strength = number('Scale', scale, { min: '-1000', max: '1000', step: 'any' });
    const range = layers.map((layer, i) => number(i ? 'Last layer' : 'First layer', layer, { min: '0', max: last < 0 ? null : last, step: '1' }));
    const row = h('div', { role: 'group', 'aria-label': name }, select, h('label', {}, 'scale ', strength), h('span', {}, 'layers ', range[0], ' – ', range[1]),
      h('button', { type: 'button', title: 'Remove', onclick: () => { row.remove(); this.#changed(); } }, '✕', h('span', { class: 'vh' }, ' Remove control vector')));
    select.addEventListener('input', () => row.setAttribute('aria-label', select.value));
    // The fingerprint of a recorded vector is only valid for its name.
    row._read = () => ({ name: select.value, scale: Number(strength.value), layers: range.map((input) => Number(input.value)), ...(fingerprint && select.value === name && { fingerprint }) });
    this.#rows.append(row);
    return row;
  }
}
