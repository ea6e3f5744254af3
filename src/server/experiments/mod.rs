//! Experiments: those that this server runs, and the positions and the summary of their cells.

mod summary;

use crate::store::{Experiment, ExperimentState};
use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
pub(crate) use summary::{CellCounts, CellPosition, ExperimentSummary, Grid, VariantSummary};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Maximum experiments that a server runs at once. Each has as many runs as the model has slots, and the runs of more
/// experiments would fill the queue for other clients.
pub(crate) const MAX_ACTIVE_EXPERIMENTS: usize = 8;

/// The reason why an experiment cannot be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotAdded {
    /// It is active already.
    Active,
    /// The server runs the maximum number of experiments.
    TooMany,
}

/// The experiments that this server runs, each with the token that cancels it.
#[derive(Debug, Default)]
pub(crate) struct ActiveExperiments(Mutex<HashMap<Uuid, CancellationToken>>);

impl ActiveExperiments {
    /// Adds an experiment. Returns the token that cancels it.
    ///
    /// # Errors
    /// It cannot be added.
    pub(crate) fn add(&self, id: Uuid) -> Result<CancellationToken, NotAdded> {
        let mut active = self.lock();
        if active.contains_key(&id) {
            return Err(NotAdded::Active);
        }
        if active.len() >= MAX_ACTIVE_EXPERIMENTS {
            return Err(NotAdded::TooMany);
        }
        let cancelled = CancellationToken::new();
        active.insert(id, cancelled.clone());
        Ok(cancelled)
    }

    /// Removes an experiment that has ended.
    pub(crate) fn remove(&self, id: Uuid) {
        self.lock().remove(&id);
    }

    /// Cancels an experiment, if it is active.
    pub(crate) fn cancel(&self, id: Uuid) {
        if let Some(cancelled) = self.lock().get(&id) {
            cancelled.cancel();
        }
    }

    /// Returns the experiments that this server runs.
    pub(crate) fn ids(&self) -> HashSet<Uuid> {
        self.lock().keys().copied().collect()
    }

    /// Marks an experiment of this server as interrupted if its execution failed. `before` are those that were active
    /// before the experiment was read: it may have ended since then, and its state in the database with it.
    pub(crate) fn update_state(&self, before: &HashSet<Uuid>, server_id: Uuid, experiment: &mut Experiment) {
        let id = experiment.experiment_id;
        let is_executed = experiment.server_id != server_id || before.contains(&id) || self.lock().contains_key(&id);
        if experiment.state == ExperimentState::Running && !is_executed {
            experiment.state = ExperimentState::Interrupted;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, CancellationToken>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
