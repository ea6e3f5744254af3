// The position of the cursor as text: above the text of the run, on the slider, and for screen readers.
import { h } from '../dom.js';
import { displayText } from './glyphs.js';

/** Delay of the announcement, so that a key that is held down causes only one. */
const ANNOUNCE_DELAY_MS = 250;

export class Position {
  #run;
  #elements;
  #signal;
  /** Number of tokens in the answer of a run that has ended, or null before it is counted. */
  #finalLength = null;
  #timer = 0;

  /** `elements` are `where` and `slider`, which show the position, and `announcer`, which is not changed after the signal aborts. */
  constructor(run, elements, signal) {
    this.#run = run;
    this.#elements = elements;
    this.#signal = signal;
  }

  /** Shows the position of a cursor, and announces it unless `isQuiet`. Returns the number of tokens in the answer so far. */
  show(cursor, { isLive, isQuiet }) {
    const run = this.#run;
    const { where, slider, announcer } = this.#elements;
    const { n, event, atEnd } = cursor;
    const total = this.#finalLength ?? run.answerLength(run.eventCount);
    if (!isLive) this.#finalLength = total;
    const count = atEnd ? total : run.answerLength(n);
    const seconds = event === null ? 0 : run.time(event) / 1000;
    const time = seconds ? ` · ${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : '';
    where.replaceChildren('token ', h('b', {}, String(count)), ` / ${total} · event `, h('b', {}, !atEnd ? String(n) : isLive ? 'live' : 'end'), ` / ${run.eventCount}${time}`);
    const spoken = this.#spoken(cursor, count, total);
    slider.setAttribute('aria-valuetext', spoken);
    clearTimeout(this.#timer);
    if (!isQuiet) this.#timer = setTimeout(() => { if (!this.#signal.aborted) announcer.textContent = spoken; }, ANNOUNCE_DELAY_MS);
    return total;
  }

  /** Returns the position for screen readers. */
  #spoken({ n, atEnd, addedRow: row }, count, total) {
    const run = this.#run;
    if (row === null) return atEnd ? 'end of the run' : `event ${n} of ${run.eventCount}`;
    const logprob = run.logprob(row);
    const probability = logprob === null ? '' : `, probability ${Math.round(Math.exp(logprob) * 100)} percent`;
    const place = run.endsGeneration(row) ? 'end of the generation' : `token ${count} of ${total}`;
    return `${place}, ${displayText(run.text(row))}${probability}, ${run.isForced(row) ? 'forced' : 'sampled'}`;
  }
}
