//! Status messages of the streaming protocol.

use serde::Serialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use utoipa::ToSchema;

/// Progress, or confirmation of a control message or feedback.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct StatusMessage<'a> {
    /// `model_loading`, `prompt_processing`, `pause`, `resume`, `modify`, `feedback`, `ping`, or `moved`: another
    /// connection receives the run now.
    #[schema(value_type = String)]
    pub(super) operation: StatusOperation,
    /// Progress in percent.
    #[schema(minimum = 0, maximum = 100)]
    pub(super) progress: u8,
    /// The status as text.
    pub(super) message: Cow<'a, str>,
    /// The run's `request_id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) request_id: Option<&'a str>,
    /// Estimated remaining seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) eta_seconds: Option<f64>,
    /// The changed parameters, as sent.
    #[schema(value_type = Option<Object>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) parameters: Option<&'a Map<String, Value>>,
}

/// The subject of a status message.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum StatusOperation {
    ModelLoading,
    PromptProcessing,
    Pause,
    Resume,
    Modify,
    Feedback,
    Ping,
    Moved,
}

impl<'a> StatusMessage<'a> {
    /// Returns a status without estimate and parameters.
    pub(super) fn new(
        operation: StatusOperation,
        progress: u8,
        message: impl Into<Cow<'a, str>>,
        request_id: Option<&'a str>,
    ) -> Self {
        Self { operation, progress, message: message.into(), request_id, eta_seconds: None, parameters: None }
    }
}
