//! Parses configurations and builds engine requests from them.

use crate::api::shared::fields::{Fields, invalid_value};
use crate::api::shared::{base_request, parameters};
use crate::engine::{Limits, ReportOptions, Request, SamplingParams};
use crate::events::Surface;
use crate::model::Vocabulary;
use crate::server::{ApiError, App, Loaded};
use serde_json::{Map, Value};
use std::time::Duration;

/// Default number of alternatives per token.
const DEFAULT_LOGPROBS: usize = 5;
/// Maximum number of alternatives per token.
const MAX_LOGPROBS: i64 = 100;

/// Parameters that a client may change during a run.
const MODIFIABLE: [&str; 33] = [
    "adaptive_decay",
    "adaptive_target",
    "banned_tokens",
    "dry_allowed_length",
    "dry_base",
    "dry_multiplier",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "dynatemp_range",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "max_steps",
    "max_tokens",
    "min_keep",
    "min_p",
    "mirostat",
    "mirostat_eta",
    "mirostat_tau",
    "presence_penalty",
    "repeat_last_n",
    "repeat_penalty",
    "repetition_penalty",
    "samplers",
    "seed",
    "stop",
    "stop_tokens",
    "temperature",
    "top_k",
    "top_n_sigma",
    "top_p",
    "typical_p",
];

/// Client options that shape the messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StreamOptions {
    pub(super) stream: bool,
    pub(super) echo_prompt: bool,
    pub(super) token_ids: bool,
    /// Number of alternatives per token.
    pub(super) logprobs: Option<usize>,
    pub(super) timing: bool,
    /// True if token messages repeat the text so far in `generated_text`.
    pub(super) cumulative: bool,
    /// Maximum duration of the run without pauses.
    pub(super) timeout: Option<Duration>,
}

/// A configuration as sent, with all sections merged into one object.
#[derive(Debug, Clone)]
pub(super) struct RunConfig {
    body: Value,
    pub(super) options: StreamOptions,
}

/// An engine request prepared for a model.
pub(super) struct PreparedRun {
    pub(super) request: Request,
    pub(super) prompt_text: String,
    /// Tokens left in the context after the prompt.
    pub(super) room: u32,
}

impl RunConfig {
    /// Parses a configuration. Parameters and options may be in the objects `parameters` and `options` or next to the
    /// prompt. `stream` is the default of `options.stream`.
    ///
    /// # Errors
    /// A field has an invalid value; the error names it.
    pub(super) fn parse(message: &Value, stream: bool) -> Result<Self, ApiError> {
        let fields = Fields::new(message)?;
        let mut body = Map::new();
        for section in [None, Some("parameters"), Some("options")] {
            let object = match section {
                None => message.as_object(),
                Some(name) => fields.object(name)?,
            };
            let inner = object.into_iter().flatten().filter(|(name, value)| !is_section(name) && !value.is_null());
            body.extend(inner.map(|(name, value)| (name.clone(), value.clone())));
        }
        rename_penalty(&mut body);
        let body = Value::Object(body);
        let fields = Fields::new(&body)?;
        let flag = |name, default| fields.flag(name).map(|flag| flag.unwrap_or(default));
        let top = fields.integer("top_logprobs", 1..=MAX_LOGPROBS)?.map_or(DEFAULT_LOGPROBS, |count| count as usize);
        let cumulative = match fields.text("generated_text")? {
            None | Some("cumulative") => true,
            Some("delta") => false,
            Some(other) => {
                return Err(invalid_value("generated_text", "\"cumulative\" or \"delta\"", &Value::from(other)));
            }
        };
        let timeout = fields.integer("timeout_ms", 1..=i64::from(u32::MAX))?;
        let options = StreamOptions {
            stream: flag("stream", stream)?,
            echo_prompt: flag("echo_prompt", false)?,
            token_ids: flag("include_token_ids", false)?,
            logprobs: flag("include_logprobs", false)?.then_some(top),
            timing: flag("include_timing", false)?,
            cumulative,
            timeout: timeout.map(|ms| Duration::from_millis(ms.unsigned_abs())),
        };
        if fields.get("prompt").is_none() {
            let detail = "`prompt` is missing; send a string, or a list of strings and token ids";
            return Err(ApiError::invalid("prompt", detail));
        }
        parameters::request_id(fields)?;
        fields.text("model")?;
        Ok(Self { body, options })
    }

    /// Returns the name of the model.
    pub(super) fn model(&self) -> Option<&str> {
        self.body.get("model").and_then(Value::as_str)
    }

    /// Returns the client's id of the run.
    pub(super) fn request_id(&self) -> Option<&str> {
        self.body.get("request_id").and_then(Value::as_str)
    }

    /// Returns the configuration without the request id, for another run.
    pub(super) fn without_request_id(&self) -> Self {
        let mut copy = self.clone();
        if let Some(body) = copy.body.as_object_mut() {
            body.shift_remove("request_id");
        }
        copy
    }

    /// Returns the configuration with changed parameters, and the changes as text.
    ///
    /// # Errors
    /// A parameter cannot be changed during a run.
    pub(super) fn modified(&self, parameters: &Map<String, Value>) -> Result<(Self, String), ApiError> {
        if let Some(unknown) = parameters.keys().find(|name| !MODIFIABLE.contains(&name.as_str())) {
            let detail = format!(
                "`parameters.{unknown}` cannot be changed during a run; modifiable parameters: {}",
                MODIFIABLE.join(", ")
            );
            return Err(ApiError::invalid(format!("parameters.{unknown}"), detail));
        }
        let changes: Vec<String> = parameters.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let mut change = parameters.clone();
        rename_penalty(&mut change);
        let mut modified = self.clone();
        if let Some(body) = modified.body.as_object_mut() {
            body.extend(change);
        }
        Ok((modified, changes.join(", ")))
    }

