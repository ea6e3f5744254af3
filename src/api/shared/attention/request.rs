//! Parses a request body into engine requests, one per sample.

use super::pruning::SentenceTracker;
use super::row_format::{DefaultEncodings, NumberEncoding, RowFormat};
use crate::api::shared::aliases::aliased_fields;
use crate::api::shared::fields::{abbreviate, integer, invalid_value};
use crate::api::shared::generation::{RunClient, Runs, repeat_request, request_id_exists};
use crate::api::shared::parameters::MinTokens;
use crate::api::shared::{ClientNames, Fields, base_request, parameters};
use crate::engine::{ReportOptions, Request};
use crate::events::{Surface, TokenId};
use crate::model::Vocabulary;
use crate::server::{ApiError, App, ErrorCode, LoadedModel};
use serde_json::Value;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Maximum samples per request.
const MAX_SAMPLES: i64 = 64;
/// Maximum alternatives per token.
const MAX_LOGPROBS: i64 = 100;
/// Default number of alternatives per token on the WebSocket; over HTTP, no probabilities are reported by default.
const DEFAULT_LOGPROBS: usize = 2;

/// An attention request that passed validation.
#[derive(Debug)]
pub(crate) struct AttentionRequest {
    /// One request per sample, in order.
    requests: Vec<Request>,
    options: AttentionOptions,
    names: ClientNames,
}

impl AttentionRequest {
    /// Submits the requests of all samples; see [`Runs::submit`].
    ///
    /// # Errors
    /// The engine rejected one of the requests; the error has the client's name of the field.
    pub(crate) async fn submit(
        self,
        client: &RunClient,
        loaded: &LoadedModel,
        cancelled: CancellationToken,
    ) -> Result<(Runs, AttentionOptions), ApiError> {
        let Self { requests, options, names } = self;
        let submitted = Runs::submit(client, loaded, requests, options.time_limit, cancelled).await;
        Ok((submitted.map_err(|error| names.restore(error))?, options))
    }
}

/// Client options that shape the response.
#[derive(Debug, Clone)]
pub(crate) struct AttentionOptions {
    /// The client's id of the request.
    pub(crate) request_id: Option<String>,
    pub(crate) attention: Option<RowFormat>,
    /// Alternatives per token; `None` reports no probabilities.
    pub(crate) logprobs: Option<usize>,
    pub(crate) pruning: Option<SentenceTracker>,
    pub(crate) samples: usize,
    /// Number of prompt tokens.
    pub(crate) prompt_tokens: u32,
    /// Number of layers of the model.
    pub(crate) layers: usize,
    /// Maximum bytes of attention in one response or message.
    pub(crate) max_bytes: usize,
    /// Maximum time of a run, not counting pauses.
    pub(crate) time_limit: Option<Duration>,
    /// Time the request arrived.
    pub(crate) received: Instant,
}

impl AttentionOptions {
    /// Returns the milliseconds since the request arrived.
    pub(crate) fn elapsed_ms(&self) -> u64 {
        self.received.elapsed().as_millis() as u64
    }
}

/// Transport and message format of a request; determines its defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    /// JSON over HTTP.
    Rest,
    /// `MessagePack` over HTTP.
    Msgpack,
    /// JSON on the WebSocket.
    Socket,
    /// `MessagePack` on the WebSocket.
    MsgpackSocket,
    /// `KoboldCPP`'s server-sent events.
    Events,
    /// `KoboldCPP`'s WebSocket, with numbers in separate binary frames.
    Frames,
}

impl Transport {
    const fn default_encodings(self) -> DefaultEncodings {
        let (per_layer, aggregated, bytes) = match self {
            Self::Rest => (NumberEncoding::Base64, NumberEncoding::Array, false),
            Self::Socket => (NumberEncoding::Base64, NumberEncoding::Array, true),
            Self::Msgpack | Self::MsgpackSocket | Self::Frames => {
                (NumberEncoding::Binary, NumberEncoding::Binary, true)
            }
            Self::Events => (NumberEncoding::Base64, NumberEncoding::Base64, false),
        };
        DefaultEncodings { per_layer, aggregated, bytes }
    }

