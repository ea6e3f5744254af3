//! Embeddings and scores, computed on a separate thread with an encoding context of the model.
//!
//! Inputs of all waiting requests share decodes, one input of each in turn, so that a long request does not delay short
//! ones. A decode never waits for more inputs: inputs that arrive during a decode wait for the next one. A request
//! whose client has disconnected is dropped before its next input.

mod capabilities;
mod queue;
mod thread;

pub use capabilities::{EncoderSettings, EncoderUnavailable};

use crate::engine::status::EngineStatus;
use crate::events::TokenId;
use crate::model::llama::{EncoderOutput, NoHiddenStates, Pooling};
use crate::model::{Model, ModelError};
use capabilities::EncoderCapabilities;
use queue::QueueReservation;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use thread::{EncodeRequest, EncoderCommand};
use tokio::sync::oneshot;

/// Error while encoding inputs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// An input has no tokens.
    #[error("input {index} is empty")]
    Empty {
        /// Index of the input, from 0.
        index: usize,
    },
    /// An input is too long.
    #[error("input {index} has {tokens} tokens; the maximum is {max}")]
    TooLong {
        /// Index of the input, from 0.
        index: usize,
        /// Tokens of the input.
        tokens: usize,
        /// Maximum tokens of an input.
        max: usize,
    },
    /// An input has a token that is not in the vocabulary.
    #[error("input {index} contains the token {token}, which is not in the vocabulary")]
    UnknownToken {
        /// Index of the input, from 0.
        index: usize,
        /// The token.
        token: TokenId,
    },
    /// The queue is full.
    #[error("the queue is full: {pending} inputs are pending; try again later")]
    Busy {
        /// Inputs that wait or are being encoded.
        pending: usize,
    },
    /// The encoder has stopped.
    #[error("the encoder has stopped")]
    Stopped,
    /// The model has no hidden states.
    #[error("hidden states are not available: {0}")]
    HiddenStates(NoHiddenStates),
    /// llama.cpp failed.
    #[error("{0}")]
    Failed(String),
}

/// Description of a model's scores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScoreInfo {
    /// Labels of the scores, in order.
    pub labels: Vec<String>,
    /// True if the relevance of a document is the first score after a softmax over all scores.
    pub softmax: bool,
}

/// Encoder of texts for one model; cheap to clone.
#[derive(Clone)]
pub struct Encoder(Arc<Inner>);

