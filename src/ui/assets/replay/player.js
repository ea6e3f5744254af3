// Plays a run at the recorded speed or at a number of tokens per second, after `play()`.

export class Player {
  playing = false;
  #run;
  #hooks;
  #speed = '20';
  #frame = 0;
  /** Time of the last frame. */
  #last = 0;
  /** Time that has passed since the cursor last moved. */
  #elapsedMs = 0;

  /** `hooks`: `at()`, `go(n)`, `changed(playing)`. */
  constructor(run, hooks) {
    this.#run = run;
    this.#hooks = hooks;
  }

  setSpeed(speed) {
    this.#speed = speed;
    this.#elapsedMs = 0;
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  play() {
    if (this.playing || !this.#run.eventCount) return;
    this.playing = true;
    if (this.#hooks.at() >= this.#run.eventCount) this.#hooks.go(0);
    this.#last = performance.now();
    this.#elapsedMs = 0;
    this.#hooks.changed(true);
    this.#frame = requestAnimationFrame((t) => this.#tick(t));
  }

  pause() {
    if (!this.playing) return;
    this.playing = false;
    cancelAnimationFrame(this.#frame);
    this.#hooks.changed(false);
  }

  #tick(now) {
    if (!this.playing) return;
    this.#elapsedMs += now - this.#last;
    this.#last = now;
    const from = this.#hooks.at();
    const n = this.#speed === 'real' ? this.#atRecordedSpeed(from) : this.#atConstantRate(from);
    if (n !== from) this.#hooks.go(n);
    if (n >= this.#run.eventCount) this.pause();
    else this.#frame = requestAnimationFrame((t) => this.#tick(t));
  }

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

  #atConstantRate(from) {
    const msPerToken = 1000 / Number(this.#speed);
    let n = from;
    while (this.#elapsedMs >= msPerToken && n < this.#run.eventCount) {
      this.#elapsedMs -= msPerToken;
      n += 1;
      while (n < this.#run.eventCount && this.#run.type(n) !== 'Added') n += 1;
    }
    return n;
  }
}