    /// Returns the default number of alternatives per token; `None` reports no probabilities.
    const fn default_logprobs(self) -> Option<usize> {
        match self {
            Self::Socket | Self::MsgpackSocket => Some(DEFAULT_LOGPROBS),
            Self::Rest | Self::Msgpack | Self::Events | Self::Frames => None,
        }
    }
}

/// Fields that request attention, in this API and in `KoboldCPP`'s.
const RETURN_FIELDS: [&str; 2] = ["return_attention", "output_attentions"];

/// Returns true if a body has `input_ids`, with which it requests the messages of the attention API.
pub(crate) fn has_input_ids(body: &Value) -> bool {
    Fields::new(body).is_ok_and(|fields| fields.get("input_ids").is_some())
}

/// Parses a body with `input_ids`. `received` is the time the request arrived.
///
/// # Errors
/// 400 naming the invalid field; 503 while the database is starting.
pub(crate) async fn parse(
    app: &App,
    loaded: &LoadedModel,
    fields: Fields<'_>,
    transport: Transport,
    received: Instant,
) -> Result<AttentionRequest, ApiError> {
    let (aliased, names) = aliased_fields(fields);
    let fields = fields.with_aliases(&aliased).with_server_defaults(app);
    let parsed = parse_fields(app, loaded, fields, transport, received);
    let (mut requests, options) = parsed.map_err(|error| names.restore(error))?;
    drop_duplicate_request_ids(app, &mut requests).await?;
    Ok(AttentionRequest { requests, options, names })
}

fn parse_fields(
    app: &App,
    loaded: &LoadedModel,
    fields: Fields<'_>,
    transport: Transport,
    received: Instant,
) -> Result<(Vec<Request>, AttentionOptions), ApiError> {
    let vocabulary = loaded.vocabulary();
    let prompt = token_ids(fields, "input_ids", vocabulary)?
        .ok_or_else(|| ApiError::invalid("input_ids", "`input_ids` is missing; send a list of token ids"))?;
    if prompt.is_empty() {
        return Err(ApiError::invalid("input_ids", "`input_ids` must have at least one token, got an empty list"));
    }
    for name in ["stop_tokens", "banned_tokens"] {
        check_known_ids(fields, name, vocabulary)?;
    }
    let context = loaded.engine().context_per_slot();
    if prompt.len() > context as usize {
        let message = format!("`input_ids` has {} tokens, but the context holds {context}", prompt.len());
        return Err(ApiError::invalid("input_ids", message).exceeds_context(prompt.len(), context as usize));
    }
    let options = response_options(app, loaded, fields, transport, &prompt, received)?;
    let (recorded, _) = parameters::recorded_attention(fields)?;
    let needs_rows = options.attention.is_some() || options.pruning.is_some();
    let mut request = Request {
        prompt_preview: parameters::preview(&vocabulary.decode(&prompt)),
        attention: needs_rows || recorded,
        alternatives: Request::ALTERNATIVES.max(options.logprobs.unwrap_or(0)),
        report: ReportOptions {
            per_token: true,
            attention_rows: needs_rows,
            siblings: options.samples.saturating_sub(1) as u32,
            ..ReportOptions::default()
        },
        may_fill_context: true,
        ..base_request(app, loaded, fields, prompt, Surface::Attention, MinTokens::One)?
    };
    if options.samples > 1 {
        request.request_id = None;
    }
    Ok((repeat_request(request, options.samples as u32).collect(), options))
}

