//! A run that continues for a grace period without a client and can be received again from any point.

use super::config::{RunConfig, StreamOptions};
use super::log::{LogEntry, RunLog};
use super::message;
use super::registry::Streams;
use super::response::{StreamMessage, StreamModelInfo};
use crate::engine::{Generation, Output, PromptProgress, RunControl, RunOver};
use crate::events::{EndCause, RunEnd, RunId, Tenant};
use crate::model::Vocabulary;
use crate::server::{ApiError, App};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

/// Number of entries a client may lag behind before its run is paused.
const MAX_LAG: usize = 64;

/// A run, shared by the task that advances it and by its listener.
pub(super) struct StreamedRun {
    pub(super) id: RunId,
    pub(super) request_id: String,
    pub(super) head: RunHead,
    pub(super) control: RunControl,
    config: Mutex<RunConfig>,
    log: Mutex<RunLog>,
    /// Progress of the prompt.
    progress: Mutex<Option<PromptProgress>>,
    ending: Mutex<Option<RunEnding>>,
    /// Notified of every entry and of the end.
    changed: watch::Sender<()>,
    listener: watch::Sender<Listener>,
}

/// Properties of a run that are known at its start.
pub(super) struct RunHead {
    /// The tenant that the run belongs to.
    pub(super) owner: Option<Tenant>,
    pub(super) options: StreamOptions,
    pub(super) model: String,
    pub(super) model_info: StreamModelInfo,
    pub(super) prompt_text: String,
    pub(super) vocabulary: Arc<Vocabulary>,
    pub(super) seed: u32,
    pub(super) room: u32,
    /// Id of the run that it replaced.
    pub(super) replaces: Option<String>,
}

/// The end of a run.
#[derive(Clone)]
pub(super) struct RunEnding {
    pub(super) outcome: Result<Arc<RunEnd>, ApiError>,
    pub(super) total: Duration,
}

/// The listener of a run.
#[derive(Debug, Clone, Copy)]
struct Listener {
    /// Number of the listener; increases with each one.
    number: u64,
    is_connected: bool,
    /// Number of entries sent to it.
    at: usize,
    /// Time since when no listener is connected.
    since: Instant,
}

/// Receives a run's messages; the run continues for a while after it is dropped.
pub(super) struct Follower {
    run: Arc<StreamedRun>,
    number: u64,
    at: usize,
    text: String,
    /// Prompt tokens reported as processed.
    sent_progress: u32,
    sent_end: bool,
    changed: watch::Receiver<()>,
}

impl StreamedRun {
    /// Starts a run's task. The caller must follow it immediately. Without a listener the run ends after `grace_period`; for as
    /// long it stays registered after its end.
    pub(super) fn start(
        app: &App,
        streams: &Streams,
        generation: Generation,
        (config, head): (RunConfig, RunHead),
        grace_period: Duration,
    ) -> Arc<Self> {
        let Generation { run_id, request_id, output, control, .. } = generation;
        let run = Arc::new(Self {
            id: run_id,
            request_id,
            head,
            control,
            config: Mutex::new(config),
            log: Mutex::new(RunLog::new()),
            progress: Mutex::default(),
            ending: Mutex::default(),
            changed: watch::Sender::new(()),
            listener: watch::Sender::new(Listener { number: 0, is_connected: true, at: 0, since: Instant::now() }),
        });
        streams.register(&run);
        let (app, streams, active) = (app.clone(), streams.clone(), Arc::clone(&run));
        tokio::spawn(async move {
            advance(&app, &active, output, grace_period).await;
            streams.deregister(&active);
        });
        run
    }

    /// Receives the run from the entry after the first `after` ones on. Replaces the previous listener.
    pub(super) fn follow(self: &Arc<Self>, after: usize) -> Follower {
        let (at, text) = self.log().text_at(after);
        let mut number = 0;
        self.listener.send_modify(|listener| {
            number = listener.number + 1;
            *listener = Listener { number, is_connected: true, at, since: Instant::now() };
        });
        // Wakes the previous listener.
        self.changed.send_replace(());
        Follower {
            run: Arc::clone(self),
            number,
            at,
            text,
            sent_progress: 0,
            sent_end: false,
            changed: self.changed.subscribe(),
        }
    }

    /// Ends the run; its text so far is the answer.
    pub(super) async fn stop(&self, cause: EndCause) {
        let message = match cause {
            EndCause::Regenerate => "the client asked for another answer",
            EndCause::Timeout => "the time is over",
            _ => "the client stopped it",
        };
        // The run may have ended already.
        let _ = self.control.stop(cause, message).await;
    }

    /// Returns the current configuration.
    pub(super) fn config(&self) -> RunConfig {
        self.config.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the configuration after a change.
    pub(super) fn set_config(&self, config: RunConfig) {
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = config;
    }

    /// Returns true if the run has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.ending.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn log(&self) -> MutexGuard<'_, RunLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, outcome: Result<Arc<RunEnd>, ApiError>) {
        let total = self.log().elapsed();
        *self.ending.lock().unwrap_or_else(PoisonError::into_inner) = Some(RunEnding { outcome, total });
        self.changed.send_replace(());
    }

    /// Waits until a listener can accept more entries, or none is connected.
    async fn wait_for_capacity(&self) {
        let reported = self.log().len();
        let mut listener = self.listener.subscribe();
        // The sender is part of `self`, so waiting cannot fail.
        let _ = listener.wait_for(|listener| !listener.is_connected || reported < listener.at + MAX_LAG).await;
    }

