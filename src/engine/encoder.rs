//! Embeddings and scores: a thread of its own with an encoding context on the model's weights.
//!
//! Inputs of all requests that wait share decodes, one of each in turn, so that a long request holds up no short one.
//! Nothing waits for company: what arrives during a decode goes into the next. A request whose client has gone is
//! dropped before its next input.

use super::status::EngineStatus;
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

/// Inputs that may wait, of all requests together; one request alone may have more.
const QUEUE: usize = 4096;

/// What the server was asked to encode, and how.
#[derive(Debug, Clone)]
pub struct EncoderSettings {
    /// Give embeddings.
    pub embeddings: bool,
    /// Give scores.
    pub reranking: bool,
    /// How embeddings are pooled; `None` asks the model.
    pub pooling: Option<DeclaredPooling>,
    /// What stands behind the head's dense layer; `None` asks the model.
    pub head: Option<Activation>,
    /// The context's size and threads.
    pub context: EncoderOptions,
}

/// Why something is not encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncoderUnavailable {
    /// Nobody asked for embeddings.
    #[error("this server does not give embeddings; start it with --embedding")]
    Embeddings,
    /// Nobody asked for scores.
    #[error("this server does not score texts; start it with --reranking")]
    ScoreInfo,
    /// The user asked for what is no embedding.
    #[error("--pooling rank gives scores and no embeddings; start the server with --pooling mean, cls, last or none")]
    Ranked,
    /// The model has no head that can be used.
    #[error(transparent)]
    Head(#[from] HeadError),
}

/// Why inputs were not encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// An input has no tokens.
    #[error("input {index} is empty")]
    Empty {
        /// Place of the input, from 0.
        index: usize,
    },
    /// An input is too long.
    #[error("input {index} has {tokens} tokens, the longest that is taken has {longest}")]
    TooLong {
        /// Place of the input, from 0.
        index: usize,
        /// Tokens it has.
        tokens: usize,
        /// Most tokens of an input.
        longest: usize,
    },
    /// An input has a token that the model does not know.
    #[error("input {index} has the token {token}, which is not in the vocabulary")]
    UnknownToken {
        /// Place of the input, from 0.
        index: usize,
        /// The token.
        token: TokenId,
    },
    /// Too many inputs wait already.
    #[error("{waiting} inputs wait already; try again later")]
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

/// What the scores of a model are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScoreInfo {
    /// Name of each, in the order in which they come.
    pub labels: Vec<String>,
    /// Whether the relevance of a document is the first one's share after softmax.
    pub softmax: bool,
}

/// Encodes texts with one model; cheap to clone.
#[derive(Clone)]
pub struct Encoder(Arc<Inner>);

struct Inner {
    model: Arc<Model>,
    embeddings: Result<Pooling, EncoderUnavailable>,
    scores: Result<ScoreInfo, EncoderUnavailable>,
    longest: usize,
    commands: Option<Sender<Command>>,
    waiting: Arc<AtomicUsize>,
    status: Arc<EngineStatus>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

enum Command {
    Encode(Job),
    Stop,
}

/// A request under way.
struct Job {
    inputs: Vec<Vec<TokenId>>,
    wanted: EncoderOutput,
    done: Vec<Vec<f32>>,
    client: oneshot::Sender<Result<Vec<Vec<f32>>, EncodeError>>,
    _place: Place,
}

/// A request's part of the queue, given back however the request ends.
struct Place(Arc<AtomicUsize>, usize);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::AcqRel);
    }
}

impl Encoder {
    /// Decides what the model can give of what was asked for, and starts the thread if that is anything. When nothing was
    /// asked for, a model that is made for it gives what it can.
    ///
    /// # Errors
    /// llama.cpp refused the context, e.g. because its memory could not be had.
    pub async fn start(model: Arc<Model>, settings: &EncoderSettings) -> Result<Self, ModelError> {
        let plan = Plan::new(&model, settings);
        plan.tell(&model, settings);
        let mut context = settings.context.clone();
        if !model.generates() {
            // Behind its last position such a model has no weights.
            context.longest = context.longest.min(model.card().context_train);
        }
        let longest = context.longest as usize;
        let waiting = Arc::new(AtomicUsize::new(0));
        let scores = plan.scores.as_ref().map(|head| ScoreInfo { labels: head.labels.clone(), softmax: head.softmax });
        let (scores, head) = (scores.map_err(Clone::clone), plan.scores.ok());
        let is_off = plan.embeddings.is_err() && head.is_none();
        let status = Arc::new(EngineStatus::new(0));
        let started =
            if is_off { None } else { Some(spawn(Arc::clone(&model), context, head, Arc::clone(&status)).await?) };
        let (commands, thread) = started.unzip();
        let embeddings = plan.embeddings;
        let thread = Mutex::new(thread);
        Ok(Self(Arc::new(Inner { model, embeddings, scores, longest, commands, waiting, status, thread })))
    }

