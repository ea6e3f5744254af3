//! From the body of a request to the requests that the engine takes: one for each sample.

use super::pruning::Watch;
use super::shape::{Coding, Shape, Usual};
use crate::api::generation::request_id_exists;
use crate::api::shared::fields::{abbreviate, integer, invalid_value};
use crate::api::shared::{Fields, constraint, mods, parameters};
use crate::api::{ApiError, App, Loaded};
use crate::engine::{ReportOptions, Request};
use crate::events::{Surface, TokenId};
use crate::model::Vocabulary;
use serde_json::{Map, Value};
use std::time::Instant;

/// Most answers to one request.
const MOST_SAMPLES: i64 = 64;
/// Most alternatives of each token.
const MOST_LOGPROBS: i64 = 100;
/// Alternatives of each token on the WebSocket, whose tokens have probabilities unless the request says otherwise.
const USUAL_LOGPROBS: usize = 2;

/// A body, read.
#[derive(Debug)]
pub(in crate::api) struct Asked {
    /// One for each sample, in order.
    pub(in crate::api) requests: Vec<Request>,
    pub(in crate::api) answer: Answer,
}

/// How the answer is to be written.
#[derive(Debug, Clone)]
pub(in crate::api) struct Answer {
    /// The client's name of the request.
    pub(in crate::api) request_id: Option<String>,
    pub(super) attention: Option<Shape>,
    /// Alternatives of each token; `None` without any probability.
    pub(super) logprobs: Option<usize>,
    pub(super) pruning: Option<Watch>,
    pub(super) samples: usize,
    /// Tokens of the prompt.
    pub(super) prompt_tokens: u32,
    /// Layers of the model.
    pub(super) layers: usize,
    /// Most bytes of attention in an answer at once, or in a message.
    pub(super) most_bytes: usize,
    /// Time of the request.
    pub(super) taken: Instant,
}

impl Answer {
    /// Returns the time since the request was taken, in milliseconds.
    pub(super) fn elapsed_ms(&self) -> u64 {
        self.taken.elapsed().as_millis() as u64
    }
}

/// Whose words a request is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::api) enum Dialect {
    /// JSON over HTTP.
    Rest,
    /// `MessagePack` over HTTP.
    Packed,
    /// JSON on the WebSocket.
    Socket,
    /// `MessagePack` on the WebSocket.
    PackedSocket,
    /// `KoboldCPP`'s server-sent events.
    Events,
    /// `KoboldCPP`'s WebSocket: numbers in frames of their own.
    Frames,
}

impl Dialect {
    const fn usual(self) -> Usual {
        let (per_layer, aggregated, bytes) = match self {
            Self::Rest => (Coding::Base64, Coding::Array, false),
            Self::Socket => (Coding::Base64, Coding::Array, true),
            Self::Packed | Self::PackedSocket | Self::Frames => (Coding::Binary, Coding::Binary, true),
            Self::Events => (Coding::Base64, Coding::Base64, false),
        };
        Usual { per_layer, aggregated, bytes }
    }

    /// Alternatives of each token when the request does not say how many; `None` without any probability.
    const fn usual_logprobs(self) -> Option<usize> {
        match self {
            Self::Socket | Self::PackedSocket => Some(USUAL_LOGPROBS),
            Self::Rest | Self::Packed | Self::Events | Self::Frames => None,
        }
    }
}

/// Fields that ask for attention: of this API, and of `KoboldCPP`'s.
const RETURN: [&str; 2] = ["return_attention", "output_attentions"];

/// Names of this API, and of `KoboldCPP`'s, for parameters that all dialects have.
const NAMES: [(&str, &str); 8] = [
    ("max_new_tokens", "max_tokens"),
    ("max_length", "max_tokens"),
    ("repetition_penalty", "repeat_penalty"),
    ("rep_pen", "repeat_penalty"),
    ("rep_pen_range", "repeat_last_n"),
    ("sampler_seed", "seed"),
    ("stop_sequence", "stop"),
    ("typical", "typical_p"),
];

