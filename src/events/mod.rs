//! The data types of a run: events, mod calls, logs and actions, in the format of the `/ingest` document.
//!
//! The engine emits these values, mods receive them, the store writes them and the trace fold reads them; the APIs
//! convert them. A payload of another engine parses into the same types and is processed in the same way. This module
//! does no I/O and imports no other module of the crate.
//!
//! A [`TraceItem`] is one entry of a run. The items of a run form one ordered list: an event, then the mod calls it
//! caused, each with its logs and its action. Thunder's measurements beyond the document (log-probabilities,
//! alternatives, texts) are in [`Measurements`], the typed form of an event's `details`.

mod action;
mod action_details;
mod call;
mod event;
mod finish;
mod float;
mod histogram;
mod image;
mod measured;
mod object;
mod requested;
mod run;
pub mod system;
mod tenant;

pub use action::{ActionRecord, ActionType};
pub use action_details::{ActionDetails, MovedToken};
pub use call::{LogLevel, ModCall, ModLog};
pub use event::{Event, EventType};
pub use finish::{DraftUsage, EndCause, EvictedMessage, Fault, Finish, FinishReason, ModFailures, RunEnd, Usage};
pub use float::shortest_f64;
pub use histogram::{Histogram, HistogramCounts};
pub use image::{ImageFile, ImageRecord, ImageTile, hex};
pub use measured::{Alternative, Eviction, LogitLens, Measurements, PromptRecord, Span, StageCount, TokenMeasurement};
pub use object::{ObjectsOnly, from_object, optional_object};
pub use requested::RequestedAction;
pub use run::{RunId, RunMetadata, RunParent, RunStart, RunStatus, Surface, is_reserved_request_id};
pub use tenant::{Scope, Tenant};

use std::sync::Arc;

/// A token id. The type is llama.cpp's; ids of other engines are kept unchanged.
pub type TokenId = i32;

/// Returns true if the id is a placeholder for one position of an image. Such ids are negative, so that no vocabulary
/// has them, and derived from the image, so that equal ids mean equal images.
#[must_use]
pub const fn is_image_token(token: TokenId) -> bool {
    // llama.cpp uses -1 for "no token".
    token < -1
}

/// JSON text, kept byte for byte.
pub type RawJson = Box<serde_json::value::RawValue>;

/// One entry of a run's trace.
#[derive(Debug, Clone)]
pub enum TraceItem {
    /// An event of the decode loop. `sequence_order` counts from 0 without gaps.
    Event(Event),
    /// A call of a mod for the newest event. Calls are numbered from 0 in the order of these items.
    ModCall(ModCall),
    /// A line that a mod wrote during a call.
    ModLog(ModLog),
    /// The action that a mod returned.
    Action(ActionRecord),
    /// The encoded attention of one step.
    Attention(AttentionStep),
}

/// The attention of one step, encoded for storage by `trace::attention`.
#[derive(Debug, Clone)]
pub struct AttentionStep {
    /// `sequence_order` of the step's `ForwardPass` event, whose logits belong to this row.
    pub sequence_order: i32,
    /// Length of the row: the number of positions attended to, which equals the position of the next token.
    pub row_len: u32,
    /// Layers with attention scores, in order; index `i` of every section belongs to `layer_ids[i]`.
    pub layer_ids: Arc<[u16]>,
    /// Heads per layer.
    pub heads: u16,
    /// Tier T0: mean, max and last-layer vectors, and per-head statistics.
    pub t0: Vec<u8>,
    /// Tier T1: the head-mean of every layer.
    pub t1: Vec<u8>,
    /// Rows of the heads that the request selected; empty if it selected none.
    pub head_rows: Vec<u8>,
}

/// The heads whose attention rows are stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum StoredHeads {
    /// No head; the tiers T0 and T1 are stored for every run with attention.
    #[default]
    None,
    /// Every head of every layer.
    All,
    /// Layer and head of each.
    Listed(Arc<[(u16, u16)]>),
}

impl StoredHeads {
    /// Returns true if the rows of this head are stored.
    #[must_use]
    pub fn has(&self, layer: u16, head: u16) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Listed(heads) => heads.contains(&(layer, head)),
        }
    }
}

/// `null`, `"all"`, or a list of `[layer, head]`.
impl serde::Serialize for StoredHeads {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_none(),
            Self::All => serializer.serialize_str("all"),
            Self::Listed(heads) => heads.serialize(serializer),
        }
    }
}
