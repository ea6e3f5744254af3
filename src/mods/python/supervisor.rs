//! Thread that supervises one worker of a mod: starts it on demand, sends it one call at a time, replaces it when it
//! exceeds a deadline or dies, and ends it after an idle period.
//!
//! Calls wait here, not in the worker. A deadline therefore counts from the moment the worker receives the call, and a
//! failing worker loses exactly one call. That call fails with an exception and is never retried, since the mod may
//! have executed half of it; the other calls go to the next worker.

use super::background_cpu::BackgroundCpu;
use super::call_log::CallLog;
use super::handle::WorkerShared;
use super::job::{CallJob, Job, RunContext};
use super::limits::MAX_THREADS;
use super::message::{FromWorker, ToWorker, to_json};
use super::process::{WorkerFailure, WorkerProcess};
use super::query::{answer, vocabulary_id};
use super::worker_spec::{StartFailure, WorkerSpec};
use crate::model::Vocabulary;
use crate::mods::{ModException, Reply};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Delay after the failed start of a worker, and after the second consecutive failure of a worker; doubles up to
/// [`MAX_RESTART_DELAY`].
const MIN_RESTART_DELAY: Duration = Duration::from_millis(500);
/// Maximum of that delay.
const MAX_RESTART_DELAY: Duration = Duration::from_secs(30);
/// Interval at which a worker is checked between calls.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Supervisor of one worker of a mod.
pub struct Supervisor {
    pub name: String,
    pub spec: WorkerSpec,
    pub shared: Arc<WorkerShared>,
    worker: Option<WorkerProcess>,
    /// Number of the current worker.
    generation: u64,
    /// Vocabularies; the index is the id known to workers.
    vocabularies: Vec<Weak<Vocabulary>>,
    backoff: Option<Backoff>,
    /// Failed workers since the last successful call.
    consecutive_failures: u32,
    /// Time of the last finished job.
    idle_since: Instant,
    /// Time of the last check of the worker.
    checked_at: Instant,
    /// CPU time that the worker has used between calls; `None` if the system does not report it.
    background_cpu: Option<BackgroundCpu>,
    /// Time of the calls of all workers, without those whose reply the decode thread polled. A call that uses several
    /// processors counts with its CPU time.
    call_time: Duration,
}

/// Delay during which no worker is started.
struct Backoff {
    exception: ModException,
    delay: Duration,
    until: Instant,
}

impl Supervisor {
    pub fn new(name: String, spec: WorkerSpec, shared: Arc<WorkerShared>) -> Self {
        Self {
            name,
            spec,
            shared,
            worker: None,
            generation: 0,
            vocabularies: Vec::new(),
            backoff: None,
            consecutive_failures: 0,
            idle_since: Instant::now(),
            checked_at: Instant::now(),
            background_cpu: None,
            call_time: Duration::ZERO,
        }
    }

    /// Runs until all senders of jobs are dropped.
    pub fn run(mut self, jobs: &Receiver<Job>) {
        while let Some(job) = self.next(jobs) {
            let reply = match job {
                Job::StartRun => {
                    // The first call reports a failure.
                    let _ = self.ensure_worker();
                    None
                }
                Job::Call(job) => {
                    let reply = self.call(&job);
                    Some((job.done, reply))
                }
                Job::Finished { run, regions } => {
                    self.finished(&run);
                    regions.into_iter().for_each(|region| self.shared.memory.free(region));
                    None
                }
            };
            // Before the next call can be sent to the worker. The worker may never be idle for a whole interval.
            if self.checked_at.elapsed() >= CHECK_INTERVAL
                && let Some(violation) = self.find_violation()
            {
                self.end_worker(&violation);
            }
            let worker = self.worker.as_ref();
            self.shared.job_done(worker.map_or(0, |_| self.generation), || worker?.stream().ok());
            // The reply is sent last, so that the next call finds the worker idle.
            if let Some((done, reply)) = reply {
                done.reply(reply);
            }
            self.idle_since = Instant::now();
        }
    }

    fn next(&mut self, jobs: &Receiver<Job>) -> Option<Job> {
        loop {
            if self.worker.is_none() {
                return jobs.recv().ok();
            }
            match jobs.recv_timeout(CHECK_INTERVAL) {
                Ok(job) => return Some(job),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => self.check_idle_worker(),
            }
        }
    }

