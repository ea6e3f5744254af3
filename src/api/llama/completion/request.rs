//! The body of `/completion`, and its conversion to engine requests: one per prompt and answer.

use crate::api::shared::body::GenerationFields;
use crate::api::shared::fields::is_null_or_empty;
use crate::api::shared::fields::{Fields, abbreviate, invalid_value};
use crate::api::shared::generation;
use crate::api::shared::images::{ImageReader, MAX_IMAGES, MEDIA_MARKER, RequestImages};
use crate::api::shared::settings::ReportedOptions;
use crate::api::shared::{self, parameters};
use crate::engine::{ReportOptions, Request};
use crate::events::{Surface, TokenId};
use crate::model::TokenizeOptions;
use crate::server::{ApiError, App, LoadedModel};
use serde::Deserialize;
use serde_json::Value;
use std::time::Duration;
use utoipa::ToSchema;

/// Maximum alternatives per token.
const MAX_PROBS: i64 = 1000;

/// A prompt to complete.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct LlamaCompletionBody {
    /// A string, token ids, a list of both, an object `{prompt_string, multimodal_data}` with images in base64 for the markers
    /// `<__media__>` of the string, or a list of such prompts.
    #[schema(value_type = Value)]
    prompt: Value,
    #[serde(flatten)]
    options: LlamaOptionFields,
    #[serde(flatten)]
    generation: GenerationFields,
}

/// Options of the response.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct LlamaOptionFields {
    /// Number of answers per prompt, up to the number of slots. Also `n`.
    #[schema(minimum = 1, default = 1)]
    n_cmpl: Option<u32>,
    /// Report the ids of the answer's tokens.
    #[schema(default = false)]
    return_tokens: Option<bool>,
    /// Paths to include in the response, such as `timings/prompt_n`; default all.
    response_fields: Option<Vec<String>>,
    /// Add timings to every chunk of a stream.
    #[schema(default = false)]
    timings_per_token: Option<bool>,
    /// Send the progress of the prompt in a stream.
    #[schema(default = false)]
    return_progress: Option<bool>,
}

/// A prompt with its images.
#[derive(Debug, Default)]
pub(super) struct LlamaPrompt {
    pub(super) tokens: Vec<TokenId>,
    pub(super) images: RequestImages,
}

/// Client options that shape the response, not the generation.
#[derive(Debug, Clone)]
pub(super) struct LlamaResponseOptions {
    /// Those that `generation_settings` repeats.
    pub(super) reported: ReportedOptions,
    pub(super) return_tokens: bool,
    pub(super) return_progress: bool,
    /// Paths to include in the response; empty for all.
    pub(super) response_fields: Vec<String>,
    /// Maximum silence of a stream before a keep-alive is sent; `None` sends none.
    pub(super) ping: Option<Duration>,
}

/// A completion request that passed validation.
#[derive(Debug)]
pub(super) struct LlamaCompletionRequest {
    /// One request per answer, in order.
    pub(super) requests: Vec<Request>,
    pub(super) options: LlamaResponseOptions,
}

/// Parses a body with these prompts.
pub(super) fn parse(
    app: &App,
    loaded: &LoadedModel,
    fields: Fields<'_>,
    prompts: Vec<LlamaPrompt>,
) -> Result<LlamaCompletionRequest, ApiError> {
    let fields = fields.with_server_defaults(app).lenient();
    let mut options = response_options(app, fields)?;
    parameters::reject_lazy_grammar(fields)?;
    let count = answer_count(fields, loaded.engine().slots())?;
    let runs = prompts.len() * count as usize;
    generation::check_run_count(runs)?;
    let mut requests = Vec::with_capacity(runs);
    for LlamaPrompt { tokens, images } in prompts {
        let mut request = llama_engine_request(app, loaded, fields, tokens, &options)?;
        images.move_to(&mut request);
        options.reported.adapters = request.adapters.clone().unwrap_or_default();
        requests.extend(generation::repeat_request(request, count));
    }
    Ok(LlamaCompletionRequest { requests, options })
}

fn response_options(app: &App, fields: Fields<'_>) -> Result<LlamaResponseOptions, ApiError> {
    let flag = |name| fields.flag(name).map(|flag| flag.unwrap_or(false));
    let n_probs = fields.first_present(&["n_probs", "logprobs"]).map(|(name, value)| match value {
        Value::Bool(enabled) => Ok(i64::from(*enabled)),
        _ => fields.integer(name, i64::from(i32::MIN)..=MAX_PROBS).map(|count| count.unwrap_or_default().max(0)),
    });
    let response_fields = fields.list("response_fields")?.into_iter().flatten().map(|path| match path.as_str() {
        Some(path) => Ok(path.to_owned()),
        None => Err(invalid_value("response_fields", "a list of strings", path)),
    });
    Ok(LlamaResponseOptions {
        reported: ReportedOptions {
            stream: flag("stream")?,
            n_probs: n_probs.transpose()?.unwrap_or(0) as usize,
            after_sampler: flag("post_sampling_probs")?,
            timings_per_token: flag("timings_per_token")?,
            ..ReportedOptions::from_fields(fields)
        },
        return_tokens: flag("return_tokens")?,
        return_progress: flag("return_progress")?,
        response_fields: response_fields.collect::<Result<_, _>>()?,
        ping: parameters::ping_interval(app, fields)?,
    })
}

