//! Default values of requests, with llama-server's flags.
//!
//! They become fields of the request's JSON, so the request parser validates them.

use super::ConfigError;
use super::flag_values::{OnOff, OnOffAuto};
use crate::events::shortest_f64;
use clap::Args;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Default values of requests.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Defaults of requests")]
pub struct RequestFlags {
    /// Maximum tokens of an answer; -1 for the size of the context; default: -1
    #[arg(
        short = 'n',
        long = "predict",
        visible_alias = "n-predict",
        env = "THUNDER_PREDICT",
        value_name = "N",
        allow_negative_numbers = true
    )]
    pub predict: Option<i32>,
    /// Random seed; -1 for a new one per request
    #[arg(short, long, env = "THUNDER_SEED", value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<i64>,
    /// Temperature; 0 always takes the most probable token; default: 0.8
    #[arg(long = "temp", alias = "temperature", env = "THUNDER_TEMP", value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Number of most probable tokens to sample from; 0 for all; default: 40
    #[arg(long, env = "THUNDER_TOP_K", value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<i32>,
    /// Cumulative probability of the most probable tokens to sample from, 0 to 1; default: 0.95
    #[arg(long, env = "THUNDER_TOP_P", value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Minimum probability of a token relative to the most probable one; default: 0.05
    #[arg(long, env = "THUNDER_MIN_P", value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Penalty on repeated tokens; 1 for none; default: 1
    #[arg(long, env = "THUNDER_REPEAT_PENALTY", value_name = "X", allow_negative_numbers = true)]
    pub repeat_penalty: Option<f32>,
    /// Number of last tokens that the penalties consider; default: 64
    #[arg(long, env = "THUNDER_REPEAT_LAST_N", value_name = "N", allow_negative_numbers = true)]
    pub repeat_last_n: Option<i32>,
    /// Penalty on tokens that occurred before
    #[arg(long, env = "THUNDER_PRESENCE_PENALTY", value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Penalty on tokens by their number of occurrences
    #[arg(long, env = "THUNDER_FREQUENCY_PENALTY", value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Generation beyond end-of-generation tokens
    #[arg(long, env = "THUNDER_IGNORE_EOS", value_parser = clap::builder::FalseyValueParser::new())]
    pub ignore_eos: bool,
    /// Number of prompt tokens to keep when the context is full; -1 for all; default: 0
    #[arg(long, env = "THUNDER_KEEP", value_name = "N", allow_negative_numbers = true)]
    pub keep: Option<i32>,
    /// Variables of the chat template as a JSON object, e.g. `{"enable_thinking": false}`
    #[arg(long, env = "THUNDER_CHAT_TEMPLATE_KWARGS", value_name = "JSON")]
    pub chat_template_kwargs: Option<String>,
    /// Reasoning of models; auto for the chat template's default [also: -rea]
    #[arg(long, env = "THUNDER_REASONING", value_name = "on|off|auto", default_missing_value = "on", num_args = 0..=1)]
    pub reasoning: Option<OnOffAuto>,
    /// Reasoning effort for chat templates that support it, e.g. low, medium or high; default for the template's
    /// default
    #[arg(long, env = "THUNDER_REASONING_EFFORT", value_name = "LEVEL")]
    pub reasoning_effort: Option<String>,
    /// Separation of reasoning from the answer: none leaves it in the text, all other values separate it
    #[arg(long, env = "THUNDER_REASONING_FORMAT", value_name = "none|auto|deepseek|deepseek-legacy",
          value_parser = ["none", "auto", "deepseek", "deepseek-legacy"])]
    pub reasoning_format: Option<String>,
    /// Maximum reasoning tokens; 0 for no reasoning, -1 for unlimited
    #[arg(long, env = "THUNDER_REASONING_BUDGET", value_name = "N", allow_negative_numbers = true)]
    pub reasoning_budget: Option<i32>,
    /// Text inserted at the end of reasoning that exceeds --reasoning-budget
    #[arg(long, env = "THUNDER_REASONING_BUDGET_MESSAGE", value_name = "TEXT")]
    pub reasoning_budget_message: Option<String>,
    /// Continuation of a final assistant message instead of an answer to it [also: --no-prefill-assistant]
    #[arg(long, env = "THUNDER_PREFILL_ASSISTANT", value_name = "on|off", default_value = "on",
          default_missing_value = "on", num_args = 0..=1, require_equals = true)]
    pub prefill_assistant: OnOff,
    /// Any other sampling parameter of requests as JSON, e.g. `xtc_probability=0.5` or `samplers=["top_k"]`
    #[arg(long = "parameter", env = "THUNDER_PARAMETER", value_name = "NAME=JSON")]
    pub parameters: Vec<String>,
    /// llama-server's less common sampling flags, hidden from the help because `--parameter` replaces them.
    #[command(flatten)]
    pub further: HiddenSamplingFlags,
}

