//! Rebuilds the request of a recorded run, for runs that repeat or continue it.

use crate::api::shared::fields::Fields;
use crate::api::shared::parameters;
use crate::api::shared::parameters::{MAX_RUN_MODS, MinTokens};
use crate::engine::{Limits, Overflow, ReasoningBudget, Request, SamplingParams, recorded_parameter};
use crate::events::{PromptRecord, Surface, TokenId};
use crate::model::Vocabulary;
use crate::model::chat::answer::AnswerFormat;
use crate::model::grammar::Constraint;
use crate::model::llama::AdapterSet;
use crate::mods::{ModRef, SelectedMod, version_of};
use crate::server::mods::{find_version, load_version};
use crate::server::{ApiError, App, LoadedModel};
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

/// Returns the model of a recorded run, which must be the same file with the same overrides.
pub(super) async fn recorded_model(app: &App, recorded: &Value) -> Result<LoadedModel, ApiError> {
    let name = recorded["model"]["name"].as_str();
    if let Some(name) = name {
        // `get_or_load` may return the default model for an unknown name, and another model would answer differently.
        app.models().entry_by_name(name)?;
    }
    let loaded = app.get_or_load(name).await?;
    let fingerprint = format!("{:032x}", loaded.model().fingerprint());
    if let Some(expected) = recorded["model"]["fingerprint"].as_str().filter(|&expected| expected != fingerprint) {
        let detail = format!(
            "the model '{}' differs from the recorded run's: it is another file or has other overrides; its \
             fingerprint is {fingerprint}, expected {expected}",
            loaded.name()
        );
        return Err(ApiError::conflict(detail).at("prompt.parameters.model"));
    }
    Ok(loaded)
}

/// Builds the recorded request. All values are validated, because the recording comes from a client.
pub(super) fn request(prompt: PromptRecord, recorded: &Value, loaded: &LoadedModel) -> Result<Request, ApiError> {
    let vocabulary = loaded.vocabulary();
    let (sampling, limits) = (&recorded["sampling"], &recorded["limits"]);
    if prompt.tokens.is_empty() || !sampling.is_object() || !limits.is_object() {
        let detail =
            "the recording lacks the prompt's tokens, sampling or limits: it comes from another engine or is too old";
        return Err(ApiError::invalid("prompt", detail));
    }
    if let Some(token) = prompt.tokens.iter().find(|&&token| !vocabulary.is_prompt_token(token)) {
        let detail = format!("`prompt.tokens` must be token ids between 0 and {}, got {token}", vocabulary.len() - 1);
        return Err(ApiError::invalid("prompt.tokens", detail));
    }
    let limits = recorded_limits(limits, vocabulary)?;
    let sampling = recorded_sampling(sampling, &limits, vocabulary)?;
    let constraint: Option<Constraint> = parse_optional(&recorded["constraint"], "prompt.parameters.constraint")?;
    let overflow: Option<Overflow> = parse_optional(&recorded["overflow"], "prompt.parameters.overflow")?;
    if let Some(Overflow::Shift { keep, discard }) = overflow
        && keep.unwrap_or(0).max(discard) > i32::MAX as usize
    {
        return Err(ApiError::invalid(
            "prompt.parameters.overflow",
            "`overflow` must have `keep` and `discard` of at most 2147483647",
        ));
    }
    check_spans(&prompt)?;
    let template = loaded.model().card().chat_template.as_deref().unwrap_or_default();
    let answer_format = Some(recorded_parameter(recorded, "answer_format"))
        .filter(|format| format.is_object())
        .map(|format| AnswerFormat::from_recording(template, prompt.tools.as_ref(), format));
    // The recorded adapters apply, not the current defaults.
    let known = loaded.model().adapters();
    let adapters = parameters::requested_adapters(Fields::new(recorded)?, known, AdapterSet::default())?;
    let alternatives = recorded["alternatives"].as_u64().unwrap_or(Request::ALTERNATIVES as u64).min(100);
    Ok(Request {
        spans: prompt.spans,
        prompt_preview: parameters::run_in_place(prompt.tokens.len(), || {
            parameters::preview(&vocabulary.decode(&prompt.tokens))
        }),
        conversation: prompt.conversation,
        tools: prompt.tools,
        answer_fields: recorded["request"].as_object().cloned().unwrap_or_default(),
        sampling,
        constraint,
        answer_format: answer_format.map(Arc::new),
        reasoning_budget: reasoning_budget(recorded_parameter(recorded, "reasoning_budget"), vocabulary)?,
        adapters: Some(adapters),
        limits,
        visible_tokens: visible_tokens(recorded, vocabulary)?,
        alternatives: alternatives as usize,
        overflow: overflow.unwrap_or_default(),
        may_fill_context: true,
        // The KV state of another request was computed in other batches and differs in its last digits.
        cache_prompt: false,
        ..Request::new(prompt.tokens, Surface::Openai)
    })
}

