//! Errors in the formats that several protocols share. A protocol with its own format has it in its folder.

use crate::server::{ApiError, ErrorKind, request_id};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

/// The token counts of a prompt that does not fit.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ExceededContext {
    /// Tokens of the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_prompt_tokens: Option<u32>,
    /// Size of the context in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_ctx: Option<u32>,
}

/// An error for clients of OpenAI.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct OpenAiErrorResponse {
    /// The error.
    pub error: OpenAiErrorBody,
}

/// The cause of an error for clients of OpenAI.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct OpenAiErrorBody {
    /// Cause of the error, and the expected value.
    pub message: String,
    r#type: &'static str,
    /// The invalid field.
    pub param: Option<String>,
    /// The machine-readable code.
    pub code: Option<&'static str>,
    #[serde(flatten)]
    exceeded: ExceededContext,
}

/// An error for clients of llama-server.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct LlamaErrorResponse {
    /// The error.
    pub error: LlamaErrorBody,
}

/// The cause of an error for clients of llama-server.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct LlamaErrorBody {
    /// The HTTP status.
    code: u16,
    message: String,
    r#type: &'static str,
    #[serde(flatten)]
    exceeded: ExceededContext,
}

/// An error for clients of Anthropic.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct AnthropicErrorResponse {
    /// Always `error`.
    r#type: &'static str,
    error: AnthropicErrorBody,
    /// Id of the request in the server's log.
    request_id: Option<String>,
}

/// The cause of an error for clients of Anthropic.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct AnthropicErrorBody {
    r#type: &'static str,
    message: String,
    #[serde(flatten)]
    exceeded: ExceededContext,
}

/// An error for clients of Ollama.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct OllamaErrorResponse {
    /// Cause of the error, and the expected value.
    error: String,
}

/// An error for clients of the streaming protocol.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct StreamErrorMessage {
    /// Always `error`.
    r#type: &'static str,
    /// The machine-readable kind: `invalid_request`, `context_length_exceeded`, `content_filter` (a mod ended the run
    /// with an error), `memory_pressure`, `timeout`, `internal_error`, `model_loading_error`, `rate_limited`,
    /// `unavailable`, `unauthorized` or `forbidden`.
    pub(crate) error: &'static str,
    message: String,
    /// True if the client can do something that makes the request succeed.
    recoverable: bool,
    /// The action that resolves it: `retry`, `reduce_prompt` or `authenticate`.
    recovery_action: Option<&'static str>,
    /// The invalid field.
    #[serde(skip_serializing_if = "Option::is_none")]
    parameter: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_seconds: Option<u64>,
    #[serde(flatten)]
    exceeded: ExceededContext,
}

impl StreamErrorMessage {
    /// Returns the error of a run. `action` resolves it.
    pub(crate) fn new(error: &'static str, message: impl Into<String>, action: Option<&'static str>) -> Self {
        Self {
            r#type: "error",
            error,
            message: message.into(),
            recoverable: action.is_some(),
            recovery_action: action,
            parameter: None,
            retry_after_seconds: None,
            exceeded: ExceededContext { n_prompt_tokens: None, n_ctx: None },
        }
    }
}

impl ApiError {
    /// Returns the error for clients of OpenAI. Logs the cause of an internal error.
    #[must_use]
    pub fn openai(&self) -> OpenAiErrorResponse {
        OpenAiErrorResponse {
            error: OpenAiErrorBody {
                message: self.public_detail(),
                r#type: self.llama_error_type(),
                param: self.pointer().map(str::to_owned),
                code: self.error_code(),
                exceeded: self.exceeded_context(),
            },
        }
    }

    /// Returns the error for clients of llama-server. Logs the cause of an internal error.
    #[must_use]
    pub fn llama(&self) -> LlamaErrorResponse {
        LlamaErrorResponse {
            error: LlamaErrorBody {
                code: self.status().as_u16(),
                message: self.public_detail(),
                r#type: self.llama_error_type(),
                exceeded: self.exceeded_context(),
            },
        }
    }

