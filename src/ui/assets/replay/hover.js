// The card next to the token under the pointer. Users of the keyboard find the same data in the panel.
import { h } from '../dom.js';
import { NEVER } from './run-columns.js';
import { surprise } from './color.js';
import { displayText } from './glyphs.js';
import { percent } from './candidates.js';

const DELAY_MS = 120;

/** Returns the lines of the card for a row. */
function cardLines(run, i) {
  const logprob = run.logprob(i);
  const bits = surprise(run, i);
  const origin = run.isPrompt(i) ? 'prompt' : run.isForced(i) ? 'forced' : 'sampled';
  return [
    logprob === null ? origin : `${origin} at ${percent(Math.exp(logprob))}`,
    bits === null ? '' : `${bits.toFixed(2)} bit`,
    run.rank(i) === null ? '' : `rank ${run.rank(i)}`,
    run.removedAt(i) === NEVER ? '' : `removed at event ${run.removedAt(i) - 1}`,
  ].filter(Boolean);
}

/** Shows the card while the pointer rests on a token in `root`, until the signal aborts. */
export function showCardOnHover(root, run, signal) {
  const card = h('div', { class: 'card', 'aria-hidden': 'true' });
  card.hidden = true;
  document.body.append(card);
  signal.addEventListener('abort', () => card.remove());
  let timer = 0;
  const hide = () => {
    clearTimeout(timer);
    card.hidden = true;
  };
  root.addEventListener('pointerover', (event) => {
    hide();
    const token = event.target.closest('.token');
    if (!token || event.pointerType !== 'mouse' || event.buttons) return;
    timer = setTimeout(() => {
      const i = token._row;
      card.replaceChildren(h('b', {}, displayText(run.text(i))), ...cardLines(run, i).map((text) => h('span', {}, text)));
      card.hidden = false;
      const bounds = token.getClientRects()[0] ?? token.getBoundingClientRect();
      const left = Math.min(bounds.left, innerWidth - card.offsetWidth - 8);
      const fitsBelow = bounds.bottom + 6 + card.offsetHeight < innerHeight;
      card.style.left = `${Math.max(8, left)}px`;
      card.style.top = `${fitsBelow ? bounds.bottom + 6 : bounds.top - 6 - card.offsetHeight}px`;
    }, DELAY_MS);
  }, { signal });
  root.addEventListener('pointerleave', hide, { signal });
  root.addEventListener('scroll', hide, { signal, passive: true });
}