fn recorded_limits(limits: &Value, vocabulary: &Vocabulary) -> Result<Limits, ApiError> {
    let fields = Fields::new(limits)?;
    let max_time: Option<std::time::Duration> =
        parse_optional(&limits["max_time"], "prompt.parameters.limits.max_time")?;
    let recorded = parameters::limits(fields, vocabulary, i32::MAX as u32, MinTokens::Zero)?;
    Ok(Limits {
        // A recording does not tell whether the client sent the number.
        has_requested_max_steps: recorded.max_steps != Limits::new(recorded.max_tokens).max_steps,
        min_indent: fields.integer("min_indent", 0..=1000)?.unwrap_or(0) as u32,
        max_time,
        ..recorded
    })
}

/// Parses recorded sampling parameters, of which a client may have changed some.
pub(super) fn recorded_sampling(
    recorded: &Value,
    limits: &Limits,
    vocabulary: &Vocabulary,
) -> Result<SamplingParams, ApiError> {
    let mut plain = recorded.clone();
    let mut biases = plain["logit_bias"].take();
    let mut sampling = parameters::sampling(Fields::new(&plain)?, vocabulary)?;
    // In requests some values select a random seed; a recorded seed is used unchanged.
    sampling.seed = plain["seed"].as_u64().and_then(|seed| u32::try_from(seed).ok()).unwrap_or(sampling.seed);
    if biases.is_null() {
        return Ok(sampling);
    }
    for pair in biases.as_array_mut().into_iter().flatten() {
        // A banned token has the bias minus infinity, which is recorded as null.
        if let Some([_, bias @ Value::Null]) = pair.as_array_mut().map(Vec::as_mut_slice) {
            *bias = Value::Bool(false);
        }
    }
    sampling.logit_bias = parameters::logit_bias(&biases, vocabulary, f32::MAX)?;
    if limits.ignore_eos {
        // The engine adds these bans again.
        let is_end = |token: TokenId| vocabulary.end_of_generation().contains(&token);
        sampling.logit_bias.retain(|&(token, bias)| bias != f32::NEG_INFINITY || !is_end(token));
    }
    Ok(sampling)
}

fn reasoning_budget(recorded: &Value, vocabulary: &Vocabulary) -> Result<Option<ReasoningBudget>, ApiError> {
    const FIELD: &str = "prompt.parameters.reasoning_budget";
    let budget: Option<ReasoningBudget> = parse_optional(recorded, FIELD)?;
    if let Some(budget) = &budget {
        if budget.open.is_empty() || budget.close.is_empty() {
            return Err(ApiError::invalid(
                FIELD,
                "`reasoning_budget` must have `open` and `close`, the markers around reasoning",
            ));
        }
        if let Some(token) = budget.closing_tokens.iter().find(|&&token| !vocabulary.contains(token)) {
            return Err(ApiError::invalid(
                FIELD,
                format!("`reasoning_budget.closing_tokens` must be token ids of the model, got {token}"),
            ));
        }
    }
    Ok(budget)
}