/// Values of parameters under our names: those of the server, and over them those that the body has under other names.
pub(in crate::api) fn renamed(app: &App, fields: Fields<'_>) -> Map<String, Value> {
    let mut layer = app.config().server.request_defaults.clone();
    for (theirs, ours) in NAMES {
        if let Some(value) = fields.get(theirs) {
            layer.insert(ours.into(), value.clone());
        }
    }
    // What the client says of the length goes before what the server's flags do, whatever both call it.
    if layer.contains_key("max_tokens") {
        layer.remove("n_predict");
    }
    layer
}

/// An error that names one of our parameters, in the words of the client.
pub(in crate::api) fn in_their_words(error: ApiError, fields: Fields<'_>) -> ApiError {
    let theirs = NAMES.iter().find(|(theirs, ours)| error.pointer() == Some(*ours) && fields.get(theirs).is_some());
    match theirs {
        Some((theirs, ours)) => error.rename_field(ours, theirs),
        None => error,
    }
}

/// Reads a body with `input_ids`, of a request that was taken at that moment.
///
/// # Errors
/// 400, with the field that is wrong.
pub(in crate::api) fn read(
    app: &App,
    loaded: &Loaded,
    fields: Fields<'_>,
    dialect: Dialect,
    taken: Instant,
) -> Result<Asked, ApiError> {
    let layer = renamed(app, fields);
    read_with(app, loaded, fields.with_defaults(&layer), dialect, taken).map_err(|error| in_their_words(error, fields))
}

fn read_with(
    app: &App,
    loaded: &Loaded,
    fields: Fields<'_>,
    dialect: Dialect,
    taken: Instant,
) -> Result<Asked, ApiError> {
    let vocabulary = loaded.vocabulary();
    let prompt = token_ids(fields, "input_ids", vocabulary)?
        .ok_or_else(|| ApiError::invalid("input_ids", "input_ids is missing; it takes a list of token ids"))?;
    if prompt.is_empty() {
        return Err(ApiError::invalid("input_ids", "input_ids is empty; at least one token is needed"));
    }
    for name in ["stop_tokens", "banned_tokens"] {
        known_ids(fields, name, vocabulary)?;
    }
    let context = loaded.engine().context_per_slot();
    if prompt.len() > context as usize {
        let message = format!("input_ids has {} tokens, the context holds {context}", prompt.len());
        return Err(ApiError::invalid("input_ids", message).exceeds_context(prompt.len(), context as usize));
    }
    let answer = answer(app, loaded, fields, dialect, &prompt, taken)?;
    let placement = parameters::placement(fields)?;
    let room = placement.room(context, prompt.len());
    let shows = answer.attention.is_some() || answer.pruning.is_some();
    let mut limits = parameters::limits(fields, vocabulary, room)?;
    limits.max_time = limits.max_time.into_iter().chain(app.config().server.run_timeouts.max_duration).min();
    let request = Request {
        request_id: answer.request_id.clone().filter(|_| answer.samples == 1),
        user_label: parameters::user(fields)?,
        prompt_preview: parameters::preview(&vocabulary.decode(&prompt)),
        sampling: parameters::sampling(fields, vocabulary)?,
        constraint: constraint::parse_constraint(fields, false)?,
        limits,
        mods: mods::requested_mods(fields, loaded, app.registry())?,
        attention: shows,
        alternatives: Request::ALTERNATIVES.max(answer.logprobs.unwrap_or(0)),
        record: parameters::record(fields)?,
        report: ReportOptions { per_token: true, attention_rows: shows, ..ReportOptions::default() },
        slot: placement.slot,
        cache_prompt: placement.cache_prompt,
        cache_reuse: placement.cache_reuse,
        overflow: placement.overflow,
        may_fill_context: true,
        ..Request::new(prompt, Surface::Attention)
    };
    let requests = (0..answer.samples).map(|sample| {
        let mut request = request.clone();
        request.sampling.seed = request.sampling.seed.wrapping_add(sample as u32);
        request
    });
    Ok(Asked { requests: requests.collect(), answer })
}

