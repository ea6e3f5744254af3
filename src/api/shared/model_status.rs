//! The state of a model in the list of models and in model events.

use crate::server::{ModelEntry, ModelState};
use serde::Serialize;
use utoipa::ToSchema;

/// The state of a model, with its details.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub(crate) struct ModelStatus {
    /// The state.
    pub(crate) value: ModelStatusValue,
    #[serde(flatten)]
    pub(crate) details: ModelStatusDetails,
}

/// The name of a model's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ModelStatusValue {
    /// Not in memory; the next request loads it.
    Sleeping,
    /// Not in memory.
    Unloaded,
    /// Being loaded.
    Loading,
    /// Accepts requests.
    Loaded,
    /// Accepts no new requests; active runs may end.
    Unloading,
}

/// Details of a model's state.
#[derive(Debug, Clone, Default, PartialEq, Serialize, ToSchema)]
pub(crate) struct ModelStatusDetails {
    /// Progress of a load from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    progress: Option<f64>,
    /// True if the last load failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<bool>,
    /// The cause of the failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl From<&ModelEntry> for ModelStatus {
    fn from(entry: &ModelEntry) -> Self {
        let mut details = ModelStatusDetails::default();
        let value = match &entry.state {
            ModelState::Failed(failure) => {
                details = ModelStatusDetails { failed: Some(true), reason: Some(failure.reason.clone()), ..details };
                ModelStatusValue::Unloaded
            }
            _ if entry.is_sleeping() => ModelStatusValue::Sleeping,
            ModelState::Unloaded => ModelStatusValue::Unloaded,
            ModelState::Loading { progress, .. } => {
                details.progress = Some(f64::from(*progress));
                ModelStatusValue::Loading
            }
            ModelState::Ready(_) => ModelStatusValue::Loaded,
            ModelState::Unloading(_) | ModelState::CancellingLoad => ModelStatusValue::Unloading,
        };
        Self { value, details }
    }
}
