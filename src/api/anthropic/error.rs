//! Errors in Anthropic's format.

use crate::api::shared::error::{ExceededContext, protocol_error};
use crate::server::{ApiError, ErrorKind, request_id};
use serde::Serialize;
use utoipa::ToSchema;

protocol_error! {
    /// An [`ApiError`] in Anthropic's format.
    AnthropicError, anthropic, "application/json"
}

/// An error response in Anthropic's format.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct AnthropicErrorResponse {
    /// Always `error`.
    r#type: &'static str,
    error: AnthropicErrorBody,
    /// Id of the request in the server's log.
    request_id: Option<String>,
}

/// An error in Anthropic's format.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct AnthropicErrorBody {
    r#type: &'static str,
    message: String,
    #[serde(flatten)]
    exceeded: ExceededContext,
}

impl ApiError {
    /// Returns the error in Anthropic's format. Logs the cause of an internal error.
    #[must_use]
    pub fn anthropic(&self) -> AnthropicErrorResponse {
        let kind = match self.kind() {
            ErrorKind::TooLarge => "request_too_large",
            ErrorKind::Internal => "api_error",
            ErrorKind::Unavailable => "overloaded_error",
            _ => self.error_type(),
        };
        let message = match self.exceeded() {
            // Clients such as Claude Code look for this text before they shorten a conversation.
            Some((tokens, context)) => format!(
                "prompt is too long: {tokens} tokens > {} maximum; {}",
                context.saturating_sub(1),
                self.public_detail()
            ),
            None => self.public_detail(),
        };
        let error = AnthropicErrorBody { r#type: kind, message, exceeded: self.exceeded_context() };
        AnthropicErrorResponse { r#type: "error", error, request_id: request_id() }
    }
}
