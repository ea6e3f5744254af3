//! The error formats of OpenAI and llama-server, which several protocols share. Other formats are in the folder of
//! their protocol.

use crate::server::{ApiError, ErrorCode, ErrorKind};
use serde::Serialize;
use utoipa::ToSchema;

/// The token counts of a prompt that does not fit.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub struct ExceededContext {
    /// Tokens of the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_prompt_tokens: Option<u32>,
    /// Size of the context in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_ctx: Option<u32>,
}

/// An error response in OpenAI's format.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct OpenAiErrorResponse {
    /// The error.
    pub error: OpenAiErrorBody,
}

/// An error in OpenAI's format.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct OpenAiErrorBody {
    /// Cause of the error, and the expected value.
    pub message: String,
    r#type: &'static str,
    /// The invalid field.
    pub param: Option<String>,
    /// The machine-readable code.
    #[schema(value_type = Option<String>)]
    pub code: Option<ErrorCode>,
    #[serde(flatten)]
    exceeded: ExceededContext,
}

/// An error response in llama-server's format.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct LlamaErrorResponse {
    /// The error.
    pub error: LlamaErrorBody,
}

/// An error in llama-server's format.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct LlamaErrorBody {
    /// The HTTP status.
    code: u16,
    message: String,
    r#type: &'static str,
    #[serde(flatten)]
    exceeded: ExceededContext,
}

impl ApiError {
    /// Returns the error in OpenAI's format. Logs the cause of an internal error.
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

    /// Returns the error in llama-server's format. Logs the cause of an internal error.
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

    /// Returns the token counts of a prompt that does not fit.
    pub(crate) fn exceeded_context(&self) -> ExceededContext {
        let (prompt_tokens, context) = self.exceeded().unzip();
        ExceededContext { n_prompt_tokens: prompt_tokens, n_ctx: context }
    }

    /// Returns the error type, which OpenAI and Anthropic share.
    pub(crate) fn error_type(&self) -> &'static str {
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
        pub struct $name(pub $crate::server::ApiError);

        impl<E: Into<$crate::server::ApiError>> From<E> for $name {
            fn from(error: E) -> Self {
                Self(error.into())
            }
        }

        impl axum::response::IntoResponse for $name {
            fn into_response(self) -> axum::response::Response {
                let body = serde_json::to_vec(&self.0.$shape()).unwrap_or_default();
                self.0.respond($content_type, body)
            }
        }

        impl $name {
            /// Renders an error in this format.
            pub fn render(error: $crate::server::ApiError) -> axum::response::Response {
                axum::response::IntoResponse::into_response(Self(error))
            }
        }
    };
}

pub(crate) use protocol_error;

protocol_error! {
    /// An [`ApiError`] in OpenAI's format.
    OpenAiError, openai, "application/json"
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
        assert_eq!(error.openai().error.code, Some(ErrorCode::ContextLengthExceeded));
    }

    #[test]
    fn error_renders_in_each_protocol() {
        let error = ApiError::invalid("top_p", "top_p must be between 0 and 1, got 3").code(ErrorCode::InvalidToken);
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
            "code": "invalid_token"
          }
        }
        "#);
    }
}
