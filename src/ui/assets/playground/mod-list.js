// The mods of the request, with their configurations.
import { h, toast } from '../dom.js';
import { removeRow } from './rows.js';

/** Returns the list of the fields of a mod's configuration, or null if its schema has none. */
function configurationFields(schema) {
  const fields = Object.entries(schema?.properties ?? {});
  if (!fields.length) return null;
  const required = new Set(schema.required ?? []);
  return h('details', { class: 'hint' }, h('summary', {}, 'Fields'),
    h('dl', {}, fields.flatMap(([name, field]) => [
      h('dt', {}, h('code', {}, name), required.has(name) ? ' (required)' : 'default' in field ? ` = ${JSON.stringify(field.default)}` : ''),
      h('dd', {}, field.description ?? '', field.enum ? ` One of ${field.enum.join(', ')}.` : ''),
    ])));
}

export class ModList {
  #list;
  /** The list of available mods. */
  #select;
  #addButton;
  #changed;

  /**
   * Shows the mods in `list`. `select` has the available ones. `addButton` gets the focus when the last one is removed.
   * `changed()` is called after a click that changes the list.
   */
  constructor(list, select, addButton, changed) {
    this.#list = list;
    this.#select = select;
    this.#addButton = addButton;
    this.#changed = changed;
  }

  /** The mods: `{name, config}`, with the configuration as JSON text. */
  get value() {
    return [...this.#list.children].map((row) => ({ name: row.dataset.mod, config: row.querySelector('textarea').value }));
  }

  set value(mods) {
    this.#list.replaceChildren();
    for (const mod of mods) this.#add(mod);
  }

  /** Names of the available mods. */
  get available() { return [...this.#select.options].map((option) => option.value); }

  /** Returns a mod with its example configuration, or null if it is not available. */
  exampleOf(name) {
    const option = this.#optionOf(name);
    return option && { name, config: option.dataset.config === 'null' ? '' : option.dataset.config };
  }

  /** Adds the selected mod. */
  addSelected() {
    const mod = this.exampleOf(this.#select.value);
    if (mod) this.#add(mod);
    else toast('No mod is registered on this server.');
  }

  #optionOf(name) { return [...this.#select.options].find((option) => option.value === name) ?? null; }

  #add({ name, config = '' }) {
    const option = this.#optionOf(name);
    // `randomUUID` needs a secure context.
    const id = `mod-${crypto.randomUUID?.() ?? Math.random()}`;
    const problem = h('p', { class: 'err', role: 'status' });
    const text = h('textarea', { id, rows: '1', spellcheck: 'false', placeholder: 'no configuration', value: config });
    const check = () => {
      problem.textContent = '';
      try { if (text.value.trim()) JSON.parse(text.value); } catch (error) { problem.textContent = error.message; }
      text.setAttribute('aria-invalid', String(Boolean(problem.textContent)));
    };
    text.addEventListener('input', check);
    const move = (by) => {
      const other = by < 0 ? row.previousElementSibling : row.nextElementSibling;
      if (!other) return;
      // Moving the row itself would take the focus from its button.
      if (by < 0) row.after(other);
      else row.before(other);
      this.#changed();
    };
    const remove = () => {
      removeRow(row, this.#addButton);
      this.#changed();
    };
    const row = h('li', { 'data-mod': name },
      h('header', {}, h('b', {}, name),
        h('button', { type: 'button', title: 'Earlier', onclick: () => move(-1) }, '↑', h('span', { class: 'visually-hidden' }, ` Move ${name} up`)),
        h('button', { type: 'button', title: 'Later', onclick: () => move(1) }, '↓', h('span', { class: 'visually-hidden' }, ` Move ${name} down`)),
        h('button', { type: 'button', title: 'Remove', onclick: remove }, '✕', h('span', { class: 'visually-hidden' }, ` Remove ${name}`))),
      option?.dataset.description ? h('p', { class: 'hint' }, option.dataset.description) : null,
      h('label', { class: 'visually-hidden', for: id }, `Configuration of ${name}, as JSON`), text, problem,
      configurationFields(JSON.parse(option?.dataset.schema || 'null')));
    this.#list.append(row);
    check();
  }
}
