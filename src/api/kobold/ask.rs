//! From a body with a `prompt` to the request that the engine takes.

use crate::api::attention::{in_their_words, renamed};
use crate::api::shared::{Fields, constraint, mods, parameters};
use crate::api::{ApiError, App, Loaded};
use crate::engine::{ReportOptions, Request};
use crate::events::{Surface, TokenId};
use serde_json::Value;

/// Tokens of an answer, unless the request says how many.
const MAX_LENGTH: i64 = 200;

/// A body, read.
pub(super) struct Asked {
    pub(super) request: Request,
    /// The client's name of the generation; empty for none.
    pub(super) genkey: String,
    /// Whether control tokens are part of the text.
    pub(super) render_special: bool,
    /// The answer tells the log-probabilities of its tokens.
    pub(super) logprobs: bool,
}

/// Tokens of an answer to a request that does not say.
pub(super) fn usual_length(app: &App) -> i64 {
    app.config().server.max_tokens.map_or(MAX_LENGTH, |most| MAX_LENGTH.min(most.into()))
}

/// Reads a body.
///
/// # Errors
/// 400, with the field that is wrong.
pub(super) fn read(app: &App, loaded: &Loaded, fields: Fields<'_>) -> Result<Asked, ApiError> {
    let mut layer = renamed(app, fields);
    layer.entry("max_tokens").or_insert(usual_length(app).into());
    layer.remove("n_predict");
    if fields.flag("bypass_eos")?.unwrap_or(false) || fields.flag("use_default_badwordsids")?.unwrap_or(false) {
        layer.insert("ignore_eos".into(), Value::Bool(true));
    }
    // Its clients send what they have in their forms, in range or not, as llama-server's do.
    read_with(app, loaded, fields.with_defaults(&layer).clamp_numbers()).map_err(|error| in_their_words(error, fields))
}

fn read_with(app: &App, loaded: &Loaded, fields: Fields<'_>) -> Result<Asked, ApiError> {
    let vocabulary = loaded.vocabulary();
    let context = loaded.engine().context_per_slot();
    let wanted = fields.integer("max_tokens", -1..=i64::from(i32::MAX))?.unwrap_or(MAX_LENGTH);
    let prompt = prompt(loaded, fields, usize::try_from(wanted).unwrap_or(0))?;
    let placement = parameters::placement(fields)?;
    let room = placement.room(context, prompt.len());
    let trims = fields.flag("trim_stop")?.unwrap_or(false);
    let request = Request {
        request_id: parameters::request_id(fields)?,
        user_label: parameters::user(fields)?,
        prompt_preview: parameters::preview(&vocabulary.decode(&prompt)),
        sampling: parameters::sampling(fields, vocabulary)?,
        constraint: constraint::parse_constraint(fields, false)?,
        limits: parameters::limits(fields, vocabulary, room)?,
        mods: mods::requested_mods(fields, loaded, app.registry())?,
        attention: fields.flag("attention")?.unwrap_or(false),
        record: parameters::record(fields)?,
        // The stop string is part of the text, unless it is to be trimmed.
        report: ReportOptions { per_token: !trims, ..ReportOptions::default() },
        slot: placement.slot,
        cache_prompt: placement.cache_prompt,
        cache_reuse: placement.cache_reuse,
        overflow: placement.overflow,
        ..Request::new(prompt, Surface::Attention)
    };
    Ok(Asked {
        request,
        genkey: fields.text("genkey")?.unwrap_or_default().to_owned(),
        render_special: fields.flag("render_special")?.unwrap_or(false),
        logprobs: fields.flag("logprobs")?.unwrap_or(false),
    })
}

/// `memory` and `prompt` as tokens. What does not fit beside the answer goes from the prompt's beginning, as `KoboldCPP` does.
fn prompt(loaded: &Loaded, fields: Fields<'_>, answer: usize) -> Result<Vec<TokenId>, ApiError> {
    let vocabulary = loaded.vocabulary();
    let text = fields.text("prompt")?.ok_or_else(|| ApiError::invalid("prompt", "prompt is missing"))?;
    let memory = fields.text("memory")?.unwrap_or_default();
    let context = loaded.engine().context_per_slot() as usize;
    let wanted = fields.integer("max_context_length", 1..=i64::from(i32::MAX))?;
    let context = wanted.map_or(context, |wanted| context.min(wanted as usize));
    // The text is the prompt's, and at least one token of it is the last that counts.
    let room = context.saturating_sub(answer.min(context / 2)).saturating_sub(1).max(1);
    let mut kept = vocabulary.encode(memory, true, true);
    kept.truncate(room - 1);
    let tokens = vocabulary.encode(text, kept.is_empty(), true);
    let behind = room - kept.len();
    kept.extend(&tokens[tokens.len().saturating_sub(behind)..]);
    if kept.is_empty() {
        return Err(ApiError::invalid("prompt", "the prompt is empty"));
    }
    Ok(kept)
}
