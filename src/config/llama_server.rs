//! llama-server's flags for request defaults and routes.
//!
//! [`RequestFlags`] become fields of the request's JSON, so the request parser validates them.

use super::ConfigError;
use super::flag_values::{OnOff, OnOffAuto};
use clap::Args;
use serde_json::{Map, Value, json};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Default values of requests.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Defaults of requests")]
pub struct RequestFlags {
    /// Maximum tokens of an answer; -1 for the size of the context
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
    #[arg(long, env = "THUNDER_TOP_P", value_name = "P")]
    pub top_p: Option<f32>,
    /// Minimum probability of a token relative to the most probable one; default: 0.05
    #[arg(long, env = "THUNDER_MIN_P", value_name = "P")]
    pub min_p: Option<f32>,
    /// Penalty on repeated tokens; 1 for none
    #[arg(long, env = "THUNDER_REPEAT_PENALTY", value_name = "X")]
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
    /// Number of prompt tokens to keep when the context is full; -1 for all
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
    /// Names of the sampler stages in order, separated by semicolons.
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
struct TokenBias(u32, f32);

impl std::str::FromStr for TokenBias {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed_bias = text.find(['+', '-']).and_then(|sign| {
            let bias = text[sign..].parse().ok().filter(|bias: &f32| !bias.is_nan())?;
            Some(Self(text[..sign].parse().ok()?, bias))
        });
        parsed_bias.ok_or_else(|| format!("'{text}' is not a token id with a bias, e.g. 15043+1 or 15043-0.5"))
    }
}

/// Routes of llama-server.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "llama-server's routes")]
pub struct RouteFlags {
    /// GET /slots with the state of every slot, the actions on slots in memory, and /sessions [also: --no-slots]
    #[arg(long, env = "THUNDER_SLOTS", value_name = "on|off", default_value = "on", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    pub slots: OnOff,
    /// GET /metrics with counters and histograms for Prometheus; default: on if the server listens on loopback addresses only
    #[arg(long, env = "THUNDER_METRICS", value_name = "on|off", default_missing_value = "on", num_args = 0..=1,
          require_equals = true)]
    pub metrics: Option<OnOff>,
    /// POST /props, which has no effect yet
    #[arg(long, env = "THUNDER_PROPS", value_parser = clap::builder::FalseyValueParser::new())]
    pub props: bool,
    /// Path prefix of all APIs, sockets and the dashboard, e.g. `/llm`
    #[arg(long, env = "THUNDER_API_PREFIX", value_name = "PATH")]
    pub api_prefix: Option<String>,
    /// APIs without the dashboard
    #[arg(long, alias = "no-webui", env = "THUNDER_NO_UI", value_parser = clap::builder::FalseyValueParser::new())]
    pub no_ui: bool,
    /// Folder for saving and restoring slot and session snapshots
    #[arg(long, env = "THUNDER_SLOT_SAVE_PATH", value_name = "DIR")]
    pub slot_save_path: Option<PathBuf>,
    /// Seconds of silence after which a stream sends a comment line to keep proxies from closing it; -1 for never
    #[arg(
        long,
        env = "THUNDER_SSE_PING_INTERVAL",
        value_name = "SECONDS",
        default_value_t = 30,
        allow_negative_numbers = true
    )]
    pub sse_ping_interval: i64,
}

/// Log settings, with llama-server's flags.
#[derive(Debug, Clone, Default, Args)]
pub struct LogFlags {
    /// File to which the log is appended; default: standard error
    #[arg(long, env = "THUNDER_LOG_FILE", value_name = "FILE", help_heading = "Logging")]
    pub log_file: Option<PathBuf>,
    /// Colored lines; default: if standard error is a terminal.
    #[arg(long, hide = true, value_name = "on|off|auto", num_args = 0..=1, default_missing_value = "on")]
    pub log_colors: Option<OnOffAuto>,
    /// Disables logging.
    #[arg(long, hide = true)]
    log_disable: bool,
    /// Logs everything, and adds `__verbose` to responses.
    #[arg(short, long, alias = "log-verbose", hide = true)]
    verbose: bool,
    /// 0 and 1 for errors, 2 for warnings, 3 for the default, 4 for more, 5 for everything.
    #[arg(long, alias = "log-verbosity", hide = true, value_name = "N", allow_negative_numbers = true)]
    verbosity: Option<i32>,
}

impl LogFlags {
    /// Returns true if responses have `__verbose` by default.
    pub(super) const fn shows_verbose(&self) -> bool {
        self.verbose
    }

