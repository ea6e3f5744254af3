//! The connection between the engine and the recorder of the store: the channel of [`Signal`]s, durability acks, and the list
//! of runs that are not stored yet.

mod handle;

pub use handle::{DurabilityAck, DurabilityAcks, NotStored, RecorderHandle, UnstoredRun, UnstoredRuns};

use crate::events::{RunEnd, RunId, RunStart, TraceItem};
use std::sync::Arc;

/// A message about a run to the recorder and to live subscribers. The signals of a run are sent in order.
#[derive(Debug, Clone)]
pub enum Signal {
    /// The run exists; always the first signal of a run.
    Started(Arc<RunStart>),
    /// New items since the last signal.
    Items(RunId, Arc<Vec<TraceItem>>),
    /// The run has ended; always the last signal of a run.
    Ended(RunId, Arc<RunEnd>),
}

impl Signal {
    /// Returns the run that the signal belongs to.
    #[must_use]
    pub fn run_id(&self) -> RunId {
        match self {
            Self::Started(start) => start.run_id,
            Self::Items(id, _) | Self::Ended(id, _) => *id,
        }
    }
}