    /// Ends a worker that no run needs, or that violates a limit, unless a call is on its way to it.
    fn check_idle_worker(&mut self) {
        let violation = self.find_violation();
        let idle = self.spec.limits.idle;
        let has_runs = self.shared.runs.load(Ordering::Relaxed) > 0;
        let is_unused = !has_runs && !idle.is_zero() && self.idle_since.elapsed() > idle;
        if (violation.is_none() && !is_unused) || !self.shared.detach_worker() {
            return;
        }
        if let Some(violation) = violation {
            self.end_worker(&violation);
        } else {
            self.worker = None;
            tracing::debug!(mod.name = self.name, "worker ended: unused");
        }
    }

    /// Returns the limit that the worker violates: it uses too much CPU time or too many threads between calls.
    fn find_violation(&mut self) -> Option<String> {
        self.checked_at = Instant::now();
        let worker = self.worker.as_ref()?;
        if let Some(threads) = worker.excess_threads() {
            return Some(format!("it had {threads} threads without a call; the maximum is {MAX_THREADS}"));
        }
        let max = self.spec.limits.idle_cpu;
        let calls = self.call_time + self.shared.direct_call_time();
        let used = self.background_cpu.as_mut()?.update(self.checked_at, worker.cpu_time()?, calls);
        let (used_ms, max_ms) = (used.as_millis(), max.as_millis());
        (!max.is_zero() && used > max)
            .then(|| format!("it used {used_ms} ms of CPU time without a call; the maximum is {max_ms} ms"))
    }

    /// Ends a worker that violates a limit. The next one starts after a delay, so that the violation is not continued at
    /// once.
    fn end_worker(&mut self, violation: &str) {
        let Some(worker) = self.worker.take() else { return };
        worker.kill();
        tracing::warn!(mod.name = self.name, "worker ended: {violation}");
        if self.consecutive_failures == 0 {
            self.backoff = None;
        }
        self.consecutive_failures += 1;
        self.start_backoff(ModException::new(format!("the worker was ended: {violation}")));
    }

    fn call(&mut self, job: &CallJob) -> Reply {
        if job.sent_directly_at.is_none()
            && let Err(exception) = self.ensure_worker()
        {
            return Reply::failed(exception);
        }
        let sent_at = job.sent_directly_at.unwrap_or_else(Instant::now);
        let deadline = sent_at + self.spec.limits.call;
        let mut logs = CallLog::default();
        let frame = job.sent_directly_at.is_none().then_some(&*job.header);
        let cpu_before = self.worker_cpu_time();
        let result = self.exchange(&job.run, frame, deadline, &mut logs);
        self.count_call(sent_at, cpu_before);
        let mut reply = match result {
            Err(failure) => Reply::failed(self.discard_worker(&failure, self.spec.limits.call)),
            Ok((FromWorker::Reply(reply), body)) => {
                self.consecutive_failures = 0;
                job.to_reply(reply, &body, &self.shared.memory, sent_at)
            }
            Ok(_) => {
                let failure = WorkerFailure::Protocol("it did not send a reply to a call".into());
                Reply::failed(self.discard_worker(&failure, self.spec.limits.call))
            }
        };
        reply.logs = logs.lines;
        reply
    }

    fn worker_cpu_time(&self) -> Option<Duration> {
        self.worker.as_ref()?.cpu_time()
    }

    /// Counts a call that began at `begun`, when the worker had used the CPU time `cpu_before`.
    fn count_call(&mut self, begun: Instant, cpu_before: Option<Duration>) {
        let cpu = self.worker_cpu_time().zip(cpu_before).map_or(Duration::ZERO, |(now, then)| now.saturating_sub(then));
        self.call_time += begun.elapsed().max(cpu);
    }

    fn finished(&mut self, run: &RunContext) {
        if !self.knows_run(run) || !self.has_live_worker() {
            return;
        }
        let header = to_json(&ToWorker::Finished { run: run.number });
        let (begun, cpu_before) = (Instant::now(), self.worker_cpu_time());
        let deadline = begun + self.spec.limits.call;
        let mut logs = CallLog::default();
        let reply = self.exchange(run, Some(&header), deadline, &mut logs);
        self.count_call(begun, cpu_before);
        for log in logs.lines {
            tracing::info!(mod.name = self.name, run.id = %run.view.run_id, "log line of finished hook: {}", log.escaped());
        }
        let exception = match reply {
            Ok((FromWorker::Reply(reply), _)) => reply.exception.map(ModException::from),
            Ok(_) => None,
            Err(failure) => Some(self.discard_worker(&failure, self.spec.limits.call)),
        };
        if let Some(ModException { message, .. }) = exception {
            tracing::warn!(mod.name = self.name, run.id = %run.view.run_id, "finished hook failed: {message}");
        }
    }

