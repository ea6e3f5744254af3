//! The flags of llama-server that decide what a request gets when it does not say, and which routes there are.
//!
//! Of what a request gets, [`RequestFlags`] make the fields of its JSON; so they are checked where a request is.

use super::ConfigError;
use super::flags::{OnOff, OnOffAuto};
use clap::Args;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What a request gets when it does not say.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Defaults of requests")]
pub struct RequestFlags {
    /// Most tokens of an answer; -1 for as many as the context holds
    #[arg(
        short = 'n',
        long = "predict",
        visible_alias = "n-predict",
        env = "THUNDER_PREDICT",
        value_name = "N",
        allow_negative_numbers = true
    )]
    pub predict: Option<i32>,
    /// Seed of the draw; -1 for a new one each time
    #[arg(short, long, env = "THUNDER_SEED", value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<i64>,
    /// 0 always takes the most probable token; without it 0.8
    #[arg(long = "temp", alias = "temperature", env = "THUNDER_TEMP", value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Take from the K most probable tokens only, 0 from all; without it 40
    #[arg(long, env = "THUNDER_TOP_K", value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<i32>,
    /// Take from the most probable tokens that have P together; without it 0.95
    #[arg(long, env = "THUNDER_TOP_P", value_name = "P")]
    pub top_p: Option<f32>,
    /// Take from the tokens that have at least P of the most probable one's probability; without it 0.05
    #[arg(long, env = "THUNDER_MIN_P", value_name = "P")]
    pub min_p: Option<f32>,
    /// Penalty on tokens that were there already; 1 is none
    #[arg(long, env = "THUNDER_REPEAT_PENALTY", value_name = "X")]
    pub repeat_penalty: Option<f32>,
    /// Tokens that the penalties look back on; without it 64
    #[arg(long, env = "THUNDER_REPEAT_LAST_N", value_name = "N", allow_negative_numbers = true)]
    pub repeat_last_n: Option<i32>,
    /// Penalty on tokens that were there at all
    #[arg(long, env = "THUNDER_PRESENCE_PENALTY", value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Penalty on tokens by how often they were there
    #[arg(long, env = "THUNDER_FREQUENCY_PENALTY", value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Never end an answer by itself
    #[arg(long, env = "THUNDER_IGNORE_EOS", value_parser = clap::builder::FalseyValueParser::new())]
    pub ignore_eos: bool,
    /// Tokens of the prompt that stay when the context is full, -1 for all
    #[arg(long, env = "THUNDER_KEEP", value_name = "N", allow_negative_numbers = true)]
    pub keep: Option<i32>,
    /// Variables of the chat template, as a JSON object, e.g. `{"enable_thinking": false}`
    #[arg(long, env = "THUNDER_CHAT_TEMPLATE_KWARGS", value_name = "JSON")]
    pub chat_template_kwargs: Option<String>,
    /// Whether models think; auto leaves it to their chat template [also: -rea]
    #[arg(long, env = "THUNDER_REASONING", value_name = "on|off|auto", default_missing_value = "on", num_args = 0..=1)]
    pub reasoning: Option<OnOffAuto>,
    /// How much, for chat templates that ask, e.g. low, medium or high; default leaves it to them
    #[arg(long, env = "THUNDER_REASONING_EFFORT", value_name = "LEVEL")]
    pub reasoning_effort: Option<String>,
    /// Whether thoughts are told from answers: none leaves them in the text, all others tell them
    #[arg(long, env = "THUNDER_REASONING_FORMAT", value_name = "none|auto|deepseek|deepseek-legacy",
          value_parser = ["none", "auto", "deepseek", "deepseek-legacy"])]
    pub reasoning_format: Option<String>,
    /// Tokens that a model may think, 0 for no thinking, -1 for any number; then the thought is ended
    #[arg(long, env = "THUNDER_REASONING_BUDGET", value_name = "N", allow_negative_numbers = true)]
    pub reasoning_budget: Option<i32>,
    /// What is written at the end of a thought that is ended so
    #[arg(long, env = "THUNDER_REASONING_BUDGET_MESSAGE", value_name = "TEXT")]
    pub reasoning_budget_message: Option<String>,
    /// Whether an assistant's message at the end is continued instead of answered [also: --no-prefill-assistant]
    #[arg(long, env = "THUNDER_PREFILL_ASSISTANT", value_name = "on|off", default_value = "on",
          default_missing_value = "on", num_args = 0..=1, require_equals = true)]
    pub prefill_assistant: OnOff,
    /// Any other sampling parameter of a request, as its JSON, e.g. `xtc_probability=0.5` or `samplers=["top_k"]`
    #[arg(long = "parameter", env = "THUNDER_PARAMETER", value_name = "NAME=JSON")]
    pub parameters: Vec<String>,
    /// llama-server's less common sampling flags; in the help they stand under `--parameter`.
    #[command(flatten)]
    pub further: HiddenSamplingFlags,
}

