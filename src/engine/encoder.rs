//! Embeddings and scores, computed on a separate thread with an encoding context of the model.
//!
//! Inputs of all waiting requests share decodes, one input of each in turn, so that a long request does not delay short
//! ones. A decode never waits for more inputs: inputs that arrive during a decode wait for the next one. A request
//! whose client has disconnected is dropped before its next input.

use crate::engine::status::EngineStatus;
use crate::events::TokenId;
use crate::model::llama::{
    Activation, DeclaredPooling, EncoderContext, EncoderOptions, EncoderOutput, Head, HeadError, Pooling,
};
use crate::model::{Model, ModelError};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::sync::oneshot;

/// Maximum number of waiting inputs over all requests. A request that arrives while none wait may have more.
const MAX_QUEUED_INPUTS: usize = 4096;

/// Settings of the encoder.
#[derive(Debug, Clone)]
pub struct EncoderSettings {
    /// True if embeddings are enabled.
    pub embeddings: bool,
    /// True if scores are enabled.
    pub reranking: bool,
    /// Pooling of embeddings; `None` for the model's default.
    pub pooling: Option<DeclaredPooling>,
    /// Activation after the head's dense layer; `None` for the model's default.
    pub head_activation: Option<Activation>,
    /// Size and threads of the context.
    pub context: EncoderOptions,
}

/// Reason why embeddings or scores are unavailable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncoderUnavailable {
    /// Embeddings are not enabled.
    #[error("embeddings are not enabled; start the server with --embedding")]
    Embeddings,
    /// Scores are not enabled.
    #[error("scores are not enabled; start the server with --reranking")]
    Scores,
    /// The configured pooling gives scores, not embeddings.
    #[error("--pooling rank gives scores, not embeddings; start the server with --pooling mean, cls, last or none")]
    Ranked,
    /// The model has no usable head.
    #[error(transparent)]
    Head(#[from] HeadError),
}

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
    #[error("the queue is full: {waiting} inputs are waiting; try again later")]
    Busy {
        /// Inputs that wait.
        waiting: usize,
    },
    /// The encoder has stopped.
    #[error("the encoder has stopped")]
    Stopped,
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
    commands: Option<Sender<Command>>,
    waiting: Arc<AtomicUsize>,
    status: Arc<EngineStatus>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

enum Command {
    Encode(Job),
    Stop,
}

/// A request in progress.
struct Job {
    inputs: Vec<Vec<TokenId>>,
    output: EncoderOutput,
    done: Vec<Vec<f32>>,
    client: oneshot::Sender<Result<Vec<Vec<f32>>, EncodeError>>,
    _reservation: QueueReservation,
}

/// Reserved part of the queue, released when the request ends.
struct QueueReservation(Arc<AtomicUsize>, usize);

