//! Parses configurations and builds engine requests from them.

use crate::api::shared::fields::{Fields, invalid_value};
use crate::api::shared::parameters::MinTokens;
use crate::api::shared::{ClientNames, base_request, parameters};
use crate::engine::{Limits, ReportOptions, Request, SamplingParams};
use crate::events::Surface;
use crate::model::{TokenizeOptions, Vocabulary};
use crate::server::{ApiError, App, LoadedModel};
use serde_json::{Map, Value};
use std::time::Duration;

/// Default number of alternatives per token.
const DEFAULT_LOGPROBS: usize = 5;
/// Maximum number of alternatives per token.
const MAX_LOGPROBS: i64 = 100;

/// Parameters that a client may change during a run.
const MODIFIABLE: [&str; 38] = [
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
    "max_completion_tokens",
    "max_steps",
    "max_tokens",
    "min_keep",
    "min_p",
    "mirostat",
    "mirostat_eta",
    "mirostat_tau",
    "n_predict",
    "presence_penalty",
    "repeat_last_n",
    "repeat_penalty",
    "repetition_penalty",
    "samplers",
    "seed",
    "stop",
    "stop_tokens",
    "t_max_predict_ms",
    "temperature",
    "top_k",
    "top_n_sigma",
    "top_p",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
];

/// Thunder's names of parameters that have several names, each with all names; the first one present applies.
const ALIASES: [(&str, &[&str]); 2] =
    [("max_tokens", &parameters::MAX_TOKENS_FIELDS), ("repeat_penalty", &["repetition_penalty", "repeat_penalty"])];

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
    /// Has Thunder's names of the parameters.
    body: Value,
    client_names: ClientNames,
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
        let client_names = rename_aliases(&mut body);
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
        Ok(Self { body, client_names, options })
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
        let client_names = rename_aliases(&mut change);
        let mut modified = self.clone();
        modified.client_names.extend(client_names);
        if let Some(body) = modified.body.as_object_mut() {
            body.extend(change);
        }
        Ok((modified, changes.join(", ")))
    }

    /// Returns the sampling parameters and limits of a changed configuration. `seed` replaces its seed, which may be -1 for
    /// a random one.
    ///
    /// # Errors
    /// A value is out of range; the error names the field.
    pub(super) fn sampling_and_limits(
        &self,
        app: &App,
        vocabulary: &Vocabulary,
        room: u32,
        seed: Option<u32>,
    ) -> Result<(SamplingParams, Limits), ApiError> {
        let fields = Fields::new(&self.body)?.with_server_defaults(app);
        let restore = |error| self.client_names.restore(error);
        let mut sampling = parameters::sampling(fields, vocabulary).map_err(restore)?;
        sampling.seed = seed.unwrap_or(sampling.seed);
        let limits = parameters::limits(fields, vocabulary, room, MinTokens::One).map_err(restore)?;
        Ok((sampling, limits))
    }

    /// Builds the engine request for a model.
    ///
    /// # Errors
    /// A field is invalid for this model; the error names it.
    pub(super) fn prepare(&self, app: &App, loaded: &LoadedModel, request_id: String) -> Result<PreparedRun, ApiError> {
        let fields = Fields::new(&self.body)?.with_server_defaults(app);
        let vocabulary = loaded.vocabulary();
        let prompt = fields.get("prompt").unwrap_or(&Value::Null);
        let tokens = parameters::encode_prompt(prompt, "prompt", vocabulary, TokenizeOptions::PROMPT)?;
        let prompt_text = prompt.as_str().map_or_else(|| vocabulary.decode(&tokens), str::to_owned);
        let request = Request {
            request_id: Some(request_id),
            metadata: parameters::metadata(fields)?,
            prompt_preview: parameters::preview(&prompt_text),
            alternatives: Request::ALTERNATIVES.max(self.options.logprobs.unwrap_or(0)),
            report: ReportOptions { progress: true, ..ReportOptions::default() },
            ..base_request(app, loaded, fields, tokens, Surface::Websocket, MinTokens::One)
                .map_err(|error| self.client_names.restore(error))?
        };
        let context = loaded.engine().context_per_slot();
        let room = parameters::answer_room(request.overflow, context, request.prompt.len());
        Ok(PreparedRun { request, prompt_text, room })
    }
}

fn is_section(name: &str) -> bool {
    matches!(name, "type" | "parameters" | "options")
}

/// Replaces the names of [`ALIASES`] with Thunder's. Returns the client's names of those present.
fn rename_aliases(body: &mut Map<String, Value>) -> ClientNames {
    let mut client_names = ClientNames::default();
    for (name, aliases) in ALIASES {
        let present: Vec<(&str, Value)> =
            aliases.iter().filter_map(|&alias| Some((alias, body.shift_remove(alias)?))).collect();
        // `null` counts as absent.
        let first = present.iter().position(|(_, value)| !value.is_null()).unwrap_or(0);
        if let Some((client_name, value)) = present.into_iter().nth(first) {
            body.insert(name.to_owned(), value);
            client_names.add(name, client_name);
        }
    }
    client_names
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

    #[test]
    fn parameter_has_one_name_after_a_change() {
        for name in parameters::MAX_TOKENS_FIELDS {
            let config = RunConfig::parse(&json!({"prompt": "p", "parameters": {name: 100}}), true).unwrap();
            assert_eq!(config.body, json!({"prompt": "p", "max_tokens": 100}));
            let error = || ApiError::invalid("max_tokens", "`max_tokens` is invalid");
            assert_eq!(config.client_names.restore(error()).problem().detail, format!("`{name}` is invalid"));
            for changed in parameters::MAX_TOKENS_FIELDS {
                let (modified, _) = config.modified(json!({changed: 5}).as_object().unwrap()).unwrap();
                assert_eq!(modified.body, json!({"prompt": "p", "max_tokens": 5}), "{name} {changed}");
                assert_eq!(modified.client_names.restore(error()).pointer(), Some(changed));
            }
        }
        let both = json!({"prompt": "p", "max_tokens": 9, "n_predict": 5});
        assert_eq!(RunConfig::parse(&both, true).unwrap().body["max_tokens"], 5, "as with llama-server");
    }
}
