// Playback of a run: moves the cursor at the recorded speed, or by a fixed number of tokens per second. It owns the button that
// starts playback, and the field for the speed.

export class Player {
  isPlaying = false;
  #run;
  #button;
  /** The field whose value is `recorded`, or tokens per second. */
  #speed;
  #hooks;
  #frame = 0;
  /** Time of the last frame. */
  #lastFrameAt = 0;
  /** Time that has passed since the cursor last moved. */
  #elapsedMs = 0;

  /** `hooks.at()` returns the event of the cursor, `hooks.go(n)` moves it, and `hooks.ended()` is called when playback ends. */
  constructor(run, button, speed, signal, hooks) {
    this.#run = run;
    this.#button = button;
    this.#speed = speed;
    this.#hooks = hooks;
    speed.addEventListener('change', () => { this.#elapsedMs = 0; }, { signal });
  }

  /** Selects the next speed, or the previous one if `step` is -1. */
  changeSpeed(step) {
    this.#speed.selectedIndex = Math.max(0, Math.min(this.#speed.options.length - 1, this.#speed.selectedIndex + step));
    this.#elapsedMs = 0;
  }

  toggle() {
    if (this.isPlaying) this.pause();
    else this.play();
  }

  play() {
    if (this.isPlaying || !this.#run.eventCount) return;
    this.#setPlaying(true);
    if (this.#hooks.at() >= this.#run.eventCount) this.#hooks.go(0);
    this.#lastFrameAt = performance.now();
    this.#elapsedMs = 0;
    this.#frame = requestAnimationFrame((t) => this.#tick(t));
  }

  pause() {
    if (!this.isPlaying) return;
    this.#setPlaying(false);
    cancelAnimationFrame(this.#frame);
    this.#hooks.ended();
  }

  #setPlaying(isPlaying) {
    this.isPlaying = isPlaying;
    this.#button.setAttribute('aria-pressed', String(isPlaying));
    this.#button.querySelector('.visually-hidden').textContent = isPlaying ? 'Pause' : 'Play';
  }

  #tick(now) {
    if (!this.isPlaying) return;
    this.#elapsedMs += now - this.#lastFrameAt;
    this.#lastFrameAt = now;
    const from = this.#hooks.at();
    const n = this.#speed.value === 'recorded' ? this.#atRecordedSpeed(from) : this.#atConstantRate(from);
    if (n !== from) this.#hooks.go(n);
    if (n >= this.#run.eventCount) this.pause();
    else this.#frame = requestAnimationFrame((t) => this.#tick(t));
  }

  /** Returns the event that the cursor reaches by now, and subtracts the time up to it from the elapsed time. */
  #atRecordedSpeed(from) {
    let n = from;
    while (n < this.#run.eventCount) {
      const gap = Math.max(0, (this.#run.time(n + 1) ?? this.#run.time(n)) - this.#run.time(n));
      if (gap > this.#elapsedMs) break;
      this.#elapsedMs -= gap;
      n += 1;
    }
    return n;
  }

  /** Like `#atRecordedSpeed`, but by a fixed number of tokens per second. */
  #atConstantRate(from) {
    const msPerToken = 1000 / Number(this.#speed.value);
    let n = from;
    while (this.#elapsedMs >= msPerToken && n < this.#run.eventCount) {
      this.#elapsedMs -= msPerToken;
      n += 1;
      while (n < this.#run.eventCount && this.#run.type(n) !== 'Added') n += 1;
    }
    return n;
  }
}