impl Drop for QueueReservation {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::AcqRel);
    }
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
            // An encoder has no weights for later positions.
            context.longest = context.longest.min(model.card().context_train);
        }
        let max_input_tokens = context.longest as usize;
        let waiting = Arc::new(AtomicUsize::new(0));
        let scores =
            capabilities.scores.as_ref().map(|head| ScoreInfo { labels: head.labels.clone(), softmax: head.softmax });
        let (scores, head) = (scores.map_err(Clone::clone), capabilities.scores.ok());
        let is_off = capabilities.embeddings.is_err() && head.is_none();
        let status = Arc::new(EngineStatus::new(0));
        let started =
            if is_off { None } else { Some(spawn(Arc::clone(&model), context, head, Arc::clone(&status)).await?) };
        let (commands, thread) = started.unzip();
        let embeddings = capabilities.embeddings;
        let thread = Mutex::new(thread);
        Ok(Self(Arc::new(Inner { model, embeddings, scores, max_input_tokens, commands, waiting, status, thread })))
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
    /// [`EncodeError`]; none of the inputs was encoded.
    pub async fn encode(&self, inputs: Vec<Vec<TokenId>>, output: EncoderOutput) -> Result<Vec<Vec<f32>>, EncodeError> {
        let Inner { model, max_input_tokens, waiting, .. } = &*self.0;
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
        let before = waiting.fetch_add(inputs.len(), Ordering::AcqRel);
        let reservation = QueueReservation(Arc::clone(waiting), inputs.len());
        if before > 0 && before + inputs.len() > MAX_QUEUED_INPUTS {
            return Err(EncodeError::Busy { waiting: before });
        }
        let (client, response) = oneshot::channel();
        let job = Job { done: Vec::with_capacity(inputs.len()), inputs, output, client, _reservation: reservation };
        let commands = self.0.commands.as_ref().ok_or(EncodeError::Stopped)?;
        commands.send(Command::Encode(job)).map_err(|_| EncodeError::Stopped)?;
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

    /// Returns the number of inputs that wait or are being encoded.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.waiting.load(Ordering::Acquire)
    }

    /// Cancels waiting requests and waits for the thread.
    pub async fn stop(&self) {
        let Some(commands) = &self.0.commands else { return };
        // A closed channel means that the thread has already ended.
        let _ = commands.send(Command::Stop);
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let joined = tokio::task::spawn_blocking(move || thread.join()).await;
            if !matches!(joined, Ok(Ok(()))) {
                tracing::error!("encoder thread panicked");
            }
        }
    }
}

/// Outputs that a model provides, or the reasons why it does not provide them.
struct EncoderCapabilities {
    embeddings: Result<Pooling, EncoderUnavailable>,
    scores: Result<Head, EncoderUnavailable>,
}

impl EncoderCapabilities {
    fn new(model: &Model, settings: &EncoderSettings) -> Self {
        let declared = settings.pooling.or_else(|| model.declared_pooling());
        let nothing_requested = !settings.embeddings && !settings.reranking;
        let scores = if settings.reranking
            || nothing_requested && (declared == Some(DeclaredPooling::Scores) || !model.generates())
        {
            model.head(settings.head_activation).map_err(EncoderUnavailable::Head)
        } else {
            Err(EncoderUnavailable::Scores)
        };
        let is_encoder = !model.generates() || matches!(declared, Some(DeclaredPooling::Embedding(_)));
        let embeddings = if settings.embeddings || nothing_requested && is_encoder {
            match (declared, settings.pooling) {
                (_, Some(DeclaredPooling::Scores)) => Err(EncoderUnavailable::Ranked),
                (Some(DeclaredPooling::Embedding(pooling)), _) => Ok(pooling),
                // The head requires the pooling of its training.
                (Some(DeclaredPooling::Scores), _) => Ok(model.head_pooling()),
                (None, _) => Ok(Pooling::Mean),
            }
        } else {
            Err(EncoderUnavailable::Embeddings)
        };
        Self { embeddings, scores }
    }

    fn log(&self, model: &Model, settings: &EncoderSettings) {
        let name = model.name();
        if !model.generates() {
            tracing::info!(model = name, "model is an encoder: it provides embeddings or scores and generates no text");
        }
        if let Ok(pooling) = self.embeddings {
            tracing::info!(model = name, ?pooling, "embeddings enabled");
        }
        if self.scores.as_ref().is_ok_and(|head| head.segments && head.labels.len() == 1) {
            tracing::warn!(
                model = name,
                "the model distinguishes query and document by token types, which llama.cpp does not support; scores of pairs differ \
                 from the reference implementation"
            );
        }
        match &self.scores {
            Ok(head) => tracing::info!(
                model = name,
                labels = head.labels.join(","),
                activation = ?head.activation,
                pooling = ?head.pooling,
                "scores enabled"
            ),
            Err(EncoderUnavailable::Head(HeadError::None)) if !settings.reranking => {}
            Err(reason @ EncoderUnavailable::Head(_)) => tracing::warn!(model = name, "scores unavailable: {reason}"),
            Err(_) => {}
        }
    }
}

