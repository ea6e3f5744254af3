use super::{ImageFile, Tenant, system};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;
use uuid::Uuid;

/// Identifier of a run. A `UUIDv7`, so that ids sort by the start time of the runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunId(pub Uuid);

impl RunId {
    /// The header of responses with the run's id.
    pub const HEADER: &str = "x-thunder-run-id";

    /// Creates an id for a run that starts now.
    #[must_use]
    pub fn now() -> Self {
        Self(system::new_id())
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

/// Returns true for a request id that would be confused with a route next to those of runs, `GET /api/v1/runs/{id}`.
#[must_use]
pub fn is_reserved_request_id(id: &str) -> bool {
    matches!(id, "live" | "tags")
}

/// The API or command that started a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Surface {
    /// `POST /ingest`: a trace of another engine.
    Ingest,
    /// OpenAI's chat completions and completions.
    Openai,
    /// OpenAI's Responses API.
    Responses,
    /// Anthropic's Messages API.
    Anthropic,
    /// Ollama's API.
    Ollama,
    /// The API of `KoboldCPP`.
    Kobold,
    /// The command line.
    Cli,
    /// The native routes of llama-server.
    LlamaServer,
    /// The attention API.
    Attention,
    /// The streaming protocol over WebSocket.
    Websocket,
    /// The streaming protocol over HTTP, `POST /v1/generate`.
    Generate,
}

impl Surface {
    /// All variants.
    pub const ALL: [Self; 11] = [
        Self::Ingest,
        Self::Openai,
        Self::Responses,
        Self::Anthropic,
        Self::Ollama,
        Self::Kobold,
        Self::Cli,
        Self::LlamaServer,
        Self::Attention,
        Self::Websocket,
        Self::Generate,
    ];

    /// Returns the name used in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ingest => "ingest",
            Self::Openai => "openai",
            Self::Responses => "responses",
            Self::Anthropic => "anthropic",
            Self::Ollama => "ollama",
            Self::Kobold => "kobold",
            Self::Cli => "cli",
            Self::LlamaServer => "llama_server",
            Self::Attention => "attention",
            Self::Websocket => "websocket",
            Self::Generate => "generate",
        }
    }

    /// Returns the surface with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|surface| surface.as_str() == name)
    }
}

/// Status of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    /// Tokens are being generated.
    Running,
    /// The run ended normally, at its token limit, or by a mod.
    Done,
    /// The client disconnected or cancelled the run, or the server shut down.
    Cancelled,
    /// The run ended with an error.
    Failed,
    /// The server stopped unexpectedly during the run. All data up to the last flush is stored.
    Interrupted,
}

impl RunStatus {
    /// All statuses.
    pub const ALL: [Self; 5] = [Self::Running, Self::Done, Self::Cancelled, Self::Failed, Self::Interrupted];

    /// Returns the name used in JSON and in the database.
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

    /// Returns the status with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == name)
    }
}

/// Metadata of a run: the keys and values that the client sent, in their order, and those that an experiment adds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunMetadata(pub Vec<(String, String)>);

impl RunMetadata {
    /// The key of the session that a run belongs to.
    pub const SESSION: &str = "session_id";
    /// The key of the HTTP request id that the client sent.
    pub const HTTP_REQUEST: &str = "x-request-id";
    /// The key of the experiment that a run belongs to.
    pub const EXPERIMENT: &str = "experiment";
    /// The key of the run's cell in its experiment.
    pub const CELL: &str = "cell";
    /// Maximum characters of a key that a client sends.
    pub const MAX_KEY_CHARS: usize = 64;
    /// Maximum characters of a value that a client sends.
    pub const MAX_VALUE_CHARS: usize = 512;

    /// Sets the value of a key.
    pub fn set(&mut self, key: &str, value: impl Into<String>) {
        self.0.retain(|(other, _)| other != key);
        self.0.push((key.to_owned(), value.into()));
    }
}

/// The run that another one was forked from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunParent {
    /// Id of the run.
    #[schema(value_type = String)]
    pub run_id: RunId,
    /// `sequence_order` of the first event that was not kept.
    pub sequence_order: i32,
    /// The step of that event.
    pub step: i32,
    /// Fields that the request for the fork changed; empty for a repetition.
    pub change: serde_json::Value,
}

/// The data known when a run starts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunStart {
    /// Thunder's id of the run.
    pub run_id: RunId,
    /// The client's id, which is unique; `run_id` as text if the client sent none.
    pub request_id: String,
    /// Start time.
    pub created_at: DateTime<Utc>,
    /// The API or command that started the run.
    pub surface: Surface,
    /// The model's name.
    pub model: String,
    /// The tenant that the run belongs to; `None` if it has no owner, e.g. because no keys are configured.
    #[serde(default)]
    pub owner: Option<Tenant>,
    /// Label of the user, never a key.
    pub user_label: Option<String>,
    /// Metadata of the run.
    #[serde(default)]
    pub metadata: RunMetadata,
    /// Maximum number of generated tokens.
    pub max_tokens: Option<i32>,
    /// Sampling temperature.
    pub temperature: Option<f64>,
    /// Random seed of the sampler.
    pub seed: Option<u32>,
    /// Names of the run's mods, in order.
    pub mods: Vec<String>,
    /// Text that identifies the run for a reader: the last user message, or the start of the prompt.
    pub prompt_preview: String,
    /// The run that this one was forked from.
    #[serde(default)]
    pub parent: Option<RunParent>,
    /// Files of images to store with the run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<ImageFile>,
}
