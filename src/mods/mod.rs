//! Mods: code that can observe and change every token of a run.
//!
//! A [`ModFactory`] is a registered mod; [`ModFactory::start`] creates a [`ModInstance`], the state of the mod for one
//! run. The engine calls the instance for the events that it handles and applies the [`Action`] of its reply. Built-in
//! mods reply immediately on the decode thread. Python mods reply later through [`ReplySender`], from their worker
//! process. While a reply is awaited, the scheduler leaves the run out of the batch.
//!
//! Mods have no access to the engine's state: they receive a [`Call`] and return a [`Reply`]. The engine applies the
//! action to the sequence, the KV cache and the trace.

mod action;
mod action_check;
mod action_record;
pub mod builtin;
mod call;
mod name;
pub mod python;
mod registry;
mod replay;
mod schema_check;

pub use action::{Action, LogitEdit, tool_calls_of};
pub use call::{Call, CallEvent, EventSet, ModException, ModLogLine, PromptImage, Reply, ReplySender, RunView};
pub use registry::{
    CallFailure, CallStats, FolderWatch, ImportRetry, InvalidUpload, LocalSource, ModDescription, ModFolder, ModInfo,
    ModOrigin, ModProblem, ModRef, ModRegistry, ModSource, ModUpload, ModUse, NameTaken, RegisteredVersion,
    SelectedMod, UnknownMod, WithSource, source_store, version_of,
};

pub use replay::{RecordedSequence, ReplayLimits, ReplayedReply};

use serde_json::Value;
use std::sync::Arc;

/// A registered mod.
pub trait ModFactory: Send + Sync {
    /// Returns the description, which includes name, language and version.
    fn describe(&self) -> ModDescription;

    /// Returns false if the mod was disabled or removed.
    fn is_enabled(&self) -> bool {
        true
    }

    /// Returns the hash of this version, [`ModUpload::hash`], if the source can be shown.
    fn source_hash(&self) -> Option<String> {
        None
    }

    /// Returns the upload that registers this version, with its source, if the source can be shown.
    fn upload(&self) -> Option<&ModUpload> {
        None
    }

    /// Creates an instance of the mod for one run.
    ///
    /// # Errors
    /// A message for the sender of `config`: the invalid field, and what is expected.
    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String>;
}

/// State of a mod for one run.
pub trait ModInstance: Send {
    /// Returns the events that the mod handles.
    fn handles(&self) -> EventSet;

    /// Returns the maximum number of appended tokens that the mod may still remove. The stream to the client is delayed
    /// by that many tokens, so that sent text is final. The default is 0.
    fn holdback(&self) -> usize {
        0
    }

    /// Returns the number of the answer's first tokens that the mod will not remove; `None` for all. The tokens after them
    /// are held back, and a stop string in them does not end the run. If the run ends, they are not part of the answer.
    fn discard_from(&self) -> Option<usize> {
        None
    }

    /// Handles the removal of all tokens of the answer after the first `generated`. If [`ModInstance::discard_from`]
    /// announced only these, it no longer announces any.
    fn retracted(&mut self, _generated: usize) {}

    /// Returns the layers after which the mod reads the hidden state of the last token at `ForwardPass`. The default is
    /// none.
    fn hidden_layers(&self) -> &[u16] {
        &[]
    }

    /// Handles one event. Returns the reply; `None` if it will come later, through a sender that `new_sender` creates.
    fn call(&mut self, call: &Call<'_>, new_sender: &dyn Fn() -> ReplySender) -> Option<Reply>;

    /// Delivers the reply to a call with a [polled](ReplySender::polled) sender, if it has arrived. Takes a
    /// microsecond, which is faster than waking the thread that would deliver it otherwise.
    fn poll_reply(&mut self) {}

    /// Ends polling. The reply is then delivered by another thread.
    fn stop_polling(&mut self) {}

    /// Handles the end of the run for any reason. The instance can drop its state.
    fn finished(&mut self) {}
}
