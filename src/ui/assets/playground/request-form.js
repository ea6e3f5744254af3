// The form of the playground. Its values are the plain data that `request.js` describes.
import { h } from '../dom.js';
import { differences } from './request.js';
import { SteeringField } from '../steering.js';
import { MessageList } from './message-list.js';
import { ModList } from './mod-list.js';

/** Tabs in the order of the page. */
const TABS = ['chat', 'raw'];

export class RequestForm {
  #element;
  #changed;
  #messages;
  #mods;
  #steering = null;
  #tabs;
  #raw;
  /** The values of `showChangesFrom`, or null. */
  #original = null;

  /** `changed(values)` is called when the user has changed the form. */
  constructor(element, changed) {
    const find = (selector) => element.querySelector(selector);
    const notify = () => this.#notify();
    this.#element = element;
    this.#changed = changed;
    this.#messages = new MessageList(find('[data-messages]'), find('[data-action=addMessage]'), notify);
    this.#mods = new ModList(find('[data-mods]'), find('[data-add-mod]'), find('[data-action=addMod]'), notify);
    this.#raw = find('[data-raw]');
    this.#tabs = [...element.querySelectorAll('[role=tab]')];
    this.#showSteering(null);
    this.#listen();
  }

  get value() {
    const { model, stop, tools, schema, extra, attention, lens } = this.#element.elements;
    return {
      tab: TABS[this.#tabs.findIndex((tab) => tab.ariaSelected === 'true')],
      messages: this.#messages.value,
      raw: this.#raw.value,
      numbers: Object.fromEntries(this.#numbers.map((input) => [input.name, input.value])),
      stop: stop.value,
      tools: tools.value,
      schema: schema.value,
      extra: extra.value,
      mods: this.#mods.value,
      attention: attention.checked,
      lens: lens.checked,
      steering: this.#steering.value,
      model: model.value,
    };
  }

  /** Missing values become the initial ones. */
  set value(values) {
    const { elements } = this.#element;
    this.#messages.value = values.messages ?? [];
    this.#raw.value = values.raw ?? '';
    for (const input of this.#numbers) input.value = values.numbers?.[input.name] ?? input.defaultValue;
    for (const name of ['stop', 'tools', 'schema', 'extra']) elements[name].value = values[name] ?? '';
    elements.model.selectedIndex = this.#optionOf(values.model)?.index ?? 0;
    this.#showSteering(values.steering ?? null);
    if (values.tools || values.schema || values.extra || values.steering) elements.extra.closest('details').open = true;
    this.#mods.value = values.mods ?? [];
    for (const name of ['attention', 'lens']) elements[name].checked = Boolean(values[name]) && !elements[name].disabled;
    this.#selectTab(TABS.indexOf(values.tab === 'raw' ? 'raw' : 'chat'));
  }

  get #numbers() { return [...this.#element.querySelectorAll('.fields input')]; }

  /** Changes some values, like the user. */
  change(values) {
    this.value = { ...this.value, ...values };
    this.#notify();
  }

  /** Shows a raw text, scrolled to its end, like the user. */
  showText(text) {
    this.#raw.value = text;
    this.#selectTab(TABS.indexOf('raw'));
    this.#raw.scrollTop = this.#raw.scrollHeight;
    this.#notify();
  }

  /** From now on, lists the fields that differ from `values`. */
  showChangesFrom(values) {
    this.#original = values;
    this.#showChanges(this.value);
  }

  /** Returns true if the server has a model with that name. */
  hasModel(name) { return this.#optionOf(name) !== null; }

  /** Returns the control vectors of a model as JSON text, which is empty if it has none. */
  vectorsOf(model) { return this.#optionOf(model)?.dataset.vectors ?? ''; }

  /** Returns a mod with its example configuration, or null if the server does not have it. */
  exampleOf(mod) { return this.#mods.exampleOf(mod); }

  /** Names of the mods that the form can add, and `attention` if the server captures it. */
  get available() {
    return [...this.#mods.available, ...(this.#element.elements.attention.disabled ? [] : ['attention'])];
  }

  /**
   * Returns true if no field has a text that is not a number, and no required number is missing; otherwise shows the first such
   * field. The server checks the values.
   */
  isComplete() {
    const field = [...this.#element.elements].find(({ willValidate, validity }) => willValidate && (validity.badInput || validity.valueMissing));
    if (!field) return true;
    const details = field.closest('details');
    if (details) details.open = true;
    field.reportValidity();
    return false;
  }

  #listen() {
    this.#element.addEventListener('input', ({ target }) => {
      if (target.name === 'model') this.#showSteering(this.#steering.value);
      this.#notify();
    });
    const actions = {
      addMessage: () => this.#messages.addNext(),
      clearMessages: () => this.#messages.clear(),
      addMod: () => this.#mods.addSelected(),
    };
    this.#element.addEventListener('click', ({ target }) => {
      const act = actions[target.closest('[data-action]')?.dataset.action];
      if (!act) return;
      act();
      this.#notify();
    });
    this.#tabs.forEach((tab, i) => {
      const select = (index) => {
        this.#selectTab(index);
        this.#notify();
      };
      tab.addEventListener('click', () => select(i));
      tab.addEventListener('keydown', ({ key }) => {
        if (key !== 'ArrowRight' && key !== 'ArrowLeft') return;
        select(1 - i);
        this.#tabs[1 - i].focus();
      });
    });
  }

  #notify() {
    const values = this.value;
    this.#showChanges(values);
    this.#changed(values);
  }

  /** Lists the fields that differ from the original values. */
  #showChanges(values) {
    const changes = this.#original ? differences(this.#original, values) : [];
    const list = this.#element.querySelector('[data-changed-fields]');
    list.hidden = changes.length === 0;
    if (!changes.length) return;
    const shortened = (text) => (text === '' ? 'not set' : text.length > 80 ? `${text.slice(0, 80)}…` : text);
    list.querySelector('summary').replaceChildren(`${changes.length} ${changes.length === 1 ? 'field differs' : 'fields differ'} from the run`);
    list.querySelector('ul').replaceChildren(...changes.map(({ name, before, after }) => h('li', {},
      h('b', {}, name), ' ', h('del', {}, shortened(before)), ' → ', h('ins', {}, shortened(after)))));
  }

  /** Shows the field for the control vectors of the selected model with a value. */
  #showSteering(value) {
    const { model, lens } = this.#element.elements;
    const vectors = JSON.parse(this.vectorsOf(model.value) || 'null');
    const field = new SteeringField(vectors ?? { names: [], layers: 0 }, 'Select control vectors', () => this.#notify());
    field.value = value;
    // For a model without control vectors, the field only shows those of the run.
    field.element.hidden = !vectors && !value;
    if (this.#steering) this.#steering.element.replaceWith(field.element);
    else lens.closest('label').after(field.element);
    this.#steering = field;
  }

  /** Returns the option of the model with that name, or null. */
  #optionOf(model) {
    return [...this.#element.elements.model.options].find((option) => JSON.parse(option.dataset.names).includes(model)) ?? null;
  }

  #selectTab(index) {
    this.#tabs.forEach((tab, i) => {
      tab.ariaSelected = String(i === index);
      tab.tabIndex = i === index ? 0 : -1;
      document.getElementById(tab.getAttribute('aria-controls')).hidden = i !== index;
    });
  }
}
