//! Operations on slots: read the tokens, erase, save and restore the state, remove tokens. A task waits until its slot
//! is free; it is dropped if its caller disconnects.

use super::Engine;
use super::conversation::SlotHistory;
use super::scheduler::{ActiveRun, Command, Scheduler, Slot};
use super::ses1::{self, Ses1Error};
use crate::events::{Scope, Tenant, TokenId};
use crate::model::ShiftError;
use crate::model::llama::AdapterSet;
use bytes::Bytes;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Task for a slot, with the sender of its result.
pub(super) enum SlotTask {
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

/// Tokens whose KV state a slot holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotTokens {
    /// The tokens.
    pub tokens: Vec<TokenId>,
    /// Prompt tokens that the last run evaluated, without the cached ones.
    pub processed: usize,
}

/// State of a slot as a block of bytes.
#[derive(Debug, Clone)]
pub struct SlotSnapshot {
    /// Number of tokens.
    pub tokens: usize,
    /// Block in SES1 format.
    pub block: Bytes,
}

/// Error of an operation on a slot. The slot is unchanged, except after [`SlotError::Failed`].
#[derive(Debug, Clone, thiserror::Error)]
pub enum SlotError {
    /// The slot does not exist.
    #[error("slot {slot} does not exist; slots must be from 0 to {}", slots - 1)]
    NoSuchSlot {
        /// Requested slot.
        slot: u32,
        /// Number of slots.
        slots: u32,
    },
    /// The model has no slots.
    #[error("the model generates no text and has no slots")]
    NoSlots,
    /// The state is not valid for this slot.
    #[error(transparent)]
    State(#[from] Ses1Error),
    /// llama.cpp rejected a validated state.
    #[error("llama.cpp rejected this state; the slot is unchanged")]
    Refused,
    /// The range to remove exceeds the tokens of the slot.
    #[error("n_keep + n_discard must be at most the slot's {tokens} tokens, got {keep} + {discard}")]
    Range {
        /// Tokens to keep.
        keep: usize,
        /// Tokens to remove.
        discard: usize,
        /// Tokens in the slot.
        tokens: usize,
    },
    /// The cache cannot remove these tokens.
    #[error("tokens cannot be removed: {0}")]
    Fixed(&'static str),
    /// llama.cpp failed; the slot is empty.
    #[error("{0}; the slot is empty now")]
    Failed(String),
    /// The identity of the model is not known yet.
    #[error(
        "states cannot be saved or restored yet: the server reads every byte of the model once to identify it, \
         and has read {percent} %; try again in {retry_after_s} seconds"
    )]
    Hashing {
        /// Hashed part of the model, in percent.
        percent: u64,
        /// Estimated seconds until the hash is known.
        retry_after_s: u64,
    },
    /// The identity of the model cannot be determined.
    #[error("states cannot be saved or restored: the model's files cannot be read: {0}")]
    Unidentified(String),
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

impl Engine {
    /// Returns the tokens whose KV state a slot holds.
    ///
    /// # Errors
    /// [`SlotError::NoSuchSlot`], [`SlotError::Stopped`].
    pub async fn slot_tokens(&self, scope: &Scope, slot: u32) -> Result<SlotTokens, SlotError> {
        self.run_on_slot(scope, slot, SlotTask::Tokens).await
    }

    /// Erases a slot's state. Returns the number of its tokens.
    ///
    /// # Errors
    /// [`SlotError::NoSuchSlot`], [`SlotError::Stopped`].
    pub async fn erase_slot(&self, scope: &Scope, slot: u32) -> Result<usize, SlotError> {
        self.run_on_slot(scope, slot, SlotTask::Erase).await
    }

    /// Returns a copy of a slot's state.
    ///
    /// # Errors
    /// [`SlotError::State`] for a model whose state cannot be validated on restore; [`SlotError::Hashing`],
    /// [`SlotError::Unidentified`], [`SlotError::NoSuchSlot`], [`SlotError::Stopped`].
    pub async fn save_slot(&self, scope: &Scope, slot: u32) -> Result<SlotSnapshot, SlotError> {
        self.check_slot(slot)?;
        let identity = self.inner.identity_watch.wait().await?;
        let saved = self.run_on_slot(scope, slot, SlotTask::Save).await??;
        let snapshot_format = Arc::clone(&self.inner.snapshot_format);
        let write = move || ses1::write(&snapshot_format, &identity, &saved).map(|block| (saved.tokens.len(), block));
        let (tokens, block) = tokio::task::spawn_blocking(write).await.map_err(|_| SlotError::Stopped)??;
        Ok(SlotSnapshot { tokens, block: block.into() })
    }

