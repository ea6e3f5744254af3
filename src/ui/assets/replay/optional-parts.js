// The parts of a replay whose code is loaded when they are first shown: attention, and the images of the prompt.
import { toast } from '../dom.js';

export class OptionalParts {
  /** The `Attention`, or null. */
  attention = null;
  /** The `Images`, or null. */
  images = null;
  #signal;
  #changed;
  #isLoadingAttention = false;

  /** No part is added after the signal aborts. `changed()` is called when the images are added. */
  constructor(signal, changed) {
    this.#signal = signal;
    this.#changed = changed;
  }

  /** Loads and returns attention, or null if it is already being loaded, or if that fails. The hooks are those of `Attention`. */
  async loadAttention(run, id, options, hooks) {
    if (this.#isLoadingAttention) return null;
    this.#isLoadingAttention = true;
    try {
      const { Attention } = await import('./attention.js');
      if (!this.#signal.aborted) this.attention = new Attention(run, id, { ...options, hooks, signal: this.#signal });
    } catch (error) {
      this.#isLoadingAttention = false;
      toast(`Attention could not be loaded: ${error.message}`);
    }
    return this.attention;
  }

  /** Shows the images of a prompt in the text. `load()` returns their module; `id` is null in an exported page. */
  async showImages(load, id, prompt, text) {
    try {
      const { Images } = await load();
      if (this.#signal.aborted || this.images) return;
      this.images = new Images(id, prompt, text);
      document.addEventListener('theme', () => this.images.draw(), { signal: this.#signal });
      this.#changed();
    } catch (error) {
      toast(`The images could not be shown: ${error.message}`);
    }
  }
}
