//! A run that outlives its connection: it goes on while its client is away for a little while, and can be heard again from any
//! point on.

use super::log::{Entry, Log};
use super::message;
use super::read::{Config, Options};
use crate::api::{ApiError, App};
use crate::engine::{Generation, Output, PromptProgress, RunControl, RunOver};
use crate::events::{RunEnd, RunId};
use crate::model::Vocabulary;
use serde_json::Value;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

/// Entries that a client may be behind before its run waits for it.
const AHEAD: usize = 64;

/// A run, shared by what makes it go on and by who hears it.
pub(super) struct Run {
    pub(super) id: RunId,
    pub(super) request_id: String,
    pub(super) head: Head,
    pub(super) control: RunControl,
    config: Mutex<Config>,
    log: Mutex<Log>,
    /// How far its prompt is.
    reading: Mutex<Option<PromptProgress>>,
    over: Mutex<Option<Over>>,
    /// Why it was ended from outside, where it was.
    ended_by: Mutex<Option<EndedBy>>,
    /// Told of every entry, and of the end.
    changed: watch::Sender<()>,
    listener: watch::Sender<Listener>,
}

/// What is known of a run from its beginning.
pub(super) struct Head {
    pub(super) options: Options,
    pub(super) model: String,
    pub(super) model_info: Value,
    pub(super) prompt_text: String,
    pub(super) vocabulary: Arc<Vocabulary>,
    pub(super) seed: u32,
    pub(super) room: u32,
    /// The run in whose place it came.
    pub(super) replaces: Option<String>,
}

/// How a run has ended.
#[derive(Clone)]
pub(super) struct Over {
    pub(super) outcome: Result<Arc<RunEnd>, ApiError>,
    pub(super) ended_by: Option<EndedBy>,
    pub(super) total: Duration,
}

/// Who ended a run before its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndedBy {
    /// The client stopped it.
    Client,
    /// The client asked for another answer in its place.
    Regenerate,
    /// It took longer than it may.
    Timeout,
}

impl EndedBy {
    pub(super) const ALL: [Self; 3] = [Self::Client, Self::Regenerate, Self::Timeout];

    /// What the recording says.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Client => "the client stopped it",
            Self::Regenerate => "the client asked for another answer",
            Self::Timeout => "the time is over",
        }
    }

    /// Who ended a run whose recording says that.
    pub(super) fn recorded(message: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|by| message.starts_with(by.words()))
    }
}

/// Who hears a run.
#[derive(Debug, Clone, Copy)]
struct Listener {
    /// Counts up with each that came.
    number: u64,
    here: bool,
    /// Entries it was told.
    at: usize,
    /// Since when nobody is there.
    since: Instant,
}

/// Somebody who hears a run; the run goes on without it for a while.
pub(super) struct Follower {
    run: Arc<Run>,
    number: u64,
    at: usize,
    text: String,
    /// Tokens of the prompt that were told to be there.
    told_prompt: u32,
    told_end: bool,
    changed: watch::Receiver<()>,
}

impl Run {
    /// Lets a run go on, which somebody must follow at once. After `keep` without anybody who hears it, it ends; so long it is also known after its end.
    pub(super) fn start(app: &App, generation: Generation, config: Config, head: Head, keep: Duration) -> Arc<Self> {
        let Generation { run_id, request_id, output, control, .. } = generation;
        let run = Arc::new(Self {
            id: run_id,
            request_id,
            head,
            control,
            config: Mutex::new(config),
            log: Mutex::new(Log::new()),
            reading: Mutex::default(),
            over: Mutex::default(),
            ended_by: Mutex::default(),
            changed: watch::Sender::new(()),
            listener: watch::Sender::new(Listener { number: 0, here: true, at: 0, since: Instant::now() }),
        });
        app.streams().enter(&run);
        tokio::spawn(go_on(app.clone(), Arc::clone(&run), output, keep));
        run
    }

    /// Hears the run from behind the first `after` entries on. Whoever heard it before hears no more.
    pub(super) fn follow(self: &Arc<Self>, after: usize) -> Follower {
        let (at, text) = self.log().text_at(after);
        let mut number = 0;
        self.listener.send_modify(|listener| {
            number = listener.number + 1;
            *listener = Listener { number, here: true, at, since: Instant::now() };
        });
        // Whoever heard it before hears that.
        self.changed.send_replace(());
        Follower {
            run: Arc::clone(self),
            number,
            at,
            text,
            told_prompt: 0,
            told_end: false,
            changed: self.changed.subscribe(),
        }
    }

    /// Ends the run; what it has said is its answer.
    pub(super) async fn stop(&self, by: EndedBy) {
        self.ended_by.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(by);
        // It may be over already.
        let _ = self.control.stop(by.words()).await;
    }

