//! Parses a body with a `prompt` into an engine request.

use super::bans::Bans;
use crate::api::shared::aliases::aliased_fields;
use crate::api::shared::body::{AdapterScaleBody, ControlVectorBody};
use crate::api::shared::fields::invalid_value;
use crate::api::shared::images::{ImageReader, RequestImages};
use crate::api::shared::parameters::MinTokens;
use crate::api::shared::{Fields, base_request, parameters};
use crate::engine::{Limits, ReportOptions, Request};
use crate::events::{Surface, TokenId};
use crate::model::{TokenizeOptions, Vocabulary};
use crate::server::{ApiError, App, LoadedModel};
use serde_json::Value;
use utoipa::ToSchema;

/// Default length of an answer in tokens.
const DEFAULT_LENGTH: i64 = 200;

/// A `KoboldCPP` request that passed validation.
pub(super) struct KoboldRequest {
    pub(super) request: Request,
    /// Key with which other requests poll or abort the generation; empty for none.
    pub(super) genkey: String,
    /// Include control tokens in the text.
    pub(super) render_special: bool,
    /// Report the log-probabilities of the answer's tokens.
    pub(super) logprobs: bool,
}

/// A body that selects generations by their `genkey`.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct GenkeyRequest {
    /// The key of the generations. An absent key selects the generations without a key.
    genkey: Option<String>,
}

/// The body of a generation.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct KoboldStreamRequest {
    /// The complete context as token ids.
    input_ids: Option<Vec<TokenId>>,
    /// The context as text, used if `input_ids` is absent.
    prompt: Option<String>,
    /// Images in base64, placed before `prompt` and after `memory`.
    images: Option<Vec<String>>,
    /// Maximum tokens of the answer; -1 for as many as fit.
    max_length: Option<i32>,
    /// Maximum tokens of prompt, images and answer together, if that is less than the context of a slot; only with
    /// `prompt`.
    max_context_length: Option<u32>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i32>,
    /// Penalty on repeated tokens; 1 for none.
    rep_pen: Option<f64>,
    sampler_seed: Option<i64>,
    /// Strings that end the answer.
    stop_sequence: Option<Vec<String>>,
    /// Phrases that are removed from the answer, and tokens that are never sampled; also `banned_strings`. With
    /// `input_ids` only tokens.
    #[schema(value_type = Option<Vec<Value>>)]
    banned_tokens: Option<Vec<Value>>,
    /// Ids of tokens that are never sampled, separated by commas; only with `prompt`.
    custom_token_bans: Option<String>,
    /// Send attention with each token; only with `input_ids`, or on the WebSocket. Default is true on the WebSocket,
    /// false over HTTP.
    output_attentions: Option<bool>,
    /// `aggregated`, the default on the WebSocket: one number per position, by default the mean of all heads (see
    /// `aggregation_mode`). `per_layer`, the default over HTTP: every head of every layer. Over HTTP also the other
    /// formats of the attention API.
    attention_format: Option<String>,
    /// Scales of LoRA adapters; adapters that are not listed are not applied.
    lora: Option<Vec<AdapterScaleBody>>,
    /// Control vectors, in place of those with a default scale; up to 64.
    steering: Option<Vec<ControlVectorBody>>,
    /// Key for `/api/extra/generate/check` and `/api/extra/abort`.
    genkey: Option<String>,
    /// The client's id of the request.
    request_id: Option<String>,
}

/// A text to tokenize.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct KoboldTokenCountRequest {
    prompt: String,
    /// Add the BOS token if the model uses one.
    #[schema(default = true)]
    special: Option<bool>,
}

/// Tokens to convert to text.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct KoboldDetokenizeRequest {
    ids: Vec<TokenId>,
}

/// Returns the default length of an answer in tokens.
pub(super) fn default_length(app: &App) -> i64 {
    app.config().server.max_tokens.map_or(DEFAULT_LENGTH, |max| DEFAULT_LENGTH.min(max.into()))
}

/// Parses a body.
///
/// # Errors
/// 400 naming the invalid field.
pub(super) async fn parse(app: &App, loaded: &LoadedModel, fields: Fields<'_>) -> Result<KoboldRequest, ApiError> {
    let images = read_images(app, loaded, fields).await?;
    let (aliased, names) = aliased_fields(fields);
    let mut defaults = app.config().server.request_defaults.clone();
    defaults.entry("max_tokens").or_insert(default_length(app).into());
    defaults.remove("n_predict");
    if bans_end(fields)? {
        defaults.insert("ignore_eos".into(), Value::Bool(true));
    }
    let bans = Bans::parse(fields, loaded.vocabulary())?;
    let body = bans.as_ref().map(|bans| bans.replace_fields(fields));
    let replaced = match &body {
        Some(body) => Fields::new(body)?,
        None => fields,
    };
    // Like llama-server's clients, `KoboldCPP` clients send values from their forms without checking their range.
    let fields = replaced.with_aliases(&aliased).with_defaults(&defaults).lenient();
    let mut parsed = parse_fields(app, loaded, fields, images).map_err(|error| names.restore(error))?;
    if let Some(bans) = bans {
        parsed.request.mods.extend(bans.mods(app.registry())?);
    }
    Ok(parsed)
}

/// Returns true if the model may not end the answer.
fn bans_end(fields: Fields<'_>) -> Result<bool, ApiError> {
    let older_name = fields.flag("use_default_badwordsids")?.unwrap_or(false);
    Ok(fields.flag("ban_eos_token")?.unwrap_or(older_name) || fields.flag("bypass_eos")?.unwrap_or(false))
}

