//! Several runs for one request: prompts of a list, or several answers to one prompt.

use super::time_limit::stop_at_time_limit;
use super::{RunClient, check_request_id, failure};
use crate::engine::{Output, Request, RunMetrics};
use crate::events::{RunEnd, RunId};
use crate::server::{ApiError, App, LoadedModel, note_started_run};
use futures::StreamExt;
use futures::stream::{BoxStream, SelectAll};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

/// Maximum runs of one request.
pub(crate) const MAX_RUNS: usize = 256;

/// Checks the number of runs that a request starts, before their prompts are encoded.
///
/// # Errors
/// The request starts more than [`MAX_RUNS`].
pub(crate) fn check_run_count(runs: usize) -> Result<(), ApiError> {
    if runs > MAX_RUNS {
        let message =
            format!("one request may start at most {MAX_RUNS} runs, got {runs}; send fewer prompts or answers");
        return Err(ApiError::invalid("prompt", message));
    }
    Ok(())
}

/// Returns the requests for several answers to one prompt. Their seeds differ. Only the first uses the requested slot
/// because the others would wait for it.
pub(crate) fn repeat_request(first: Request, count: u32) -> impl Iterator<Item = Request> {
    (0..count).map(move |index| {
        let mut request = first.clone();
        request.sampling.seed = request.sampling.seed.wrapping_add(index);
        request.slot = first.slot.filter(|_| index == 0);
        request
    })
}

/// Started runs and their outputs in order of arrival.
pub(crate) struct Runs {
    app: App,
    /// Started runs in the order of the requests.
    pub(crate) started: Vec<StartedRun>,
    /// The first output, until it is returned.
    first: Option<(usize, Output)>,
    outputs: SelectAll<BoxStream<'static, (usize, Output)>>,
    /// Number of runs whose end has not been returned yet.
    active: usize,
    /// Ends the runs when the client cancels them.
    cancelled: CancellationToken,
    /// Tasks that end the runs at their time limit, also if the client reads slowly. Dropping this ends them.
    _time_limits: JoinSet<()>,
}

/// A run accepted by the engine.
#[derive(Debug, Clone)]
pub(crate) struct StartedRun {
    pub(crate) id: RunId,
    pub(crate) metrics: Arc<RunMetrics>,
}

impl Runs {
    /// Submits the requests of a client and waits for the first output of any run, so that a request that fails
    /// immediately gets a plain error response, even if it requested a stream.
    ///
    /// # Errors
    /// The engine rejected one of the requests, or the first output is the end of a failed run.
    pub(crate) async fn start(
        client: &RunClient,
        loaded: &LoadedModel,
        requests: Vec<Request>,
    ) -> Result<Self, ApiError> {
        Self::start_cancellable(client, loaded, requests, CancellationToken::new()).await
    }

    /// Same as [`Runs::start`], for runs that the client can cancel; see [`Runs::next_output`].
    pub(crate) async fn start_cancellable(
        client: &RunClient,
        loaded: &LoadedModel,
        requests: Vec<Request>,
        cancelled: CancellationToken,
    ) -> Result<Self, ApiError> {
        let runs = Self::submit(client, loaded, requests, None, cancelled).await?;
        match runs.first_end() {
            Some((run, end)) => runs.failure(run, end).map_or(Ok(runs), Err),
            None => Ok(runs),
        }
    }

    /// Returns the end of a run, before any output is returned, if it is the first output.
    pub(crate) fn first_end(&self) -> Option<(usize, &RunEnd)> {
        match &self.first {
            Some((run, Output::Ended(end))) => Some((*run, end)),
            _ => None,
        }
    }