    /// Replaces a slot's state. The block is not trusted. Returns the number of its tokens.
    ///
    /// # Errors
    /// [`SlotError::State`], [`SlotError::Hashing`], [`SlotError::Unidentified`] and [`SlotError::Refused`] leave the
    /// slot unchanged; [`SlotError::NoSuchSlot`], [`SlotError::Stopped`].
    pub async fn restore_slot(&self, owner: Option<Tenant>, slot: u32, block: Bytes) -> Result<usize, SlotError> {
        self.check_slot(slot)?;
        let identity = self.inner.identity_watch.wait().await?;
        let snapshot_format = Arc::clone(&self.inner.snapshot_format);
        let read = move || ses1::read(&snapshot_format, &identity, &block);
        let saved = tokio::task::spawn_blocking(read).await.map_err(|_| SlotError::Stopped)??;
        let count = saved.tokens.len();
        self.run_on_slot(&Scope::All, slot, |answer| SlotTask::Restore(saved, owner, answer)).await??;
        Ok(count)
    }

    /// Removes `discard` tokens after the first `keep` and shifts the rest. Returns how many are left.
    ///
    /// # Errors
    /// [`SlotError`]; only [`SlotError::Failed`] changes the slot.
    pub async fn shift_slot(&self, scope: &Scope, slot: u32, keep: usize, discard: usize) -> Result<usize, SlotError> {
        self.run_on_slot(scope, slot, |answer| SlotTask::Shift { keep, discard, answer }).await?
    }

    /// Returns the maximum size of a slot's state in bytes.
    ///
    /// # Errors
    /// [`SlotError::State`] for a model whose states cannot be validated.
    pub fn max_snapshot_bytes(&self) -> Result<usize, SlotError> {
        self.check_slot(0)?;
        Ok(self.inner.snapshot_format.max_bytes()?)
    }

    async fn run_on_slot<T>(
        &self,
        scope: &Scope,
        slot: u32,
        task: impl FnOnce(oneshot::Sender<T>) -> SlotTask,
    ) -> Result<T, SlotError> {
        self.check_slot(slot)?;
        let (answer, answered) = oneshot::channel();
        let command = Command::Slot(slot as usize, scope.clone(), task(answer));
        self.inner.commands.send(command).map_err(|_| SlotError::Stopped)?;
        answered.await.map_err(|_| SlotError::Stopped)
    }

    pub(super) fn check_slot(&self, slot: u32) -> Result<(), SlotError> {
        let slots = self.slots();
        if !self.inner.model.generates() {
            return Err(SlotError::NoSlots);
        }
        if slot < slots { Ok(()) } else { Err(SlotError::NoSuchSlot { slot, slots }) }
    }
}

impl Scheduler<'_> {
    /// Runs the tasks of slots that are free, in turn with the runs that wait for them.
    pub(super) fn run_slot_tasks(&mut self) {
        for _ in 0..self.tasks.len() {
            let Some(waiting) = self.tasks.pop_front() else { return };
            if waiting.task.is_cancelled() {
                continue;
            }
            let first = |live: &ActiveRun| {
                live.arrival < waiting.arrival && live.run.request.slot.is_none_or(|slot| slot as usize == waiting.slot)
            };
            if self.slots[waiting.slot].active.is_some() || self.queue.iter().any(first) {
                self.tasks.push_back(waiting);
            } else {
                self.run_task(waiting.slot, &waiting.scope, waiting.task);
            }
        }
    }

