//! Parameters of a run as they are recorded with its prompt. Mods receive them, too.

use crate::engine::fork::ForkPoint;
use crate::engine::request::{Limits, Overflow, ReasoningBudget, Request};
use crate::events::{StoredHeads, TokenId};
use crate::model::Model;
use crate::model::grammar::Constraint;
use crate::model::llama::{AdapterSet, SamplingParams, ScaledAdapter, ScaledVector};
use crate::mods::SelectedMod;
use serde::Serialize;
use serde_json::{Map, Value};

#[derive(Serialize)]
struct RecordedParameters<'a> {
    sampling: &'a SamplingParams,
    constraint: &'a Option<Constraint>,
    limits: &'a Limits,
    mods: Vec<Value>,
    attention: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    lens: bool,
    visible_tokens: &'a [TokenId],
    overflow: Overflow,
    alternatives: usize,
    model: RecordedModel<'a>,
    release: &'static str,
    #[serde(skip_serializing_if = "Map::is_empty")]
    request: &'a Map<String, Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer_format: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_budget: Option<&'a ReasoningBudget>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_heads: Option<&'a StoredHeads>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lora: Option<&'a [ScaledAdapter]>,
    /// Absent if the model has no control vectors.
    #[serde(skip_serializing_if = "Option::is_none")]
    steering: Option<&'a [ScaledVector]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fork: Option<&'a Value>,
}

#[derive(Serialize)]
struct RecordedModel<'a> {
    name: &'a str,
    fingerprint: String,
}

/// Returns the parameters of a request as JSON.
pub fn record_parameters(request: &Request, fork: Option<&ForkPoint>, model: &Model) -> Value {
    let has_vectors = !model.adapters().control_vectors().as_slice().is_empty();
    let parameters = RecordedParameters {
        sampling: &request.sampling,
        constraint: &request.constraint,
        limits: &request.limits,
        mods: request.mods.iter().map(SelectedMod::to_record).collect(),
        attention: request.attention,
        lens: request.lens,
        visible_tokens: &request.visible_tokens,
        overflow: request.overflow,
        alternatives: request.alternatives,
        model: RecordedModel { name: model.name(), fingerprint: format!("{:032x}", model.fingerprint()) },
        release: env!("CARGO_PKG_VERSION"),
        request: &request.answer_fields,
        answer_format: request.answer_format.as_ref().map(|format| format.to_recording()),
        reasoning_budget: request.reasoning_budget.as_ref(),
        attention_heads: Some(&request.stored_heads).filter(|&heads| *heads != StoredHeads::None),
        lora: request.adapters.as_ref().map(AdapterSet::loras).filter(|adapters| !adapters.is_empty()),
        steering: request.adapters.as_ref().map(AdapterSet::steering).filter(|_| has_vectors),
        fork: fork.map(|fork| &fork.earlier_parameters),
    };
    serde_json::to_value(parameters).expect("parameters have string keys")
}

/// Returns a recorded parameter by its current name; recordings of earlier releases have other names.
#[must_use]
pub fn recorded_parameter<'a>(parameters: &'a Value, name: &str) -> &'a Value {
    let old_name = match name {
        "answer_format" => "reading",
        "reasoning_budget" => "thinking",
        "visible_tokens" => "visible",
        name => name,
    };
    parameters.get(name).unwrap_or(&parameters[old_name])
}

#[cfg(test)]
mod tests {
    use super::recorded_parameter;
    use serde_json::{Value, json};

    #[test]
    fn old_names_of_parameters_are_readable() {
        let old = json!({ "reading": 1, "lora": 3 });
        assert_eq!(*recorded_parameter(&old, "answer_format"), 1);
        assert_eq!(*recorded_parameter(&old, "lora"), 3);
        assert_eq!(*recorded_parameter(&old, "reasoning_budget"), Value::Null);
        assert_eq!(*recorded_parameter(&json!({ "answer_format": 4, "reading": 1 }), "answer_format"), 4);
    }
}
