//! Status of the decode thread, readable from any thread: counters since the start, and a view of every slot. The
//! decode thread writes atomics; it takes a lock only when a slot gets a new run or the parameters of its run change.

use super::latencies::Latencies;
use super::request::Limits;
use crate::events::{RunEnd, RunId, Tenant};
use crate::model::llama::{AdapterSet, SamplingParams};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Seconds covered by the recent totals of [`EngineCounts`].
const WINDOW_SECONDS: u64 = 60;

/// Counters and slot states of the decode thread.
#[derive(Debug)]
pub struct EngineStatus {
    started: Instant,
    counters: Counters,
    recent: Vec<Bucket>,
    queued: AtomicU32,
    slots: Vec<SlotStatus>,
    latencies: Latencies,
    is_stopping: AtomicBool,
}

#[derive(Debug, Default)]
struct Counters {
    decodes: AtomicU64,
    busy_slots: AtomicU64,
    longest: AtomicU64,
    work: WorkCounters,
}

/// Tokens of finished runs, and the time spent on them.
#[derive(Debug, Default)]
struct WorkCounters {
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    prompt_us: AtomicU64,
    generated_tokens: AtomicU64,
    generation_us: AtomicU64,
    drafts: AtomicU64,
    drafted_tokens: AtomicU64,
    accepted_tokens: AtomicU64,
}

/// Tokens and times of the runs that finished in one second.
#[derive(Debug, Default)]
struct Bucket {
    second: AtomicU64,
    work: WorkCounters,
}

#[derive(Debug, Default)]
struct SlotStatus {
    /// See [`SlotView::task`].
    task: AtomicU64,
    /// Number of changes of the parameters in `run`.
    parameter_changes: AtomicU32,
    busy: AtomicBool,
    prompt_tokens: AtomicU32,
    decoded: AtomicU32,
    cached: AtomicU32,
    generated: AtomicU32,
    new_line: AtomicBool,
    run: Mutex<Option<Arc<SlotRun>>>,
}

/// Parameters of the run in a slot.
#[derive(Debug)]
pub struct SlotRun {
    /// Id of the run.
    pub run_id: RunId,
    /// The tenant that the run belongs to.
    pub owner: Option<Tenant>,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Limits and stop conditions.
    pub limits: Limits,
    /// LoRA adapters and control vectors applied to the run.
    pub adapters: AdapterSet,
}

/// Progress of a run in a slot.
#[derive(Debug, Clone, Copy)]
pub(super) struct SlotProgress {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens decoded so far, without the cached ones.
    pub decoded: usize,
    /// Prompt tokens whose state was cached.
    pub cached: usize,
    /// Tokens generated so far.
    pub generated: usize,
    /// True if the answer has a line break.
    pub new_line: bool,
    /// True until the run has ended.
    pub busy: bool,
    /// Number of changes of the run's parameters.
    pub parameter_changes: u32,
}

/// State of a slot, as last published by the decode thread.
#[derive(Debug, Clone)]
pub struct SlotView {
    /// Arrival number of the slot's newest run, which llama-server calls its task; 0 before the first. Runs and slot
    /// tasks are counted together from 1.
    pub task: u64,
    /// True while that run is active.
    pub busy: bool,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens decoded so far, without the cached ones.
    pub decoded: u32,
    /// Prompt tokens whose state was cached.
    pub cached: u32,
    /// Tokens generated so far.
    pub generated: u32,
    /// True if the answer has a line break.
    pub new_line: bool,
    /// Parameters of the run; `None` before the first.
    pub run: Option<Arc<SlotRun>>,
}

/// Tokens of finished runs, and the time spent on them, summed over runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenTotals {
    /// Prompt tokens that were decoded.
    pub prompt_tokens: u64,
    /// Prompt tokens whose state was cached.
    pub cached_tokens: u64,
    /// Microseconds spent on prompts.
    pub prompt_us: u64,
    /// Generated tokens.
    pub generated_tokens: u64,
    /// Microseconds spent on generating.
    pub generation_us: u64,
    /// Drafts of speculative decoding.
    pub drafts: u64,
    /// Tokens of these drafts.
    pub drafted_tokens: u64,
    /// Drafted tokens that were accepted.
    pub accepted_tokens: u64,
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default)]
pub struct EngineCounts {
    /// Decodes of the model.
    pub decodes: u64,
    /// Busy slots, summed over these decodes.
    pub busy_slots: u64,
    /// Tokens of the longest sequence that was decoded.
    pub longest: u64,
    /// Totals since the start.
    pub total: TokenTotals,
    /// Totals of the last minute.
    pub recent: TokenTotals,
    /// Runs that have a slot.
    pub running: u32,
    /// Runs that wait for a slot.
    pub queued: u32,
}

