//! Commands to the decode thread.

use crate::engine::kv::conversation::SlotHistory;
use crate::engine::kv::error::SlotError;
use crate::engine::kv::snapshot::{SlotTokens, Snapshot};
use crate::engine::output::{EndReasoning, Output, RunProgress};
use crate::engine::run::Run;
use crate::engine::run::change::ParameterChange;
use crate::events::{EndCause, RunId, Scope, Signal, Tenant};
use crate::model::llama::AdapterSet;
use crate::mods::Reply;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Command to the decode thread.
pub enum Command {
    /// A new run, its client, and the signal of its start if the recorder had no room for it.
    Submit(Box<Run>, mpsc::Sender<Output>, Option<Signal>),
    /// Reply of a mod to the call of that number.
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
    /// Pause; release the slot after that time.
    Pause(Duration),
    Resume,
    Modify(Box<ParameterChange>),
    /// End the run by this cause, with a message; the text so far is the answer.
    Stop(EndCause, String),
    /// End the current reasoning, and report whether there was one.
    EndReasoning(oneshot::Sender<EndReasoning>),
    /// Report the progress only.
    Progress,
}

/// Task for a slot, with the sender of its result.
pub enum SlotTask {
    Tokens(oneshot::Sender<SlotTokens>),
    Erase(oneshot::Sender<usize>),
    Save(oneshot::Sender<Result<Snapshot, SlotError>>),
    /// Restores a validated state.
    Restore(Snapshot, Option<Tenant>, oneshot::Sender<Result<(), SlotError>>),
    Shift {
        keep: usize,
        discard: usize,
        answer: oneshot::Sender<Result<usize, SlotError>>,
    },
}

/// A task that waits for its slot, with its order of arrival.
pub struct QueuedTask {
    pub arrival: u64,
    pub slot: usize,
    /// States that the caller may see.
    pub scope: Scope,
    pub task: SlotTask,
}

impl SlotTask {
    /// Answers as for an empty slot.
    pub fn answer_as_empty(self) {
        // The caller may have disconnected meanwhile.
        match self {
            Self::Tokens(answer) => drop(answer.send(SlotTokens::default())),
            Self::Erase(answer) => drop(answer.send(0)),
            Self::Save(answer) => {
                let (tokens, adapters, history) = (Vec::new(), AdapterSet::default(), SlotHistory::default());
                drop(answer.send(Ok(Snapshot { tokens, adapters, history, state: Vec::new() })));
            }
            Self::Restore(_, _, answer) => drop(answer.send(Err(SlotError::Refused))),
            Self::Shift { keep, discard, answer } => {
                drop(answer.send(Err(SlotError::Range { keep, discard, tokens: 0 })));
            }
        }
    }

    /// Returns true if the caller no longer waits for the result.
    pub fn is_cancelled(&self) -> bool {
        match self {
            Self::Tokens(answer) => answer.is_closed(),
            Self::Erase(answer) => answer.is_closed(),
            Self::Save(answer) => answer.is_closed(),
            Self::Restore(_, _, answer) => answer.is_closed(),
            Self::Shift { answer, .. } => answer.is_closed(),
        }
    }
}