    /// Its configuration, as it was changed last.
    pub(super) fn config(&self) -> Config {
        self.config.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that its configuration has changed.
    pub(super) fn set_config(&self, config: Config) {
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = config;
    }

    /// Whether it is over.
    pub(super) fn is_over(&self) -> bool {
        self.over.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, outcome: Result<Arc<RunEnd>, ApiError>) {
        let ended_by = *self.ended_by.lock().unwrap_or_else(PoisonError::into_inner);
        let total = self.log().elapsed();
        *self.over.lock().unwrap_or_else(PoisonError::into_inner) = Some(Over { outcome, ended_by, total });
        self.changed.send_replace(());
    }

    /// Returns when there is somebody to hear more, or nobody at all.
    async fn wanted(&self) {
        let told = self.log().len();
        let mut listener = self.listener.subscribe();
        // The sender is ours, so waiting cannot fail.
        let _ = listener.wait_for(|listener| !listener.here || told < listener.at + AHEAD).await;
    }

    /// Returns when nobody has been there for that long.
    async fn deserted(&self, keep: Duration) {
        let mut listener = self.listener.subscribe();
        loop {
            let now = *listener.borrow_and_update();
            if now.here {
                // The sender is ours, so waiting cannot fail.
                let _ = listener.changed().await;
                continue;
            }
            tokio::select! {
                () = sleep_until(now.since + keep) => return,
                _ = listener.changed() => {}
            }
        }
    }

    /// Returns when the run has taken longer than it may.
    async fn too_long(&self) {
        /// How often a run that rests is looked at.
        const LOOK: Duration = Duration::from_millis(50);
        let Some(limit) = self.head.options.timeout else { return std::future::pending().await };
        sleep(limit).await;
        loop {
            match self.control.progress().await {
                Ok(standing) if standing.active_time < limit => {
                    sleep(limit.saturating_sub(standing.active_time).max(LOOK)).await
                }
                Ok(_) => return,
                Err(RunOver) => std::future::pending().await,
            }
        }
    }
}

/// Takes what the engine says, as long as somebody wants it.
async fn go_on(app: App, run: Arc<Run>, mut output: tokio::sync::mpsc::Receiver<Output>, keep: Duration) {
    let mut too_long = std::pin::pin!(run.too_long());
    let mut timed_out = false;
    loop {
        let next = async {
            run.wanted().await;
            output.recv().await
        };
        let output = tokio::select! {
            output = next => output,
            () = run.deserted(keep) => {
                run.end(Err(ApiError::unavailable("the client went away and did not come back in time")));
                break;
            }
            () = &mut too_long, if !timed_out => {
                timed_out = true;
                run.stop(EndedBy::Timeout).await;
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
            // The report before the first decode tells a client of the protocol nothing.
            Some(Output::Progress(progress)) if progress.processed == progress.cached => continue,
            Some(Output::Progress(progress)) => {
                *run.reading.lock().unwrap_or_else(PoisonError::into_inner) = Some(progress);
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
        () = sleep(keep) => {}
        () = app.stopping() => {}
    }
    app.streams().leave(&run);
}

impl Follower {
    /// The run.
    pub(super) fn run(&self) -> &Arc<Run> {
        &self.run
    }

    /// How many entries were told, and the text after them.
    pub(super) fn position(&self) -> (usize, &str) {
        (self.at, &self.text)
    }

    /// Whether the last message was told; else somebody else hears the run.
    pub(super) fn has_told_end(&self) -> bool {
        self.told_end
    }

    /// The next message; `None` after the last one, and when somebody else hears the run now.
    pub(super) async fn next(&mut self) -> Option<Value> {
        loop {
            self.changed.mark_unchanged();
            if self.told_end || self.run.listener.borrow().number != self.number {
                return None;
            }
            // Read before the log: an end behind the last entry must not be told before it.
            let over = self.run.over.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let entry = self.run.log().get(self.at).cloned();
            if let Some(entry) = entry {
                self.at += 1;
                entry.apply(&mut self.text);
                self.tell_position();
                if !self.run.head.options.stream {
                    continue;
                }
                return Some(match entry {
                    Entry::Token(token) => message::token(&self.run, self.at, &token, &self.text),
                    Entry::Backtrack { chars, tokens, text } => {
                        message::backtrack(&self.run, self.at, (chars, tokens), &text, &self.text)
                    }
                });
            }
            if let Some(over) = over {
                self.told_end = true;
                return Some(message::last(&self.run, &over, &self.text));
            }
            if let Some(progress) = self.reading() {
                self.told_prompt = progress.processed;
                return Some(message::reading(&self.run, progress));
            }
            // The run holds the sender, and this the run.
            let _ = self.changed.changed().await;
        }
    }

    /// How far the prompt is, where that is news: a prompt that takes one step has none.
    fn reading(&self) -> Option<PromptProgress> {
        let progress = *self.run.reading.lock().unwrap_or_else(PoisonError::into_inner);
        progress.filter(|now| self.at == 0 && now.processed < now.total && now.processed > self.told_prompt)
    }

    fn tell_position(&self) {
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
                (listener.here, listener.since) = (false, Instant::now());
            }
            mine
        });
    }
}
