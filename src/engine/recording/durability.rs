//! Reports the end of a run that must be stored before its client receives the end.

use crate::engine::output::Output;
use crate::events::{EndCause, RunEnd, Usage};
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
/// cannot be stored, the channel ends with an error instead. `unfinished` is the end to report if storing fails before
/// the run has ended.
pub fn hold_end(output: mpsc::Receiver<Output>, ack: DurabilityAck, unfinished: RunEnd) -> mpsc::Receiver<Output> {
    // Outputs that the client has not read wait in `output`, which limits their bytes.
    let (client, held) = mpsc::channel(1);
    tokio::spawn(forward(output, ack, unfinished, client));
    held
}

async fn forward(
    mut output: mpsc::Receiver<Output>,
    mut ack: DurabilityAck,
    mut end: RunEnd,
    client: mpsc::Sender<Output>,
) {
    let mut text: Vec<char> = Vec::new();
    let mut tokens = 0usize;
    let mut is_stored = false;
    let reason = loop {
        let next = tokio::select! {
            outcome = wait_until_stored(&mut ack), if !is_stored => match outcome {
                Ok(()) => {
                    is_stored = true;
                    continue;
                }
                Err(reason) => break reason,
            },
            output = output.recv() => output,
            () = client.closed() => return,
        };
        match next {
            Some(Output::Ended(ended)) => {
                if !is_stored {
                    let outcome = timeout(STORE_TIMEOUT, wait_until_stored(&mut ack)).await;
                    if let Err(reason) = outcome.unwrap_or(Err(NotDurable::Timeout)) {
                        end = RunEnd::clone(&ended);
                        break reason;
                    }
                }
                let _ = client.send(Output::Ended(ended)).await;
                return;
            }
            Some(next) => {
                match &next {
                    Output::Text(delta) => {
                        text.extend(delta.text.chars());
                        tokens += delta.tokens.len();
                    }
                    Output::Retract { chars, tokens: removed } => {
                        tokens = tokens.saturating_sub(*removed);
                        text.truncate(text.len().saturating_sub(*chars));
                    }
                    Output::PromptProbabilities(_) | Output::PromptProgress(_) | Output::Ended(_) => {}
                }
                end.finish.usage.completion_tokens = tokens as u32;
                if client.send(next).await.is_err() {
                    return;
                }
            }
            None => return,
        }
    };
    if end.finish.text.is_empty() {
        end.finish.text = text.into_iter().collect();
    }
    end.set_aborted(EndCause::NotRecorded, format!("the run must be recorded, but {reason}"));
    let _ = client.send(Output::Ended(Arc::new(end))).await;
}

async fn wait_until_stored(ack: &mut DurabilityAck) -> Result<(), NotDurable> {
    ack.await.map_err(|_| NotDurable::RecorderStopped)?.map_err(NotDurable::NotStored)
}

/// Returns the end of a run that has not generated anything.
pub fn unfinished_end(now: chrono::DateTime<chrono::Utc>, prompt_tokens: usize) -> RunEnd {
    RunEnd::empty(now, Usage { prompt_tokens: prompt_tokens as u32, ..Usage::default() })
}

#[cfg(test)]
mod tests {
    use super::{hold_end, unfinished_end};
    use crate::engine::output::{MeasuredToken, Output, TextDelta};
    use crate::events::{EndCause, FinishReason, RunEnd, RunStatus, TokenMeasurement, system};
    use crate::recording::NotStored;
    use std::sync::Arc;
    use tokio::sync::{mpsc, oneshot};

    fn aborted(end: &RunEnd) -> (RunStatus, FinishReason, Option<EndCause>) {
        (end.status, end.finish.reason, end.finish.cause)
    }

    #[tokio::test]
    async fn run_that_cannot_be_stored_ends_with_error() {
        let (run, output) = mpsc::channel(4);
        let (ack, receiver) = oneshot::channel();
        let mut held = hold_end(output, receiver, unfinished_end(system::now(), 3));
        let mut done = unfinished_end(system::now(), 3);
        (done.status, done.finish.reason) = (RunStatus::Done, FinishReason::Stop);
        run.send(Output::Ended(Arc::new(done))).await.unwrap();
        ack.send(Err(NotStored::NoRoom)).unwrap();
        let Some(Output::Ended(end)) = held.recv().await else { panic!("no end") };
        assert_eq!(aborted(&end), (RunStatus::Failed, FinishReason::Error, Some(EndCause::NotRecorded)));
    }

    #[tokio::test]
    async fn run_that_cannot_be_stored_ends_without_retracted_tokens() {
        let delta = |texts: &[&str]| {
            let measure = |text: &&str| {
                let text = (*text).to_owned();
                let measurement = TokenMeasurement { token: 1, text, logprob: None, rank: None, entropy: None };
                MeasuredToken { measurement, alternatives: Vec::new() }
            };
            let tokens = texts.iter().map(measure).collect();
            Output::Text(TextDelta { text: texts.concat(), tokens, ..TextDelta::default() })
        };
        let (run, output) = mpsc::channel(4);
        let (ack, receiver) = oneshot::channel();
        let mut held = hold_end(output, receiver, unfinished_end(system::now(), 3));
        for output in [delta(&["a", "bé", "c"]), Output::Retract { chars: 3, tokens: 2 }, delta(&["d"])] {
            run.send(output).await.unwrap();
            held.recv().await.unwrap();
        }
        ack.send(Err(NotStored::NoRoom)).unwrap();
        let Some(Output::Ended(end)) = held.recv().await else { panic!("no end") };
        assert_eq!((end.finish.text.as_str(), end.finish.usage.completion_tokens), ("ad", 2));
    }
}
