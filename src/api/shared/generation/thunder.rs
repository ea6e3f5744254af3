//! The field `thunder` that answers have in every protocol.

use crate::events::RunId;
use crate::model::chat::answer::Retraction;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

/// The runs of an answer, or the part of the sent answer that a mod removed.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub(crate) struct ThunderFields {
    /// Id of the first run.
    #[schema(value_type = Option<String>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    run_id: Option<RunId>,
    /// Path of its replay.
    #[serde(skip_serializing_if = "Option::is_none")]
    replay: Option<String>,
    /// Slot of the first run.
    #[schema(value_type = Option<u32>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    id_slot: Option<ReportedSlot>,
    /// Ids of all runs, if there are several.
    #[schema(value_type = Vec<String>)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    run_ids: Vec<RunId>,
    /// The tool calls with which a mod ended the run, as the mod passed them, on llama-server's and OpenAI's routes that
    /// complete a prompt. The routes for chats have them in their own fields.
    #[schema(value_type = Option<Vec<Object>>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Value>,
    /// The removed part.
    #[serde(skip_serializing_if = "Option::is_none")]
    retract: Option<RetractedOutput>,
}

/// A slot; null if the run had none.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(transparent)]
struct ReportedSlot(Option<u32>);

/// The part of a sent answer that a mod removed.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
struct RetractedOutput {
    /// Unicode scalar values to remove from the end of the text.
    chars: usize,
    /// Unicode scalar values to remove from the end of the reasoning.
    #[serde(skip_serializing_if = "is_zero")]
    reasoning_chars: usize,
    /// Tool calls to remove.
    #[serde(skip_serializing_if = "is_zero")]
    tool_calls: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl ThunderFields {
    /// Returns the id of a run and the path of its replay.
    pub(crate) fn run(run: RunId) -> Self {
        Self { run_id: Some(run), replay: Some(format!("/runs/{run}")), ..Self::default() }
    }

    /// Returns the id of the first of several runs, the path of its replay, and the ids of all if there are several.
    pub(crate) fn runs(runs: impl IntoIterator<Item = RunId>) -> Self {
        let runs: Vec<RunId> = runs.into_iter().collect();
        match runs[..] {
            [] => Self::default(),
            [run] => Self::run(run),
            [first, ..] => Self { run_ids: runs, ..Self::run(first) },
        }
    }

    /// Adds the slot of the first run.
    pub(crate) fn with_slot(self, slot: Option<u32>) -> Self {
        Self { id_slot: Some(ReportedSlot(slot)), ..self }
    }

    /// Adds the tool calls with which a mod ended the run.
    pub(crate) fn with_tool_calls(self, tool_calls: Option<&Value>) -> Self {
        Self { tool_calls: tool_calls.cloned(), ..self }
    }

    /// Returns a retraction.
    pub(crate) fn retract(retraction: &Retraction) -> Self {
        let Retraction { content: chars, reasoning: reasoning_chars, calls: tool_calls } = *retraction;
        Self { retract: Some(RetractedOutput { chars, reasoning_chars, tool_calls }), ..Self::default() }
    }

    /// Returns a retraction of text.
    pub(crate) fn retract_chars(chars: usize) -> Self {
        Self { retract: Some(RetractedOutput { chars, ..RetractedOutput::default() }), ..Self::default() }
    }
}
