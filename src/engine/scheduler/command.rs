//! Commands to the decode thread.

use super::queue_place::QueuePlace;
use crate::engine::kv::error::SlotError;
use crate::engine::kv::snapshot::{SlotTokens, Snapshot};
use crate::engine::output::{EndReasoningOutcome, Output, RunProgress};
use crate::engine::run::Run;
use crate::engine::run::parameter_change::ParameterChange;
use crate::events::{EndCause, RunId, Scope, Tenant};
use crate::mods::Reply;
use crate::recording::Signal;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Command to the decode thread.
pub enum Command {
    /// A new run.
    Submit {
        run: Box<Run>,
        client: mpsc::Sender<Output>,
        /// Signal that the run has started, if it did not fit into the recorder's channel.
        unsent_start: Option<Signal>,
        place: QueuePlace,
    },
    /// Reply of a mod to the call with this number.
    Reply(RunId, u64, Reply),
    /// Request to control an active run.
    Control(RunId, ControlRequest, oneshot::Sender<RunProgress>),
    /// Task for a slot, run as soon as the slot is free.
    Slot(usize, Scope, SlotTask),
    /// Ends all runs and the thread.
    Stop,
}

/// Request to an active run.
pub enum ControlRequest {
    /// Pause; release the slot after this time.
    Pause(Duration),
    Resume,
    Modify(Box<ParameterChange>),
    /// End the run for this cause, with a message.
    Stop(EndCause, String),
    /// End the current reasoning, and report the outcome.
    EndReasoning(oneshot::Sender<EndReasoningOutcome>),
    /// Change nothing; every request returns the progress.
    Progress,
}

/// Task for a slot, with the sender of its result.
pub enum SlotTask {
    Tokens(oneshot::Sender<SlotTokens>),
    Erase(oneshot::Sender<usize>),
    Save(oneshot::Sender<Result<Snapshot, SlotError>>),
    /// Restores a validated snapshot.
    Restore(Snapshot, Option<Tenant>, oneshot::Sender<Result<(), SlotError>>),
    Shift {
        keep: usize,
        discard: usize,
        response: oneshot::Sender<Result<usize, SlotError>>,
    },
}

impl SlotTask {
    /// Sends the response for an empty slot.
    pub fn answer_as_empty(self) {
        // The caller may have disconnected in the meantime.
        match self {
            Self::Tokens(response) => drop(response.send(SlotTokens::default())),
            Self::Erase(response) => drop(response.send(0)),
            Self::Save(response) => {
                drop(response.send(Ok(Snapshot::default())));
            }
            Self::Restore(_, _, response) => drop(response.send(Err(SlotError::Rejected))),
            Self::Shift { keep, discard, response } => {
                drop(response.send(Err(SlotError::Range { keep, discard, tokens: 0 })));
            }
        }
    }

    /// Returns true if the caller no longer waits for the result.
    pub fn is_cancelled(&self) -> bool {
        match self {
            Self::Tokens(response) => response.is_closed(),
            Self::Erase(response) => response.is_closed(),
            Self::Save(response) => response.is_closed(),
            Self::Restore(_, _, response) => response.is_closed(),
            Self::Shift { response, .. } => response.is_closed(),
        }
    }
}