/// Returns the number of answers per prompt.
fn answer_count(fields: Fields<'_>, slots: u32) -> Result<u32, ApiError> {
    let count = match fields.first_present(&["n_cmpl", "n"]) {
        Some((name, _)) => fields.integer(name, 1..=i64::from(slots))?,
        None => None,
    };
    Ok(count.unwrap_or(1) as u32)
}

fn llama_engine_request(
    app: &App,
    loaded: &LoadedModel,
    fields: Fields<'_>,
    prompt: Vec<TokenId>,
    options: &LlamaResponseOptions,
) -> Result<Request, ApiError> {
    let reported = &options.reported;
    Ok(Request {
        prompt_preview: parameters::preview(&loaded.vocabulary().decode(&prompt)),
        alternatives: Request::ALTERNATIVES.max(reported.n_probs),
        report: ReportOptions {
            progress: options.return_progress && reported.stream,
            after_sampler: reported.after_sampler && reported.n_probs > 0,
            ..ReportOptions::default()
        },
        ..shared::engine_request(app, loaded, fields, prompt, Surface::LlamaServer)?
    })
}

/// Parses the prompts of a body: a string, token ids, a list of both, a string with images, or a list of prompts.
pub(super) async fn parse_prompts(
    app: &App,
    fields: Fields<'_>,
    loaded: &LoadedModel,
) -> Result<Vec<LlamaPrompt>, ApiError> {
    const EXPECTED: &str = "a string, a list of token ids and strings, or a list of such prompts";
    let value = fields
        .get("prompt")
        .ok_or_else(|| ApiError::invalid("prompt", format!("`prompt` is missing; send {EXPECTED}")))?;
    match value {
        Value::Array(list) if list.is_empty() => Err(invalid_value("prompt", EXPECTED, value)),
        // As in llama-server, a list that contains a number is one prompt; any other list contains prompts.
        Value::Array(list) if !list.iter().any(Value::is_number) => {
            generation::check_run_count(list.len())?;
            let images: usize =
                list.iter().filter_map(|prompt| prompt.get("multimodal_data")?.as_array()).map(Vec::len).sum();
            if images > MAX_IMAGES {
                let detail = format!("a request may have up to {MAX_IMAGES} images, got {images}; send fewer");
                return Err(ApiError::invalid("prompt", detail));
            }
            let mut prompts = Vec::with_capacity(list.len());
            for (index, prompt) in list.iter().enumerate() {
                prompts.push(parse_prompt(app, prompt, &format!("prompt[{index}]"), loaded).await?);
            }
            Ok(prompts)
        }
        prompt => Ok(vec![parse_prompt(app, prompt, "prompt", loaded).await?]),
    }
}

async fn parse_prompt(app: &App, value: &Value, name: &str, loaded: &LoadedModel) -> Result<LlamaPrompt, ApiError> {
    let text = match value {
        Value::Object(object) => {
            let text = object.get("prompt_string").filter(|text| text.is_string()).ok_or_else(|| {
                ApiError::invalid(name, format!("`{name}` must have a string prompt_string, got {}", abbreviate(value)))
            })?;
            if let Some(data) = object.get("multimodal_data").filter(|data| !is_null_or_empty(data)) {
                return media_prompt(app, text.as_str().unwrap_or_default(), data, name, loaded).await;
            }
            text
        }
        other => other,
    };
    let tokens = parameters::encode_prompt(text, name, loaded.vocabulary(), TokenizeOptions::PROMPT)?;
    let tokens = parameters::or_start_token(tokens, loaded.vocabulary());
    Ok(LlamaPrompt { tokens, images: RequestImages::default() })
}

/// Returns a prompt in which the images replace the markers, in order.
async fn media_prompt(
    app: &App,
    text: &str,
    data: &Value,
    name: &str,
    loaded: &LoadedModel,
) -> Result<LlamaPrompt, ApiError> {
    let at = format!("{name}.multimodal_data");
    let expected = || invalid_value(&at, "a list of images in base64", data);
    let mut reader = ImageReader::new(app.config().engine.images.as_ref(), loaded);
    for (index, image) in data.as_array().ok_or_else(expected)?.iter().enumerate() {
        reader.add_base64(image.as_str().ok_or_else(expected)?, &format!("{at}[{index}]"))?;
    }
    let (markers, sent) = (text.matches(MEDIA_MARKER).count(), reader.len());
    if markers != sent {
        let detail = format!(
            "`{name}.prompt_string` must have one marker {MEDIA_MARKER} for each image of multimodal_data; it has {markers} \
             markers for {sent} images"
        );
        return Err(ApiError::invalid(name, detail));
    }
    let images = reader.read().await?;
    let tokens = images.insert_into(text, MEDIA_MARKER, loaded.vocabulary())?;
    Ok(LlamaPrompt { tokens, images })
}