/// llama-server's less common sampling flags; in the help they stand under `--parameter`.
#[derive(Debug, Clone, Default, Args)]
pub struct HiddenSamplingFlags {
    #[arg(long, alias = "typical", hide = true)]
    typical_p: Option<f32>,
    #[arg(long, alias = "top-nsigma", hide = true, allow_negative_numbers = true)]
    top_n_sigma: Option<f32>,
    #[arg(long, hide = true)]
    xtc_probability: Option<f32>,
    #[arg(long, hide = true)]
    xtc_threshold: Option<f32>,
    #[arg(long, hide = true)]
    dry_multiplier: Option<f32>,
    #[arg(long, hide = true)]
    dry_base: Option<f32>,
    #[arg(long, hide = true)]
    dry_allowed_length: Option<i32>,
    #[arg(long, hide = true, allow_negative_numbers = true)]
    dry_penalty_last_n: Option<i32>,
    #[arg(long = "dry-sequence-breaker", hide = true)]
    dry_sequence_breakers: Vec<String>,
    #[arg(long, hide = true)]
    dynatemp_range: Option<f32>,
    #[arg(long = "dynatemp-exp", hide = true)]
    dynatemp_exponent: Option<f32>,
    #[arg(long, hide = true)]
    mirostat: Option<i32>,
    #[arg(long = "mirostat-ent", hide = true)]
    mirostat_tau: Option<f32>,
    #[arg(long = "mirostat-lr", hide = true)]
    mirostat_eta: Option<f32>,
    #[arg(long, hide = true, allow_negative_numbers = true)]
    adaptive_target: Option<f32>,
    #[arg(long, hide = true)]
    adaptive_decay: Option<f32>,
    /// Names of the stages in order, separated by ;
    #[arg(long, hide = true)]
    samplers: Option<String>,
    #[arg(long = "sampler-seq", alias = "sampling-seq", hide = true)]
    sampler_letters: Option<String>,
    #[arg(long, hide = true)]
    grammar: Option<String>,
    #[arg(long, hide = true, conflicts_with = "grammar")]
    grammar_file: Option<PathBuf>,
    #[arg(short = 'j', long, hide = true)]
    json_schema: Option<String>,
    #[arg(long, hide = true, conflicts_with = "json_schema")]
    json_schema_file: Option<PathBuf>,
    /// Texts that end an answer.
    #[arg(short = 'r', long = "reverse-prompt", hide = true)]
    stop: Vec<String>,
    #[arg(short = 'l', long = "logit-bias", hide = true, value_name = "TOKEN+BIAS", value_delimiter = ',')]
    logit_bias: Vec<TokenBias>,
    #[arg(long, hide = true)]
    spm_infill: bool,
    #[arg(long, hide = true, allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..=32))]
    embd_normalize: Option<i64>,
}

/// A token and what is added to its logit, as `15043+1` or `15043-0.5`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct TokenBias(u32, f32);

impl std::str::FromStr for TokenBias {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let read = text.find(['+', '-']).and_then(|sign| {
            let bias = text[sign..].parse().ok().filter(|bias: &f32| !bias.is_nan())?;
            Some(Self(text[..sign].parse().ok()?, bias))
        });
        read.ok_or_else(|| format!("'{text}' is not a token's id and a bias, such as 15043+1 or 15043-0.5"))
    }
}

/// Which of llama-server's routes there are.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "llama-server's routes")]
pub struct RouteFlags {
    /// Whether GET /slots tells what every slot is doing [also: --no-slots]
    #[arg(long, env = "THUNDER_SLOTS", value_name = "on|off", default_value = "on", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    pub slots: OnOff,
    /// Give counters for Prometheus at GET /metrics
    #[arg(long, env = "THUNDER_METRICS", value_parser = clap::builder::FalseyValueParser::new())]
    pub metrics: bool,
    /// Take POST /props, which changes nothing yet
    #[arg(long, env = "THUNDER_PROPS", value_parser = clap::builder::FalseyValueParser::new())]
    pub props: bool,
    /// Path that stands before all others, e.g. `/llm`, for APIs, sockets and dashboard
    #[arg(long, env = "THUNDER_API_PREFIX", value_name = "PATH")]
    pub api_prefix: Option<String>,
    /// Serve the APIs without the dashboard
    #[arg(long, alias = "no-webui", env = "THUNDER_NO_UI", value_parser = clap::builder::FalseyValueParser::new())]
    pub no_ui: bool,
    /// Folder that the state of slots and sessions is saved to and restored from
    #[arg(long, env = "THUNDER_SLOT_SAVE_PATH", value_name = "DIR")]
    pub slot_save_path: Option<PathBuf>,
    /// Seconds of silence after which a stream gets a comment line, so that proxies keep it; -1 for never
    #[arg(
        long,
        env = "THUNDER_SSE_PING_INTERVAL",
        value_name = "SECONDS",
        default_value_t = 30,
        allow_negative_numbers = true
    )]
    pub sse_ping_interval: i64,
}

