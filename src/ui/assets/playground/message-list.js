// The messages of the chat.
import { h } from '../dom.js';
import { removeRow } from './rows.js';

const ROLES = ['system', 'user', 'assistant'];

export class MessageList {
  #list;
  #addButton;
  #changed;

  /** Shows the messages in `list`. `addButton` gets the focus when the last one is removed. `changed()` is called after every removal. */
  constructor(list, addButton, changed) {
    this.#list = list;
    this.#addButton = addButton;
    this.#changed = changed;
  }

  /** The messages: `{role, content, more}`. */
  get value() {
    return [...this.#list.children].map((row) => ({ role: row.querySelector('select').value, content: row.querySelector('textarea').value, more: row._more }));
  }

  set value(messages) {
    this.#list.replaceChildren();
    for (const message of messages.length ? messages : [{}]) this.#add(message);
    this.#number();
  }

  /** Adds an empty message and moves the focus to it. */
  addNext() {
    const last = this.#list.lastElementChild?.querySelector('select').value;
    const row = this.#add({ role: last === 'user' ? 'assistant' : 'user' });
    this.#number();
    row.querySelector('textarea').focus();
  }

  /** Removes all messages, adds an empty one, and moves the focus to it. */
  clear() {
    this.value = [];
    this.#list.querySelector('textarea').focus();
  }

  /** Adds a message without labels. `more` are its other fields, such as tool calls, which the form shows but cannot change. */
  #add({ role = 'user', content = '', more }) {
    const row = h('li', { class: 'message' },
      h('header', {},
        h('select', {}, ROLES.map((r) => h('option', { value: r }, r))),
        h('button', { type: 'button', title: 'Remove this message', onclick: () => this.#remove(row) }, '✕', h('span', { class: 'visually-hidden' }, ' Remove message'))),
      h('textarea', { rows: '2', placeholder: role === 'system' ? 'Instructions for the model' : 'Message…' }),
      more ? h('details', { class: 'hint' }, h('summary', {}, Object.keys(more).join(', ')), h('pre', { class: 'trace', tabindex: '0' }, JSON.stringify(more, null, 2))) : null);
    row._more = more;
    if (!ROLES.includes(role)) row.querySelector('select').append(h('option', { value: role }, role));
    row.querySelector('select').value = role;
    row.querySelector('textarea').value = content;
    this.#list.append(row);
    return row;
  }

  #remove(row) {
    removeRow(row, this.#addButton);
    this.#number();
    this.#changed();
  }

  /** Sets the labels of the fields, which have the number of the message. */
  #number() {
    [...this.#list.children].forEach((row, i) => {
      row.querySelector('select').ariaLabel = `Role of message ${i + 1}`;
      row.querySelector('textarea').ariaLabel = `Message ${i + 1}`;
    });
  }
}
