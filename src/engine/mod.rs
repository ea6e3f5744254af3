//! One validated [`Request`] in, events out: scheduler, slots, sequences, sampling, stop, KV state.
//!
//! One decode thread per loaded model owns the llama context. Slots are llama sequences; every loop decodes one
//! batch of all runs that are ready, prompt chunks mixed in. A run that waits (for a mod, for a client that
//! does not read) is left out of the batch and delays nobody. Everything that happens leaves the thread through
//! bounded channels: [`crate::events::Signal`]s to the recorder, [`Output`]s to the surface that asked. Nothing
//! here waits for a database, a disk or a socket.

mod request;

pub use request::{Limits, RecordPolicy, Request, Sampling};

use crate::events::{Alternative, RunEnd, RunId, Signal, TokenMeasure};
use crate::model::Model;
use std::sync::Arc;
use tokio::sync::mpsc;

/// How the engine is set up.
#[derive(Debug, Clone)]
pub struct Options {
    /// Context in tokens, shared by all slots.
    pub ctx_size: u32,
    /// Slots: runs that decode at the same time.
    pub parallel: u32,
    /// Threads for decoding.
    pub threads: i32,
    /// Most tokens in one decode.
    pub batch_size: u32,
    /// Most tokens in one physical batch.
    pub ubatch_size: u32,
    /// Whether attention can be captured; flash attention is then off.
    pub attention: bool,
}

/// What a surface receives of its run, in order. Dropping the receiver cancels the run within a token.
#[derive(Debug, Clone)]
pub enum Output {
    /// Text was appended to the answer, and will not be taken back unless a `Retract` says so.
    Text(Delta),
    /// A mod took back more than the stream had held back: the last `chars` characters of the answer are gone.
    Retract {
        /// Unicode scalar values to remove from the end.
        chars: usize,
    },
    /// The run is over; always the last output.
    Ended(Arc<RunEnd>),
}

/// Text, with the tokens it came from.
#[derive(Debug, Clone, Default)]
pub struct Delta {
    /// Complete UTF-8; may be empty when a token only began a character.
    pub text: String,
    /// The tokens, with the most probable alternatives of the model for each; the list is empty for forced tokens.
    pub tokens: Vec<(TokenMeasure, Vec<Alternative>)>,
}

/// A run that was accepted.
#[derive(Debug)]
pub struct Generation {
    /// Its id, known before the first token.
    pub run_id: RunId,
    /// The client's id, or ours as text.
    pub request_id: String,
    /// What happens to it.
    pub output: mpsc::Receiver<Output>,
}

/// Why a request was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The prompt does not fit.
    #[error("the prompt has {prompt_tokens} tokens, the context of a slot holds {context}")]
    PromptTooLong {
        /// Tokens in the prompt.
        prompt_tokens: usize,
        /// Tokens a slot holds.
        context: usize,
    },
    /// There is nothing to continue from.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The server was started without attention.
    #[error("attention was asked for, but the server runs with flash attention; start it with --attention on")]
    AttentionOff,
    /// A mod refused its configuration.
    #[error("mod '{name}': {message}")]
    ModConfig {
        /// The mod.
        name: String,
        /// What it said.
        message: String,
    },
    /// Too many runs wait already.
    #[error("{waiting} runs wait already; try again later")]
    Busy {
        /// Runs in the queue.
        waiting: usize,
    },
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

/// A running engine; cheap to clone.
#[derive(Clone)]
pub struct Engine {
    model: Arc<Model>,
}

impl Engine {
    /// Starts the decode thread. `recorder` receives every signal of every recorded run.
    ///
    /// # Errors
    /// llama.cpp refused the context, e.g. because its memory could not be had.
    pub fn start(
        _model: Arc<Model>,
        _options: Options,
        _recorder: mpsc::Sender<Signal>,
    ) -> Result<Self, crate::model::Error> {
        todo!()
    }

    /// Hands a request to the decode thread.
    ///
    /// # Errors
    /// [`SubmitError`]; the run then does not exist.
    pub async fn submit(&self, _request: Request) -> Result<Generation, SubmitError> {
        todo!()
    }

    /// The model it runs.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Tokens that one run can hold, prompt and answer together.
    #[must_use]
    pub fn context_per_slot(&self) -> u32 {
        todo!()
    }
}
