// The overview of a run, a strip behind the slider: bars for the surprise of its tokens, ticks for backtracks, actions and
// errors, and dots for notes and feedback.
import { palette, prepareCanvas, scheduleDrawing } from '../canvas.js';
import { surprise } from './color.js';
import { colorNameOf } from './lanes.js';
import { NEVER } from './run-columns.js';

/** Distance between two bars, in pixels. */
const BIN_WIDTH = 2;

/**
 * Divides the events of a run into `count` bins of the same size. Returns the highest surprise of the tokens in each bin, and 1
 * in `removed` if one of them was removed later.
 */
function binsOf(run, count) {
  const highest = new Float32Array(count);
  const removed = new Uint8Array(count);
  const eventCount = Math.max(1, run.eventCount);
  for (let i = 0; i < run.count; i += 1) {
    if (run.isPrompt(i)) continue;
    const bin = Math.min(count - 1, Math.floor((run.addedAt(i) / eventCount) * count));
    highest[bin] = Math.max(highest[bin], surprise(run, i) ?? 0);
    if (run.removedAt(i) !== NEVER) removed[bin] = 1;
  }
  return { highest, removed };
}

export class Overview {
  #canvas;
  #slider;
  #run;
  /** Notes and feedback on tokens, `{row, tone}`. */
  annotations = [];

  /** `box` contains a canvas and a range input, the slider, which covers the canvas. */
  constructor(box, run, signal) {
    this.#run = run;
    this.#canvas = box.querySelector('canvas');
    this.#slider = box.querySelector('input');
    this.redraw = scheduleDrawing(box, () => this.#draw(), signal);
  }

  #draw() {
    const drawing = prepareCanvas(this.#canvas);
    if (!drawing) return;
    const colors = palette(['spark', 'danger', 'accent', 'forced', 'line-strong', 'ok', 'bg']);
    this.#drawBars(drawing, colors);
    const { context, width } = drawing;
    const xOf = (event) => (event / Math.max(1, this.#run.eventCount)) * width;
    for (const mark of this.#run.marks) {
      if (mark.kind === 'log') continue;
      context.fillStyle = colors[colorNameOf(mark)];
      context.fillRect(xOf(mark.seq) - 0.75, 0, mark.kind === 'error' ? 3 : 1.5, mark.kind === 'error' ? 9 : 6);
    }
    for (const { row, tone } of this.annotations) {
      context.beginPath();
      context.arc(xOf(this.#run.addedAt(row)), 5, 4, 0, 2 * Math.PI);
      context.fillStyle = colors[{ good: 'ok', bad: 'danger', neutral: 'accent', remark: 'accent' }[tone]];
      context.fill();
      context.lineWidth = 1.5;
      context.strokeStyle = colors.bg;
      context.stroke();
    }
  }

  #drawBars({ context, width, height }, colors) {
    const { highest, removed } = binsOf(this.#run, Math.max(1, Math.floor(width / BIN_WIDTH)));
    // In a short run, a bar is as wide as two events. A token has about three events, so it does not cover the next bar.
    const barWidth = Math.max(BIN_WIDTH - 0.5, Math.min(10, (width / Math.max(1, this.#run.eventCount)) * 2));
    highest.forEach((value, bin) => {
      if (!value && !removed[bin]) return;
      context.fillStyle = removed[bin] ? colors.danger : colors.spark;
      context.globalAlpha = removed[bin] ? 0.55 : 0.9;
      const barHeight = Math.max(1.5, Math.sqrt(Math.min(1, value / 12)) * (height - 14));
      context.fillRect(bin * BIN_WIDTH, height - 2 - barHeight, barWidth, barHeight);
    });
    context.globalAlpha = 1;
  }

  /** Moves the slider to event `n`. */
  moveCursor(n) {
    const count = this.#run.eventCount;
    if (Number(this.#slider.max) !== count) this.#slider.max = String(count);
    this.#slider.disabled = count === 0;
    this.#slider.value = String(n);
  }
}