/// llama-server's less common sampling flags, hidden from the help because `--parameter` replaces them.
#[derive(Debug, Clone, Args)]
pub struct HiddenSamplingFlags {
    #[arg(long, alias = "typical", hide = true, allow_negative_numbers = true)]
    typical_p: Option<f32>,
    #[arg(long, alias = "top-nsigma", hide = true, allow_negative_numbers = true)]
    top_n_sigma: Option<f32>,
    #[arg(long, hide = true, allow_negative_numbers = true)]
    xtc_probability: Option<f32>,
    #[arg(long, hide = true, allow_negative_numbers = true)]
    xtc_threshold: Option<f32>,
    #[arg(long, hide = true, allow_negative_numbers = true)]
    dry_multiplier: Option<f32>,
    #[arg(long, hide = true, allow_negative_numbers = true)]
    dry_base: Option<f32>,
    #[arg(long, hide = true, allow_negative_numbers = true)]
    dry_allowed_length: Option<i32>,
    #[arg(long, hide = true, allow_negative_numbers = true)]
    dry_penalty_last_n: Option<i32>,
    #[arg(long = "dry-sequence-breaker", hide = true)]
    dry_sequence_breakers: Vec<String>,
    #[arg(long, hide = true, allow_negative_numbers = true)]
    dynatemp_range: Option<f32>,
    #[arg(long = "dynatemp-exp", hide = true, allow_negative_numbers = true)]
    dynatemp_exponent: Option<f32>,
    #[arg(long, hide = true, allow_negative_numbers = true)]
    mirostat: Option<i32>,
    #[arg(long = "mirostat-ent", hide = true, allow_negative_numbers = true)]
    mirostat_tau: Option<f32>,
    #[arg(long = "mirostat-lr", hide = true, allow_negative_numbers = true)]
    mirostat_eta: Option<f32>,
    #[arg(long, hide = true, allow_negative_numbers = true)]
    adaptive_target: Option<f32>,
    #[arg(long, hide = true, allow_negative_numbers = true)]
    adaptive_decay: Option<f32>,
    /// Names of the sampler stages in order, separated by semicolons.
    #[arg(long, hide = true)]
    samplers: Option<String>,
    #[arg(long = "sampler-seq", alias = "sampling-seq", hide = true)]
    sampler_letters: Option<String>,
    // Of the flags for a grammar or a schema, the last one applies, as in llama-server.
    #[arg(long, hide = true, overrides_with_all = ["grammar_file", "json_schema", "json_schema_file"])]
    grammar: Option<String>,
    #[arg(long, hide = true, overrides_with_all = ["json_schema", "json_schema_file"])]
    grammar_file: Option<PathBuf>,
    #[arg(short = 'j', long, hide = true, overrides_with = "json_schema_file")]
    json_schema: Option<String>,
    #[arg(long, hide = true)]
    json_schema_file: Option<PathBuf>,
    /// Stop strings.
    #[arg(short = 'r', long = "reverse-prompt", hide = true)]
    stop: Vec<String>,
    #[arg(short = 'l', long = "logit-bias", hide = true, value_name = "TOKEN+BIAS", value_delimiter = ',')]
    logit_bias: Vec<TokenBias>,
    #[arg(long, hide = true)]
    spm_infill: bool,
    #[arg(long, hide = true, allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..=32))]
    embd_normalize: Option<i64>,
}

