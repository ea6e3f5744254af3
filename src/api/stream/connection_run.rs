//! A run of a connection: its start in the background, and the task that sends its messages.

use super::config::RunConfig;
use super::message;
use super::response::{RunErrorMessage, StatusMessage, StatusOperation, StreamMessage, stopped_before_start};
use super::run::{Follower, StreamedRun};
use super::start::{NewRun, start};
use crate::api::shared::sse::to_json;
use crate::events::EndCause;
use crate::server::peers::Relay;
use crate::server::socket::Outgoing;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::task::{AbortHandle, JoinSet, yield_now};
use tokio_util::sync::CancellationToken;

/// A run of a connection.
#[derive(Clone)]
pub(super) struct ConnectionRun {
    state: Arc<Mutex<ConnectionRunState>>,
    /// The task that sends its messages.
    pub(super) task: AbortHandle,
}

enum ConnectionRunState {
    /// Cancelling the token stops the run before it starts.
    Starting(CancellationToken),
    /// The run failed or was stopped before it started.
    NotStarted,
    /// This server generates the run.
    Local(Arc<StreamedRun>),
    /// Another server generates the run.
    Remote(Relay),
}

/// A run that is replaced by a new one.
pub(super) struct ReplacedRun {
    pub(super) run: Arc<StreamedRun>,
    /// The task that sends its messages.
    pub(super) follower: AbortHandle,
}

impl ConnectionRun {
    fn new(state: ConnectionRunState, task: AbortHandle) -> Self {
        Self { state: Arc::new(Mutex::new(state)), task }
    }

    /// Starts a run and sends its messages in a task. `replaced` continues if the new run does not start.
    pub(super) fn start(
        tasks: &mut JoinSet<()>,
        config: RunConfig,
        new_run: NewRun,
        replaced: Option<ReplacedRun>,
        outgoing: Outgoing,
    ) -> Self {
        let cancelled = CancellationToken::new();
        let state = Arc::new(Mutex::new(ConnectionRunState::Starting(cancelled.clone())));
        let task = tasks.spawn(run_to_end(config, new_run, replaced, outgoing, Arc::clone(&state), cancelled));
        Self { state, task }
    }

    /// Sends the messages of a run that was started before, in a task.
    pub(super) fn resume(tasks: &mut JoinSet<()>, follower: Follower, outgoing: Outgoing) -> Self {
        let state = ConnectionRunState::Local(Arc::clone(follower.run()));
        let task = tasks.spawn(async move {
            let _activity = outgoing.mark_active();
            let run = Arc::clone(follower.run());
            let init = to_json(&message::init(&run, Some(follower.position())));
            if outgoing.send(init).await.is_ok() {
                let paused = paused_status(&run).await;
                follow(follower, paused.into_iter(), &outgoing).await;
            }
        });
        Self::new(state, task)
    }

    /// Returns a run of another server, whose messages `task` forwards.
    pub(super) fn remote(relay: Relay, task: AbortHandle) -> Self {
        Self::new(ConnectionRunState::Remote(relay), task)
    }

    /// Returns the run if it has started on this server.
    pub(super) fn started(&self) -> Option<Arc<StreamedRun>> {
        match &*self.lock() {
            ConnectionRunState::Local(run) => Some(Arc::clone(run)),
            _ => None,
        }
    }

    /// Stops the run before it starts. Returns the run if it has started on this server.
    pub(super) fn cancel_start(&self) -> Option<Arc<StreamedRun>> {
        match &*self.lock() {
            ConnectionRunState::Starting(cancelled) => {
                cancelled.cancel();
                None
            }
            ConnectionRunState::Local(run) => Some(Arc::clone(run)),
            ConnectionRunState::NotStarted | ConnectionRunState::Remote(_) => None,
        }
    }

    /// Returns the relay to the server that generates the run, if that is another server.
    pub(super) fn relay(&self) -> Option<Relay> {
        match &*self.lock() {
            ConnectionRunState::Remote(relay) => Some(relay.clone()),
            _ => None,
        }
    }

    /// Returns true if the run has this run id.
    pub(super) fn has_run_id(&self, id: &str) -> bool {
        match &*self.lock() {
            ConnectionRunState::Local(run) => run.id.to_string() == id,
            ConnectionRunState::Remote(relay) => relay.has(id),
            ConnectionRunState::Starting(_) | ConnectionRunState::NotStarted => false,
        }
    }