/// Reads the images of a body.
async fn read_images(app: &App, loaded: &LoadedModel, fields: Fields<'_>) -> Result<RequestImages, ApiError> {
    let mut reader = ImageReader::new(app.config().engine.images.as_ref(), loaded);
    for (index, image) in fields.list("images")?.into_iter().flatten().enumerate() {
        let at = format!("images[{index}]");
        let data = image.as_str().ok_or_else(|| invalid_value(&at, "an image in base64", image))?;
        if data.starts_with("data:") { reader.add_url(data, &at)? } else { reader.add_base64(data, &at)? }
    }
    reader.read().await
}

fn parse_fields(
    app: &App,
    loaded: &LoadedModel,
    fields: Fields<'_>,
    images: RequestImages,
) -> Result<KoboldRequest, ApiError> {
    let max_tokens = fields.integer("max_tokens", -1..=i64::from(i32::MAX))?.filter(|&max| max >= 0);
    let max_context = fields.integer("max_context_length", 1..=i64::from(i32::MAX))?.map(|max| max as usize);
    let slot_context = loaded.engine().context_per_slot() as usize;
    let smaller_context = max_context.filter(|&max| max < slot_context);
    let context = smaller_context.unwrap_or(slot_context);
    if let Some(max) = smaller_context {
        check_images(&images, max)?;
    }
    let reserved = max_tokens.unwrap_or_else(|| default_length(app)) as usize;
    let prompt = prompt(loaded, fields, context, reserved, &images)?;
    let room = context.saturating_sub(prompt.len()).max(1) as u32;
    let trim_stop = fields.flag("trim_stop")?.unwrap_or(true);
    let render_special = fields.flag("render_special")?.unwrap_or(false);
    let mut request = Request {
        prompt_preview: parameters::preview(&loaded.vocabulary().decode(&prompt)),
        // As in KoboldCPP, the stop string is part of the text only if `trim_stop` is false.
        report: ReportOptions { per_token: !trim_stop, ..ReportOptions::default() },
        visible_tokens: if render_special { control_tokens(loaded.vocabulary()) } else { Vec::new() },
        ..base_request(app, loaded, fields, prompt, Surface::Kobold, MinTokens::One)?
    };
    if smaller_context.is_some() {
        let limits = &mut request.limits;
        limits.max_tokens = limits.max_tokens.min(room);
        limits.max_steps = limits.max_steps.min(Limits::new(room).max_steps);
    }
    images.move_to(&mut request);
    Ok(KoboldRequest {
        request,
        genkey: fields.text("genkey")?.unwrap_or_default().to_owned(),
        render_special,
        logprobs: fields.flag("logprobs")?.unwrap_or(false),
    })
}

/// Checks that images leave room for a token of the prompt and one of the answer in a context of `max` tokens.
fn check_images(images: &RequestImages, max: usize) -> Result<(), ApiError> {
    let tokens: usize = images.images.iter().map(|image| image.tokens().len()).sum();
    if tokens == 0 || tokens + 2 <= max {
        return Ok(());
    }
    let message = format!(
        "`max_context_length` must be at least {}, because the images have {tokens} tokens, got {max}; increase it, or send \
         fewer or smaller images",
        tokens + 2
    );
    Err(ApiError::invalid("max_context_length", message))
}

fn control_tokens(vocabulary: &Vocabulary) -> Vec<TokenId> {
    (0..vocabulary.len() as TokenId).filter(|&token| vocabulary.is_control(token)).collect()
}

/// Tokenizes `memory` and `prompt`, with the images between them. If `reserved` tokens of the answer, or half of the
/// context if that is less, would not fit in the context, the start of the prompt is dropped, as in `KoboldCPP`.
fn prompt(
    loaded: &LoadedModel,
    fields: Fields<'_>,
    context: usize,
    reserved: usize,
    images: &RequestImages,
) -> Result<Vec<TokenId>, ApiError> {
    let vocabulary = loaded.vocabulary();
    let text =
        fields.text("prompt")?.ok_or_else(|| ApiError::invalid("prompt", "`prompt` is missing; send a string"))?;
    let memory = fields.text("memory")?.unwrap_or_default();
    // `memory` leaves room for at least one token of the prompt.
    let room = context.saturating_sub(reserved.min(context / 2)).saturating_sub(1).max(1);
    let media: Vec<TokenId> = images.images.iter().flat_map(|image| image.tokens()).copied().collect();
    // The engine rejects images that do not fit.
    let room = room.saturating_sub(media.len()).max(1);
    let mut kept = parameters::encode(vocabulary, memory, TokenizeOptions::PROMPT);
    kept.truncate(room - 1);
    let tokens = parameters::encode(
        vocabulary,
        text,
        TokenizeOptions { add_special: kept.is_empty(), ..TokenizeOptions::PROMPT },
    );
    let free = room - kept.len();
    kept.extend(media);
    kept.extend(&tokens[tokens.len().saturating_sub(free)..]);
    if kept.is_empty() {
        return Err(ApiError::invalid("prompt", "`prompt` must have at least one token"));
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn end_is_banned_by_each_name() {
        for (body, expected) in [
            (json!({}), false),
            (json!({"bypass_eos": true}), true),
            (json!({"use_default_badwordsids": true}), true),
            (json!({"ban_eos_token": true, "use_default_badwordsids": false}), true),
            (json!({"ban_eos_token": false, "use_default_badwordsids": true}), false),
        ] {
            assert_eq!(bans_end(Fields::new(&body).unwrap()).unwrap(), expected, "{body}");
        }
        assert!(bans_end(Fields::new(&json!({"ban_eos_token": "yes"})).unwrap()).is_err());
    }
}
