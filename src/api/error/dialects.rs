//! The same error in the shapes that the clients of each dialect read.

use super::{ApiError, Kind, request_id};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

impl ApiError {
    /// `{"error":{message,type,param,code}}`, as OpenAI's clients read it. Logs the cause of an internal error.
    #[must_use]
    pub fn openai(&self) -> Value {
        let mut error = json!({ "message": self.public_detail(), "type": self.word_of_llama(), "param": self.pointer,
                                "code": self.code });
        self.tell_exceeded(&mut error);
        json!({ "error": error })
    }

    /// `{"error":{code,message,type}}` with the HTTP status as the code, as llama-server's clients read it. Logs the
    /// cause of an internal error.
    #[must_use]
    pub fn llama(&self) -> Value {
        let mut error =
            json!({ "code": self.status().as_u16(), "message": self.public_detail(), "type": self.word_of_llama() });
        self.tell_exceeded(&mut error);
        json!({ "error": error })
    }

    /// `{"type":"error","error":{type,message}}`, as Anthropic's clients read it. Logs the cause of an internal error.
    #[must_use]
    pub fn anthropic(&self) -> Value {
        let kind = match self.kind {
            Kind::TooLarge => "request_too_large",
            Kind::Internal => "api_error",
            Kind::Unavailable => "overloaded_error",
            _ => self.word(),
        };
        let mut error = json!({ "type": kind, "message": self.public_detail() });
        self.tell_exceeded(&mut error);
        json!({ "type": "error", "error": error, "request_id": request_id() })
    }

    /// `{"type":"error","error",message,recoverable,recovery_action}`, as clients of the streaming protocol read it. Logs the
    /// cause of an internal error.
    #[must_use]
    pub fn streaming(&self) -> Value {
        let (kind, action) = match self.kind {
            _ if self.exceeded.is_some() => ("context_length_exceeded", Some("reduce_prompt")),
            Kind::Busy => ("rate_limited", Some("retry")),
            Kind::NoRoom => ("memory_pressure", Some("retry")),
            Kind::Unavailable if self.pointer.as_deref() == Some("model") => ("model_loading_error", None),
            Kind::Unavailable => ("unavailable", Some("retry")),
            Kind::Internal => ("internal_error", None),
            Kind::Unauthorized => ("unauthorized", Some("authenticate")),
            Kind::Forbidden => ("forbidden", None),
            _ => ("invalid_request", None),
        };
        let recoverable = action.is_some() && self.kind != Kind::Unauthorized;
        let mut error = json!({ "type": "error", "error": kind, "message": self.public_detail(),
                                "recoverable": recoverable, "recovery_action": action });
        if let Some(pointer) = &self.pointer {
            error["parameter"] = pointer.as_str().into();
        }
        if let Some(seconds) = self.retry_after_s {
            error["retry_after_seconds"] = seconds.into();
        }
        self.tell_exceeded(&mut error);
        error
    }

    fn word(&self) -> &'static str {
        match self.kind {
            Kind::Unauthorized => "authentication_error",
            Kind::Forbidden => "permission_error",
            Kind::NotFound => "not_found_error",
            Kind::Busy => "rate_limit_error",
            Kind::Internal => "server_error",
            Kind::NotSupported => "not_supported_error",
            Kind::Unavailable => "unavailable_error",
            _ => "invalid_request_error",
        }
    }

    /// llama-server, also on OpenAI's routes, has a word of its own for a prompt that does not fit.
    fn word_of_llama(&self) -> &'static str {
        if self.exceeded.is_some() { "exceed_context_size_error" } else { self.word() }
    }

    fn tell_exceeded(&self, error: &mut Value) {
        if let Some((prompt_tokens, context)) = self.exceeded {
            error["n_prompt_tokens"] = prompt_tokens.into();
            error["n_ctx"] = context.into();
        }
    }
}

/// A type whose errors a dialect's clients read: `$name(error)` renders as `error.$shape()`.
macro_rules! dialect {
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
    };
}

dialect! {
    /// An [`ApiError`] in OpenAI's shape.
    OpenAiError, openai, "application/json"
}

dialect! {
    /// An [`ApiError`] in Anthropic's shape.
    AnthropicError, anthropic, "application/json"
}

dialect! {
    /// An [`ApiError`] in the streaming protocol's shape.
    StreamError, streaming, "application/json"
}

dialect! {
    /// An [`ApiError`] in llama-server's shape.
    LlamaError, llama, "application/json; charset=utf-8"
}
