// Plays a run at recorded speed or at a number of tokens per second. Never starts by itself.

export class Player {
  playing = false;
  #run;
  #hooks;
  #speed = '20';
  #frame = 0;
  #last = 0;
  #debt = 0;

  /** `hooks`: `at()`, `go(n)`, `changed(playing)`. */
  constructor(run, hooks) {
    this.#run = run;
    this.#hooks = hooks;
  }

  setSpeed(speed) {
    this.#speed = speed;
    this.#debt = 0;
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
    this.#debt = 0;
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
    this.#debt += now - this.#last;
    this.#last = now;
    const from = this.#hooks.at();
    const n = this.#speed === 'real' ? this.#recorded(from) : this.#steady(from);
    if (n !== from) this.#hooks.go(n);
    if (n >= this.#run.eventCount) this.pause();
    else this.#frame = requestAnimationFrame((t) => this.#tick(t));
  }

  #recorded(from) {
    let n = from;
    while (n < this.#run.eventCount) {
      const gap = Math.max(0, (this.#run.time(n + 1) ?? this.#run.time(n)) - this.#run.time(n));
      if (gap > this.#debt) break;
      this.#debt -= gap;
      n += 1;
    }
    return n;
  }

  #steady(from) {
    const each = 1000 / Number(this.#speed);
    let n = from;
    while (this.#debt >= each && n < this.#run.eventCount) {
      this.#debt -= each;
      n += 1;
      while (n < this.#run.eventCount && this.#run.kind(n) !== 3) n += 1;
    }
    return n;
  }
}
