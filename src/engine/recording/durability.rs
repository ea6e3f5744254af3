//! Reports the end of a run that must be stored before its client receives the end.

use crate::engine::control::RunControl;
use crate::engine::output::Output;
use crate::events::{EndCause, RunEnd};
use crate::recording::{DurabilityAck, NotStored};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Maximum time from the end of a run until it is stored.
const STORE_TIMEOUT: Duration = Duration::from_secs(45);

/// Reason why a run that must be recorded is not known to be stored.
#[derive(Debug, thiserror::Error)]
enum NotDurable {
    #[error(transparent)]
    NotStored(NotStored),
    #[error("the recorder has stopped")]
    RecorderStopped,
    #[error("it was not stored within {} s", STORE_TIMEOUT.as_secs())]
    Timeout,
}

/// Returns a channel that forwards the outputs of a run, and holds back its end until the run is stored. If the run
/// cannot be stored, its end is an error; if it is still running then, `control` ends it.
pub fn hold_end(output: mpsc::Receiver<Output>, ack: DurabilityAck, control: RunControl) -> mpsc::Receiver<Output> {
    // Outputs that the client has not read wait in `output`, which limits their bytes.
    let (client, held) = mpsc::channel(1);
    tokio::spawn(forward(output, ack, control, client));
    held
}

async fn forward(
    mut output: mpsc::Receiver<Output>,
    mut ack: DurabilityAck,
    control: RunControl,
    client: mpsc::Sender<Output>,
) {
    // `None` until the ack arrives.
    let mut outcome: Option<Result<(), NotDurable>> = None;
    loop {
        let next = tokio::select! {
            stored = wait_until_stored(&mut ack), if outcome.is_none() => {
                if let Err(reason) = &stored {
                    // Fails if the run has ended. Otherwise its next outputs are the rest of its text and its end.
                    let _ = control.stop(EndCause::NotRecorded, reason.message()).await;
                }
                outcome = Some(stored);
                continue;
            }
            output = output.recv() => output,
            () = client.closed() => return,
        };
        let next = match next {
            Some(Output::Ended(end)) => {
                // The recording of a run with this cause has failed.
                let failed = end.finish.cause == Some(EndCause::NotRecorded);
                let end = if failed { end } else { await_storage(end, outcome, &mut ack).await };
                let _ = client.send(Output::Ended(end)).await;
                return;
            }
            Some(next) => next,
            None => return,
        };
        if client.send(next).await.is_err() {
            return;
        }
    }
}

/// Waits until an ended run is stored, unless the `outcome` is known. Returns the end for the client: that of the run, or
/// an error if it is not known to be stored.
async fn await_storage(
    end: Arc<RunEnd>,
    outcome: Option<Result<(), NotDurable>>,
    ack: &mut DurabilityAck,
) -> Arc<RunEnd> {
    let outcome = match outcome {
        Some(outcome) => outcome,
        None => timeout(STORE_TIMEOUT, wait_until_stored(ack)).await.unwrap_or(Err(NotDurable::Timeout)),
    };
    let Err(reason) = outcome else { return end };
    let mut end = RunEnd::clone(&end);
    end.set_aborted(EndCause::NotRecorded, reason.message());
    Arc::new(end)
}

async fn wait_until_stored(ack: &mut DurabilityAck) -> Result<(), NotDurable> {
    ack.await.map_err(|_| NotDurable::RecorderStopped)?.map_err(NotDurable::NotStored)
}

impl NotDurable {
    /// Returns the message for the client.
    fn message(&self) -> String {
        format!("the run must be recorded, but {self}")
    }
}

#[cfg(test)]
mod tests {
    use super::hold_end;
    use crate::engine::control::RunControl;
    use crate::engine::output::Output;
    use crate::events::{EndCause, FinishReason, RunEnd, RunId, RunStatus, Usage, system};
    use crate::model::grammar::testing::vocabulary;
    use crate::recording::NotStored;
    use std::sync::Arc;
    use tokio::sync::{mpsc, oneshot};

    #[tokio::test]
    async fn run_that_cannot_be_stored_ends_with_error() {
        let (run, output) = mpsc::channel(4);
        let (ack, receiver) = oneshot::channel();
        let (commands, _) = std::sync::mpsc::channel();
        let mut held = hold_end(output, receiver, RunControl::new(RunId::now(), commands, vocabulary()));
        let mut done = RunEnd::empty(system::now(), Usage::default());
        (done.status, done.finish.reason) = (RunStatus::Done, FinishReason::Stop);
        run.send(Output::Ended(Arc::new(done))).await.unwrap();
        ack.send(Err(NotStored::NoRoom)).unwrap();
        let Some(Output::Ended(end)) = held.recv().await else { panic!("no end") };
        let aborted = (end.status, end.finish.reason, end.finish.cause);
        assert_eq!(aborted, (RunStatus::Failed, FinishReason::Error, Some(EndCause::NotRecorded)));
    }
}