/// A token and the bias of its logit, as `15043+1` or `15043-0.5`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct TokenBias(i32, f32);

impl std::str::FromStr for TokenBias {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // The first character may be the sign of a negative id, which llama-server accepts and ignores.
        let sign = text.char_indices().skip(1).find(|(_, character)| ['+', '-'].contains(character));
        let parsed_bias = sign.and_then(|(sign, _)| {
            let bias = text[sign..].parse().ok().filter(|bias: &f32| !bias.is_nan())?;
            Some(Self(text[..sign].parse().ok()?, bias))
        });
        parsed_bias.ok_or_else(|| format!("'{text}' is not a token id with a bias, e.g. 15043+1 or 15043-0.5"))
    }
}

/// Default fields of requests.
#[derive(Default)]
pub(super) struct RequestDefaults {
    /// Values by JSON name.
    pub(super) fields: Map<String, Value>,
    /// Flags that set the values, by JSON name.
    pub(super) flags: HashMap<String, &'static str>,
}

impl RequestDefaults {
    /// Sets a field unless the value is null.
    fn set(&mut self, flag: &'static str, name: &str, value: Value) {
        if !value.is_null() {
            self.fields.insert(name.to_owned(), value);
            self.flags.insert(name.to_owned(), flag);
        }
    }
}

impl RequestFlags {
    /// Returns the default fields of requests.
    pub(super) fn defaults(&self) -> Result<RequestDefaults, ConfigError> {
        let mut defaults = RequestDefaults::default();
        let mut set = |flag, name, value| defaults.set(flag, name, value);
        set("--predict", "n_predict", json!(self.predict));
        set("--seed", "seed", json!(self.seed));
        set("--temp", "temperature", number(self.temperature));
        set("--top-k", "top_k", json!(self.top_k));
        set("--top-p", "top_p", number(self.top_p));
        set("--min-p", "min_p", number(self.min_p));
        set("--repeat-penalty", "repeat_penalty", number(self.repeat_penalty));
        set("--repeat-last-n", "repeat_last_n", json!(self.repeat_last_n));
        set("--presence-penalty", "presence_penalty", number(self.presence_penalty));
        set("--frequency-penalty", "frequency_penalty", number(self.frequency_penalty));
        set("--ignore-eos", "ignore_eos", json!(self.ignore_eos.then_some(true)));
        set("--keep", "n_keep", json!(self.keep));
        set("--reasoning", "enable_thinking", json!(self.reasoning.and_then(OnOffAuto::as_bool)));
        set(
            "--reasoning-effort",
            "reasoning_effort",
            json!(self.reasoning_effort.as_deref().filter(|level| *level != "default")),
        );
        set("--reasoning-format", "reasoning_format", json!(self.reasoning_format));
        set(
            "--prefill-assistant",
            "continue_final_message",
            json!((self.prefill_assistant == OnOff::Off).then_some(false)),
        );
        set("--reasoning-budget", "reasoning_budget", json!(self.reasoning_budget));
        set("--reasoning-budget-message", "reasoning_budget_message", json!(self.reasoning_budget_message));
        if let Some(variables) = &self.chat_template_kwargs {
            let variables = parse_json("--chat-template-kwargs", variables)?;
            if !variables.is_object() {
                let text = variables.to_string();
                return Err(ConfigError::Parameter { flag: "--chat-template-kwargs", text });
            }
            set("--chat-template-kwargs", "chat_template_kwargs", variables);
        }
        self.further.add_defaults(&mut defaults)?;
        for parameter in &self.parameters {
            let (name, value) = parameter
                .split_once('=')
                .filter(|(name, _)| !name.trim().is_empty())
                .ok_or_else(|| ConfigError::Parameter { flag: "--parameter", text: parameter.clone() })?;
            defaults.set("--parameter", name.trim(), parse_json("--parameter", value)?);
        }
        Ok(defaults)
    }
}

