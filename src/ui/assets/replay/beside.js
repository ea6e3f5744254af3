// A branch beside the text of a run: a second replay that follows the controls of the first one.
import { base, h } from '../dom.js';
import { changeOf } from './tree.js';
import { Replay } from './replay.js';

export class Beside {
  #root;
  #view;

  /** `unusedCopy` is the replay's markup before a run was shown in it, `root` the replay; the close button calls `close()`. */
  constructor(unusedCopy, root, member, state, close) {
    this.id = member.run_id;
    const copy = unusedCopy.cloneNode(true);
    copy.classList.add('beside');
    for (const el of copy.querySelectorAll('[id], [for]')) {
      el.removeAttribute('id');
      el.removeAttribute('for');
    }
    for (const el of copy.querySelectorAll('.replay-controls, [data-panel], [data-lanes]')) el.inert = true;
    const count = h('span', { class: 'num hint' });
    copy.prepend(h('p', { class: 'beside-head' }, h('b', {}, changeOf(member)), count,
      h('a', { href: `${base}/runs/${member.run_id}` }, 'Open'), h('button', { type: 'button', onclick: close, 'aria-label': 'Close this branch' }, '✕')));
    copy.querySelector('[data-text]').setAttribute('aria-label', `Text of the branch ${changeOf(member)}`);
    root.querySelector('[data-text]').after(copy);
    this.#root = copy;
    const at = member.status === 'running' ? null : member.parent?.sequence_order ?? null;
    this.#view = new Replay(copy, this.id, {
      state: { ...state, at: state.attention ? at : null }, live: member.status === 'running', hasAttention: member.has_attention,
      hooks: { grown: (tokens) => { count.textContent = `${tokens} tok`; } },
    });
    this.#view.open().catch((error) => { count.textContent = error.message; });
  }

  /** Uses the colors and attention of the first replay. */
  follow({ color, attention }) {
    const mine = this.#view.state;
    if (mine.attention !== attention) this.#view.act('attention');
    if (mine.color !== color && !attention) this.#view.colorBy(color);
  }

  close() {
    this.#view.close();
    this.#root.remove();
  }
}
