// A branch beside the text of a run: a second replay without its own controls, which uses the colors of the first one.
import { base } from '../api.js';
import { h } from '../dom.js';
import { changeOf } from './tree.js';
import { Replay } from './replay.js';

export class BranchReplay {
  #root;
  #replay;

  /**
   * Shows a member of the family beside the text of the first replay, `mainRoot`. `emptyReplay` is a copy of that element before a
   * run was shown in it, and `state` the state of the first replay. The close button calls `onClose()`.
   */
  constructor(emptyReplay, mainRoot, member, state, onClose) {
    this.id = member.run_id;
    this.#root = emptyReplay.cloneNode(true);
    this.#root.classList.add('beside');
    // Ids must be unique in the page.
    for (const el of this.#root.querySelectorAll('[id], [for]')) {
      el.removeAttribute('id');
      el.removeAttribute('for');
    }
    for (const el of this.#root.querySelectorAll('.replay-controls, [data-panel], [data-lanes]')) el.inert = true;
    const tokenCount = h('span', { class: 'num hint' });
    this.#root.prepend(h('p', { class: 'beside-head' }, h('b', {}, changeOf(member)), tokenCount,
      h('a', { href: `${base}/runs/${member.run_id}` }, 'Open'), h('button', { type: 'button', onclick: onClose, 'aria-label': 'Close this branch' }, '✕')));
    this.#root.querySelector('[data-text]').setAttribute('aria-label', `Text of the branch ${changeOf(member)}`);
    mainRoot.querySelector('[data-text]').after(this.#root);
    const isLive = member.status === 'running';
    // Attention is that of one step, so the cursor is then at the step of the fork instead of the end.
    const forkedAt = isLive ? null : member.parent?.sequence_order ?? null;
    this.#replay = new Replay(this.#root, this.id, {
      state: { ...state, at: state.attention ? forkedAt : null },
      isLive,
      hasAttention: member.has_attention,
      hooks: { grown: (count) => { tokenCount.textContent = `${count} tok`; } },
    });
    this.#replay.open().catch((error) => { tokenCount.textContent = error.message; });
  }

  /** Shows the colors or the attention, as the first replay with this state does. */
  follow({ color, attention }) {
    const { state } = this.#replay;
    if (state.attention !== attention) this.#replay.act('attention');
    if (state.color !== color && !attention) this.#replay.colorBy(color);
  }

  close() {
    this.#replay.close();
    this.#root.remove();
  }
}