impl EngineStatus {
    pub(super) fn new(slots: u32) -> Self {
        Self {
            started: Instant::now(),
            counters: Counters::default(),
            recent: (0..WINDOW_SECONDS).map(|_| Bucket::default()).collect(),
            queued: AtomicU32::new(0),
            slots: (0..slots).map(|_| SlotStatus::default()).collect(),
            latencies: Latencies::new(),
            is_stopping: AtomicBool::new(false),
        }
    }

    /// Returns true after [`Engine::announce_stop`](super::Engine::announce_stop).
    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Relaxed)
    }

    pub(super) fn set_stopping(&self) {
        self.is_stopping.store(true, Relaxed);
    }

    /// Returns the latencies of runs and mod calls.
    #[must_use]
    pub fn latencies(&self) -> &Latencies {
        &self.latencies
    }

    /// Returns the state of every slot, by number.
    #[must_use]
    pub fn slots(&self) -> Vec<SlotView> {
        self.slots.iter().map(SlotStatus::view).collect()
    }

    /// Returns the counters since the start.
    #[must_use]
    pub fn counts(&self) -> EngineCounts {
        let now = self.second();
        let recent = self
            .recent
            .iter()
            .filter(|bucket| now.saturating_sub(bucket.second.load(Relaxed)) < WINDOW_SECONDS)
            .fold(TokenTotals::default(), |sum, bucket| sum.plus(bucket.work.totals()));
        EngineCounts {
            decodes: self.counters.decodes.load(Relaxed),
            busy_slots: self.counters.busy_slots.load(Relaxed),
            longest: self.counters.longest.load(Relaxed),
            total: self.counters.work.totals(),
            recent,
            running: self.slots.iter().map(|slot| u32::from(slot.busy.load(Relaxed))).sum(),
            queued: self.queued.load(Relaxed),
        }
    }

    fn second(&self) -> u64 {
        self.started.elapsed().as_secs()
    }

    /// Publishes the number of runs that wait for a slot.
    pub(super) fn set_queued(&self, queued: usize) {
        self.queued.store(queued as u32, Relaxed);
    }

    /// Publishes the run in a slot. `task` is its arrival number; `run` is called only if that number or the run's
    /// parameters have changed.
    pub(super) fn set_slot(&self, slot: usize, task: u64, progress: SlotProgress, run: impl FnOnce() -> SlotRun) {
        let Some(slot) = self.slots.get(slot) else { return };
        let is_new = slot.task.swap(task, Relaxed) != task;
        let is_changed = slot.parameter_changes.swap(progress.parameter_changes, Relaxed) != progress.parameter_changes;
        if is_new || is_changed {
            *slot.run.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(run()));
        }
        slot.set(progress);
    }

    /// Publishes that a slot has no run.
    pub(super) fn set_free(&self, slot: usize) {
        if let Some(slot) = self.slots.get(slot) {
            slot.busy.store(false, Relaxed);
        }
    }

    /// Counts a run that has ended. `slot` is its slot, whose last progress it sets; `None` for a run without a slot.
    pub(super) fn count_run(&self, slot: Option<u32>, progress: SlotProgress, end: &RunEnd) {
        if let Some(slot) = slot.and_then(|slot| self.slots.get(slot as usize)) {
            slot.set(progress);
        }
        let (finish, usage) = (&end.finish, end.finish.usage);
        if let Some(us) = finish.first_token_us {
            self.latencies.first_token.observe_us(us);
        }
        if let Some(us) = finish.generation_us.checked_div(u64::from(usage.completion_tokens)) {
            self.latencies.output_token.observe_us(us);
        }
        self.add(TokenTotals {
            prompt_tokens: u64::from(finish.prompt_decoded),
            cached_tokens: u64::from(usage.cached_tokens),
            prompt_us: finish.prompt_us,
            generated_tokens: u64::from(usage.completion_tokens),
            generation_us: finish.generation_us,
            drafts: u64::from(finish.drafts.drafts),
            drafted_tokens: u64::from(finish.drafts.drafted),
            accepted_tokens: u64::from(finish.drafts.accepted),
        });
    }

    /// Counts a decode of `busy` runs, with `longest` tokens in the longest sequence.
    pub(super) fn count_decode(&self, busy: usize, longest: usize) {
        self.counters.decodes.fetch_add(1, Relaxed);
        self.counters.busy_slots.fetch_add(busy as u64, Relaxed);
        self.counters.longest.fetch_max(longest as u64, Relaxed);
    }

    /// Counts an encoder decode of `inputs` inputs, with `tokens` in total and `longest` in the longest.
    pub(super) fn count_encode(&self, inputs: usize, tokens: usize, longest: usize, elapsed_us: u64) {
        self.count_decode(inputs, longest);
        self.add(TokenTotals { prompt_tokens: tokens as u64, prompt_us: elapsed_us, ..TokenTotals::default() });
    }

    fn add(&self, totals: TokenTotals) {
        self.counters.work.add(totals);
        let second = self.second();
        let bucket = &self.recent[(second % WINDOW_SECONDS) as usize];
        // Only one thread writes, so there is no race.
        if bucket.second.swap(second, Relaxed) != second {
            bucket.work.clear();
        }
        bucket.work.add(totals);
    }
}