    /// Returns the sampling parameters and limits of a changed configuration. `seed` is used if the configuration has
    /// none.
    ///
    /// # Errors
    /// A value is out of range; the error names the field.
    pub(super) fn sampling_and_limits(
        &self,
        app: &App,
        vocabulary: &Vocabulary,
        room: u32,
        seed: u32,
    ) -> Result<(SamplingParams, Limits), ApiError> {
        let fields = Fields::new(&self.body)?.with_defaults(&app.config().server.request_defaults);
        let mut sampling = parameters::sampling(fields, vocabulary).map_err(restore_client_name)?;
        if fields.get("seed").is_none() {
            sampling.seed = seed;
        }
        Ok((sampling, parameters::limits(fields, vocabulary, room)?))
    }

    /// Builds the engine request for a model.
    ///
    /// # Errors
    /// A field is invalid for this model; the error names it.
    pub(super) fn prepare(&self, app: &App, loaded: &Loaded, request_id: String) -> Result<PreparedRun, ApiError> {
        let fields = Fields::new(&self.body)?.with_defaults(&app.config().server.request_defaults);
        let vocabulary = loaded.vocabulary();
        let prompt = fields.get("prompt").unwrap_or(&Value::Null);
        let tokens = parameters::encode_prompt(prompt, "prompt", vocabulary, true, true)?;
        let prompt_text = prompt.as_str().map_or_else(|| vocabulary.decode(&tokens), str::to_owned);
        let room = parameters::placement(fields)?.room(loaded.engine().context_per_slot(), tokens.len());
        let request = Request {
            request_id: Some(request_id),
            metadata: parameters::metadata(fields)?,
            prompt_preview: parameters::preview(&prompt_text),
            alternatives: Request::ALTERNATIVES.max(self.options.logprobs.unwrap_or(0)),
            report: ReportOptions { progress: true, ..ReportOptions::default() },
            ..base_request(app, loaded, fields, tokens, Surface::Websocket, 1).map_err(restore_client_name)?
        };
        Ok(PreparedRun { request, prompt_text, room })
    }
}

fn is_section(name: &str) -> bool {
    matches!(name, "type" | "parameters" | "options")
}

/// The protocol's name of the repetition penalty, and Thunder's.
const PENALTY: [&str; 2] = ["repetition_penalty", "repeat_penalty"];

/// Replaces the protocol's name of the repetition penalty with Thunder's.
fn rename_penalty(body: &mut Map<String, Value>) {
    if let Some(penalty) = body.shift_remove(PENALTY[0]) {
        body.insert(PENALTY[1].to_owned(), penalty);
    }
}

fn restore_client_name(error: ApiError) -> ApiError {
    if error.pointer() == Some(PENALTY[1]) { error.rename_field(PENALTY[1], PENALTY[0]) } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn detail(message: &Value) -> String {
        RunConfig::parse(message, true).unwrap_err().problem().detail
    }

    #[test]
    fn sections_and_top_level_fields_are_merged() {
        let nested = json!({"type": "config", "prompt": "p", "parameters": {"temperature": 0.7, "repetition_penalty": 1.1},
                            "options": {"include_logprobs": true, "generated_text": "delta"}});
        let config = RunConfig::parse(&nested, true).unwrap();
        assert_eq!(
            config.body,
            json!({"prompt": "p", "temperature": 0.7, "include_logprobs": true,
                                       "generated_text": "delta", "repeat_penalty": 1.1})
        );
        assert_eq!((config.options.logprobs, config.options.cumulative), (Some(DEFAULT_LOGPROBS), false));
        let flat = json!({"prompt": "p", "temperature": 0.7, "stream": false});
        assert!(!RunConfig::parse(&flat, true).unwrap().options.stream);
    }

    #[test]
    fn invalid_config_reports_expected_value() {
        assert!(detail(&json!({"type": "config"})).contains("`prompt` is missing"));
        assert!(detail(&json!({"prompt": "p", "parameters": 3})).contains("`parameters` must be an object"));
        assert!(
            detail(&json!({"prompt": "p", "options": {"stream": "yes"}})).contains("`stream` must be true or false")
        );
        assert!(detail(&json!({"prompt": "p", "options": {"generated_text": "x"}})).contains("\"delta\""));
        assert!(detail(&json!([])).contains("must be a JSON object"));
    }

    #[test]
    fn modified_parameters_are_reported_and_stored() {
        let config = RunConfig::parse(&json!({"prompt": "p", "parameters": {"temperature": 0.7}}), true).unwrap();
        let change = json!({"temperature": 0.9, "repetition_penalty": 1.2});
        let (modified, changes) = config.modified(change.as_object().unwrap()).unwrap();
        assert_eq!(changes, "temperature=0.9, repetition_penalty=1.2");
        assert_eq!(modified.body, json!({"prompt": "p", "temperature": 0.9, "repeat_penalty": 1.2}));
        let error = config.modified(json!({"prompt": "q"}).as_object().unwrap()).unwrap_err();
        assert!(error.problem().detail.contains("`parameters.prompt` cannot be changed"));
        assert!(MODIFIABLE.is_sorted());
    }
}