fn answer(
    app: &App,
    loaded: &Loaded,
    fields: Fields<'_>,
    dialect: Dialect,
    prompt: &[TokenId],
    taken: Instant,
) -> Result<Answer, ApiError> {
    let flag = |names: [&str; 2]| match fields.first_present(&names) {
        Some((name, _)) => fields.flag(name).map(|flag| flag.unwrap_or(false)),
        None => Ok(false),
    };
    let layers = loaded.model().card().layers as usize;
    // Read whether it is wanted or not: a wrong word is an error in any case.
    let shape = Shape::read(fields, dialect.usual())?;
    shape.fits(layers)?;
    let pruning = Watch::read(fields, loaded.vocabulary(), prompt)?;
    let attention = flag(RETURN)?.then_some(shape);
    if (attention.is_some() || pruning.is_some())
        && let Err(unavailable) = loaded.engine().attention()
    {
        let asks = if attention.is_some() {
            fields.first_present(&RETURN).map_or(RETURN[0], |(name, _)| name)
        } else {
            "suggest_pruning"
        };
        return Err(ApiError::from(unavailable).at(asks));
    }
    Ok(Answer {
        request_id: parameters::request_id(fields)?,
        attention,
        logprobs: logprobs(fields, dialect.usual_logprobs())?,
        pruning,
        samples: fields.integer("num_samples", 1..=MOST_SAMPLES)?.unwrap_or(1) as usize,
        prompt_tokens: prompt.len() as u32,
        layers,
        most_bytes: app.config().server.max_attention_bytes,
        taken,
    })
}

/// Lets a run take the client's name for the request, unless another run has or had it: on this API a name is for those who listen, and
/// a client may begin at 1 each time.
///
/// # Errors
/// 503 while the database is being started.
pub(in crate::api) async fn free_ids(app: &App, requests: &mut [Request]) -> Result<(), ApiError> {
    for request in requests {
        request.may_drop_request_id = true;
        if let Some(id) = &request.request_id
            && request_id_exists(app, id).await?
        {
            request.request_id = None;
        }
    }
    Ok(())
}

/// `logprobs: true`, and `top_logprobs`, how many alternatives; or `logprobs` as that number.
fn logprobs(fields: Fields<'_>, usual: Option<usize>) -> Result<Option<usize>, ApiError> {
    let top = fields.integer("top_logprobs", 0..=MOST_LOGPROBS)?.map(|top| top as usize);
    match fields.get("logprobs") {
        None => Ok(top.or(usual)),
        Some(Value::Bool(false)) => Ok(None),
        Some(Value::Bool(true)) => Ok(Some(top.unwrap_or(0))),
        Some(Value::Number(_)) => Ok(fields.integer("logprobs", 0..=MOST_LOGPROBS)?.map(|top| top as usize)),
        Some(other) => Err(invalid_value("logprobs", "true, false or a number of alternatives", other)),
    }
}

/// A list of token ids of the vocabulary; `None` when the field is not there.
///
/// # Errors
/// 400: not a list, or `INVALID_TOKEN` for what is no token of this vocabulary.
pub(in crate::api) fn token_ids(
    fields: Fields<'_>,
    name: &str,
    vocabulary: &Vocabulary,
) -> Result<Option<Vec<TokenId>>, ApiError> {
    let Some(list) = fields.list(name)? else { return Ok(None) };
    list.iter()
        .map(|value| {
            let Some(id) = integer(value) else {
                return Err(ApiError::invalid(
                    name,
                    format!("{name} must be a list of token ids, got {}", abbreviate(value)),
                )
                .code("invalid_token"));
            };
            let known = TokenId::try_from(id).ok().filter(|&id| vocabulary.contains(id));
            known.ok_or_else(|| not_in_vocabulary(name, id, vocabulary))
        })
        .collect::<Result<_, _>>()
        .map(Some)
}

/// Refuses ids that are not in the vocabulary, in a list that may hold texts besides.
fn known_ids(fields: Fields<'_>, name: &str, vocabulary: &Vocabulary) -> Result<(), ApiError> {
    let ids = fields.list(name)?.into_iter().flatten().filter_map(integer);
    for id in ids {
        if TokenId::try_from(id).ok().is_none_or(|id| !vocabulary.contains(id)) {
            return Err(not_in_vocabulary(name, id, vocabulary));
        }
    }
    Ok(())
}

fn not_in_vocabulary(name: &str, id: i64, vocabulary: &Vocabulary) -> ApiError {
    let message = format!("Token ID {id} not in vocabulary (vocab_size={})", vocabulary.len());
    ApiError::invalid(name, message).code("invalid_token")
}
