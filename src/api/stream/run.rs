//! A run that continues for a grace period without a client, and that a client can follow from any point.

use super::config::{RunConfig, StreamOptions};
use super::log::{LogEntry, RunLog};
use super::message;
use super::registry::StreamedRuns;
use super::response::{StreamMessage, StreamModelInfo};
use crate::api::shared::generation::wait_for_time_limit;
use crate::engine::{Generation, Output, PromptProgress, RunControl};
use crate::events::{EndCause, RunEnd, RunId, Tenant};
use crate::model::Vocabulary;
use crate::server::{ApiError, App};
use std::future::pending;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::{Instant, sleep, sleep_until};

/// Maximum entries that a client may lag behind before its run is paused.
const MAX_LAG: usize = 64;

/// A run, shared by the task that stores its output and by its follower.
pub(super) struct StreamedRun {
    pub(super) id: RunId,
    pub(super) request_id: String,
    pub(super) properties: RunProperties,
    pub(super) control: RunControl,
    config: Mutex<RunConfig>,
    /// Seed of the sampler, which the configuration lacks if it is random.
    seed: AtomicU32,
    log: Mutex<RunLog>,
    /// Progress of the prompt.
    progress: Mutex<Option<PromptProgress>>,
    ending: Mutex<Option<StreamedRunEnd>>,
    /// Held during a change of parameters, which may end the run: the client receives the status before the last message.
    pub(super) change_status: AsyncMutex<()>,
    /// Notified of every entry, of progress and of the end.
    changed: watch::Sender<()>,
    follower: watch::Sender<FollowerState>,
}

/// Properties of a run that are known at its start.
pub(super) struct RunProperties {
    /// The tenant that the run belongs to.
    pub(super) owner: Option<Tenant>,
    pub(super) options: StreamOptions,
    pub(super) model: String,
    pub(super) model_info: StreamModelInfo,
    pub(super) prompt_text: String,
    pub(super) vocabulary: Arc<Vocabulary>,
    /// Seed of the sampler at the start.
    pub(super) seed: u32,
    pub(super) room: u32,
    /// `request_id` of the run that it replaced.
    pub(super) replaces: Option<String>,
}

/// The outcome of a run and its duration.
#[derive(Clone)]
pub(super) struct StreamedRunEnd {
    pub(super) outcome: Result<Arc<RunEnd>, ApiError>,
    pub(super) total: Duration,
}

/// The state of a run's newest follower.
#[derive(Debug, Clone, Copy)]
struct FollowerState {
    /// Number of the follower, increasing with every follower of the run.
    number: u64,
    is_connected: bool,
    /// Number of entries sent to it.
    at: usize,
    /// Time at which it connected or disconnected.
    since: Instant,
}

/// Receiver of the messages of a run. After it is dropped, the run continues for the grace period.
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
    /// Starts the task of a run. The caller must follow the run immediately. Without a follower the run ends after
    /// `grace_period`. It stays registered for `grace_period` after its end.
    pub(super) fn start(
        app: &App,
        streamed_runs: &StreamedRuns,
        generation: Generation,
        config: RunConfig,
        properties: RunProperties,
        grace_period: Duration,
    ) -> Arc<Self> {
        let Generation { run_id, request_id, output, control, .. } = generation;
        let run = Arc::new(Self {
            id: run_id,
            request_id,
            seed: AtomicU32::new(properties.seed),
            log: Mutex::new(RunLog::new(properties.options.logprobs)),
            properties,
            control,
            config: Mutex::new(config),
            progress: Mutex::default(),
            ending: Mutex::default(),
            change_status: AsyncMutex::default(),
            changed: watch::Sender::new(()),
            follower: watch::Sender::new(FollowerState { number: 0, is_connected: true, at: 0, since: Instant::now() }),
        });
        streamed_runs.register(&run);
        let (app, streamed_runs, active) = (app.clone(), streamed_runs.clone(), Arc::clone(&run));
        tokio::spawn(async move {
            advance(&app, &active, output, grace_period).await;
            streamed_runs.deregister(&active);
        });
        run
    }

    /// Returns a follower that receives the run's entries without the first `after` ones. It replaces the previous
    /// follower.
    pub(super) fn follow(self: &Arc<Self>, after: usize) -> Follower {
        // Locked until the position is known, so that no entry after it is dropped.
        let log = self.log();
        let (at, text) = log.text_at(after);
        let mut number = 0;
        self.follower.send_modify(|follower| {
            number = follower.number + 1;
            *follower = FollowerState { number, is_connected: true, at, since: Instant::now() };
        });
        drop(log);
        // Wakes the previous follower.
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
            EndCause::Regenerate => "the client requested another answer",
            EndCause::Timeout => "the run exceeded its time limit",
            _ => "the client stopped the run",
        };
        // The run may have ended already.
        let _ = self.control.stop(cause, message).await;
    }

    /// Returns the current configuration.
    pub(super) fn config(&self) -> RunConfig {
        self.config.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the seed of the sampler.
    pub(super) fn seed(&self) -> u32 {
        self.seed.load(Relaxed)
    }

    /// Sets the configuration and the seed after a change.
    pub(super) fn set_config(&self, config: RunConfig, seed: u32) {
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = config;
        self.seed.store(seed, Relaxed);
    }

    /// Returns true if the run has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.ending.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn log(&self) -> MutexGuard<'_, RunLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the log and drops its oldest entries, except those that a connected follower has not taken.
    fn change_log(&self, change: impl FnOnce(&mut RunLog)) {
        let mut log = self.log();
        change(&mut log);
        let follower = *self.follower.borrow();
        log.drop_oldest(if follower.is_connected { follower.at } else { usize::MAX });
    }

    fn end(&self, outcome: Result<Arc<RunEnd>, ApiError>) {
        let total = self.log().elapsed();
        *self.ending.lock().unwrap_or_else(PoisonError::into_inner) = Some(StreamedRunEnd { outcome, total });
        self.changed.send_replace(());
    }

    /// Waits until the follower can accept more entries or has disconnected.
    async fn wait_for_capacity(&self) {
        let reported = self.log().len();
        let mut follower = self.follower.subscribe();
        // The sender is part of `self`, so waiting cannot fail.
        let _ = follower.wait_for(|follower| !follower.is_connected || reported < follower.at + MAX_LAG).await;
    }

    /// Waits until no follower was connected for `grace_period`.
    async fn wait_until_abandoned(&self, grace_period: Duration) {
        let mut follower = self.follower.subscribe();
        loop {
            let now = *follower.borrow_and_update();
            if now.is_connected {
                // The sender is part of `self`, so waiting cannot fail.
                let _ = follower.changed().await;
                continue;
            }
            tokio::select! {
                () = sleep_until(now.since + grace_period) => return,
                _ = follower.changed() => {}
            }
        }
    }

    /// Waits until the run has exceeded its time limit.
    async fn wait_for_time_limit(&self) {
        match self.properties.options.timeout {
            Some(limit) => wait_for_time_limit(&self.control, limit).await,
            None => pending().await,
        }
    }
}

