// Delay between the requests of a page that is updated until something has ended.

const MAX_MS = 30_000;

/**
 * Limits the time that the server spends on updates: it computes for at most a tenth of the time, and each error doubles the
 * delay.
 */
export class PollDelay {
  #minMs;
  #ms;

  /** `minMs` is the delay while the server answers at once. */
  constructor(minMs) {
    this.#minMs = minMs;
    this.#ms = minMs;
  }

  get ms() {
    return this.#ms;
  }

  /** Sets the delay after an answer to a request sent at `startedAt`, a time of `performance.now()`. */
  answered(startedAt) {
    this.#ms = Math.max(this.#minMs, 9 * (performance.now() - startedAt));
  }

  failed() {
    this.#ms = Math.max(this.#ms, Math.min(2 * this.#ms, MAX_MS));
  }

  async elapse() {
    await new Promise((resolve) => setTimeout(resolve, this.#ms));
  }
}
