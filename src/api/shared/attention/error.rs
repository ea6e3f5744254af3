//! Errors in the attention API's format: `{"type": "error", "error": text, "error_code": WORD, …}`.

use crate::api::shared::error::protocol_error;
use crate::engine::AttentionRow;
use crate::model::llama::devices;
use crate::server::{ApiError, ErrorCode, ErrorKind};
use serde::Serialize;
use utoipa::ToSchema;

protocol_error! {
    /// An [`ApiError`] in the attention API's format.
    AttentionError, attention, "application/json"
}

/// An error: a message is invalid or a request failed.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct AttentionErrorMessage {
    r#type: &'static str,
    /// Cause of the error and the expected value.
    error: String,
    /// `INVALID_TOKEN`, `INVALID_REQUEST`, `INVALID_JSON`, `NESTED_TOO_DEEP`, `CONTEXT_LENGTH_EXCEEDED`,
    /// `ATTENTION_UNAVAILABLE`, `NO_MODEL`, `MODEL_NOT_FOUND`, `UNKNOWN_MOD`, `MOD_DISABLED`, `DUPLICATE_REQUEST_ID`,
    /// `NOT_FOUND`, `BUSY`, `RATE_LIMITED`, `OOM`, `RUN_FAILED`, `UNAVAILABLE`, `UNAUTHORIZED`, `FORBIDDEN`,
    /// `METHOD_NOT_ALLOWED`, `CONFLICT`, `TOO_LARGE`, `NOT_SUPPORTED`, `INTERNAL`, or another error code in capital
    /// letters.
    error_code: String,
    /// The invalid field.
    #[serde(skip_serializing_if = "Option::is_none")]
    field: Option<String>,
    /// With `CONTEXT_LENGTH_EXCEEDED`: tokens sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_count: Option<u32>,
    /// With `CONTEXT_LENGTH_EXCEEDED`: tokens that fit; with `OOM`: tokens of the context at that point.
    #[serde(skip_serializing_if = "Option::is_none")]
    context_length: Option<u32>,
    /// Used GPU memory in MiB, with `OOM` on a server with a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    vram_used_mb: Option<u64>,
    /// Total GPU memory in MiB, with `OOM` on a server with a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    vram_total_mb: Option<u64>,
    /// The client's id of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) request_id: Option<String>,
    /// Index of the sample, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sample: Option<usize>,
}

impl ApiError {
    /// Returns the error for clients of the attention API, without a request. Logs the cause of an internal error.
    pub(crate) fn attention(&self) -> AttentionErrorMessage {
        let (token_count, exceeded) = self.exceeded().unzip();
        let is_out_of_memory = is_out_of_memory(self);
        let context = self.context().filter(|_| is_out_of_memory);
        let (vram_used_mb, vram_total_mb) = is_out_of_memory.then(gpu_memory).flatten().unzip();
        AttentionErrorMessage {
            r#type: "error",
            error: self.public_detail(),
            error_code: code(self),
            field: self.pointer().map(str::to_owned),
            token_count,
            context_length: context.or(exceeded),
            vram_used_mb,
            vram_total_mb,
            request_id: None,
            sample: None,
        }
    }
}

/// Returns the error for a `subject`, such as an answer, whose attention exceeds the server's limit; `row` is the row
/// that exceeded it.
pub(crate) fn out_of_memory(subject: &str, max_bytes: usize, row: Option<&AttentionRow>) -> ApiError {
    let context = row.map_or(0, |row| row.row_len);
    let message = format!(
        "out of memory: at a context of {context} tokens, the attention of {subject} exceeds {max_bytes} bytes \
         (--max-attention); request fewer tokens, another attention_format or float16; on the WebSocket the limit \
         applies to each token"
    );
    ApiError::new(ErrorKind::NoRoom, message).code(ErrorCode::OutOfMemory).at_context(context)
}

fn is_out_of_memory(error: &ApiError) -> bool {
    error.error_code().map_or(error.kind() == ErrorKind::NoRoom, |code| code == ErrorCode::OutOfMemory)
}

/// Returns this API's name of the error code.
fn code(error: &ApiError) -> String {
    match error.error_code() {
        Some(ErrorCode::OutOfMemory) => return "OOM".into(),
        Some(ErrorCode::ModelNotLoaded) => return "NO_MODEL".into(),
        Some(code) => return code.as_str().to_ascii_uppercase(),
        None => {}
    }
    let name = match error.kind() {
        ErrorKind::BadRequest | ErrorKind::RequestTimeout | ErrorKind::UnsupportedMediaType => "INVALID_REQUEST",
        ErrorKind::Unauthorized => "UNAUTHORIZED",
        ErrorKind::Forbidden => "FORBIDDEN",
        ErrorKind::NotFound => "NOT_FOUND",
        ErrorKind::MethodNotAllowed => "METHOD_NOT_ALLOWED",
        ErrorKind::Conflict => "CONFLICT",
        ErrorKind::TooLarge => "TOO_LARGE",
        ErrorKind::Unprocessable => "RUN_FAILED",
        ErrorKind::NoRoom => "OOM",
        ErrorKind::Busy => "BUSY",
        ErrorKind::Internal => "INTERNAL",
        ErrorKind::NotSupported => "NOT_SUPPORTED",
        // The model is being loaded or unloaded, or its loading failed.
        ErrorKind::Unavailable if error.pointer() == Some("model") => "NO_MODEL",
        ErrorKind::Unavailable => "UNAVAILABLE",
    };
    name.into()
}

/// Returns used and total MiB of the GPUs, if any.
fn gpu_memory() -> Option<(u64, u64)> {
    let gpus = devices().into_iter().filter(|device| device.gpu && device.memory_bytes > 0);
    let (total, free) = gpus.fold((0u64, 0u64), |(total, free), gpu| (total + gpu.memory_bytes, free + gpu.free_bytes));
    (total > 0).then_some((total.saturating_sub(free) >> 20, total >> 20))
}
