//! Conversion of actions. Quote sends their fields in `details` only.

use super::{ActionWire, DocumentWire};
use crate::events::{ActionRecord, ActionType, RawJson, from_object};
use serde::Deserialize;

/// Fields of an action that Quote nests in `details`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Nested {
    tokens_as_text: Vec<String>,
    token_count: Option<i32>,
    backtrack_steps: Option<i32>,
    adjusted_max_steps: Option<i32>,
    logits_shape: Option<RawJson>,
    tool_calls: Option<RawJson>,
}

impl DocumentWire {
    /// Returns true if an action has specified fields next to its `details`, so that the document does not have Quote's form.
    /// An export of Quote's run has both, but Quote also names the active mod of every run with actions.
    pub(super) fn has_specified_actions(&self) -> bool {
        let mut actions = self.actions.iter().flatten();
        self.request.active_mod_name.is_none()
            && actions.any(|action| action.details.is_some() && action.has_specified_fields())
    }
}

impl ActionWire {
    /// Returns true if the action has a field that the specification has for actions of its type.
    fn has_specified_fields(&self) -> bool {
        match self.action_type {
            ActionType::AdjustedPrefill => {
                self.new_prompt.is_some() || self.new_length.is_some() || self.adjusted_max_steps.is_some()
            }
            ActionType::ForceTokens | ActionType::ForceOutput => {
                self.token_count.is_some() || self.tokens_preview.is_some()
            }
            ActionType::Backtrack => self.backtrack_steps.is_some() || self.backtrack_token_count.is_some(),
            ActionType::AdjustedLogits => self.logits_shape.is_some() || self.temperature.is_some(),
            ActionType::ToolCalls => self.has_tool_calls.is_some() || self.tool_calls.is_some(),
            ActionType::EmitError => self.error_message.is_some(),
            ActionType::Noop => false,
        }
    }

    /// Returns the fields in `details`, if the action has Quote's form.
    fn nested(&self) -> Nested {
        let details = self.details.as_ref().filter(|_| !self.has_specified_fields());
        details.and_then(|details| from_object(details.get()).ok()).unwrap_or_default()
    }
}

