// The run on one strip: surprise by event, with ticks for backtracks, actions and errors. Click or drag to go there.
import { h, palette, surface } from '../dom.js';
import { surprise } from './colour.js';
import { NEVER } from './branches.js';

/** Highest surprise and whether rows were erased, per pixel column; pure. */
export function bins(run, width) {
  const high = new Float32Array(width);
  const erased = new Uint8Array(width);
  const span = Math.max(1, run.eventCount);
  for (let i = 0; i < run.count; i += 1) {
    if (run.isPrompt(i)) continue;
    const x = Math.min(width - 1, Math.floor((run.born(i) / span) * width));
    const value = surprise(run, i);
    if (value !== null && value > high[x]) high[x] = value;
    if (run.died(i) !== NEVER) erased[x] = 1;
  }
  return { high, erased };
}

export class Overview {
  #box;
  #canvas;
  #run;
  #cursor = h('div', { class: 'cursor' });

  constructor(box, run, onSeek) {
    this.#box = box;
    this.#run = run;
    this.#canvas = box.querySelector('canvas');
    box.append(this.#cursor);
    const seek = (event) => {
      const at = box.getBoundingClientRect();
      onSeek(Math.round(((event.clientX - at.left) / at.width) * run.eventCount));
    };
    box.addEventListener('pointerdown', (event) => {
      box.setPointerCapture(event.pointerId);
      seek(event);
    });
    box.addEventListener('pointermove', (event) => { if (box.hasPointerCapture(event.pointerId)) seek(event); });
    new ResizeObserver(() => this.draw()).observe(box);
    document.addEventListener('theme', () => this.draw());
  }

  draw() {
    const s = surface(this.#canvas);
    if (!s) return;
    const { g, w, h: height } = s;
    const c = palette(['spark', 'erased', 'accent', 'forced', 'line-strong']);
    const run = this.#run;
    const step = 2;
    const { high, erased } = bins(run, Math.max(1, Math.floor(w / step)));
    g.clearRect(0, 0, w, height);
    const floor = height - 2;
    // A token takes about three events: in a short run its bar may be as wide as that leaves room for.
    const wide = Math.max(step - 0.5, Math.min(10, (w / Math.max(1, run.eventCount)) * 2));
    high.forEach((value, x) => {
      if (!value && !erased[x]) return;
      g.fillStyle = erased[x] ? c.erased : c.spark;
      g.globalAlpha = erased[x] ? 0.55 : 0.9;
      const tall = Math.max(1.5, Math.sqrt(Math.min(1, value / 12)) * (height - 14));
      g.fillRect(x * step, floor - tall, wide, tall);
    });
    g.globalAlpha = 1;
    for (const mark of run.marks) {
      if (mark.kind === 'log') continue;
      const x = (mark.seq / Math.max(1, run.eventCount)) * w;
      g.fillStyle = mark.kind === 'error' || /^Backtrack/.test(mark.label) ? c.erased : /^Force/.test(mark.label) ? c.forced : c.accent;
      g.fillRect(x - 0.75, 0, mark.kind === 'error' ? 3 : 1.5, mark.kind === 'error' ? 9 : 6);
    }
  }

  at(n) {
    const share = this.#run.eventCount ? n / this.#run.eventCount : 0;
    this.#cursor.style.left = `calc(${(share * 100).toFixed(3)}% - 1px)`;
  }
}