    /// Runs a task. A slot with the state of a tenant that the scope does not cover looks empty and stays unchanged.
    fn run_task(&mut self, index: usize, scope: &Scope, task: SlotTask) {
        if !scope.includes(self.slots[index].owner.as_ref()) {
            return task.answer_as_empty();
        }
        // The caller may have disconnected meanwhile.
        match task {
            SlotTask::Tokens(answer) => {
                let Slot { cache, processed, .. } = &self.slots[index];
                let _ = answer.send(SlotTokens { tokens: cache.clone(), processed: *processed });
            }
            SlotTask::Erase(answer) => {
                let erased = self.slots[index].cache.len();
                self.clear_slot(index);
                let _ = answer.send(erased);
            }
            SlotTask::Save(answer) => {
                let tokens = self.slots[index].cache.clone();
                let adapters = self.slots[index].adapters.clone().unwrap_or_default();
                let history = self.slots[index].history.clone();
                let state = if tokens.is_empty() { Ok(Vec::new()) } else { self.context.save(index as i32) };
                drop(answer.send(state.map(|state| Snapshot { tokens, adapters, history, state }).map_err(|error| {
                    tracing::error!(%error, slot = index, "slot state not saved");
                    SlotError::Stopped
                })));
            }
            SlotTask::Restore(saved, owner, answer) => {
                let restored = self.restore(index, saved);
                if restored.is_ok() {
                    self.slots[index].owner = owner;
                }
                let _ = answer.send(restored);
            }
            SlotTask::Shift { keep, discard, answer } => drop(answer.send(self.shift(index, keep, discard))),
        }
    }

    fn clear_slot(&mut self, index: usize) {
        self.context.clear(index as i32);
        self.slots[index].replace(Vec::new(), AdapterSet::default());
    }

    fn restore(&mut self, index: usize, saved: Snapshot) -> Result<(), SlotError> {
        let Snapshot { tokens, adapters, history, state } = saved;
        if tokens.is_empty() {
            self.clear_slot(index);
            return Ok(());
        }
        let sequence = index as i32;
        let held = self.slots[index].cache.len();
        let checkpoints = self.context.checkpoints(sequence).clone();
        let before = if held == 0 { None } else { Some(self.context.save(sequence).map_err(|_| SlotError::Refused)?) };
        if let Err(error) = self.context.restore(sequence, &state, tokens.len() as u32) {
            tracing::error!(%error, slot = index, "validated slot state rejected by llama.cpp");
            if let Some(before) = before {
                if self.context.restore(sequence, &before, held as u32).is_err() {
                    self.clear_slot(index);
                    return Err(SlotError::Failed("llama.cpp accepted neither the new state nor the old one".into()));
                }
                self.context.set_checkpoints(sequence, checkpoints);
            }
            return Err(SlotError::Refused);
        }
        self.slots[index].replace(tokens, adapters);
        self.slots[index].history = history;
        self.slots[index].last_used = self.arrivals;
        Ok(())
    }

    fn shift(&mut self, index: usize, keep: usize, discard: usize) -> Result<usize, SlotError> {
        let tokens = self.slots[index].cache.len();
        let end = keep.checked_add(discard).filter(|&end| end <= tokens);
        let end = end.ok_or(SlotError::Range { keep, discard, tokens })?;
        if discard == 0 {
            return Ok(tokens);
        }
        match self.context.cut(index as i32, tokens as u32, &[keep as u32..end as u32]) {
            Ok(left) => {
                self.slots[index].cache.drain(keep..end);
                self.slots[index].history.remove_ranges(&[keep..end]);
                Ok(left as usize)
            }
            Err(ShiftError::Fixed(reason)) => Err(SlotError::Fixed(reason)),
            Err(ShiftError::Failed) => {
                self.clear_slot(index);
                Err(SlotError::Failed(ShiftError::Failed.to_string()))
            }
        }
    }
}

/// Saved state of a slot.
pub(super) struct Snapshot {
    pub tokens: Vec<TokenId>,
    /// LoRA adapters that it was computed with.
    pub adapters: AdapterSet,
    /// History of the conversation.
    pub history: SlotHistory,
    /// Data of llama.cpp; empty without tokens.
    pub state: Vec<u8>,
}

/// A task that waits for its slot, with its order of arrival.
pub(super) struct QueuedTask {
    pub arrival: u64,
    pub slot: usize,
    /// States that the caller may see.
    pub scope: Scope,
    pub task: SlotTask,
}

impl SlotTask {
    /// Answers as for an empty slot.
    fn answer_as_empty(self) {
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
    fn is_cancelled(&self) -> bool {
        match self {
            Self::Tokens(answer) => answer.is_closed(),
            Self::Erase(answer) => answer.is_closed(),
            Self::Save(answer) => answer.is_closed(),
            Self::Restore(_, _, answer) => answer.is_closed(),
            Self::Shift { answer, .. } => answer.is_closed(),
        }
    }
}
