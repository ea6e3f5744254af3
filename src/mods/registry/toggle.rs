//! A mod that can be disabled while runs use it, and that counts its calls.

use crate::events::{RunId, Scope, Tenant, system};
use crate::mods::{Call, EventSet, ModDescription, ModException, ModFactory, ModInstance, Reply, ReplySender, RunView};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use utoipa::ToSchema;

/// State of a mod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ToggleState {
    /// The mod is enabled.
    Enabled,
    /// The mod was disabled.
    Disabled,
    /// The mod was removed.
    Removed,
}

/// Statistics of the calls of a mod.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub struct CallStats {
    /// Number of calls.
    pub calls: u64,
    /// Number of failed calls.
    pub failures: u64,
    /// Mean time of a call in microseconds; `None` before the first.
    pub mean_us: Option<f64>,
    /// Last failed call, of the runs that the client may read.
    pub last_failure: Option<CallFailure>,
}

/// A failed call.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct CallFailure {
    /// Message, one line.
    pub message: String,
    /// Time of the call.
    pub at: DateTime<Utc>,
    /// Run of the call.
    #[schema(value_type = String)]
    pub run_id: RunId,
}

/// Toggle and statistics of one version of a mod, shared by all its runs.
pub(super) struct Toggle {
    name: String,
    /// State shared by all versions of a mod.
    state: Arc<AtomicU8>,
    calls: AtomicU64,
    failures: AtomicU64,
    busy_ns: AtomicU64,
    /// Last failed call of the runs of each owner.
    last_failures: Mutex<HashMap<Option<Tenant>, CallFailure>>,
}

impl Toggle {
    /// Creates the toggle of the first version of a mod.
    pub fn new(name: &str) -> Arc<Self> {
        Self::sharing(name, Arc::new(AtomicU8::new(ToggleState::Enabled as u8)))
    }

    /// Creates the toggle of the next version. It shares the state: a disabled mod stays disabled, and a change of the
    /// state also applies to runs of earlier versions.
    pub fn for_next_version(&self) -> Arc<Self> {
        Self::sharing(&self.name, Arc::clone(&self.state))
    }

    fn sharing(name: &str, state: Arc<AtomicU8>) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            state,
            calls: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            busy_ns: AtomicU64::new(0),
            last_failures: Mutex::default(),
        })
    }

    pub fn is_enabled(&self) -> bool {
        self.state.load(Ordering::Relaxed) == ToggleState::Enabled as u8
    }

    pub fn set(&self, state: ToggleState) {
        self.state.store(state as u8, Ordering::Relaxed);
    }

    /// Returns the statistics; only with a scope, they have the last failure of the runs that the scope covers.
    pub fn stats(&self, scope: Option<&Scope>) -> CallStats {
        let calls = self.calls.load(Ordering::Relaxed);
        CallStats {
            calls,
            failures: self.failures.load(Ordering::Relaxed),
            mean_us: (calls > 0).then(|| self.busy_ns.load(Ordering::Relaxed) as f64 / calls as f64 / 1e3),
            last_failure: scope.and_then(|scope| self.last_failure(scope)),
        }
    }

    fn last_failure(&self, scope: &Scope) -> Option<CallFailure> {
        let failures = self.last_failures.lock().unwrap_or_else(PoisonError::into_inner);
        let covered = failures.iter().filter(|(owner, _)| scope.includes(owner.as_ref()));
        covered.map(|(_, failure)| failure).max_by_key(|failure| failure.at).cloned()
    }

    /// Counts a call that began at `start`.
    fn count(&self, reply: &Reply, start: Instant, run: &RunView) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.busy_ns.fetch_add(reply.elapsed_since(start).as_nanos() as u64, Ordering::Relaxed);
        if let Some(exception) = &reply.exception {
            self.failures.fetch_add(1, Ordering::Relaxed);
            let failure = CallFailure { message: exception.message.clone(), at: system::now(), run_id: run.run_id };
            let mut failures = self.last_failures.lock().unwrap_or_else(PoisonError::into_inner);
            failures.insert(run.owner.clone(), failure);
        }
    }

    /// Returns the reply for the first call after the mod was disabled or removed.
    fn disabled_reply(&self) -> Reply {
        let state =
            if self.state.load(Ordering::Relaxed) == ToggleState::Removed as u8 { "removed" } else { "disabled" };
        let message = format!("the mod '{}' was {state} during the run and is no longer called", self.name);
        Reply { exception: Some(ModException { message, traceback: None }), ..Reply::default() }
    }
}

/// A mod with its toggle.
pub(super) struct ToggledMod {
    inner: Arc<dyn ModFactory>,
    toggle: Arc<Toggle>,
}

impl ToggledMod {
    pub fn new(inner: Arc<dyn ModFactory>, toggle: Arc<Toggle>) -> Self {
        Self { inner, toggle }
    }

    pub fn toggle(&self) -> &Toggle {
        &self.toggle
    }
}

impl ModFactory for ToggledMod {
    fn describe(&self) -> ModDescription {
        self.inner.describe()
    }

    fn is_enabled(&self) -> bool {
        self.toggle.is_enabled()
    }

    fn source_hash(&self) -> Option<String> {
        self.inner.source_hash()
    }

    fn source_text(&self) -> Option<Value> {
        self.inner.source_text()
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let inner = self.inner.start(config, run)?;
        Ok(Box::new(ToggledInstance { inner, toggle: Arc::clone(&self.toggle), is_off: false }))
    }
}

struct ToggledInstance {
    inner: Box<dyn ModInstance>,
    toggle: Arc<Toggle>,
    /// True if the run was informed that the mod is disabled. The mod then misses events, so it stays off.
    is_off: bool,
}

impl ModInstance for ToggledInstance {
    fn handles(&self) -> EventSet {
        if self.is_off { EventSet::NONE } else { self.inner.handles() }
    }

    fn holdback(&self) -> usize {
        if self.is_off || !self.toggle.is_enabled() { 0 } else { self.inner.holdback() }
    }

    fn hidden_layers(&self) -> &[u16] {
        self.inner.hidden_layers()
    }

    fn call(&mut self, call: &Call<'_>, new_sender: &dyn Fn() -> ReplySender) -> Option<Reply> {
        if self.is_off || !self.toggle.is_enabled() {
            self.is_off = true;
            return Some(self.toggle.disabled_reply());
        }
        let start = Instant::now();
        let reply = self.inner.call(call, &|| {
            let (run, toggle) = (Arc::clone(call.run), Arc::clone(&self.toggle));
            new_sender().inspected_by(move |reply| toggle.count(reply, start, &run))
        });
        reply.inspect(|reply| self.toggle.count(reply, start, call.run))
    }

    fn poll_reply(&mut self) {
        self.inner.poll_reply();
    }

    fn stop_polling(&mut self) {
        self.inner.stop_polling();
    }

    fn finished(&mut self) {
        self.inner.finished();
    }
}