fn response_options(
    app: &App,
    loaded: &LoadedModel,
    fields: Fields<'_>,
    transport: Transport,
    prompt: &[TokenId],
    received: Instant,
) -> Result<AttentionOptions, ApiError> {
    let flag = |names: [&str; 2]| match fields.first_present(&names) {
        Some((name, _)) => fields.flag(name).map(|flag| flag.unwrap_or(false)),
        None => Ok(false),
    };
    let layers = loaded.model().card().layers as usize;
    // Validated even without attention, so that an unknown value is always an error.
    let format = RowFormat::parse(fields, transport.default_encodings())?;
    format.check_layers(layers)?;
    let pruning = SentenceTracker::parse(fields, loaded.vocabulary(), prompt)?;
    let attention = flag(RETURN_FIELDS)?.then_some(format);
    if (attention.is_some() || pruning.is_some())
        && let Err(unavailable) = loaded.engine().attention()
    {
        let field = if attention.is_some() {
            fields.first_present(&RETURN_FIELDS).map_or(RETURN_FIELDS[0], |(name, _)| name)
        } else {
            "suggest_pruning"
        };
        return Err(ApiError::from(unavailable).at(field));
    }
    Ok(AttentionOptions {
        request_id: parameters::request_id(fields)?,
        attention,
        logprobs: logprobs(fields, transport.default_logprobs())?,
        pruning,
        samples: samples(fields)?,
        prompt_tokens: prompt.len() as u32,
        layers,
        max_bytes: app.config().server.max_attention_bytes,
        time_limit: app.config().server.run_timeouts.max_duration,
        received,
    })
}

/// Parses `num_samples`.
///
/// # Errors
/// 400 if it is out of range.
pub(crate) fn samples(fields: Fields<'_>) -> Result<usize, ApiError> {
    Ok(fields.integer("num_samples", 1..=MAX_SAMPLES)?.unwrap_or(1) as usize)
}

/// Removes a request id that another run already has. In this API an id identifies a request only on its connection,
/// and clients may count from 1 on every connection.
async fn drop_duplicate_request_ids(app: &App, requests: &mut [Request]) -> Result<(), ApiError> {
    for request in requests {
        request.may_drop_request_id = true;
        if let Some(id) = &request.request_id
            && request_id_exists(app, id).await? == Some(true)
        {
            request.request_id = None;
        }
    }
    Ok(())
}

/// Parses `logprobs` (a flag or a number of alternatives) and `top_logprobs`.
fn logprobs(fields: Fields<'_>, default: Option<usize>) -> Result<Option<usize>, ApiError> {
    let top = fields.integer("top_logprobs", 0..=MAX_LOGPROBS)?.map(|top| top as usize);
    match fields.get("logprobs") {
        None => Ok(top.or(default)),
        Some(Value::Bool(false)) => Ok(None),
        Some(Value::Bool(true)) => Ok(top.or(default).or(Some(0))),
        Some(Value::Number(_)) => Ok(fields.integer("logprobs", 0..=MAX_LOGPROBS)?.map(|top| top as usize)),
        Some(other) => Err(invalid_value("logprobs", "true, false or a number of alternatives", other)),
    }
}

/// Parses a list of token ids; returns `None` if the field is absent.
///
/// # Errors
/// 400 if the value is not a list, or `INVALID_TOKEN` for an id outside the vocabulary.
pub(crate) fn token_ids(
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
                    format!("`{name}` must be a list of token ids, got {}", abbreviate(value)),
                )
                .code(ErrorCode::InvalidToken));
            };
            let known = TokenId::try_from(id).ok().filter(|&id| vocabulary.contains(id));
            known.ok_or_else(|| not_in_vocabulary(name, id, vocabulary))
        })
        .collect::<Result<_, _>>()
        .map(Some)
}

/// Rejects ids outside the vocabulary in a list that may also contain strings.
fn check_known_ids(fields: Fields<'_>, name: &str, vocabulary: &Vocabulary) -> Result<(), ApiError> {
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
    ApiError::invalid(name, message).code(ErrorCode::InvalidToken)
}
