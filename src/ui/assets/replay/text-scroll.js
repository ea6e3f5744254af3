// Scrolling of a run's text: to tokens, and to the end while a live run grows.

/** Distance from its end, in pixels, at which the text still counts as being at its end. */
const NEAR_END_PX = 40;

export class TextScroll {
  #root;
  /** The span to which the text scrolls, or null. */
  #target = null;
  /** Newest known scroll position. */
  #scrollTop = 0;
  /** True while the text is kept at its end, unless the user has scrolled back. */
  #isFollowing = false;
  #isScrolledBack = false;
  /** Observes the parts. New blocks get their actual heights only in the next frame, so the end moves then. */
  #resized = new ResizeObserver(() => this.#scrollToEnd());

  constructor(root) {
    this.#root = root;
    root.addEventListener('scroll', () => this.#onScroll());
  }

  /** Keeps the text at its end when the size of a part of it changes. */
  observe(part) { this.#resized.observe(part); }

  /** Notices that the user has scrolled back. It is called before rows are added, because the event of a scroll may arrive after them. */
  noticeScroll() {
    if (this.#root.scrollTop < this.#scrollTop) this.#onScroll();
  }

  /** Scrolls the text so that a span is visible, at some distance from the edges. Without a span, it scrolls no further. */
  reveal(span) {
    this.#target = span;
    if (span) this.#scrollTo(span);
  }

  #scrollTo(span, tries = 3) {
    const view = this.#root.getBoundingClientRect();
    const bounds = span.getBoundingClientRect();
    if (bounds.width === 0 && bounds.height === 0) return;
    const margin = Math.min(80, view.height / 4);
    // `scrollIntoView` would also scroll the page on small screens.
    const above = view.top + margin - bounds.top;
    const below = bounds.bottom - view.bottom + margin;
    if (above <= 0 && below <= 0) return;
    if (Math.max(above, below) > view.height) this.#root.scrollTop += bounds.top - view.top - view.height / 3;
    else this.#root.scrollTop += above > 0 ? -above : below;
    // Blocks that were off screen get their actual heights only now, so the position may have changed.
    if (tries) requestAnimationFrame(() => { if (this.#target === span) this.#scrollTo(span, tries - 1); });
  }

  /** Keeps the text at its end while `isFollowing` is true. When the user scrolls back, it stays there until the user returns to the end. */
  follow(isFollowing) {
    this.#isFollowing = isFollowing;
    this.#scrollToEnd();
  }

  /** Lets the text follow its end again, although the user has scrolled back. */
  resumeFollowing() { this.#isScrolledBack = false; }

  #scrollToEnd() {
    if (!this.#isFollowing || this.#isScrolledBack) return;
    this.#root.scrollTop = this.#root.scrollHeight;
    this.#scrollTop = this.#root.scrollTop;
  }

  #onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.#root;
    const rest = scrollHeight - clientHeight - scrollTop;
    // If the text becomes shorter, the browser scrolls back, but to the end of the text. Positions can be fractions of a pixel.
    if (scrollTop < this.#scrollTop) this.#isScrolledBack = rest > 1;
    else if (rest <= NEAR_END_PX) this.#isScrolledBack = false;
    this.#scrollTop = scrollTop;
  }
}
