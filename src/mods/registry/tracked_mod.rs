//! A mod that can be disabled while runs use it, and that counts its calls.

use super::call_counters::CallCounters;
use crate::mods::{
    Call, EventSet, ModDescription, ModException, ModFactory, ModInstance, ModUpload, Reply, ReplySender, RunView,
};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

/// Status of a mod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ModStatus {
    /// The mod is enabled.
    Enabled,
    /// The mod was disabled.
    Disabled,
    /// The mod was removed.
    Removed,
}

/// Status shared by all versions of a mod: a disabled mod stays disabled, and a change also applies to runs of earlier
/// versions.
pub(super) struct SharedStatus {
    /// Name of the mod.
    name: String,
    status: AtomicU8,
}

impl SharedStatus {
    pub fn new(name: &str, status: ModStatus) -> Arc<Self> {
        Arc::new(Self { name: name.to_owned(), status: AtomicU8::new(status as u8) })
    }

    pub fn is_enabled(&self) -> bool {
        self.status.load(Ordering::Relaxed) == ModStatus::Enabled as u8
    }

    pub fn set(&self, status: ModStatus) {
        self.status.store(status as u8, Ordering::Relaxed);
    }

    /// Returns the reply for the first call after the mod was disabled or removed.
    fn disabled_reply(&self) -> Reply {
        let is_removed = self.status.load(Ordering::Relaxed) == ModStatus::Removed as u8;
        let change = if is_removed { "removed" } else { "disabled" };
        let message = format!("the mod '{}' was {change} during the run and is no longer called", self.name);
        Reply::failed(ModException::new(message))
    }
}

/// One version of a mod, with its status and counters.
pub(super) struct TrackedMod {
    inner: Arc<dyn ModFactory>,
    status: Arc<SharedStatus>,
    counters: Arc<CallCounters>,
}

impl TrackedMod {
    pub fn new(inner: Arc<dyn ModFactory>, status: Arc<SharedStatus>) -> Self {
        Self { inner, status, counters: Arc::default() }
    }

    pub fn status(&self) -> &Arc<SharedStatus> {
        &self.status
    }

    pub fn counters(&self) -> &CallCounters {
        &self.counters
    }
}

impl ModFactory for TrackedMod {
    fn describe(&self) -> ModDescription {
        self.inner.describe()
    }

    fn is_enabled(&self) -> bool {
        self.status.is_enabled()
    }

    fn source_hash(&self) -> Option<String> {
        self.inner.source_hash()
    }

    fn upload(&self) -> Option<&ModUpload> {
        self.inner.upload()
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let inner = self.inner.start(config, run)?;
        Ok(Box::new(TrackedInstance {
            inner,
            status: Arc::clone(&self.status),
            counters: Arc::clone(&self.counters),
            is_off: false,
        }))
    }
}

struct TrackedInstance {
    inner: Box<dyn ModInstance>,
    status: Arc<SharedStatus>,
    counters: Arc<CallCounters>,
    /// True if the run was informed that the mod is disabled. The mod then misses events, so it stays off.
    is_off: bool,
}

impl ModInstance for TrackedInstance {
    fn handles(&self) -> EventSet {
        if self.is_off { EventSet::NONE } else { self.inner.handles() }
    }

    fn holdback(&self) -> usize {
        if self.is_off || !self.status.is_enabled() { 0 } else { self.inner.holdback() }
    }

    fn discard_from(&self) -> Option<usize> {
        if self.is_off || !self.status.is_enabled() { None } else { self.inner.discard_from() }
    }

    fn retracted(&mut self, generated: usize) {
        self.inner.retracted(generated);
    }

    fn hidden_layers(&self) -> &[u16] {
        self.inner.hidden_layers()
    }

    fn call(&mut self, call: &Call<'_>, new_sender: &dyn Fn() -> ReplySender) -> Option<Reply> {
        if self.is_off || !self.status.is_enabled() {
            self.is_off = true;
            return Some(self.status.disabled_reply());
        }
        let start = Instant::now();
        let reply = self.inner.call(call, &|| {
            let (run, counters) = (Arc::clone(call.run), Arc::clone(&self.counters));
            new_sender().inspected_by(move |reply| counters.count(reply, start, &run))
        });
        reply.inspect(|reply| self.counters.count(reply, start, call.run))
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