async fn spawn(
    model: Arc<Model>,
    options: EncoderOptions,
    head: Option<Head>,
    status: Arc<EngineStatus>,
) -> Result<(Sender<Command>, JoinHandle<()>), ModelError> {
    let (commands, inbox) = channel();
    let (ready, started) = oneshot::channel();
    let thread = move || match model.encoder(&options, head) {
        Ok(context) => {
            if ready.send(Ok(())).is_ok() {
                run(context, &inbox, &status);
            }
        }
        // The receiver is dropped only if the start was cancelled.
        Err(error) => drop(ready.send(Err(error))),
    };
    let thread = std::thread::Builder::new()
        .name("thunder-encode".into())
        .spawn(thread)
        .map_err(|error| ModelError::Decode(error.to_string()))?;
    started.await.map_err(|_| ModelError::Decode("the encoder thread panicked during start-up".into()))??;
    Ok((commands, thread))
}

fn run(mut context: EncoderContext<'_>, inbox: &Receiver<Command>, status: &EngineStatus) {
    let mut jobs = VecDeque::new();
    loop {
        if jobs.is_empty() {
            match inbox.recv() {
                Ok(Command::Encode(job)) => jobs.push_back(job),
                Ok(Command::Stop) | Err(_) => return,
            }
        }
        while let Ok(command) = inbox.try_recv() {
            match command {
                Command::Encode(job) => jobs.push_back(job),
                Command::Stop => return,
            }
        }
        jobs.retain(|job| !job.client.is_closed());
        encode_next(&mut context, &mut jobs, status);
    }
}

/// Runs one decode with the next inputs of the jobs in turn, as many as fit.
fn encode_next(context: &mut EncoderContext<'_>, jobs: &mut VecDeque<Job>, status: &EngineStatus) {
    let rounds = jobs.iter().map(|job| job.inputs.len() - job.done.len()).max().unwrap_or(0);
    let round_robin = (0..rounds).flat_map(|round| {
        jobs.iter().enumerate().filter_map(move |(index, job)| Some((index, job.inputs.get(job.done.len() + round)?)))
    });
    let count_fitting = context.count_fitting(round_robin.clone().map(|(_, input)| input.len()));
    let chosen: Vec<(usize, &[TokenId], EncoderOutput)> =
        round_robin.take(count_fitting).map(|(index, input)| (index, input.as_slice(), jobs[index].output)).collect();
    let inputs: Vec<(&[TokenId], EncoderOutput)> = chosen.iter().map(|&(_, input, output)| (input, output)).collect();
    let owners: Vec<usize> = chosen.iter().map(|&(index, ..)| index).collect();
    if inputs.is_empty() {
        return;
    }
    let mut served = vec![false; jobs.len()];
    owners.iter().for_each(|&owner| served[owner] = true);
    let start = Instant::now();
    let encoded = context.encode(&inputs);
    let lengths = || inputs.iter().map(|(input, _)| input.len());
    let elapsed_us = start.elapsed().as_micros() as u64;
    status.count_encode(inputs.len(), lengths().sum(), lengths().max().unwrap_or(0), elapsed_us);
    let (vectors, failed) = match encoded {
        Ok(vectors) => (vectors, None),
        Err(error) => {
            tracing::error!(%error, "encoding failed");
            (Vec::new(), Some(EncodeError::Failed(error.to_string())))
        }
    };
    for (&owner, vector) in owners.iter().zip(vectors) {
        jobs[owner].done.push(vector);
    }
    let (mut first, mut last) = (VecDeque::new(), VecDeque::new());
    for (job, is_served) in jobs.drain(..).zip(served) {
        // The client may have disconnected.
        if let (true, Some(error)) = (is_served, &failed) {
            let _ = job.client.send(Err(error.clone()));
        } else if job.done.len() == job.inputs.len() {
            let _ = job.client.send(Ok(job.done));
        } else if is_served {
            last.push_back(job);
        } else {
            first.push_back(job);
        }
    }
    jobs.append(&mut first);
    jobs.append(&mut last);
}
