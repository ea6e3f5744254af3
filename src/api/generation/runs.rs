//! Several runs of one request at once: prompts of a list, or several answers to one prompt.

use super::{failure, refuse_known_id};
use crate::api::{ApiError, App, Loaded};
use crate::engine::{Output, Request, RunMetrics, TextDelta};
use crate::events::{Alternative, RunId, TokenMeasurement};
use futures::StreamExt;
use futures::stream::{BoxStream, SelectAll};
use std::sync::Arc;
use tokio_stream::wrappers::ReceiverStream;

/// Most runs that one request may make.
pub(in crate::api) const MOST_RUNS: usize = 256;

/// The requests for several answers to one prompt: they differ, and only the first is for the slot that was named, for the
/// others would wait until it is free again.
pub(in crate::api) fn answers(first: Request, count: u32) -> impl Iterator<Item = Request> {
    (0..count).map(move |index| {
        let mut request = first.clone();
        request.sampling.seed = request.sampling.seed.wrapping_add(index);
        request.slot = first.slot.filter(|_| index == 0);
        request
    })
}

/// Runs that have begun, and their outputs in the order they come.
pub(in crate::api) struct Runs {
    app: App,
    /// Of each run, in the order of the requests.
    pub(in crate::api) begun: Vec<BegunRun>,
    first: Option<(usize, Output)>,
    outputs: SelectAll<BoxStream<'static, (usize, Output)>>,
    going_on: usize,
}

/// A run that was accepted.
#[derive(Debug, Clone)]
pub(in crate::api) struct BegunRun {
    pub(in crate::api) id: RunId,
    pub(in crate::api) metrics: Arc<RunMetrics>,
}

impl Runs {
    /// Hands all requests to the engine and waits for the first output of any of them.
    ///
    /// # Errors
    /// One of them is not taken.
    pub(in crate::api) async fn begin(app: App, loaded: &Loaded, requests: Vec<Request>) -> Result<Self, ApiError> {
        if requests.len() > MOST_RUNS {
            let message = format!("one request may make {MOST_RUNS} runs, this one makes {}", requests.len());
            return Err(ApiError::invalid("prompt", message));
        }
        if let ([_, _, ..], Some(_)) = (&requests[..], requests.iter().find_map(|request| request.request_id.as_ref()))
        {
            let message = format!("request_id names one run, and this request makes {}", requests.len());
            return Err(ApiError::invalid("request_id", message));
        }
        let going_on = requests.len();
        let (mut begun, mut outputs) = (Vec::with_capacity(going_on), SelectAll::new());
        for (index, request) in requests.into_iter().enumerate() {
            refuse_known_id(&app, request.request_id.as_deref()).await?;
            let generation = loaded.engine().submit(request).await?;
            begun.push(BegunRun { id: generation.run_id, metrics: generation.metrics });
            outputs.push(ReceiverStream::new(generation.output).map(move |output| (index, output)).boxed());
        }
        let mut runs = Self { app, begun, first: None, outputs, going_on };
        let first = runs.next().await?;
        // Handed out again below, with everything that follows.
        runs.going_on += usize::from(matches!(first, Some((_, Output::Ended(_)))));
        runs.first = first;
        Ok(runs)
    }

    /// The error that a run ended with before anything else happened: a plain error, also where a stream was asked for.
    pub(in crate::api) fn failed_at_once(&self) -> Option<ApiError> {
        match &self.first {
            Some((index, Output::Ended(end))) => failure(end, self.begun[*index].id),
            _ => None,
        }
    }

    /// The next output of any run, with the run's index; `None` when all have ended.
    ///
    /// # Errors
    /// 503 when the server stops.
    pub(in crate::api) async fn next(&mut self) -> Result<Option<(usize, Output)>, ApiError> {
        let next = match self.first.take() {
            Some(first) => Some(first),
            None if self.going_on == 0 => return Ok(None),
            None => tokio::select! {
                output = self.outputs.next() => output,
                () = self.app.stopped() => return Err(ApiError::unavailable("the server is stopping").retry_after(1)),
            },
        };
        match next {
            None => Err(ApiError::internal("the engine dropped a run")),
            Some((index, output)) => {
                self.going_on -= usize::from(matches!(output, Output::Ended(_)));
                Ok(Some((index, output)))
            }
        }
    }
}

/// The tokens of an answer that a client has been told of.
#[derive(Debug, Default)]
pub(in crate::api) struct Told {
    pub(in crate::api) tokens: Vec<(TokenMeasurement, Vec<Alternative>)>,
}

impl Told {
    /// Adds what was appended.
    pub(in crate::api) fn add(&mut self, delta: TextDelta) {
        self.tokens.extend(delta.tokens);
    }

    /// Removes the last tokens.
    pub(in crate::api) fn retract(&mut self, tokens: usize) {
        self.tokens.truncate(self.tokens.len().saturating_sub(tokens));
    }
}

#[cfg(test)]
mod tests {
    use super::answers;
    use crate::engine::Request;
    use crate::events::Surface;

    #[test]
    fn several_answers_differ_and_only_the_first_waits_for_the_slot() {
        let mut first = Request::new(vec![1], Surface::Openai);
        (first.slot, first.sampling.seed) = (Some(2), u32::MAX);
        let told: Vec<_> = answers(first, 3).map(|request| (request.slot, request.sampling.seed)).collect();
        assert_eq!(told, [(Some(2), u32::MAX), (None, 0), (None, 1)]);
    }
}