fn visible_tokens(recorded: &Value, vocabulary: &Vocabulary) -> Result<Vec<TokenId>, ApiError> {
    let name = if recorded.get("visible_tokens").is_some() { "visible_tokens" } else { "visible" };
    parameters::tokens(Fields::new(recorded)?, name, vocabulary)
}

fn check_spans(prompt: &PromptRecord) -> Result<(), ApiError> {
    let mut previous_end = 0;
    for span in &prompt.spans {
        if span.start < previous_end || span.end < span.start || span.end as usize > prompt.tokens.len() {
            let detail = "`spans` must be within the prompt, in order and without overlap";
            return Err(ApiError::invalid("prompt.spans", detail));
        }
        previous_end = span.end;
    }
    Ok(())
}

fn parse_optional<T: for<'de> Deserialize<'de>>(value: &Value, field: &str) -> Result<Option<T>, ApiError> {
    if value.is_null() {
        return Ok(None);
    }
    let parsed = serde_path_to_error::deserialize(value);
    parsed.map(Some).map_err(|error| ApiError::from_field_deserialization(field, &error))
}

/// Returns the mods of the recorded run in the recorded versions, or with `any_version` in their current versions.
pub(super) async fn mods(app: &App, recorded: &Value, any_version: bool) -> Result<Vec<SelectedMod>, ApiError> {
    const FIELD: &str = "prompt.parameters.mods";
    if !recorded.is_null() && !recorded.is_array() {
        return Err(ApiError::invalid(FIELD, format!("`{FIELD}` must be a list")));
    }
    if recorded.as_array().is_some_and(|mods| mods.len() > MAX_RUN_MODS) {
        return Err(ApiError::invalid(FIELD, format!("`{FIELD}` must have at most {MAX_RUN_MODS} mods")));
    }
    let mut mods = Vec::new();
    for entry in recorded.as_array().into_iter().flatten() {
        let mod_ref: ModRef = parse_optional(entry, FIELD)?
            .ok_or_else(|| ApiError::invalid(FIELD, format!("`{FIELD}` must not contain null")))?;
        let version = entry["version"].as_str().filter(|_| !any_version);
        let current = app.registry().select(vec![mod_ref.clone()]);
        let is_same = |found: &SelectedMod| version.is_none_or(|version| version_of(&*found.factory) == version);
        match current {
            Ok(mut found) if found.iter().all(is_same) => mods.append(&mut found),
            Err(error) if error.disabled => return Err(ApiError::conflict(error.to_string()).at(FIELD)),
            // Also a mod that was removed.
            Err(_) if app.registry().is_disabled(&mod_ref.name) => {
                return Err(ApiError::conflict(format!("the mod '{}' is disabled", mod_ref.name)).at(FIELD));
            }
            Err(error) if version.is_none() => return Err(ApiError::conflict(error.to_string()).at(FIELD)),
            Ok(_) | Err(_) => mods.push(earlier_version(app, mod_ref, version.unwrap_or_default()).await?),
        }
    }
    Ok(mods)
}

/// Returns an earlier version of a mod.
async fn earlier_version(app: &App, mod_ref: ModRef, hash: &str) -> Result<SelectedMod, ApiError> {
    if let Some(version) = find_version(app, &mod_ref.name, hash).await? {
        return load_version(app, version, mod_ref).await;
    }
    let short: String = hash.chars().take(12).collect();
    let current = match app.registry().info(&mod_ref.name, None) {
        Some(info) => format!("the current version is {}", info.description.version),
        None => "the mod no longer exists".to_owned(),
    };
    let detail = format!(
        "the recorded run used version {short} of the mod '{}', which is not stored here; {current}",
        mod_ref.name
    );
    Err(ApiError::conflict(detail).at("prompt.parameters.mods"))
}
