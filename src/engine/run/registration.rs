//! Registration of a run until it ends: reserves its request id, counts it as a run of the engine, and reports its end
//! if the decode thread panics.

use super::request_ids::ActiveRequestId;
use crate::engine::output::Output;
use crate::events::{EndCause, RunEnd, RunId};
use crate::recording::Signal;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Registration of one run.
pub struct Registration {
    /// Reserves the request id.
    active_id: Option<ActiveRequestId>,
    panic_guard: PanicGuard,
    /// The engine counts the clones of this reference.
    _run_counter: Arc<()>,
}

impl Registration {
    /// Registers a run.
    pub fn new(active_id: ActiveRequestId, panic_guard: PanicGuard, run_counter: Arc<()>) -> Self {
        Self { active_id: Some(active_id), panic_guard, _run_counter: run_counter }
    }

    /// Releases the request id. Called before the end is sent to the client, which may then use the id again
    /// immediately.
    pub fn release_id(&mut self) {
        self.active_id = None;
    }

    /// Ends the registration of a run whose end is recorded.
    pub fn end(self) {
        self.panic_guard.disarm();
    }
}

/// Guard that, unless it was disarmed, reports the end of its run when it is dropped: if the decode thread panics, or
/// stops before it receives the run.
pub struct PanicGuard {
    run_id: RunId,
    client: mpsc::Sender<Output>,
    recorder: Option<mpsc::Sender<Signal>>,
    unfinished: RunEnd,
    /// True if the run has ended normally.
    disarmed: bool,
}

impl PanicGuard {
    /// Creates the guard of a run. It reports `unfinished` to the client and, for a recorded run, to the recorder.
    pub fn new(
        run_id: RunId,
        client: mpsc::Sender<Output>,
        recorder: Option<mpsc::Sender<Signal>>,
        unfinished: RunEnd,
    ) -> Self {
        Self { run_id, client, recorder, unfinished, disarmed: false }
    }

    /// Disarms the guard: the run has ended normally.
    pub fn disarm(mut self) {
        self.disarmed = true;
    }
}

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if self.disarmed {
            return;
        }
        let reason = if std::thread::panicking() {
            "the decode thread panicked; restart the server"
        } else {
            "the engine has stopped"
        };
        let mut end = self.unfinished.clone();
        end.set_aborted(EndCause::EngineStopped, reason.into());
        let end = Arc::new(end);
        // The thread must not wait here. A client that does not get the output sees a closed channel.
        let _ = self.client.try_send(Output::Ended(Arc::clone(&end)));
        if let Some(recorder) = &self.recorder {
            let _ = recorder.try_send(Signal::Ended(self.run_id, end));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::PanicGuard;
    use crate::engine::output::Output;
    use crate::events::{EndCause, FinishReason, RunEnd, RunId, RunStatus, Usage, system};
    use crate::recording::Signal;
    use tokio::sync::mpsc;

    #[test]
    fn dropped_guard_reports_stopped_engine() {
        let (client, mut output) = mpsc::channel(1);
        let (recorder, mut signals) = mpsc::channel(1);
        let unfinished = RunEnd::empty(system::now(), Usage::default());
        drop(PanicGuard::new(RunId::now(), client, Some(recorder), unfinished));
        let aborted = |end: &RunEnd| (end.status, end.finish.reason, end.finish.cause);
        let expected = (RunStatus::Failed, FinishReason::Cancelled, Some(EndCause::EngineStopped));
        assert!(matches!(output.try_recv(), Ok(Output::Ended(end)) if aborted(&end) == expected));
        assert!(matches!(signals.try_recv(), Ok(Signal::Ended(_, end)) if aborted(&end) == expected));
    }
}