    /// How embeddings are pooled.
    ///
    /// # Errors
    /// Why there are none.
    pub fn embeddings(&self) -> Result<Pooling, &EncoderUnavailable> {
        self.0.embeddings.as_ref().copied()
    }

    /// What scores are.
    ///
    /// # Errors
    /// Why there are none.
    pub fn scores(&self) -> Result<&ScoreInfo, &EncoderUnavailable> {
        self.0.scores.as_ref()
    }

    /// Most tokens of an input.
    #[must_use]
    pub fn max_input_tokens(&self) -> usize {
        self.0.longest
    }

    /// Encodes inputs; what was wanted of each, in order. Dropping the future gives them up.
    ///
    /// # Errors
    /// [`EncodeError`]; then none of them was encoded.
    pub async fn encode(&self, inputs: Vec<Vec<TokenId>>, wanted: EncoderOutput) -> Result<Vec<Vec<f32>>, EncodeError> {
        let Inner { model, longest, waiting, .. } = &*self.0;
        for (index, input) in inputs.iter().enumerate() {
            if input.is_empty() {
                return Err(EncodeError::Empty { index });
            }
            if input.len() > *longest {
                return Err(EncodeError::TooLong { index, tokens: input.len(), longest: *longest });
            }
            if let Some(&token) = input.iter().find(|&&token| !model.vocabulary().contains(token)) {
                return Err(EncodeError::UnknownToken { index, token });
            }
        }
        let before = waiting.fetch_add(inputs.len(), Ordering::AcqRel);
        let place = Place(Arc::clone(waiting), inputs.len());
        if before > 0 && before + inputs.len() > QUEUE {
            return Err(EncodeError::Busy { waiting: before });
        }
        let (client, answer) = oneshot::channel();
        let job = Job { done: Vec::with_capacity(inputs.len()), inputs, wanted, client, _place: place };
        let commands = self.0.commands.as_ref().ok_or(EncodeError::Stopped)?;
        commands.send(Command::Encode(job)).map_err(|_| EncodeError::Stopped)?;
        answer.await.unwrap_or(Err(EncodeError::Stopped))
    }

    /// Whether the thread runs, where there is anything for it to do. It does not after [`Encoder::stop`], nor when it has
    /// died of a panic.
    #[must_use]
    pub fn is_running(&self) -> bool {
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.commands.is_none() || thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Returns the counters of its work.
    #[must_use]
    pub fn status(&self) -> &Arc<EngineStatus> {
        &self.0.status
    }

    /// Inputs that wait or are being encoded.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.waiting.load(Ordering::Acquire)
    }

    /// Gives up what waits, and waits for the thread.
    pub async fn stop(&self) {
        let Some(commands) = &self.0.commands else { return };
        // A closed channel says that the thread has ended already.
        let _ = commands.send(Command::Stop);
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let joined = tokio::task::spawn_blocking(move || thread.join()).await;
            if !matches!(joined, Ok(Ok(()))) {
                tracing::error!("the encoder's thread panicked");
            }
        }
    }
}

/// What a model gives, and why not.
struct Plan {
    embeddings: Result<Pooling, EncoderUnavailable>,
    scores: Result<Head, EncoderUnavailable>,
}

