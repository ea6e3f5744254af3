//! The vocabulary: everything that can happen in a run, in the shape of the `/ingest` document.
//!
//! The engine emits these values, mods see them, the store keeps them, the trace fold reads them, and
//! every surface only translates them. A payload of somebody else's engine parses into the same types, so a
//! foreign run and our own take one way from here on. No I/O, and no import of any other module of ours.
//!
//! An [`TraceItem`] is one thing that happened; the items of a run form one ordered list: an event, then the
//! mod calls it caused, each with its logs and its action. What our engine measured beyond the document
//! (log-probabilities, alternatives, texts) travels in [`Measurements`], the typed form of an event's `details`.

mod action;
mod call;
mod event;
mod measured;
mod recorder;
mod run;

pub use action::{ActionRecord, ActionType};
pub use call::{LogLevel, ModCall, ModLog};
pub use event::{Event, EventType};
pub use measured::{Alternative, Eviction, Measurements, PromptRecord, Span, StageCount, TokenMeasurement};
pub use recorder::{DurabilityAck, DurabilityAcks, Recorder, UnstoredRun, UnstoredRuns};
pub use run::{EvictedMessage, Fault, Finish, FinishReason, RunEnd, RunId, RunStart, RunStatus, Surface, Usage};

use std::sync::Arc;

/// A token id of the vocabulary. llama.cpp's type; ids of other engines are kept as they are given.
pub type TokenId = i32;

/// A JSON text kept exactly as it was given.
pub type RawJson = Box<serde_json::value::RawValue>;

/// One thing that happened in a run.
#[derive(Debug, Clone)]
pub enum TraceItem {
    /// An event of the decode loop. `sequence_order` counts from 0 without holes.
    Event(Event),
    /// A mod was called for the newest event. Calls are numbered from 0 in the order of these items.
    ModCall(ModCall),
    /// A mod wrote a line during a call.
    ModLog(ModLog),
    /// What a mod answered.
    Action(ActionRecord),
    /// The coded attention of one step.
    Attention(AttentionStep),
}

/// What the recorder and live subscribers receive, in order, for every run.
#[derive(Debug, Clone)]
pub enum Signal {
    /// The run exists; always the first signal of a run.
    Started(Arc<RunStart>),
    /// Things that happened since the last signal.
    Items(RunId, Arc<Vec<TraceItem>>),
    /// The run is over; always the last signal of a run.
    Ended(RunId, Arc<RunEnd>),
}

impl Signal {
    /// The run that the signal belongs to.
    #[must_use]
    pub fn run_id(&self) -> RunId {
        match self {
            Self::Started(start) => start.run_id,
            Self::Items(id, _) | Self::Ended(id, _) => *id,
        }
    }
}

/// The attention of one step, coded for storage (`trace::attention` owns the coding).
#[derive(Debug, Clone)]
pub struct AttentionStep {
    /// The event whose logits this row produced: the step's `ForwardPass`.
    pub sequence_order: i32,
    /// Length of the row: the number of positions attended to, which is the position of the next token.
    pub row_len: u32,
    /// Layers that have attention scores, in order; index `i` of every section is `layer_ids[i]`.
    pub layer_ids: Arc<[u16]>,
    /// Heads per layer.
    pub heads: u16,
    /// Tier T0: mean, max and last-layer vectors, and per-head statistics.
    pub t0: Vec<u8>,
    /// Tier T1: the head-mean of every layer.
    pub t1: Vec<u8>,
}