/// What is logged, and where, as llama-server's flags say it.
#[derive(Debug, Clone, Default, Args)]
pub struct LogFlags {
    /// A file that the log is appended to instead of being written to standard error.
    #[arg(long, hide = true, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Whether lines are coloured; without it where standard error is a terminal.
    #[arg(long, hide = true, value_name = "on|off|auto", num_args = 0..=1, default_missing_value = "on")]
    pub log_colors: Option<OnOffAuto>,
    /// Log nothing.
    #[arg(long, hide = true)]
    log_disable: bool,
    /// Log everything, and add `__verbose` to answers.
    #[arg(short, long, alias = "log-verbose", hide = true)]
    verbose: bool,
    /// 0 and 1 errors, 2 warnings, 3 what is usual, 4 more, 5 everything.
    #[arg(long, alias = "log-verbosity", hide = true, value_name = "N", allow_negative_numbers = true)]
    verbosity: Option<i32>,
}

impl LogFlags {
    /// Returns true if answers have `__verbose` unless their requests say otherwise.
    pub(super) const fn shows_verbose(&self) -> bool {
        self.verbose
    }

    /// What llama-server's flags say about the log, as a filter.
    #[must_use]
    pub fn log_filter(&self) -> Option<&'static str> {
        match (self.log_disable, self.verbose, self.verbosity) {
            (true, _, _) => Some("off"),
            (_, true, _) | (_, _, Some(5..)) => Some("debug"),
            (_, _, Some(4)) => Some("info"),
            (_, _, Some(2)) => Some("warn"),
            (_, _, Some(..=1)) => Some("error"),
            (_, _, Some(3) | None) => None,
        }
    }
}

/// Which of llama-server's routes there are, and how they behave.
#[derive(Debug, Clone)]
pub struct RouteConfig {
    /// Whether `GET /slots` tells what every slot is doing.
    pub slots: bool,
    /// Whether `GET /metrics` gives counters.
    pub metrics: bool,
    /// Whether `POST /props` is taken.
    pub props: bool,
    /// Whether there is a dashboard.
    pub dashboard: bool,
    /// Folder that the state of slots and sessions is saved to.
    pub slot_save_path: Option<PathBuf>,
    /// Silence after which a stream gets a comment line; `None` for never.
    pub sse_ping_interval: Option<Duration>,
}

impl RouteFlags {
    /// What stands before every path; empty for nothing.
    pub(super) fn prefix(&self) -> Result<String, ConfigError> {
        let given = self.api_prefix.as_deref().unwrap_or_default();
        let prefix = given.trim_end_matches('/');
        let plain = |part: &str| {
            let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
            !part.is_empty() && part.bytes().all(known) && !part.bytes().all(|byte| byte == b'.')
        };
        match prefix.strip_prefix('/') {
            None if prefix.is_empty() => Ok(String::new()),
            Some(parts) if parts.split('/').all(plain) => Ok(prefix.to_owned()),
            _ => Err(ConfigError::Prefix { prefix: given.to_owned() }),
        }
    }

    pub(super) fn config(&self) -> Result<RouteConfig, ConfigError> {
        if let Some(path) = self.slot_save_path.as_ref().filter(|path| !path.is_dir()) {
            return Err(ConfigError::NoFolder { flag: "--slot-save-path", path: path.display().to_string() });
        }
        Ok(RouteConfig {
            slots: self.slots == OnOff::On,
            metrics: self.metrics,
            props: self.props,
            dashboard: !self.no_ui,
            slot_save_path: self.slot_save_path.clone(),
            sse_ping_interval: u64::try_from(self.sse_ping_interval).ok().filter(|&s| s > 0).map(Duration::from_secs),
        })
    }
}

