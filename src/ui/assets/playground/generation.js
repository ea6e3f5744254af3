// The request that generates a run. A new one replaces the one before.
import { base, errorOf, fetchUrl } from '../api.js';
import { cancelRun } from '../cancel-run.js';
import { readEvents } from '../sse.js';

/** Throws the error of an event. The replay shows the text of the others. */
function checkEvent({ data }) {
  if (!data.startsWith('{')) return;
  const { error } = JSON.parse(data);
  if (error) throw new Error(error.message ?? 'The run failed.');
}

/** Returns the status text at the end of a run. */
function endText(run, startedAt) {
  if (!run) return 'Done.';
  const seconds = run.generation_us ? run.generation_us / 1e6 : (performance.now() - startedAt) / 1000;
  const speed = run.completion_tokens && seconds > 0 ? `, ${(run.completion_tokens / seconds).toFixed(1)} tok/s` : '';
  return `${run.status ?? 'done'}: ${run.completion_tokens ?? 0} tokens${speed}${run.message ? ` · ${run.message}` : ''}`;
}

export class Generation {
  #hooks;
  /** The active request, `{controller, runId, isStopped}`, or null. `runId` is null before its run has started. */
  #active = null;

  /**
   * `hooks.onRun(id, body, ended)` is called when the run of a request has started; its replay calls `ended(summary)`.
   * `hooks.onStatus(text)` and `hooks.onProblem(text)` show a text, and `hooks.onBusy(isBusy)` is called at the start and at the
   * end of a request.
   */
  constructor(hooks) {
    this.#hooks = hooks;
  }

  get isActive() { return this.#active !== null; }

  /** Cancels the run of the active request, and then ends the request. */
  async stop() {
    const active = this.#active;
    if (!active) return;
    active.isStopped = true;
    // A run whose request is only aborted is recorded as one whose client disconnected.
    if (active.runId) await cancelRun(active.runId).catch(() => { /* it ends with the request */ });
    active.controller.abort();
  }

  /** Sends a request of `requestOf()` and reads its response to the end. */
  async start({ path, body }) {
    const { onRun, onStatus, onProblem, onBusy } = this.#hooks;
    this.stop();
    const active = { controller: new AbortController(), runId: null, isStopped: false };
    this.#active = active;
    // Another request may have replaced this one.
    const isCurrent = () => this.#active === active;
    const startedAt = performance.now();
    let status = 'Done.';
    onBusy(true);
    onStatus('Waiting for the model…');
    try {
      const response = await fetchUrl(base + path, {
        method: 'POST',
        headers: { 'Content-Type': 'application/json' },
        body: JSON.stringify(body),
        signal: active.controller.signal,
      });
      if (!response.ok) throw await errorOf(response);
      const id = response.headers.get('x-thunder-run-id');
      if (id) {
        active.runId = id;
        onRun(id, body, (run) => {
          status = endText(run, startedAt);
          if (isCurrent() || !this.isActive) onStatus(status);
        });
      }
      onStatus('Generating…');
      // To the end, because a run pauses if its client does not read.
      await readEvents(response, checkEvent);
      if (isCurrent()) onStatus(status);
    } catch (error) {
      if (!isCurrent()) return;
      onStatus(active.isStopped ? 'Stopped.' : '');
      if (!active.isStopped) onProblem(error.message);
    } finally {
      if (isCurrent()) {
        this.#active = null;
        onBusy(false);
      }
    }
  }
}