    /// Returns the error for clients of Anthropic. Logs the cause of an internal error.
    #[must_use]
    pub fn anthropic(&self) -> AnthropicErrorResponse {
        let kind = match self.kind() {
            ErrorKind::TooLarge => "request_too_large",
            ErrorKind::Internal => "api_error",
            ErrorKind::Unavailable => "overloaded_error",
            _ => self.error_type(),
        };
        let error =
            AnthropicErrorBody { r#type: kind, message: self.public_detail(), exceeded: self.exceeded_context() };
        AnthropicErrorResponse { r#type: "error", error, request_id: request_id() }
    }

    /// Returns the error for clients of Ollama. Logs the cause of an internal error.
    #[must_use]
    pub fn ollama(&self) -> OllamaErrorResponse {
        OllamaErrorResponse { error: self.public_detail() }
    }

    /// Returns the error for clients of the streaming protocol. Logs the cause of an internal error.
    #[must_use]
    pub fn streaming(&self) -> StreamErrorMessage {
        let (kind, action) = match self.kind() {
            _ if self.exceeded().is_some() => ("context_length_exceeded", Some("reduce_prompt")),
            ErrorKind::Busy => ("rate_limited", Some("retry")),
            ErrorKind::NoRoom => ("memory_pressure", Some("retry")),
            ErrorKind::Unavailable if self.pointer() == Some("model") => ("model_loading_error", None),
            ErrorKind::Unavailable => ("unavailable", Some("retry")),
            ErrorKind::Internal => ("internal_error", None),
            ErrorKind::Unauthorized => ("unauthorized", Some("authenticate")),
            ErrorKind::Forbidden => ("forbidden", None),
            _ => ("invalid_request", None),
        };
        StreamErrorMessage {
            recoverable: action.is_some() && self.kind() != ErrorKind::Unauthorized,
            parameter: self.pointer().map(str::to_owned),
            retry_after_seconds: self.retry_after_s(),
            exceeded: self.exceeded_context(),
            ..StreamErrorMessage::new(kind, self.public_detail(), action)
        }
    }

    fn exceeded_context(&self) -> ExceededContext {
        let (prompt_tokens, context) = self.exceeded().unzip();
        ExceededContext { n_prompt_tokens: prompt_tokens, n_ctx: context }
    }

    fn error_type(&self) -> &'static str {
        match self.kind() {
            ErrorKind::Unauthorized => "authentication_error",
            ErrorKind::Forbidden => "permission_error",
            ErrorKind::NotFound => "not_found_error",
            ErrorKind::Busy => "rate_limit_error",
            ErrorKind::Internal => "server_error",
            ErrorKind::NotSupported => "not_supported_error",
            ErrorKind::Unavailable => "unavailable_error",
            _ => "invalid_request_error",
        }
    }

    /// Returns the error type; llama-server has its own type for a prompt that does not fit, also on OpenAI's routes.
    fn llama_error_type(&self) -> &'static str {
        if self.exceeded().is_some() { "exceed_context_size_error" } else { self.error_type() }
    }
}

/// Defines a newtype for errors of one protocol: `$name(error)` is rendered as `error.$shape()`.
macro_rules! protocol_error {
    ($(#[$doc:meta])* $name:ident, $shape:ident, $content_type:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $name(pub ApiError);

        impl<E: Into<ApiError>> From<E> for $name {
            fn from(error: E) -> Self {
                Self(error.into())
            }
        }

        impl IntoResponse for $name {
            fn into_response(self) -> Response {
                let body = serde_json::to_vec(&self.0.$shape()).unwrap_or_default();
                self.0.respond($content_type, body)
            }
        }

        impl $name {
            /// Renders an error in this format.
            pub fn render(error: ApiError) -> Response {
                Self(error).into_response()
            }
        }
    };
}

protocol_error! {
    /// An [`ApiError`] in OpenAI's format.
    OpenAiError, openai, "application/json"
}

protocol_error! {
    /// An [`ApiError`] in Anthropic's format.
    AnthropicError, anthropic, "application/json"
}

protocol_error! {
    /// An [`ApiError`] in Ollama's format.
    OllamaError, ollama, "application/json; charset=utf-8"
}

protocol_error! {
    /// An [`ApiError`] in the streaming protocol's format.
    StreamError, streaming, "application/json"
}

protocol_error! {
    /// An [`ApiError`] in llama-server's format.
    LlamaError, llama, "application/json; charset=utf-8"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_overflow_reports_token_counts() {
        let error = ApiError::bad_request("too long").exceeds_context(40, 16);
        insta::assert_json_snapshot!(error.llama(), @r#"
        {
          "error": {
            "code": 400,
            "message": "too long",
            "type": "exceed_context_size_error",
            "n_prompt_tokens": 40,
            "n_ctx": 16
          }
        }
        "#);
        assert_eq!(error.openai().error.code, Some("context_length_exceeded"));
    }

    #[test]
    fn error_renders_in_each_protocol() {
        let error = ApiError::invalid("top_p", "top_p must be between 0 and 1, got 3").code("out_of_range");
        insta::assert_json_snapshot!(error.problem(), @r#"
        {
          "type": "/problems/bad-request",
          "title": "Bad Request",
          "status": 400,
          "detail": "top_p must be between 0 and 1, got 3",
          "pointer": "top_p"
        }
        "#);
        insta::assert_json_snapshot!(error.openai(), @r#"
        {
          "error": {
            "message": "top_p must be between 0 and 1, got 3",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": "out_of_range"
          }
        }
        "#);
    }
}
