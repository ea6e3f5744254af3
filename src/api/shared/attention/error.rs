//! Errors in this API's format: `{"type": "error", "error": text, "error_code": WORD, …}`.

use crate::engine::AttentionRow;
use crate::model::llama::devices;
use crate::server::{ApiError, ErrorKind};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

/// An [`ApiError`] in this API's format.
#[derive(Debug, Clone)]
pub struct AttentionError(pub ApiError);

impl<E: Into<ApiError>> From<E> for AttentionError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl AttentionError {
    /// Renders an error in this format.
    pub fn render(error: ApiError) -> Response {
        Self(error).into_response()
    }
}

impl IntoResponse for AttentionError {
    fn into_response(self) -> Response {
        let body = Value::Object(fields(&self.0)).to_string();
        self.0.respond("application/json", body.into_bytes())
    }
}

/// Returns the fields of an error; WebSocket messages add `request_id`.
pub(crate) fn fields(error: &ApiError) -> Map<String, Value> {
    let code = code(error);
    let mut fields = Map::new();
    fields.insert("type".into(), "error".into());
    fields.insert("error".into(), error.public_detail().into());
    fields.insert("error_code".into(), code.as_str().into());
    if let Some(pointer) = error.pointer() {
        fields.insert("field".into(), pointer.into());
    }
    if let Some((tokens, context)) = error.exceeded() {
        fields.insert("token_count".into(), tokens.into());
        fields.insert("context_length".into(), context.into());
    }
    if code == "OOM" {
        if let Some(context) = error.context() {
            fields.insert("context_length".into(), context.into());
        }
        fields.extend(memory());
    }
    fields
}

/// Returns the error for attention of `what` that exceeds the server's limit; `row` is the row that exceeded it.
pub(crate) fn out_of_memory(what: &str, max_bytes: usize, row: Option<&AttentionRow>) -> ApiError {
    let context = row.map_or(0, |row| row.row_len);
    let message = format!(
        "out of memory: at a context of {context} tokens, the attention of {what} exceeds {max_bytes} bytes \
         (--max-attention); request fewer tokens, another attention_format or float16; on the WebSocket the limit \
         applies to each token"
    );
    ApiError::new(ErrorKind::NoRoom, message).code("out_of_memory").at_context(context)
}

/// Returns the machine-readable code.
fn code(error: &ApiError) -> String {
    match error.error_code() {
        Some("out_of_memory") => return "OOM".into(),
        Some("model_not_loaded") => return "NO_MODEL".into(),
        Some(code) => return code.to_ascii_uppercase(),
        None => {}
    }
    let word = match error.kind() {
        ErrorKind::BadRequest | ErrorKind::UnsupportedMediaType => "INVALID_REQUEST",
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
        ErrorKind::Unavailable => "NO_MODEL",
    };
    word.into()
}

/// Returns the memory usage of the GPUs, if any.
fn memory() -> Vec<(String, Value)> {
    let gpus: Vec<_> = devices().into_iter().filter(|device| device.gpu && device.memory_bytes > 0).collect();
    if gpus.is_empty() {
        return Vec::new();
    }
    let total: u64 = gpus.iter().map(|gpu| gpu.memory_bytes).sum();
    let free: u64 = gpus.iter().map(|gpu| gpu.free_bytes).sum();
    let mebibytes = |bytes: u64| json!(bytes >> 20);
    vec![("vram_used_mb".into(), mebibytes(total.saturating_sub(free))), ("vram_total_mb".into(), mebibytes(total))]
}