impl RequestFlags {
    /// The fields that a request has when it does not say otherwise, by their names in its JSON.
    pub(super) fn defaults(&self) -> Result<Map<String, Value>, ConfigError> {
        let mut fields = Map::new();
        let mut set = |name: &str, value: Value| {
            if !value.is_null() {
                fields.insert(name.to_owned(), value);
            }
        };
        set("n_predict", json!(self.predict));
        set("seed", json!(self.seed));
        set("temperature", number(self.temperature));
        set("top_k", json!(self.top_k));
        set("top_p", number(self.top_p));
        set("min_p", number(self.min_p));
        set("repeat_penalty", number(self.repeat_penalty));
        set("repeat_last_n", json!(self.repeat_last_n));
        set("presence_penalty", number(self.presence_penalty));
        set("frequency_penalty", number(self.frequency_penalty));
        set("ignore_eos", json!(self.ignore_eos.then_some(true)));
        set("n_keep", json!(self.keep));
        set("enable_thinking", json!(self.reasoning.and_then(OnOffAuto::decided)));
        set("reasoning_effort", json!(self.reasoning_effort.as_deref().filter(|level| *level != "default")));
        set("reasoning_format", json!(self.reasoning_format));
        set("continue_final_message", json!((self.prefill_assistant == OnOff::Off).then_some(false)));
        set("reasoning_budget", json!(self.reasoning_budget));
        set("reasoning_budget_message", json!(self.reasoning_budget_message));
        if let Some(variables) = &self.chat_template_kwargs {
            let variables = parsed("--chat-template-kwargs", variables)?;
            if !variables.is_object() {
                let text = variables.to_string();
                return Err(ConfigError::Parameter { flag: "--chat-template-kwargs", text });
            }
            set("chat_template_kwargs", variables);
        }
        let further = &self.further;
        set("typical_p", number(further.typical_p));
        set("top_n_sigma", number(further.top_n_sigma));
        set("xtc_probability", number(further.xtc_probability));
        set("xtc_threshold", number(further.xtc_threshold));
        set("dry_multiplier", number(further.dry_multiplier));
        set("dry_base", number(further.dry_base));
        set("dry_allowed_length", json!(further.dry_allowed_length));
        set("dry_penalty_last_n", json!(further.dry_penalty_last_n));
        set("dynatemp_range", number(further.dynatemp_range));
        set("dynatemp_exponent", number(further.dynatemp_exponent));
        set("mirostat", json!(further.mirostat));
        set("mirostat_tau", number(further.mirostat_tau));
        set("mirostat_eta", number(further.mirostat_eta));
        set("adaptive_target", number(further.adaptive_target));
        set("adaptive_decay", number(further.adaptive_decay));
        set("samplers", json!(further.sampler_letters));
        set("samplers", json!(further.samplers.as_ref().map(|names| names.split(';').collect::<Vec<_>>())));
        if !further.dry_sequence_breakers.is_empty() {
            let breakers = further.dry_sequence_breakers.iter().filter(|text| *text != "none").collect::<Vec<_>>();
            set("dry_sequence_breakers", json!(breakers));
        }
        set("stop", json!(Some(&further.stop).filter(|stop| !stop.is_empty())));
        let biases = further.logit_bias.iter().map(|TokenBias(token, bias)| {
            // JSON has no infinity, and a request says false for a token that is never drawn.
            let bias = if *bias == f32::NEG_INFINITY { json!(false) } else { number(Some(bias.min(f32::MAX))) };
            json!([token, bias])
        });
        let biases = biases.collect::<Vec<_>>();
        set("logit_bias", json!(Some(biases).filter(|biases| !biases.is_empty())));
        set("spm_infill", json!(further.spm_infill.then_some(true)));
        set("embd_normalize", json!(further.embd_normalize));
        set("grammar", json!(text("--grammar-file", further.grammar.as_ref(), further.grammar_file.as_deref())?));
        let schema = text("--json-schema-file", further.json_schema.as_ref(), further.json_schema_file.as_deref())?;
        set("json_schema", schema.map_or(Ok(Value::Null), |schema| parsed("--json-schema", &schema))?);
        for parameter in &self.parameters {
            let (name, value) = parameter
                .split_once('=')
                .filter(|(name, _)| !name.trim().is_empty())
                .ok_or_else(|| ConfigError::Parameter { flag: "--parameter", text: parameter.clone() })?;
            set(name.trim(), parsed("--parameter", value)?);
        }
        Ok(fields)
    }
}

/// The number as it was written: 0.8, not 0.800000011920929.
fn number(value: Option<f32>) -> Value {
    value.and_then(|value| value.to_string().parse::<f64>().ok()).map_or(Value::Null, Value::from)
}

fn parsed(flag: &'static str, text: &str) -> Result<Value, ConfigError> {
    serde_json::from_str(text).map_err(|_| ConfigError::Parameter { flag, text: text.to_owned() })
}

fn text(flag: &'static str, given: Option<&String>, file: Option<&Path>) -> Result<Option<String>, ConfigError> {
    let Some(path) = file else { return Ok(given.cloned()) };
    std::fs::read_to_string(path).map(Some).map_err(|source| ConfigError::File {
        flag,
        path: path.display().to_string(),
        source,
    })
}