    /// Returns the log filter that the flags select.
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

/// Routes of llama-server and their settings.
#[derive(Debug, Clone)]
pub struct RouteConfig {
    /// True if `GET /slots` is served.
    pub slots: bool,
    /// True if `GET /metrics` is served.
    pub metrics: bool,
    /// True if `POST /props` is served.
    pub props: bool,
    /// True if the dashboard is served.
    pub dashboard: bool,
    /// Folder for slot and session snapshots.
    pub slot_save_path: Option<PathBuf>,
    /// Silence after which a stream sends a comment line; `None` for never.
    pub sse_ping_interval: Option<Duration>,
}

impl RouteFlags {
    /// Returns the prefix of every path; empty for none.
    pub(super) fn prefix(&self) -> Result<String, ConfigError> {
        let path = self.api_prefix.as_deref().unwrap_or_default();
        let prefix = path.trim_end_matches('/');
        let is_plain = |part: &str| {
            let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
            !part.is_empty() && part.bytes().all(is_known) && !part.bytes().all(|byte| byte == b'.')
        };
        match prefix.strip_prefix('/') {
            None if prefix.is_empty() => Ok(String::new()),
            Some(parts) if parts.split('/').all(is_plain) => Ok(prefix.to_owned()),
            _ => Err(ConfigError::Prefix { prefix: path.to_owned() }),
        }
    }

    pub(super) fn config(&self, listen: &[SocketAddr]) -> Result<RouteConfig, ConfigError> {
        if let Some(path) = self.slot_save_path.as_ref().filter(|path| !path.is_dir()) {
            return Err(ConfigError::NoFolder { flag: "--slot-save-path", path: path.display().to_string() });
        }
        Ok(RouteConfig {
            slots: self.slots == OnOff::On,
            metrics: self.metrics.map_or_else(
                || listen.iter().all(|address| address.ip().is_loopback()),
                |metrics| metrics == OnOff::On,
            ),
            props: self.props,
            dashboard: !self.no_ui,
            slot_save_path: self.slot_save_path.clone(),
            sse_ping_interval: u64::try_from(self.sse_ping_interval).ok().filter(|&s| s > 0).map(Duration::from_secs),
        })
    }
}

impl RequestFlags {
    /// Returns the default fields of requests, by their JSON names.
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
        set("enable_thinking", json!(self.reasoning.and_then(OnOffAuto::as_bool)));
        set("reasoning_effort", json!(self.reasoning_effort.as_deref().filter(|level| *level != "default")));
        set("reasoning_format", json!(self.reasoning_format));
        set("continue_final_message", json!((self.prefill_assistant == OnOff::Off).then_some(false)));
        set("reasoning_budget", json!(self.reasoning_budget));
        set("reasoning_budget_message", json!(self.reasoning_budget_message));
        if let Some(variables) = &self.chat_template_kwargs {
            let variables = parse_json("--chat-template-kwargs", variables)?;
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
            // JSON has no infinity; in a request, false bans a token.
            let bias = if *bias == f32::NEG_INFINITY { json!(false) } else { number(Some(bias.min(f32::MAX))) };
            json!([token, bias])
        });
        let biases = biases.collect::<Vec<_>>();
        set("logit_bias", json!(Some(biases).filter(|biases| !biases.is_empty())));
        set("spm_infill", json!(further.spm_infill.then_some(true)));
        set("embd_normalize", json!(further.embd_normalize));
        set(
            "grammar",
            json!(text_or_file("--grammar-file", further.grammar.as_ref(), further.grammar_file.as_deref())?),
        );
        let schema =
            text_or_file("--json-schema-file", further.json_schema.as_ref(), further.json_schema_file.as_deref())?;
        set("json_schema", schema.map_or(Ok(Value::Null), |schema| parse_json("--json-schema", &schema))?);
        for parameter in &self.parameters {
            let (name, value) = parameter
                .split_once('=')
                .filter(|(name, _)| !name.trim().is_empty())
                .ok_or_else(|| ConfigError::Parameter { flag: "--parameter", text: parameter.clone() })?;
            set(name.trim(), parse_json("--parameter", value)?);
        }
        Ok(fields)
    }
}

/// Converts a number with its decimal notation: 0.8, not 0.800000011920929.
fn number(value: Option<f32>) -> Value {
    value.and_then(|value| value.to_string().parse::<f64>().ok()).map_or(Value::Null, Value::from)
}

fn parse_json(flag: &'static str, text: &str) -> Result<Value, ConfigError> {
    serde_json::from_str(text).map_err(|_| ConfigError::Parameter { flag, text: text.to_owned() })
}

/// Returns the contents of a file if one is given, else the text.
fn text_or_file(flag: &'static str, text: Option<&String>, file: Option<&Path>) -> Result<Option<String>, ConfigError> {
    let Some(path) = file else { return Ok(text.cloned()) };
    std::fs::read_to_string(path).map(Some).map_err(|source| ConfigError::File {
        flag,
        path: path.display().to_string(),
        source,
    })
}
