//! What a request to the engine has from its body on every route of OpenAI and llama-server.

use super::{Fields, lora, mods, parameters};
use crate::api::{ApiError, App, Loaded};
use crate::engine::Request;
use crate::events::{Surface, TokenId};

/// Fields that shape the answer and that nothing else of a recording has as they were sent.
const RECORDED: [&str; 10] = [
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

/// The request for a prompt, with what the body says about sampling, limits, slot, adapters, mods and recording. What the
/// answer must be and what is told of it is for the route to add.
///
/// # Errors
/// A field is wrong.
pub(in crate::api) fn request(
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
        sampling: parameters::sampling(fields, vocabulary)?,
        adapters: lora::adapters(fields, loaded.model().adapters())?,
        limits: parameters::limits_from(0, fields, vocabulary, room)?,
        mods: mods::chosen(fields, loaded, app.registry())?,
        attention: fields.flag("attention")?.unwrap_or(false),
        record: parameters::record(fields)?,
        slot: placement.slot,
        cache_prompt: placement.cache_prompt,
        cache_reuse: placement.cache_reuse,
        overflow: placement.overflow,
        answer_fields: fields.said(&RECORDED),
        ..Request::new(prompt, surface)
    })
}
