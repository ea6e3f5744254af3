//! What can be done with a slot from outside: look at its tokens, throw its state away, take it out, put one in, cut tokens
//! out. A slot that is busy is waited for; a caller who goes away is forgotten.

use super::Engine;
use super::conversation::Memory;
use super::scheduler::{Command, Live, Scheduler, Slot};
use super::ses1::{self, Ses1Error};
use crate::events::TokenId;
use crate::model::ShiftError;
use crate::model::llama::AdapterSet;
use bytes::Bytes;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Something to do with a slot, and where the answer goes.
pub(super) enum SlotTask {
    Tokens(oneshot::Sender<SlotTokens>),
    Erase(oneshot::Sender<usize>),
    Save(oneshot::Sender<Result<Saved, SlotError>>),
    /// A state that was checked.
    Restore(Saved, oneshot::Sender<Result<(), SlotError>>),
    Shift {
        keep: usize,
        discard: usize,
        answer: oneshot::Sender<Result<usize, SlotError>>,
    },
}

/// The tokens whose KV state a slot holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotTokens {
    /// The tokens.
    pub tokens: Vec<TokenId>,
    /// Tokens of the last run's prompt that were evaluated, and not found.
    pub processed: usize,
}

/// The state of a slot as a block of bytes.
#[derive(Debug, Clone)]
pub struct SlotSnapshot {
    /// Number of its tokens.
    pub tokens: usize,
    /// SES1.
    pub block: Bytes,
}

/// Why something could not be done with a slot. The slot is as it was, except after [`SlotError::Failed`].
#[derive(Debug, Clone, thiserror::Error)]
pub enum SlotError {
    /// There is no such slot.
    #[error("there is no slot {slot}; the slots are 0 to {}", slots - 1)]
    NoSuchSlot {
        /// Asked for.
        slot: u32,
        /// Number of slots.
        slots: u32,
    },
    /// The model has no slots.
    #[error("the model generates no text, and has no slots")]
    NoSlots,
    /// The state is not one for this slot.
    #[error(transparent)]
    State(#[from] Ses1Error),
    /// llama.cpp did not take a state that was found to be in order.
    #[error("llama.cpp does not take this state; the slot is as it was")]
    Refused,
    /// More is to be removed than there is.
    #[error("n_keep + n_discard is {keep} + {discard}; the slot has {tokens} tokens")]
    Range {
        /// Tokens to keep.
        keep: usize,
        /// Tokens to remove.
        discard: usize,
        /// Tokens there are.
        tokens: usize,
    },
    /// The cache cannot remove these tokens.
    #[error("tokens cannot be removed: {0}")]
    Fixed(&'static str),
    /// llama.cpp failed; the slot is empty.
    #[error("{0}; the slot is empty now")]
    Failed(String),
    /// It is not known yet whether a state is of this model.
    #[error(
        "states cannot be saved or restored yet: the server reads every byte of the model once, to tell its states from those of \
         other models, and has read {percent} %; try again in {retry_after_s} seconds"
    )]
    Hashing {
        /// Hashed part of the model, in percent.
        percent: u64,
        /// Seconds until the hash may be known.
        retry_after_s: u64,
    },
    /// It cannot be known whether a state is of this model.
    #[error("states cannot be saved or restored: the model's files cannot be told from others: {0}")]
    Unidentified(String),
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

impl Engine {
    /// The tokens whose KV state a slot holds.
    ///
    /// # Errors
    /// [`SlotError::NoSuchSlot`], [`SlotError::Stopped`].
    pub async fn slot_tokens(&self, slot: u32) -> Result<SlotTokens, SlotError> {
        self.with_slot(slot, SlotTask::Tokens).await
    }

    /// Throws a slot's state away. Returns how many tokens it had.
    ///
    /// # Errors
    /// [`SlotError::NoSuchSlot`], [`SlotError::Stopped`].
    pub async fn erase_slot(&self, slot: u32) -> Result<usize, SlotError> {
        self.with_slot(slot, SlotTask::Erase).await
    }

    /// Copies a slot's state out.
    ///
    /// # Errors
    /// [`SlotError::State`] for a model whose state could not be checked when it comes back; [`SlotError::Hashing`],
    /// [`SlotError::Unidentified`], [`SlotError::NoSuchSlot`], [`SlotError::Stopped`].
    pub async fn save_slot(&self, slot: u32) -> Result<SlotSnapshot, SlotError> {
        self.check_slot(slot)?;
        let identity = self.inner.identification.known().await?;
        let saved = self.with_slot(slot, SlotTask::Save).await??;
        let home = Arc::clone(&self.inner.home);
        let write = move || ses1::write(&home, &identity, &saved).map(|block| (saved.tokens.len(), block));
        let (tokens, block) = tokio::task::spawn_blocking(write).await.map_err(|_| SlotError::Stopped)??;
        Ok(SlotSnapshot { tokens, block: block.into() })
    }

    /// Replaces a slot's state. The block may come from anywhere. Returns the number of its tokens.
    ///
    /// # Errors
    /// [`SlotError::State`], [`SlotError::Hashing`], [`SlotError::Unidentified`] and [`SlotError::Refused`] leave the slot as
    /// it was; [`SlotError::NoSuchSlot`],
    /// [`SlotError::Stopped`].
    pub async fn restore_slot(&self, slot: u32, block: Bytes) -> Result<usize, SlotError> {
        self.check_slot(slot)?;
        let identity = self.inner.identification.known().await?;
        let home = Arc::clone(&self.inner.home);
        let read = move || ses1::read(&home, &identity, &block);
        let saved = tokio::task::spawn_blocking(read).await.map_err(|_| SlotError::Stopped)??;
        let count = saved.tokens.len();
        self.with_slot(slot, |answer| SlotTask::Restore(saved, answer)).await??;
        Ok(count)
    }

