use serde::Serialize;

/// The machine-readable code of an error, for clients that react to a specific one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The model's attention cannot be captured, or the server was started without it.
    AttentionUnavailable,
    /// The prompt has more tokens than the context.
    ContextLengthExceeded,
    /// The `request_id` belongs to another active request.
    DuplicateRequestId,
    /// The body or message is not JSON or `MessagePack`.
    InvalidJson,
    /// A token id or text is not in the vocabulary.
    InvalidToken,
    /// The mod is disabled.
    ModDisabled,
    /// The mod cannot be imported.
    ModFailed,
    /// The model does not exist.
    ModelNotFound,
    /// The model is not loaded, and the server does not load it on request.
    ModelNotLoaded,
    /// The body or message is nested too deeply.
    NestedTooDeep,
    /// No model is loaded.
    NoModel,
    /// Memory is exhausted.
    OutOfMemory,
    /// The response to continue does not exist.
    PreviousResponseNotFound,
    /// The client has sent too many requests.
    RateLimited,
    /// The run ended with an error.
    RunFailed,
    /// The mod does not exist.
    UnknownMod,
    /// The field or its value is not supported.
    Unsupported,
}

impl ErrorCode {
    /// Returns the name used in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AttentionUnavailable => "attention_unavailable",
            Self::ContextLengthExceeded => "context_length_exceeded",
            Self::DuplicateRequestId => "duplicate_request_id",
            Self::InvalidJson => "invalid_json",
            Self::InvalidToken => "invalid_token",
            Self::ModDisabled => "mod_disabled",
            Self::ModFailed => "mod_failed",
            Self::ModelNotFound => "model_not_found",
            Self::ModelNotLoaded => "model_not_loaded",
            Self::NestedTooDeep => "nested_too_deep",
            Self::NoModel => "no_model",
            Self::OutOfMemory => "out_of_memory",
            Self::PreviousResponseNotFound => "previous_response_not_found",
            Self::RateLimited => "rate_limited",
            Self::RunFailed => "run_failed",
            Self::UnknownMod => "unknown_mod",
            Self::Unsupported => "unsupported",
        }
    }
}