struct Inner {
    model: Arc<Model>,
    embeddings: Result<Pooling, EncoderUnavailable>,
    scores: Result<ScoreInfo, EncoderUnavailable>,
    max_input_tokens: usize,
    /// `None` if the model provides neither embeddings nor scores.
    commands: Option<Sender<EncoderCommand>>,
    /// Number of inputs in the queue, see [`QueueReservation`].
    pending: Arc<AtomicUsize>,
    status: Arc<EngineStatus>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Encoder {
    /// Determines the available outputs from model and settings, and starts the thread if there are any. Without
    /// settings, an embedding or reranking model provides the outputs that it supports.
    ///
    /// # Errors
    /// llama.cpp could not create the context, e.g. for lack of memory.
    pub async fn start(model: Arc<Model>, settings: &EncoderSettings) -> Result<Self, ModelError> {
        let capabilities = EncoderCapabilities::new(&model, settings);
        capabilities.log(&model, settings);
        let mut context = settings.context.clone();
        if !model.generates() {
            // An encoder has no embeddings for positions beyond its training context.
            context.max_input_tokens = context.max_input_tokens.min(model.card().context_train);
        }
        if let Some(max) = model.max_whole_input(context.max_output_bytes).filter(|&max| max < context.max_input_tokens)
        {
            tracing::warn!(
                model = model.name(),
                max_input_tokens = max,
                requested = context.max_input_tokens,
                max_output_bytes = context.max_output_bytes,
                "maximum input tokens lowered: llama.cpp reserves the logits of the whole vocabulary for each token of an input"
            );
            context.max_input_tokens = max;
        }
        let max_input_tokens = context.max_input_tokens as usize;
        let pending = Arc::new(AtomicUsize::new(0));
        let scores =
            capabilities.scores.as_ref().map(|head| ScoreInfo { labels: head.labels.clone(), softmax: head.softmax });
        let (scores, head) = (scores.map_err(Clone::clone), capabilities.scores.ok());
        let is_off = capabilities.embeddings.is_err() && head.is_none();
        let status = Arc::new(EngineStatus::new(0));
        let started = if is_off {
            None
        } else {
            Some(thread::spawn(Arc::clone(&model), context, head, Arc::clone(&status)).await?)
        };
        let (commands, thread) = started.unzip();
        let embeddings = capabilities.embeddings;
        let thread = Mutex::new(thread);
        Ok(Self(Arc::new(Inner { model, embeddings, scores, max_input_tokens, commands, pending, status, thread })))
    }

    /// Returns the pooling of embeddings.
    ///
    /// # Errors
    /// The reason why they are unavailable.
    pub fn embeddings(&self) -> Result<Pooling, &EncoderUnavailable> {
        self.0.embeddings.as_ref().copied()
    }

    /// Returns the description of the scores.
    ///
    /// # Errors
    /// The reason why they are unavailable.
    pub fn scores(&self) -> Result<&ScoreInfo, &EncoderUnavailable> {
        self.0.scores.as_ref()
    }

    /// Returns the maximum number of tokens of an input.
    #[must_use]
    pub fn max_input_tokens(&self) -> usize {
        self.0.max_input_tokens
    }

    /// Encodes inputs. Returns the requested output of each, in order. Dropping the future cancels the request.
    ///
    /// # Errors
    /// [`EncodeError`]; the request gets no outputs.
    pub async fn encode(&self, inputs: Vec<Vec<TokenId>>, output: EncoderOutput) -> Result<Vec<Vec<f32>>, EncodeError> {
        let Inner { model, max_input_tokens, pending, .. } = &*self.0;
        if inputs.is_empty() {
            return Ok(Vec::new());
        }
        for (index, input) in inputs.iter().enumerate() {
            if input.is_empty() {
                return Err(EncodeError::Empty { index });
            }
            if input.len() > *max_input_tokens {
                return Err(EncodeError::TooLong { index, tokens: input.len(), max: *max_input_tokens });
            }
            if let Some(&token) = input.iter().find(|&&token| !model.vocabulary().contains(token)) {
                return Err(EncodeError::UnknownToken { index, token });
            }
        }
        let reservation = QueueReservation::new(pending, inputs.len())?;
        let (client, response) = oneshot::channel();
        let request = EncodeRequest::new(inputs, output, client, reservation);
        let commands = self.0.commands.as_ref().ok_or(EncodeError::Stopped)?;
        commands.send(EncoderCommand::Encode(request)).map_err(|_| EncodeError::Stopped)?;
        response.await.unwrap_or(Err(EncodeError::Stopped))
    }

    /// Returns true while the thread runs, or if none is needed. Returns false after [`Encoder::stop`] and after a
    /// panic of the thread.
    #[must_use]
    pub fn is_running(&self) -> bool {
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.commands.is_none() || thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Returns the counters of the encoder.
    #[must_use]
    pub fn status(&self) -> &Arc<EngineStatus> {
        &self.0.status
    }

    /// Returns the number of inputs that wait or are being encoded. Inputs of large requests are not counted in full.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.0.pending.load(Ordering::Acquire)
    }

    /// Cancels waiting requests and waits for the thread.
    pub async fn stop(&self) {
        let Some(commands) = &self.0.commands else { return };
        // A closed channel means that the thread has already ended.
        let _ = commands.send(EncoderCommand::Stop);
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let joined = tokio::task::spawn_blocking(move || thread.join()).await;
            if !matches!(joined, Ok(Ok(()))) {
                tracing::error!("encoder thread panicked");
            }
        }
    }
}
