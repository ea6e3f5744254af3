//! Engine requests built from the body fields that protocols share.

use super::parameters::{MinTokens, SeveralConstraints};
use super::{Fields, parameters};
use crate::engine::Request;
use crate::events::{Surface, TokenId};
use crate::server::{ApiError, App, LoadedModel};

/// Fields that influence the answer and are recorded as sent, because no other part of the recording contains them.
const RECORDED_FIELDS: [&str; 10] = [
    "chat_template_kwargs",
    "grammar",
    "ignore_eos",
    "json_schema",
    "logit_bias",
    "parallel_tool_calls",
    "reasoning_effort",
    "reasoning_format",
    "response_format",
    "tool_choice",
];

/// Builds a request of an OpenAI or llama-server route. The route adds the format of the answer.
///
/// # Errors
/// A field has an invalid value.
pub(crate) fn engine_request(
    app: &App,
    loaded: &LoadedModel,
    fields: Fields<'_>,
    prompt: Vec<TokenId>,
    surface: Surface,
) -> Result<Request, ApiError> {
    Ok(Request {
        metadata: parameters::metadata(fields)?,
        answer_fields: fields.present_fields(&RECORDED_FIELDS),
        ..base_request(app, loaded, fields, prompt, surface, MinTokens::Zero)?
    })
}

/// Builds a request from the fields that all protocols share: ids, sampling, constraint, limits, mods, adapters, recording,
/// slot and cache. `fields` include the server's defaults.
///
/// # Errors
/// A field has an invalid value.
pub(crate) fn base_request(
    app: &App,
    loaded: &LoadedModel,
    fields: Fields<'_>,
    prompt: Vec<TokenId>,
    surface: Surface,
    min_tokens: MinTokens,
) -> Result<Request, ApiError> {
    let vocabulary = loaded.vocabulary();
    let known = loaded.model().adapters();
    let (attention, stored_heads) = parameters::recorded_attention(fields)?;
    let context = parameters::context_settings(fields)?;
    let room = parameters::answer_room(context.overflow, loaded.engine().context_per_slot(), prompt.len());
    Ok(Request {
        request_id: parameters::request_id(fields)?,
        user_label: parameters::user(fields)?,
        sampling: parameters::sampling(fields, vocabulary)?,
        constraint: parameters::parse_constraint(fields, SeveralConstraints::TakeFirst)?,
        limits: parameters::limits(fields, vocabulary, room, min_tokens)?,
        mods: parameters::requested_mods(fields, loaded, app.registry())?,
        adapters: Some(parameters::requested_adapters(fields, known, known.default_set())?),
        attention,
        stored_heads,
        lens: fields.flag("lens")?.unwrap_or(false),
        record: parameters::record(fields)?,
        slot: context.slot,
        cache_prompt: context.cache_prompt,
        cache_reuse: context.cache_reuse,
        drafts: context.drafts,
        overflow: context.overflow,
        ..Request::new(prompt, surface)
    })
}