impl Plan {
    fn new(model: &Model, settings: &EncoderSettings) -> Self {
        let declared = settings.pooling.or_else(|| model.declared_pooling());
        let nothing_said = !settings.embeddings && !settings.reranking;
        let scores =
            if settings.reranking || nothing_said && (declared == Some(DeclaredPooling::Ranks) || !model.generates()) {
                model.head(settings.head).map_err(EncoderUnavailable::Head)
            } else {
                Err(EncoderUnavailable::ScoreInfo)
            };
        let is_made_for_it = !model.generates() || matches!(declared, Some(DeclaredPooling::Embeds(_)));
        let embeddings = if settings.embeddings || nothing_said && is_made_for_it {
            match (declared, settings.pooling) {
                (_, Some(DeclaredPooling::Ranks)) => Err(EncoderUnavailable::Ranked),
                (Some(DeclaredPooling::Embeds(pooling)), _) => Ok(pooling),
                // What its head reads is what it was trained to say something with.
                (Some(DeclaredPooling::Ranks), _) => Ok(model.ranked_pooling()),
                (None, _) => Ok(Pooling::Mean),
            }
        } else {
            Err(EncoderUnavailable::Embeddings)
        };
        Self { embeddings, scores }
    }

    fn tell(&self, model: &Model, settings: &EncoderSettings) {
        let name = model.name();
        if !model.generates() {
            tracing::info!(
                model = name,
                "the model is an encoder: it gives embeddings or scores, and continues no text"
            );
        }
        if let Ok(pooling) = self.embeddings {
            tracing::info!(model = name, ?pooling, "embeddings are on");
        }
        if self.scores.as_ref().is_ok_and(|head| head.segments && head.labels.len() == 1) {
            tracing::warn!(
                model = name,
                "the model tells query and document apart by token types, which llama.cpp does not: scores of pairs differ \
                 from its authors'"
            );
        }
        match &self.scores {
            Ok(head) => tracing::info!(
                model = name,
                labels = head.labels.join(","),
                activation = ?head.activation,
                pooling = ?head.pooling,
                "scores are on"
            ),
            Err(EncoderUnavailable::Head(HeadError::None)) if !settings.reranking => {}
            Err(reason @ EncoderUnavailable::Head(_)) => tracing::warn!(model = name, "no scores: {reason}"),
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
        // Nobody listens only when the start was given up.
        Err(error) => drop(ready.send(Err(error))),
    };
    let thread = std::thread::Builder::new()
        .name("thunder-encode".into())
        .spawn(thread)
        .map_err(|error| ModelError::Decode(error.to_string()))?;
    started.await.map_err(|_| ModelError::Decode("the encoder's thread died while starting".into()))??;
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

/// One decode: the next inputs of the jobs in turn, as many as fit.
fn encode_next(context: &mut EncoderContext<'_>, jobs: &mut VecDeque<Job>, status: &EngineStatus) {
    let rounds = jobs.iter().map(|job| job.inputs.len() - job.done.len()).max().unwrap_or(0);
    let in_turn = (0..rounds).flat_map(|round| {
        jobs.iter().enumerate().filter_map(move |(index, job)| Some((index, job.inputs.get(job.done.len() + round)?)))
    });
    let fitting = context.fitting(in_turn.clone().map(|(_, input)| input.len()));
    let chosen: Vec<(usize, &[TokenId], EncoderOutput)> =
        in_turn.take(fitting).map(|(index, input)| (index, input.as_slice(), jobs[index].wanted)).collect();
    let inputs: Vec<(&[TokenId], EncoderOutput)> = chosen.iter().map(|&(_, input, wanted)| (input, wanted)).collect();
    let owners: Vec<usize> = chosen.iter().map(|&(index, ..)| index).collect();
    if inputs.is_empty() {
        return;
    }
    let mut served = vec![false; jobs.len()];
    owners.iter().for_each(|&owner| served[owner] = true);
    let begun = Instant::now();
    let encoded = context.encode(&inputs);
    let lengths = || inputs.iter().map(|(input, _)| input.len());
    let elapsed_us = begun.elapsed().as_micros() as u64;
    status.encoded(inputs.len(), lengths().sum(), lengths().max().unwrap_or(0), elapsed_us);
    let (vectors, failed) = match encoded {
        Ok(vectors) => (vectors, None),
        Err(error) => {
            tracing::error!(%error, "inputs could not be encoded");
            (Vec::new(), Some(EncodeError::Failed(error.to_string())))
        }
    };
    for (&owner, vector) in owners.iter().zip(vectors) {
        jobs[owner].done.push(vector);
    }
    let (mut first, mut last) = (VecDeque::new(), VecDeque::new());
    for (job, is_served) in jobs.drain(..).zip(served) {
        // A client that has gone needs no answer.
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
