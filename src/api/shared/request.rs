//! Engine requests built from the body fields that all OpenAI and llama-server routes share.

use super::{Fields, lora, mods, parameters};
use crate::engine::Request;
use crate::events::{Surface, TokenId};
use crate::server::{ApiError, App, Loaded};

/// Fields that shape the answer and are recorded as sent, because no other part of the recording has them.
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

/// Builds the request for a prompt: sampling, limits, slot, adapters, mods and recording. The route adds the constraint
/// and the format of the answer.
///
/// # Errors
/// A field has an invalid value.
pub(crate) fn engine_request(
    app: &App,
    loaded: &Loaded,
    fields: Fields<'_>,
    prompt: Vec<TokenId>,
    surface: Surface,
) -> Result<Request, ApiError> {
    let vocabulary = loaded.vocabulary();
    let placement = parameters::placement(fields)?;
    let room = placement.room(loaded.engine().context_per_slot(), prompt.len());
    Ok(Request {
        request_id: parameters::request_id(fields)?,
        user_label: parameters::user(fields)?,
        metadata: parameters::metadata(fields)?,
        sampling: parameters::sampling(fields, vocabulary)?,
        adapters: lora::requested_adapters(fields, loaded.model().adapters())?,
        limits: parameters::limits_with_min(0, fields, vocabulary, room)?,
        mods: mods::requested_mods(fields, loaded, app.registry())?,
        attention: fields.flag("attention")?.unwrap_or(false),
        record: parameters::record(fields)?,
        slot: placement.slot,
        cache_prompt: placement.cache_prompt,
        cache_reuse: placement.cache_reuse,
        drafts: placement.drafts,
        overflow: placement.overflow,
        answer_fields: fields.present_fields(&RECORDED_FIELDS),
        ..Request::new(prompt, surface)
    })
}