    /// Returns true if the run is starting or has not ended.
    pub(super) fn is_active(&self) -> bool {
        match &*self.lock() {
            // A panic ends the task without a new state.
            ConnectionRunState::Starting(_) | ConnectionRunState::Remote(_) => !self.task.is_finished(),
            ConnectionRunState::NotStarted => false,
            ConnectionRunState::Local(run) => !run.has_ended(),
        }
    }

    /// Returns true if the run failed or was stopped before it started.
    pub(super) fn is_not_started(&self) -> bool {
        match &*self.lock() {
            ConnectionRunState::NotStarted => true,
            ConnectionRunState::Starting(_) => self.task.is_finished(),
            ConnectionRunState::Local(_) | ConnectionRunState::Remote(_) => false,
        }
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionRunState> {
        lock(&self.state)
    }
}

impl ReplacedRun {
    /// Stops the run. The client receives no last message of it; the new run's init message names it.
    async fn stop(&self) {
        self.follower.abort();
        self.run.stop(EndCause::Regenerate).await;
        while !self.follower.is_finished() {
            yield_now().await;
        }
    }
}

/// Starts a run and sends its messages until its end.
async fn run_to_end(
    config: RunConfig,
    new_run: NewRun,
    replaced: Option<ReplacedRun>,
    outgoing: Outgoing,
    state: Arc<Mutex<ConnectionRunState>>,
    cancelled: CancellationToken,
) {
    let _activity = outgoing.mark_active();
    let id = new_run.request_id.clone();
    let started = tokio::select! {
        biased;
        started = start(&config, new_run, Some(&outgoing)) => Some(started),
        () = cancelled.cancelled() => None,
    };
    let message = match started {
        Some(Ok(run)) => {
            let follower = run.follow(0);
            if let Some(replaced) = &replaced {
                replaced.stop().await;
            }
            *lock(&state) = ConnectionRunState::Local(Arc::clone(&run));
            // From here on, a stop finds the run. The token is cancelled if one arrived before.
            if cancelled.is_cancelled() {
                run.stop(EndCause::ClientStop).await;
            }
            let first = [Some(message::init(&run, None)), message::echo(&run)];
            return follow(follower, first.into_iter().flatten(), &outgoing).await;
        }
        Some(Err(error)) => {
            // The client does not know the id of a run that was to replace another one.
            let known = replaced.as_ref().map_or(&id, |replaced| &replaced.run.request_id);
            to_json(&RunErrorMessage::new(&error, Some(known)))
        }
        None => {
            if let Some(replaced) = &replaced {
                // Its follower sends its end.
                replaced.run.stop(EndCause::ClientStop).await;
            }
            to_json(&stopped_before_start(&id))
        }
    };
    // Before the message, so that the client can send the `request_id` again when it has received it.
    *lock(&state) = ConnectionRunState::NotStarted;
    // Sending fails only if the client has disconnected.
    let _ = outgoing.send(message).await;
}

/// Returns the status of a paused run, for a client that did not pause it itself.
async fn paused_status(run: &StreamedRun) -> Option<StreamMessage<'_>> {
    let progress = run.control.progress().await.ok().filter(|progress| progress.is_paused)?;
    let text = format!("the run is paused after {} tokens; send resume to continue it", progress.generated);
    Some(StatusMessage::complete(StatusOperation::Pause, text, Some(&run.request_id)).into())
}

/// Sends the `first` messages, then those of the run until its end.
async fn follow<'a>(mut follower: Follower, first: impl Iterator<Item = StreamMessage<'a>>, outgoing: &Outgoing) {
    for message in first {
        if outgoing.send(to_json(&message)).await.is_err() {
            return;
        }
    }
    while let Some(message) = follower.next().await {
        if outgoing.send(to_json(&message)).await.is_err() {
            return;
        }
    }
    if !follower.has_sent_end() {
        let id = &follower.run().request_id;
        let text = "another connection receives this run now";
        let moved = StreamMessage::from(StatusMessage::complete(StatusOperation::Moved, text, Some(id)));
        let _ = outgoing.send(to_json(&moved)).await;
    }
}

fn lock(state: &Mutex<ConnectionRunState>) -> MutexGuard<'_, ConnectionRunState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn start_that_panics_leaves_no_active_run() {
        let task = tokio::spawn(std::future::pending::<()>());
        let state = ConnectionRunState::Starting(CancellationToken::new());
        let run = ConnectionRun::new(state, task.abort_handle());
        assert_eq!((run.is_active(), run.is_not_started()), (true, false));
        // Like a panic, the abort ends the task without a new state.
        task.abort();
        assert!(task.await.is_err());
        assert_eq!((run.is_active(), run.is_not_started()), (false, true));
    }
}
