// The run as a strip drawn behind the slider: surprise by event, with ticks for backtracks, actions and errors, and dots for notes and feedback.
import { palette, scheduleDrawing, prepareCanvas } from '../dom.js';
import { surprise } from './color.js';
import { NEVER } from './rows.js';
import { toneOf } from './lanes.js';

/** Divides the events of a run into `width` bins; returns the highest surprise of each, and whether rows were removed. Pure. */
export function bins(run, width) {
  const high = new Float32Array(width);
  const removed = new Uint8Array(width);
  const span = Math.max(1, run.eventCount);
  for (let i = 0; i < run.count; i += 1) {
    if (run.isPrompt(i)) continue;
    const x = Math.min(width - 1, Math.floor((run.addedAt(i) / span) * width));
    const value = surprise(run, i);
    if (value !== null && value > high[x]) high[x] = value;
    if (run.removedAt(i) !== NEVER) removed[x] = 1;
  }
  return { high, removed };
}

export class Overview {
  #canvas;
  #slider;
  #run;
  /** Notes and feedback on tokens: `{row, tone}`. */
  annotations = [];

  /** `box` contains a canvas and a range input, the slider, which covers the canvas. */
  constructor(box, run, signal) {
    this.#run = run;
    this.#canvas = box.querySelector('canvas');
    this.#slider = box.querySelector('input');
    this.redraw = scheduleDrawing(box, () => this.#draw(), signal);
  }

  #draw() {
    const s = prepareCanvas(this.#canvas);
    if (!s) return;
    const { context, width, height } = s;
    const c = palette(['spark', 'danger', 'accent', 'forced', 'line-strong', 'ok', 'bg']);
    const run = this.#run;
    const step = 2;
    const { high, removed } = bins(run, Math.max(1, Math.floor(width / step)));
    const floor = height - 2;
    // A token has about three events, so in a short run a bar of two events does not cover the next bar.
    const barWidth = Math.max(step - 0.5, Math.min(10, (width / Math.max(1, run.eventCount)) * 2));
    high.forEach((value, x) => {
      if (!value && !removed[x]) return;
      context.fillStyle = removed[x] ? c.danger : c.spark;
      context.globalAlpha = removed[x] ? 0.55 : 0.9;
      const barHeight = Math.max(1.5, Math.sqrt(Math.min(1, value / 12)) * (height - 14));
      context.fillRect(x * step, floor - barHeight, barWidth, barHeight);
    });
    context.globalAlpha = 1;
    for (const mark of run.marks) {
      if (mark.kind === 'log') continue;
      const x = (mark.seq / Math.max(1, run.eventCount)) * width;
      context.fillStyle = c[toneOf(mark)];
      context.fillRect(x - 0.75, 0, mark.kind === 'error' ? 3 : 1.5, mark.kind === 'error' ? 9 : 6);
    }
    for (const { row, tone } of this.annotations) {
      context.beginPath();
      context.arc((run.addedAt(row) / Math.max(1, run.eventCount)) * width, 5, 4, 0, 2 * Math.PI);
      context.fillStyle = c[{ good: 'ok', bad: 'danger', neutral: 'accent', remark: 'accent' }[tone]];
      context.fill();
      context.lineWidth = 1.5;
      context.strokeStyle = c.bg;
      context.stroke();
    }
  }

  /** Sets the slider to event `n`. */
  at(n) {
    const count = this.#run.eventCount;
    if (Number(this.#slider.max) !== count) this.#slider.max = String(count);
    this.#slider.disabled = count === 0;
    this.#slider.value = String(n);
  }
}