    /// Sends the frame, unless the worker has it already, and waits for the reply. Until then, answers queries of the
    /// worker.
    fn exchange(
        &mut self,
        run: &RunContext,
        header: Option<&[u8]>,
        deadline: Instant,
        logs: &mut CallLog,
    ) -> Result<(FromWorker, Vec<u8>), WorkerFailure> {
        let is_new = !self.knows_run(run);
        let worker = self.worker.as_mut().ok_or(WorkerFailure::Ended)?;
        if is_new {
            let id = vocabulary_id(&mut self.vocabularies, &run.view.vocabulary);
            worker.send(&to_json(&run.to_message(id)), &[], deadline)?;
            run.reset_holdback();
            run.introduced_to.store(self.generation, Ordering::Release);
        }
        if let Some(header) = header {
            worker.send(header, &[], deadline)?;
        }
        loop {
            match worker.receive_message(deadline, logs, Some(run))? {
                (FromWorker::Query(query), _) => {
                    let (answer, body) = answer(query, &self.vocabularies)?;
                    worker.send(&to_json(&answer), &body, deadline)?;
                }
                message @ (FromWorker::Reply(_), _) => {
                    worker.end_call();
                    return Ok(message);
                }
                violation => return Ok(violation),
            }
        }
    }

    /// Returns true if the run was introduced to the current worker.
    fn knows_run(&self, run: &RunContext) -> bool {
        run.introduced_to.load(Ordering::Acquire) == self.generation
    }

    /// Returns true if a worker is running. Drops one that has ended between two calls.
    fn has_live_worker(&mut self) -> bool {
        match self.worker.take().map(WorkerProcess::if_alive) {
            Some(Ok(worker)) => {
                self.worker = Some(worker);
                return true;
            }
            Some(Err(end)) => tracing::warn!(mod.name = self.name, "{end}"),
            None => {}
        }
        false
    }

    /// Starts a worker and imports the mod, unless such a worker is running.
    fn ensure_worker(&mut self) -> Result<(), ModException> {
        if self.has_live_worker() {
            return Ok(());
        }
        if let Some(backoff) = &self.backoff
            && let Some(left) = backoff.until.checked_duration_since(Instant::now())
        {
            let ModException { message, traceback } = backoff.exception.clone();
            let message = format!("{message}; the next attempt is in {} ms", left.as_millis() + 1);
            return Err(ModException { message, traceback });
        }
        match self.spec.start(&self.shared.memory) {
            Ok((worker, _)) => {
                let calls = self.call_time + self.shared.direct_call_time();
                self.background_cpu = worker.cpu_time().map(|cpu| BackgroundCpu::new(Instant::now(), cpu, calls));
                self.worker = Some(worker);
                self.generation += 1;
                // The delay is kept until a call succeeds, so that it continues to double.
                if self.consecutive_failures == 0 {
                    self.backoff = None;
                }
                Ok(())
            }
            Err(StartFailure { exception, .. }) => {
                self.start_backoff(exception.clone());
                Err(exception)
            }
        }
    }

    fn start_backoff(&mut self, exception: ModException) {
        let delay =
            self.backoff.as_ref().map_or(MIN_RESTART_DELAY, |backoff| (backoff.delay * 2).min(MAX_RESTART_DELAY));
        self.backoff = Some(Backoff { exception, delay, until: Instant::now() + delay });
    }

    /// Ends a failed worker. The next call gets a new one, after a delay if failures repeat.
    fn discard_worker(&mut self, failure: &WorkerFailure, deadline: Duration) -> ModException {
        let Some(worker) = self.worker.take() else {
            return ModException::new("the worker has ended");
        };
        let exception = worker.fail(failure, deadline);
        self.consecutive_failures += 1;
        if self.consecutive_failures == 1 {
            self.backoff = None;
        } else {
            self.start_backoff(exception.clone());
        }
        tracing::warn!(mod.name = self.name, "{}; a new worker starts with the next call", exception.message);
        exception
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.shared.close();
    }
}