impl HiddenSamplingFlags {
    fn add_defaults(&self, defaults: &mut RequestDefaults) -> Result<(), ConfigError> {
        let mut set = |flag, name, value| defaults.set(flag, name, value);
        set("--typical-p", "typical_p", number(self.typical_p));
        set("--top-n-sigma", "top_n_sigma", number(self.top_n_sigma));
        set("--xtc-probability", "xtc_probability", number(self.xtc_probability));
        set("--xtc-threshold", "xtc_threshold", number(self.xtc_threshold));
        set("--dry-multiplier", "dry_multiplier", number(self.dry_multiplier));
        set("--dry-base", "dry_base", number(self.dry_base));
        set("--dry-allowed-length", "dry_allowed_length", json!(self.dry_allowed_length));
        set("--dry-penalty-last-n", "dry_penalty_last_n", json!(self.dry_penalty_last_n));
        set("--dynatemp-range", "dynatemp_range", number(self.dynatemp_range));
        set("--dynatemp-exp", "dynatemp_exponent", number(self.dynatemp_exponent));
        set("--mirostat", "mirostat", json!(self.mirostat));
        set("--mirostat-ent", "mirostat_tau", number(self.mirostat_tau));
        set("--mirostat-lr", "mirostat_eta", number(self.mirostat_eta));
        set("--adaptive-target", "adaptive_target", number(self.adaptive_target));
        set("--adaptive-decay", "adaptive_decay", number(self.adaptive_decay));
        set("--sampler-seq", "samplers", json!(self.sampler_letters));
        set("--samplers", "samplers", json!(self.samplers.as_ref().map(|names| names.split(';').collect::<Vec<_>>())));
        if !self.dry_sequence_breakers.is_empty() {
            let breakers = self.dry_sequence_breakers.iter().filter(|text| *text != "none").collect::<Vec<_>>();
            set("--dry-sequence-breaker", "dry_sequence_breakers", json!(breakers));
        }
        set("--reverse-prompt", "stop", json!(Some(&self.stop).filter(|stop| !stop.is_empty())));
        let biases = self.logit_bias.iter().map(|TokenBias(token, bias)| {
            // JSON has no infinity; in a request, false bans a token.
            let bias = if *bias == f32::NEG_INFINITY { json!(false) } else { number(Some(bias.min(f32::MAX))) };
            json!([token, bias])
        });
        let biases = biases.collect::<Vec<_>>();
        set("--logit-bias", "logit_bias", json!(Some(biases).filter(|biases| !biases.is_empty())));
        set("--spm-infill", "spm_infill", json!(self.spm_infill.then_some(true)));
        set("--embd-normalize", "embd_normalize", json!(self.embd_normalize));
        let grammar = text_or_file("--grammar", self.grammar.as_ref(), "--grammar-file", self.grammar_file.as_deref())?;
        if let Some((flag, text)) = grammar {
            set(flag, "grammar", text.into());
        }
        let (schema, file) = (self.json_schema.as_ref(), self.json_schema_file.as_deref());
        if let Some((flag, text)) = text_or_file("--json-schema", schema, "--json-schema-file", file)? {
            set(flag, "json_schema", parse_json("--json-schema", &text)?);
        }
        Ok(())
    }
}

fn number(value: Option<f32>) -> Value {
    value.map_or(Value::Null, |value| shortest_f64(value).into())
}

fn parse_json(flag: &'static str, text: &str) -> Result<Value, ConfigError> {
    serde_json::from_str(text).map_err(|_| ConfigError::Parameter { flag, text: text.to_owned() })
}

/// Returns the contents of a file if one is given, else the text, with the flag that sets it.
fn text_or_file(
    flag: &'static str,
    text: Option<&String>,
    file_flag: &'static str,
    file: Option<&Path>,
) -> Result<Option<(&'static str, String)>, ConfigError> {
    let Some(path) = file else { return Ok(text.map(|text| (flag, text.clone()))) };
    std::fs::read_to_string(path).map(|text| Some((file_flag, text))).map_err(|source| ConfigError::File {
        flag: file_flag,
        path: path.display().to_string(),
        source,
    })
}
