//! Errors in the formats that several protocols share. A protocol with its own format has it in its folder.

use crate::server::{ApiError, ErrorKind, request_id};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

impl ApiError {
    /// Returns `{"error":{message,type,param,code}}` for clients of OpenAI. Logs the cause of an internal error.
    #[must_use]
    pub fn openai(&self) -> Value {
        let mut error = json!({ "message": self.public_detail(), "type": self.llama_error_type(), "param": self.pointer(),
                                "code": self.error_code() });
        self.add_token_counts(&mut error);
        json!({ "error": error })
    }

    /// Returns `{"error":{code,message,type}}` for clients of llama-server; `code` is the HTTP status. Logs the cause
    /// of an internal error.
    #[must_use]
    pub fn llama(&self) -> Value {
        let mut error =
            json!({ "code": self.status().as_u16(), "message": self.public_detail(), "type": self.llama_error_type() });
        self.add_token_counts(&mut error);
        json!({ "error": error })
    }

    /// Returns `{"type":"error","error":{type,message}}` for clients of Anthropic. Logs the cause of an internal error.
    #[must_use]
    pub fn anthropic(&self) -> Value {
        let kind = match self.kind() {
            ErrorKind::TooLarge => "request_too_large",
            ErrorKind::Internal => "api_error",
            ErrorKind::Unavailable => "overloaded_error",
            _ => self.error_type(),
        };
        let mut error = json!({ "type": kind, "message": self.public_detail() });
        self.add_token_counts(&mut error);
        json!({ "type": "error", "error": error, "request_id": request_id() })
    }

    /// Returns `{"type":"error","error",message,recoverable,recovery_action}` for clients of the streaming protocol.
    /// Logs the cause of an internal error.
    #[must_use]
    pub fn streaming(&self) -> Value {
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
        let recoverable = action.is_some() && self.kind() != ErrorKind::Unauthorized;
        let mut error = json!({ "type": "error", "error": kind, "message": self.public_detail(),
                                "recoverable": recoverable, "recovery_action": action });
        if let Some(pointer) = self.pointer() {
            error["parameter"] = pointer.into();
        }
        if let Some(seconds) = self.retry_after_s() {
            error["retry_after_seconds"] = seconds.into();
        }
        self.add_token_counts(&mut error);
        error
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

    fn add_token_counts(&self, error: &mut Value) {
        if let Some((prompt_tokens, context)) = self.exceeded() {
            error["n_prompt_tokens"] = prompt_tokens.into();
            error["n_ctx"] = context.into();
        }
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
        assert_eq!(error.openai()["error"]["code"], "context_length_exceeded");
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