    /// Waits until no listener was connected for `grace_period`.
    async fn wait_until_abandoned(&self, grace_period: Duration) {
        let mut listener = self.listener.subscribe();
        loop {
            let now = *listener.borrow_and_update();
            if now.is_connected {
                // The sender is part of `self`, so waiting cannot fail.
                let _ = listener.changed().await;
                continue;
            }
            tokio::select! {
                () = sleep_until(now.since + grace_period) => return,
                _ = listener.changed() => {}
            }
        }
    }

    /// Waits until the run has exceeded its time limit.
    async fn wait_for_time_limit(&self) {
        /// Interval between two checks of a paused run.
        const CHECK_INTERVAL: Duration = Duration::from_millis(50);
        let Some(limit) = self.head.options.timeout else { return std::future::pending().await };
        sleep(limit).await;
        loop {
            match self.control.progress().await {
                Ok(progress) if progress.active_time < limit => {
                    sleep(limit.saturating_sub(progress.active_time).max(CHECK_INTERVAL)).await;
                }
                Ok(_) => return,
                Err(RunOver) => std::future::pending().await,
            }
        }
    }
}

/// Stores the engine's output while the run has a listener or its grace period lasts.
async fn advance(
    app: &App,
    run: &StreamedRun,
    mut output: tokio::sync::mpsc::Receiver<Output>,
    grace_period: Duration,
) {
    let mut time_limit = std::pin::pin!(run.wait_for_time_limit());
    let mut timed_out = false;
    loop {
        let next = async {
            run.wait_for_capacity().await;
            output.recv().await
        };
        let output = tokio::select! {
            output = next => output,
            () = run.wait_until_abandoned(grace_period) => {
                run.end(Err(ApiError::unavailable("the client disconnected and did not resume in time")));
                break;
            }
            () = &mut time_limit, if !timed_out => {
                timed_out = true;
                run.stop(EndCause::Timeout).await;
                continue;
            }
            () = app.stopped() => {
                run.end(Err(ApiError::unavailable("the server is stopping").retry_after(1)));
                break;
            }
        };
        match output {
            Some(Output::Text(delta)) => run.log().add(delta, &run.head.vocabulary),
            Some(Output::Prompt(_) | Output::Retract { chars: 0, .. }) => continue,
            // The report before the first decode contains nothing new for the client.
            Some(Output::Progress(progress)) if progress.processed == progress.cached => continue,
            Some(Output::Progress(progress)) => {
                *run.progress.lock().unwrap_or_else(PoisonError::into_inner) = Some(progress);
            }
            Some(Output::Retract { chars, .. }) => run.log().retract(chars),
            Some(Output::Ended(end)) => {
                run.end(Ok(end));
                break;
            }
            None => {
                run.end(Err(ApiError::internal("the engine dropped a run")));
                break;
            }
        }
        run.changed.send_replace(());
    }
    drop(output);
    tokio::select! {
        () = sleep(grace_period) => {}
        () = app.stopping() => {}
    }
}

impl Follower {
    /// Returns the run.
    pub(super) fn run(&self) -> &Arc<StreamedRun> {
        &self.run
    }

    /// Returns the number of entries sent and the text after them.
    pub(super) fn position(&self) -> (usize, &str) {
        (self.at, &self.text)
    }

    /// Returns true if the last message was sent; false means that another listener took over.
    pub(super) fn has_sent_end(&self) -> bool {
        self.sent_end
    }

    /// Returns the next message, or `None` after the last one and when another listener took over.
    pub(super) async fn next(&mut self) -> Option<StreamMessage<'_>> {
        loop {
            self.changed.mark_unchanged();
            if self.sent_end || self.run.listener.borrow().number != self.number {
                return None;
            }
            // Read before the log, so that the end is not sent before the last entry.
            let ending = self.run.ending.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let entry = self.run.log().get(self.at).cloned();
            if let Some(entry) = entry {
                self.at += 1;
                entry.apply(&mut self.text);
                self.report_position();
                if !self.run.head.options.stream {
                    continue;
                }
                return Some(match entry {
                    LogEntry::Token(token) => message::token(&self.run, self.at, token, &self.text),
                    LogEntry::Backtrack { chars, tokens, text } => {
                        message::backtrack(&self.run, self.at, (chars, tokens), text, &self.text)
                    }
                });
            }
            if let Some(ending) = ending {
                self.sent_end = true;
                return Some(message::last(&self.run, &ending, &self.text));
            }
            if let Some(progress) = self.new_progress() {
                self.sent_progress = progress.processed;
                return Some(message::prompt_progress(&self.run, progress));
            }
            // The run holds the sender, and `self` holds the run.
            let _ = self.changed.changed().await;
        }
    }

    /// Returns new progress of the prompt; a prompt that takes one step has none.
    fn new_progress(&self) -> Option<PromptProgress> {
        let progress = *self.run.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.filter(|now| self.at == 0 && now.processed < now.total && now.processed > self.sent_progress)
    }

    fn report_position(&self) {
        self.run.listener.send_if_modified(|listener| {
            let mine = listener.number == self.number;
            if mine {
                listener.at = self.at;
            }
            mine
        });
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.run.listener.send_if_modified(|listener| {
            let mine = listener.number == self.number;
            if mine {
                (listener.is_connected, listener.since) = (false, Instant::now());
            }
            mine
        });
    }
}