    /// Submits the requests of a client and waits for the first output of any run, or until they are `cancelled`. Each
    /// run ends with [`EndCause::Timeout`] when it was active for `time_limit`.
    ///
    /// [`EndCause::Timeout`]: crate::events::EndCause::Timeout
    ///
    /// # Errors
    /// The engine rejected one of the requests.
    pub(crate) async fn submit(
        client: &RunClient,
        loaded: &LoadedModel,
        mut requests: Vec<Request>,
        time_limit: Option<Duration>,
        cancelled: CancellationToken,
    ) -> Result<Self, ApiError> {
        check_run_count(requests.len())?;
        if let ([_, _, ..], Some(_)) = (&requests[..], requests.iter().find_map(|request| request.request_id.as_ref()))
        {
            let message = format!("`request_id` identifies one run, but this request starts {}", requests.len());
            return Err(ApiError::invalid("request_id", message));
        }
        requests.iter_mut().for_each(|request| client.set_client(request));
        let active = requests.len();
        let (mut started, mut outputs) = (Vec::with_capacity(active), SelectAll::new());
        let mut time_limits = JoinSet::new();
        for (index, request) in requests.into_iter().enumerate() {
            check_request_id(&client.app, &request).await?;
            let generation = loaded.engine().submit(request).await?;
            note_started_run(generation.run_id);
            started.push(StartedRun { id: generation.run_id, metrics: generation.metrics });
            if let Some(limit) = time_limit {
                time_limits.spawn(stop_at_time_limit(generation.control, limit));
            }
            outputs.push(ReceiverStream::new(generation.output).map(move |output| (index, output)).boxed());
        }
        let mut runs = Self {
            app: client.app.clone(),
            started,
            first: None,
            outputs,
            active,
            cancelled,
            _time_limits: time_limits,
        };
        runs.first = runs.receive().await?;
        Ok(runs)
    }

    /// Returns the id of the first run.
    pub(crate) fn run_id(&self) -> RunId {
        self.started[0].id
    }

    /// Returns the error with which a run ended, if any.
    pub(crate) fn failure(&self, run: usize, end: &RunEnd) -> Option<ApiError> {
        failure(end, self.started[run].id).map(|error| error.in_run(self.run_id()))
    }

    /// Returns the next output of any run with the run's index, or `None` when all have ended or were cancelled.
    ///
    /// # Errors
    /// A run failed, or the server is stopping.
    pub(crate) async fn next(&mut self) -> Result<Option<(usize, Output)>, ApiError> {
        let next = self.next_output().await?;
        if let Some((run, Output::Ended(end))) = &next
            && let Some(error) = self.failure(*run, end)
        {
            return Err(error);
        }
        Ok(next)
    }

    /// Returns the next output of any run with the run's index, including the end of a failed run; `None` when all have
    /// ended. If the client cancels the runs, `None` precedes the outputs that were not returned.
    ///
    /// # Errors
    /// 503 when the server is stopping.
    pub(crate) async fn next_output(&mut self) -> Result<Option<(usize, Output)>, ApiError> {
        let next = match self.first.take() {
            Some(first) => Some(first),
            None if self.active == 0 => None,
            None => self.receive().await?,
        };
        self.active -= usize::from(matches!(next, Some((_, Output::Ended(_)))));
        Ok(next)
    }

    /// Waits for the next output of any run; `None` if the client cancels the runs.
    async fn receive(&mut self) -> Result<Option<(usize, Output)>, ApiError> {
        tokio::select! {
            biased;
            () = self.cancelled.cancelled() => {
                // Without a receiver, the engine ends the runs within a token.
                self.outputs.clear();
                Ok(None)
            }
            () = self.app.wait_until_stopped() => {
                Err(ApiError::unavailable("the server is stopping").retry_after(1).in_run(self.run_id()))
            }
            output = self.outputs.next() => match output {
                Some(output) => Ok(Some(output)),
                None => Err(ApiError::internal("the engine dropped a run").in_run(self.run_id())),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::repeat_request;
    use crate::engine::Request;
    use crate::events::Surface;

    #[test]
    fn repeated_requests_differ_in_seed_and_only_the_first_has_the_slot() {
        let mut first = Request::new(vec![1], Surface::Openai);
        (first.slot, first.sampling.seed) = (Some(2), u32::MAX);
        let slots_and_seeds: Vec<_> =
            repeat_request(first, 3).map(|request| (request.slot, request.sampling.seed)).collect();
        assert_eq!(slots_and_seeds, [(Some(2), u32::MAX), (None, 0), (None, 1)]);
    }
}
