use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use std::fmt;
use uuid::Uuid;

/// Identifies a run. A `UUIDv7`, so that ids sort by the time at which runs began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunId(pub Uuid);

impl RunId {
    /// A new id for a run that begins now.
    #[must_use]
    pub fn now() -> Self {
        Self(Uuid::now_v7())
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::str::FromStr for RunId {
    type Err = uuid::Error;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

/// Where a run came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Surface {
    /// `POST /ingest`: somebody else's engine.
    Ingest,
    /// The OpenAI-compatible routes.
    Openai,
    /// The command line.
    Cli,
    /// llama-server's own routes.
    LlamaServer,
    /// The attention API.
    Attention,
    /// The streaming protocol on its WebSocket.
    Websocket,
    /// The same over HTTP, `POST /v1/generate`.
    Generate,
}

impl Surface {
    /// All surfaces.
    pub const ALL: [Self; 7] =
        [Self::Ingest, Self::Openai, Self::Cli, Self::LlamaServer, Self::Attention, Self::Websocket, Self::Generate];

    /// The name as it stands in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ingest => "ingest",
            Self::Openai => "openai",
            Self::Cli => "cli",
            Self::LlamaServer => "llama_server",
            Self::Attention => "attention",
            Self::Websocket => "websocket",
            Self::Generate => "generate",
        }
    }

    /// The surface of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|surface| surface.as_str() == name)
    }
}

/// State of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    /// It is being generated.
    Running,
    /// It ended by itself, at its limit, or by a mod.
    Done,
    /// The client went away or asked to stop.
    Cancelled,
    /// It ended with an error.
    Failed,
    /// The server died in the middle; everything up to the last flush is there.
    Interrupted,
}

impl RunStatus {
    /// All states.
    pub const ALL: [Self; 5] = [Self::Running, Self::Done, Self::Cancelled, Self::Failed, Self::Interrupted];

    /// The name as it stands on the wire and in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
            Self::Interrupted => "interrupted",
        }
    }

    /// The state of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == name)
    }
}

/// What is known when a run begins.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunStart {
    /// Ours.
    pub run_id: RunId,
    /// The client's; unique. Ours as text when the client gave none.
    pub request_id: String,
    /// When it began.
    pub created_at: DateTime<Utc>,
    /// Where it came from.
    pub surface: Surface,
    /// The model's name.
    pub model: String,
    /// Who asked: a label, never a key.
    pub user_label: Option<String>,
    /// Most tokens to generate.
    pub max_tokens: Option<i32>,
    /// Sampling temperature.
    pub temperature: Option<f64>,
    /// Random seed of the draw.
    pub seed: Option<u32>,
    /// Names of the run's mods, in order.
    pub mods: Vec<String>,
    /// What a person would recognise the run by: the last user message, or the start of the prompt.
    pub prompt_preview: String,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// End-of-generation token, stop string, stop token, or a mod's `ForceOutput`.
    Stop,
    /// The limit of tokens, of steps, or the context's end.
    Length,
    /// Tool calls.
    ToolCalls,
    /// The client went away or asked to stop.
    Cancelled,
    /// An error.
    Error,
}

impl FinishReason {
    /// The name as it stands on the wire and in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
            Self::Cancelled => "cancelled",
            Self::Error => "error",
        }
    }
}

/// Token counts of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the prompt whose KV state was reused.
    pub cached_tokens: u32,
    /// Tokens that stand in the final answer, the end-of-generation token not counted.
    pub completion_tokens: u32,
}

/// Whose error ended a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// A mod's, which ended the run with `EmitError`.
    Mod,
    /// The same of a mod that was written for Quote, whose clients expect the status 400.
    QuoteMod,
    /// The request's: what it asked for leaves no token to be drawn.
    Request,
}

/// How a run ended, as a surface needs it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// In words, where the reason alone does not say it: which stop string, which limit, which error.
    pub message: Option<String>,
    /// The stop string that ended it.
    pub stop_string: Option<String>,
    /// The answer: generated text up to the stop string.
    pub text: String,
    /// Tool calls that a mod ended the run with.
    pub tool_calls: Option<serde_json::Value>,
    /// Whose error it is, where it is not the engine's own.
    #[serde(default)]
    pub fault: Option<Fault>,
    /// Token counts.
    pub usage: Usage,
    /// Microseconds from the start to the first generated token.
    pub first_token_us: Option<u64>,
    /// Tokens of the prompt that were decoded: those that were not cached, and fewer where the run was broken off.
    #[serde(default)]
    pub prompt_decoded: u32,
    /// Microseconds spent on the prompt.
    pub prompt_us: u64,
    /// Microseconds from the end of the prompt to the end of the run.
    pub generation_us: u64,
    /// Whether the context was full: the answer ended there, or tokens of its beginning had to go.
    #[serde(default)]
    pub truncated: bool,
    /// Tokens that went because the context was full.
    #[serde(default)]
    pub evicted_tokens: u32,
    /// Messages that went because the context was full, in the order in which they went.
    #[serde(default)]
    pub evicted: Vec<EvictedMessage>,
}

/// A message that went because the context was full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictedMessage {
    /// Who wrote it.
    pub role: String,
    /// Tokens of its content.
    pub tokens: u32,
    /// How its content begins.
    pub text: String,
}

/// What is known when a run is over.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunEnd {
    /// When it ended.
    pub completed_at: DateTime<Utc>,
    /// Its final state.
    pub status: RunStatus,
    /// The rest.
    pub finish: Finish,
}

impl RunEnd {
    /// An end of which nothing is known but some counts.
    #[must_use]
    pub fn blank(completed_at: DateTime<Utc>, usage: Usage) -> Self {
        let finish = Finish {
            reason: FinishReason::Cancelled,
            message: None,
            stop_string: None,
            text: String::new(),
            tool_calls: None,
            fault: None,
            usage,
            first_token_us: None,
            prompt_decoded: 0,
            prompt_us: 0,
            generation_us: 0,
            truncated: false,
            evicted_tokens: 0,
            evicted: Vec::new(),
        };
        Self { completed_at, status: RunStatus::Failed, finish }
    }

    /// The run was given up for a reason that lies neither in it nor with its client.
    pub fn broken_off(&mut self, message: String) {
        self.status = RunStatus::Failed;
        self.finish.reason = FinishReason::Cancelled;
        self.finish.message = Some(message);
    }
}
