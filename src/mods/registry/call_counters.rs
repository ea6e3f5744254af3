//! Counters of the calls of a mod.

use crate::events::{RunId, Scope, Tenant, system};
use crate::mods::{Reply, RunView};
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use utoipa::ToSchema;

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

/// Counters of the calls of one version of a mod, shared by all its runs.
#[derive(Default)]
pub(super) struct CallCounters {
    calls: AtomicU64,
    failures: AtomicU64,
    busy_ns: AtomicU64,
    /// Last failed call of the runs of each owner.
    last_failures: Mutex<HashMap<Option<Tenant>, CallFailure>>,
}

impl CallCounters {
    /// Returns the statistics. The last failure is that of a run that the scope covers; `None` without a scope.
    pub fn stats(&self, failures_for: Option<&Scope>) -> CallStats {
        let calls = self.calls.load(Ordering::Relaxed);
        CallStats {
            calls,
            failures: self.failures.load(Ordering::Relaxed),
            mean_us: (calls > 0).then(|| self.busy_ns.load(Ordering::Relaxed) as f64 / calls as f64 / 1e3),
            last_failure: failures_for.and_then(|scope| self.last_failure(scope)),
        }
    }

    fn last_failure(&self, scope: &Scope) -> Option<CallFailure> {
        let failures = self.last_failures.lock().unwrap_or_else(PoisonError::into_inner);
        let covered = failures.iter().filter(|(owner, _)| scope.includes(owner.as_ref()));
        covered.map(|(_, failure)| failure).max_by_key(|failure| failure.at).cloned()
    }

    /// Counts a call that began at `start`.
    pub fn count(&self, reply: &Reply, start: Instant, run: &RunView) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.busy_ns.fetch_add(reply.elapsed_since(start).as_nanos() as u64, Ordering::Relaxed);
        if let Some(exception) = &reply.exception {
            self.failures.fetch_add(1, Ordering::Relaxed);
            let failure = CallFailure { message: exception.message.clone(), at: system::now(), run_id: run.run_id };
            let mut failures = self.last_failures.lock().unwrap_or_else(PoisonError::into_inner);
            failures.insert(run.owner.clone(), failure);
        }
    }
}
