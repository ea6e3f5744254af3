//! Mods: code that steps into every token of a run.
//!
//! A [`ModFactory`] is a mod as the registry knows it; [`ModFactory::start`] makes a [`ModInstance`], the mod within one
//! run. The engine calls the session for the events it handles and applies the [`Action`] it answers with. A
//! session answers at once (built-in mods, on the decode thread) or later through [`ReplySender`] (Python mods, in
//! their worker process); while an answer is out, the scheduler leaves that run out of the batch.
//!
//! Mods never touch engine state: they see a [`Call`] and return a [`Reply`]. What an action does to sequence,
//! KV cache and trace is decided in `engine`, in one place.

mod action;
pub mod builtin;
mod call;
pub mod python;
mod registry;
mod schema_check;

pub use action::{Action, LogitEdit};
pub use call::{Call, CallEvent, EventSet, ModException, ModLogLine, Reply, ReplySender, RunView};
pub use registry::{
    CallFailure, CallStats, FolderWatch, InvalidUpload, ModDescription, ModFolder, ModInfo, ModOrigin, ModProblem,
    ModRef, ModRegistry, ModSource, ModUpload, ModUse, NameTaken, RegisteredVersion, SelectedMod, UnknownMod,
    WithSource, source_store, version_of,
};

use serde_json::Value;
use std::sync::Arc;

/// A mod as the registry knows it.
pub trait ModFactory: Send + Sync {
    /// Name, description, language, version.
    fn describe(&self) -> ModDescription;

    /// SHA-256 of its source in hexadecimal, where it has one that can be shown.
    fn source_hash(&self) -> Option<String> {
        None
    }

    /// Its source: a text, or an object from path to text.
    fn source_text(&self) -> Option<Value> {
        None
    }

    /// Begins the mod's part in one run.
    ///
    /// # Errors
    /// A message for the person who sent `config`: which field was wrong, and what would be right.
    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String>;
}

/// A mod within one run.
pub trait ModInstance: Send {
    /// The events it wants to be called for.
    fn handles(&self) -> EventSet;

    /// Most generated tokens it may take back after they were appended, where it knows a bound. The stream to the
    /// client lags by that much, so that what was sent stands.
    fn holdback(&self) -> usize {
        0
    }

    /// Handles one event. `Ok` is the answer; `Err(Pending)` says that it will come through the `done` it was given.
    ///
    /// # Errors
    /// [`Pending`] is not a failure: it hands the duty to answer over to whoever holds `done`.
    fn call(&mut self, call: &Call<'_>, done: ReplySender) -> Result<Reply, Pending>;

    /// Looks whether the answer to a call with a [watched](ReplySender::watched) `done` has come, and delivers it if so. Costs a
    /// microsecond, where the thread that would deliver it later has to wake up first.
    fn poll_reply(&mut self) {}

    /// The caller looks no longer; the answer comes by itself.
    fn stop_polling(&mut self) {}

    /// The run is over, for whatever reason; per-run state can be dropped.
    fn finished(&mut self) {}
}

/// The answer comes later, through [`ReplySender`].
#[derive(Debug)]
pub struct Pending;