impl EngineCounts {
    /// Adds the counters of another thread of the same model.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            decodes: self.decodes + other.decodes,
            busy_slots: self.busy_slots + other.busy_slots,
            longest: self.longest.max(other.longest),
            total: self.total.plus(other.total),
            recent: self.recent.plus(other.recent),
            running: self.running + other.running,
            queued: self.queued + other.queued,
        }
    }
}

impl TokenTotals {
    fn plus(self, other: Self) -> Self {
        Self {
            prompt_tokens: self.prompt_tokens + other.prompt_tokens,
            cached_tokens: self.cached_tokens + other.cached_tokens,
            prompt_us: self.prompt_us + other.prompt_us,
            generated_tokens: self.generated_tokens + other.generated_tokens,
            generation_us: self.generation_us + other.generation_us,
            drafts: self.drafts + other.drafts,
            drafted_tokens: self.drafted_tokens + other.drafted_tokens,
            accepted_tokens: self.accepted_tokens + other.accepted_tokens,
        }
    }
}

impl WorkCounters {
    fn add(&self, totals: TokenTotals) {
        self.prompt_tokens.fetch_add(totals.prompt_tokens, Relaxed);
        self.cached_tokens.fetch_add(totals.cached_tokens, Relaxed);
        self.prompt_us.fetch_add(totals.prompt_us, Relaxed);
        self.generated_tokens.fetch_add(totals.generated_tokens, Relaxed);
        self.generation_us.fetch_add(totals.generation_us, Relaxed);
        self.drafts.fetch_add(totals.drafts, Relaxed);
        self.drafted_tokens.fetch_add(totals.drafted_tokens, Relaxed);
        self.accepted_tokens.fetch_add(totals.accepted_tokens, Relaxed);
    }

    fn clear(&self) {
        for counter in [
            &self.prompt_tokens,
            &self.cached_tokens,
            &self.prompt_us,
            &self.generated_tokens,
            &self.generation_us,
            &self.drafts,
            &self.drafted_tokens,
            &self.accepted_tokens,
        ] {
            counter.store(0, Relaxed);
        }
    }

    fn totals(&self) -> TokenTotals {
        TokenTotals {
            prompt_tokens: self.prompt_tokens.load(Relaxed),
            cached_tokens: self.cached_tokens.load(Relaxed),
            prompt_us: self.prompt_us.load(Relaxed),
            generated_tokens: self.generated_tokens.load(Relaxed),
            generation_us: self.generation_us.load(Relaxed),
            drafts: self.drafts.load(Relaxed),
            drafted_tokens: self.drafted_tokens.load(Relaxed),
            accepted_tokens: self.accepted_tokens.load(Relaxed),
        }
    }
}

impl SlotStatus {
    fn view(&self) -> SlotView {
        SlotView {
            task: self.task.load(Relaxed),
            busy: self.busy.load(Relaxed),
            prompt_tokens: self.prompt_tokens.load(Relaxed),
            decoded: self.decoded.load(Relaxed),
            cached: self.cached.load(Relaxed),
            generated: self.generated.load(Relaxed),
            new_line: self.new_line.load(Relaxed),
            run: self.run.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    fn set(&self, progress: SlotProgress) {
        self.prompt_tokens.store(progress.prompt_tokens as u32, Relaxed);
        self.decoded.store(progress.decoded as u32, Relaxed);
        self.cached.store(progress.cached as u32, Relaxed);
        self.generated.store(progress.generated as u32, Relaxed);
        self.new_line.store(progress.new_line, Relaxed);
        self.busy.store(progress.busy, Relaxed);
    }
}