    /// Removes `discard` tokens behind the first `keep`; what follows moves up. Returns how many are left.
    ///
    /// # Errors
    /// [`SlotError`]; only [`SlotError::Failed`] changes the slot.
    pub async fn shift_slot(&self, slot: u32, keep: usize, discard: usize) -> Result<usize, SlotError> {
        self.with_slot(slot, |answer| SlotTask::Shift { keep, discard, answer }).await?
    }

    /// Most bytes that the state of a slot can have.
    ///
    /// # Errors
    /// [`SlotError::State`] for a model whose states cannot be checked.
    pub fn max_snapshot_bytes(&self) -> Result<usize, SlotError> {
        self.check_slot(0)?;
        Ok(self.inner.home.largest()?)
    }

    async fn with_slot<T>(&self, slot: u32, task: impl FnOnce(oneshot::Sender<T>) -> SlotTask) -> Result<T, SlotError> {
        self.check_slot(slot)?;
        let (answer, answered) = oneshot::channel();
        let command = Command::Slot(slot as usize, task(answer));
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
    /// Does what was asked for of slots that are free, in turn with the runs that wait for them.
    pub(super) fn serve_slots(&mut self) {
        for _ in 0..self.tasks.len() {
            let Some(waiting) = self.tasks.pop_front() else { return };
            if waiting.task.is_given_up() {
                continue;
            }
            let first = |live: &Live| {
                live.arrival < waiting.arrival && live.run.request.slot.is_none_or(|slot| slot as usize == waiting.slot)
            };
            if self.slots[waiting.slot].live.is_some() || self.queue.iter().any(first) {
                self.tasks.push_back(waiting);
            } else {
                self.do_task(waiting.slot, waiting.task);
            }
        }
    }

    fn do_task(&mut self, index: usize, task: SlotTask) {
        // Whoever has gone away meanwhile needs no answer.
        match task {
            SlotTask::Tokens(answer) => {
                let Slot { cache, processed, .. } = &self.slots[index];
                let _ = answer.send(SlotTokens { tokens: cache.clone(), processed: *processed });
            }
            SlotTask::Erase(answer) => {
                let erased = self.slots[index].cache.len();
                self.empty(index);
                let _ = answer.send(erased);
            }
            SlotTask::Save(answer) => {
                let tokens = self.slots[index].cache.clone();
                let adapters = self.slots[index].adapters.clone().unwrap_or_default();
                let memory = self.slots[index].memory.clone();
                let state = if tokens.is_empty() { Ok(Vec::new()) } else { self.context.save(index as i32) };
                drop(answer.send(state.map(|state| Saved { tokens, adapters, memory, state }).map_err(|error| {
                    tracing::error!(%error, slot = index, "a slot's state cannot be saved");
                    SlotError::Stopped
                })));
            }
            SlotTask::Restore(saved, answer) => drop(answer.send(self.restore(index, saved))),
            SlotTask::Shift { keep, discard, answer } => drop(answer.send(self.shift(index, keep, discard))),
        }
    }

    fn empty(&mut self, index: usize) {
        self.context.clear(index as i32);
        self.slots[index].hold(Vec::new(), AdapterSet::default());
    }

    fn restore(&mut self, index: usize, saved: Saved) -> Result<(), SlotError> {
        let Saved { tokens, adapters, memory, state } = saved;
        if tokens.is_empty() {
            self.empty(index);
            return Ok(());
        }
        let sequence = index as i32;
        let held = self.slots[index].cache.len();
        let checkpoints = self.context.checkpoints(sequence).clone();
        let before = if held == 0 { None } else { Some(self.context.save(sequence).map_err(|_| SlotError::Refused)?) };
        if let Err(error) = self.context.restore(sequence, &state, tokens.len() as u32) {
            tracing::error!(%error, slot = index, "a state that was checked is refused");
            if let Some(before) = before {
                if self.context.restore(sequence, &before, held as u32).is_err() {
                    self.empty(index);
                    return Err(SlotError::Failed("llama.cpp took neither the new state nor the old one back".into()));
                }
                self.context.set_checkpoints(sequence, checkpoints);
            }
            return Err(SlotError::Refused);
        }
        self.slots[index].hold(tokens, adapters);
        self.slots[index].memory = memory;
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
                self.slots[index].memory.cut(&[keep..end]);
                Ok(left as usize)
            }
            Err(ShiftError::Fixed(reason)) => Err(SlotError::Fixed(reason)),
            Err(ShiftError::Failed) => {
                self.empty(index);
                Err(SlotError::Failed(ShiftError::Failed.to_string()))
            }
        }
    }
}

/// The state of a slot.
pub(super) struct Saved {
    pub tokens: Vec<TokenId>,
    /// The LoRA adapters that it was computed with.
    pub adapters: AdapterSet,
    /// What is remembered of the conversation.
    pub memory: Memory,
    /// What llama.cpp writes of it; empty without tokens.
    pub state: Vec<u8>,
}

/// Something to do with a slot, in its place among the runs.
pub(super) struct Waiting {
    pub arrival: u64,
    pub slot: usize,
    pub task: SlotTask,
}

impl SlotTask {
    /// Whether nobody waits for the answer any more.
    fn is_given_up(&self) -> bool {
        match self {
            Self::Tokens(answer) => answer.is_closed(),
            Self::Erase(answer) => answer.is_closed(),
            Self::Save(answer) => answer.is_closed(),
            Self::Restore(_, answer) => answer.is_closed(),
            Self::Shift { answer, .. } => answer.is_closed(),
        }
    }
}