/// Stores the engine's output until the run ends, or until it has no follower for `grace_period`.
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
            () = app.wait_until_stopped() => {
                run.end(Err(ApiError::unavailable("the server is stopping").retry_after(1)));
                break;
            }
        };
        match output {
            Some(Output::Text(delta)) => run.change_log(|log| log.add(delta, &run.properties.vocabulary)),
            Some(Output::PromptProbabilities(_)) => continue,
            // The report before the first decode contains nothing new for the client.
            Some(Output::PromptProgress(progress)) if progress.processed == progress.cached => continue,
            Some(Output::PromptProgress(progress)) => {
                *run.progress.lock().unwrap_or_else(PoisonError::into_inner) = Some(progress);
            }
            Some(Output::Retract { chars, tokens }) => run.change_log(|log| log.retract(chars, tokens)),
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
        () = app.wait_until_stopping() => {}
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

    /// Returns true if the last message was sent; false means that another follower took over.
    pub(super) fn has_sent_end(&self) -> bool {
        self.sent_end
    }

    /// Returns the next message, or `None` after the last one and when another follower took over.
    pub(super) async fn next(&mut self) -> Option<StreamMessage<'_>> {
        loop {
            self.changed.mark_unchanged();
            if self.sent_end || self.run.follower.borrow().number != self.number {
                return None;
            }
            // Read before the log, so that the end is not sent before the last entry.
            let ending = self.run.ending.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let entry = self.run.log().get(self.at).cloned();
            if let Some(entry) = entry {
                self.at += 1;
                entry.apply(&mut self.text);
                self.report_position();
                if !self.run.properties.options.stream {
                    continue;
                }
                return Some(match entry {
                    LogEntry::Token(token) => message::token(&self.run, self.at, token, &self.text),
                    LogEntry::Backtrack(removed) => message::backtrack(&self.run, self.at, removed, &self.text),
                });
            }
            if let Some(ending) = ending {
                drop(self.run.change_status.lock().await);
                if self.run.follower.borrow().number != self.number {
                    return None;
                }
                // After the last wait, so that the message is not lost if the caller drops this future.
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

    /// Returns the prompt's progress if it has not been sent yet; a prompt that takes one step has none.
    fn new_progress(&self) -> Option<PromptProgress> {
        let progress = *self.run.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.filter(|now| self.at == 0 && now.processed < now.total && now.processed > self.sent_progress)
    }

    fn report_position(&self) {
        self.run.follower.send_if_modified(|follower| {
            let is_current = follower.number == self.number;
            if is_current {
                follower.at = self.at;
            }
            is_current
        });
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.run.follower.send_if_modified(|follower| {
            let is_current = follower.number == self.number;
            if is_current {
                (follower.is_connected, follower.since) = (false, Instant::now());
            }
            is_current
        });
    }
}
