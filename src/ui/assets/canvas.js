// Drawing on canvases in the colors of the theme.
import { h } from './dom.js';

/** Colors of the current theme by the name of their CSS variable. */
const colors = new Map();
globalThis.document?.addEventListener('theme', () => colors.clear());

/** Returns the colors of CSS variables, by their names, for drawing on a canvas. The browser resolves `light-dark()`. */
export function palette(names) {
  const unresolved = names.filter((name) => !colors.has(name));
  if (unresolved.length) {
    const probe = h('i', { class: 'visually-hidden' });
    document.body.append(probe);
    for (const name of unresolved) {
      probe.style.color = `var(--${name})`;
      colors.set(name, getComputedStyle(probe).color);
    }
    probe.remove();
  }
  return Object.fromEntries(names.map((name) => [name, colors.get(name)]));
}

/**
 * Clears a canvas and adapts its resolution to its size on the page and to the screen. Returns its context, which draws in CSS
 * pixels, with the width and height, or null if the canvas is hidden.
 */
export function prepareCanvas(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return null;
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const [deviceWidth, deviceHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
  // Setting the size causes a new layout of the page, even if the value is the same.
  if (canvas.width !== deviceWidth) canvas.width = deviceWidth;
  if (canvas.height !== deviceHeight) canvas.height = deviceHeight;
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/**
 * Calls `draw` in the next frame when the size of `box` or the theme has changed, and when the returned function is called.
 * `draw` is not called before the browser has laid out `box`, so it does not delay the first frame of the page. After
 * `signal` aborts, it is no longer called.
 */
export function scheduleDrawing(box, draw, signal) {
  let hasLayout = false;
  let frame = 0;
  const redraw = () => {
    if (hasLayout && !signal.aborted) frame ||= requestAnimationFrame(() => { frame = 0; draw(); });
  };
  const observer = new ResizeObserver(() => { hasLayout = true; redraw(); });
  observer.observe(box);
  document.addEventListener('theme', redraw, { signal });
  signal.addEventListener('abort', () => { observer.disconnect(); cancelAnimationFrame(frame); });
  return redraw;
}
