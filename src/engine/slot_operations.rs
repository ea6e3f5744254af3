//! Operations of clients on slots: read the tokens, erase, save and restore the state, remove tokens.

use super::Engine;
use super::kv::error::SlotError;
use super::kv::ses1;
use super::kv::snapshot::{SlotSnapshot, SlotTokens};
use super::scheduler::command::{Command, SlotTask};
use crate::events::{Scope, Tenant};
use bytes::Bytes;
use std::sync::Arc;
use tokio::sync::oneshot;

impl Engine {
    /// Returns the tokens whose KV state a slot holds.
    ///
    /// # Errors
    /// [`SlotError::NoSlots`], [`SlotError::NoSuchSlot`], [`SlotError::Stopped`].
    pub async fn slot_tokens(&self, scope: &Scope, slot: u32) -> Result<SlotTokens, SlotError> {
        self.run_on_slot(scope, slot, SlotTask::Tokens).await
    }

    /// Erases a slot's state. Returns the number of its tokens.
    ///
    /// # Errors
    /// [`SlotError::NoSlots`], [`SlotError::NoSuchSlot`], [`SlotError::Stopped`].
    pub async fn erase_slot(&self, scope: &Scope, slot: u32) -> Result<usize, SlotError> {
        self.run_on_slot(scope, slot, SlotTask::Erase).await
    }

    /// Returns a copy of a slot's state.
    ///
    /// # Errors
    /// [`SlotError::State`] for a model whose state cannot be validated on restore; [`SlotError::Hashing`],
    /// [`SlotError::Unidentified`], [`SlotError::NotSaved`], [`SlotError::NoSlots`], [`SlotError::NoSuchSlot`],
    /// [`SlotError::Stopped`].
    pub async fn save_slot(&self, scope: &Scope, slot: u32) -> Result<SlotSnapshot, SlotError> {
        self.check_slot(slot)?;
        let identity = self.inner.identity_watch.wait().await?;
        let saved = self.run_on_slot(scope, slot, SlotTask::Save).await??;
        let snapshot_format = Arc::clone(&self.inner.snapshot_format);
        let write = move || ses1::write(&snapshot_format, &identity, &saved).map(|block| (saved.tokens.len(), block));
        let (tokens, block) = tokio::task::spawn_blocking(write).await.map_err(|_| SlotError::Stopped)??;
        Ok(SlotSnapshot { tokens, block: block.into() })
    }

    /// Replaces a slot's state with that of a block, which is validated first. Returns the number of its tokens.
    ///
    /// # Errors
    /// [`SlotError::State`], [`SlotError::Hashing`], [`SlotError::Unidentified`] and [`SlotError::Rejected`] leave the
    /// slot unchanged; [`SlotError::NoSlots`], [`SlotError::NoSuchSlot`], [`SlotError::Stopped`].
    pub async fn restore_slot(&self, owner: Option<Tenant>, slot: u32, block: Bytes) -> Result<usize, SlotError> {
        self.check_slot(slot)?;
        let identity = self.inner.identity_watch.wait().await?;
        let snapshot_format = Arc::clone(&self.inner.snapshot_format);
        let read = move || ses1::read(&snapshot_format, &identity, &block);
        let saved = tokio::task::spawn_blocking(read).await.map_err(|_| SlotError::Stopped)??;
        let count = saved.tokens.len();
        self.run_on_slot(&Scope::All, slot, |response| SlotTask::Restore(saved, owner, response)).await??;
        Ok(count)
    }

    /// Removes `discard` tokens after the first `keep` and shifts the rest. Returns the number of tokens left.
    ///
    /// # Errors
    /// [`SlotError`]; only [`SlotError::Failed`] changes the slot.
    pub async fn shift_slot(&self, scope: &Scope, slot: u32, keep: usize, discard: usize) -> Result<usize, SlotError> {
        self.run_on_slot(scope, slot, |response| SlotTask::Shift { keep, discard, response }).await?
    }

    /// Returns the maximum size of a slot's state in bytes.
    ///
    /// # Errors
    /// [`SlotError::State`] for a model whose states cannot be validated; [`SlotError::NoSlots`].
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
        let (response, receiver) = oneshot::channel();
        let command = Command::Slot(slot as usize, scope.clone(), task(response));
        self.inner.commands.send(command).map_err(|_| SlotError::Stopped)?;
        receiver.await.map_err(|_| SlotError::Stopped)
    }

    pub(super) fn check_slot(&self, slot: u32) -> Result<(), SlotError> {
        let slots = self.slots();
        if !self.inner.model.generates() {
            return Err(SlotError::NoSlots);
        }
        if slot < slots { Ok(()) } else { Err(SlotError::NoSuchSlot { slot, slots }) }
    }
}