impl From<ActionWire> for ActionRecord {
    fn from(wire: ActionWire) -> Self {
        /// Maximum tokens of a preview.
        const MAX_PREVIEW_TOKENS: usize = 10;
        let nested = wire.nested();
        let forces = matches!(wire.action_type, ActionType::ForceTokens | ActionType::ForceOutput);
        let backtracks = wire.action_type == ActionType::Backtrack;
        let prefills = wire.action_type == ActionType::AdjustedPrefill;
        let edits_logits = wire.action_type == ActionType::AdjustedLogits;
        let calls_tools = wire.action_type == ActionType::ToolCalls;
        let count_of = |applies: bool| nested.token_count.filter(|_| applies);
        let text_of = |applies: bool, max: usize| {
            let texts = &nested.tokens_as_text;
            (applies && !texts.is_empty()).then(|| texts[..max.min(texts.len())].concat())
        };
        let adjusted_max_steps = nested.adjusted_max_steps.filter(|_| prefills);
        let backtrack_steps = nested.backtrack_steps.filter(|_| backtracks);
        let logits_shape = nested.logits_shape.as_ref().filter(|_| edits_logits).map(|shape| shape.get().to_owned());
        let nested_calls = nested.tool_calls.as_ref().filter(|_| calls_tools);
        Self {
            mod_call_sequence: wire.mod_call_sequence.into(),
            action_type: wire.action_type,
            action_order: wire.action_order.into(),
            created_at: wire.created_at.map(|time| time.0),
            new_prompt: wire.new_prompt.or_else(|| text_of(prefills, usize::MAX)),
            new_length: wire.new_length.map(i32::from).or_else(|| count_of(prefills)),
            adjusted_max_steps: wire.adjusted_max_steps.map(i32::from).or(adjusted_max_steps),
            token_count: wire.token_count.map(i32::from).or_else(|| count_of(forces)),
            tokens_preview: wire.tokens_preview.or_else(|| text_of(forces, MAX_PREVIEW_TOKENS)),
            backtrack_steps: wire.backtrack_steps.map(i32::from).or(backtrack_steps),
            backtrack_token_count: wire.backtrack_token_count.map(i32::from).or_else(|| count_of(backtracks)),
            logits_shape: wire.logits_shape.or(logits_shape),
            temperature: wire.temperature,
            has_tool_calls: wire.has_tool_calls.or(nested_calls.map(|_| true)),
            tool_calls: wire.tool_calls.or_else(|| nested_calls.cloned()),
            error_message: wire.error_message,
            details: wire.details,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::trace::document::Document;
    use serde_json::{Value, json};

    fn document(action: &Value) -> Document {
        let document = json!({
            "request": {"request_id": "r"},
            "events": [{"event_type": "Added", "step": 1, "sequence_order": 0}],
            "mod_calls": [{"event_sequence_order": 0, "mod_name": "m", "event_type": "Added", "step": 1}],
            "actions": [action]});
        Document::parse(document.to_string().as_bytes()).unwrap()
    }

    fn with_details(kind: &str, details: &Value) -> Value {
        json!({"mod_call_sequence": 0, "action_type": kind, "action_order": 0, "details": details})
    }

    /// Returns the action in the exported document.
    fn written(action: &Value) -> Value {
        serde_json::from_slice::<Value>(&document(action).write()).unwrap()["actions"][0].clone()
    }

    #[test]
    fn nested_fields_of_quote_actions_become_top_level() {
        let action = |kind: &str, details: Value| written(&with_details(kind, &details));
        let tokens = json!({"tokens": [5, 6], "tokens_as_text": ["a", "b"], "token_count": 2});
        let with = |name: &str, value: Value| {
            let mut details = tokens.clone();
            details[name] = value;
            details
        };
        let back = action("Backtrack", with("backtrack_steps", json!(3)));
        assert_eq!((&back["backtrack_steps"], &back["backtrack_token_count"]), (&json!(3), &json!(2)));
        assert_eq!(back["token_count"], Value::Null);
        let force = action("ForceTokens", tokens.clone());
        assert_eq!((&force["token_count"], &force["tokens_preview"]), (&json!(2), &json!("ab")));
        let prefill = action("AdjustedPrefill", with("adjusted_max_steps", json!(9)));
        assert_eq!(
            (&prefill["new_length"], &prefill["new_prompt"], &prefill["adjusted_max_steps"]),
            (&json!(2), &json!("ab"), &json!(9))
        );
        let calls = action("ToolCalls", json!({"tool_calls": "f()"}));
        assert_eq!((&calls["tool_calls"], &calls["has_tool_calls"]), (&json!("f()"), &json!(true)));
        assert_eq!(action("AdjustedLogits", json!({"logits_shape": [1, 64]}))["logits_shape"], "[1,64]");
        assert_eq!(action("Backtrack", json!({"backtrack_steps": "many"}))["backtrack_steps"], Value::Null);
    }

    #[test]
    fn action_of_another_type_or_with_specified_fields_is_read_back_unchanged() {
        let details = json!({"tokens_as_text": ["a"], "token_count": 1, "backtrack_steps": 1, "adjusted_max_steps": 2,
            "logits_shape": [1, 64], "tool_calls": "f()"});
        let with = |kind: &str, fields: Value| {
            let mut action = with_details(kind, &details);
            fields.as_object().unwrap().iter().for_each(|(name, value)| action[name] = value.clone());
            action
        };
        for action in [
            with("Noop", json!({})),
            with("EmitError", json!({})),
            with("AdjustedPrefill", json!({"new_length": 3})),
            with("ForceTokens", json!({"token_count": 1})),
            with("ForceOutput", json!({"tokens_preview": "a"})),
            with("Backtrack", json!({"backtrack_steps": 1})),
            with("AdjustedLogits", json!({"temperature": 0.5})),
            with("ToolCalls", json!({"tool_calls": {"name": "f"}})),
        ] {
            assert_eq!(written(&action), action);
        }
    }

    #[test]
    fn specified_fields_next_to_details_are_recognized() {
        let nested = with_details("Backtrack", &json!({"backtrack_steps": 1}));
        let mut specified = nested.clone();
        specified["backtrack_steps"] = json!(1);
        let without_details =
            json!({"mod_call_sequence": 0, "action_type": "Backtrack", "action_order": 0, "backtrack_steps": 1});
        for (action, expected) in [(&nested, false), (&specified, true), (&without_details, false)] {
            assert_eq!(document(action).request.extras.specified_actions, expected, "{action}");
        }
    }
}
