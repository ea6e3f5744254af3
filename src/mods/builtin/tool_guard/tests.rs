//! Tests of `tool-guard`.

use super::ToolGuard;
use crate::mods::ModFactory;
use crate::mods::builtin::structured::Regex;
use crate::mods::builtin::testing::{Simulation, SimulationResult, run};
use proptest::prelude::*;
use serde_json::{Value, json};

const RIGHT: &str = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2}}\n</tool_call>";

fn config(more_fields: &Value) -> Value {
    let mut config = json!({"tools": [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object",
            "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}}},
        {"type": "function", "function": {"name": "delete"}},
    ]});
    config.as_object_mut().unwrap().extend(more_fields.as_object().unwrap().clone());
    config
}

/// Runs a model that writes the first script, and the next one each time a call was removed.
fn simulate(scripts: &[&str], more_fields: &Value) -> SimulationResult {
    let scripts: Vec<String> = scripts.iter().map(ToString::to_string).collect();
    Simulation {
        script: scripts[0].clone(),
        next_scripts: scripts[1..].to_vec(),
        max_tokens: 400,
        ..Simulation::default()
    }
    .run_mods(&[(&ToolGuard, config(more_fields))])
}

#[test]
fn valid_calls_are_unchanged() {
    for text in [RIGHT.to_owned(), format!("I look.\n{RIGHT}\n{RIGHT}"), "no call, 1 < 2 {\"a\": 1}".into()] {
        let result = simulate(&[&format!("{text}\0")], &json!({}));
        assert_eq!((result.text.as_str(), result.controls), (text.as_str(), 0), "{result:?}");
    }
}

#[test]
fn invalid_call_is_retried() {
    for (invalid, why) in [
        ("{\"name\": \"sub\", \"arguments\": {\"a\": 2}}", "unknown tool 'sub'; known tools: add, delete"),
        ("{\"name\": \"delete\", \"arguments\": {}}", "the tool 'delete' is blocked"),
        (
            "{\"name\": \"add\", \"arguments\": {\"a\": 2.5}}",
            "the arguments of 'add' are invalid: `a` must be an integer, got 2.5",
        ),
        ("{\"arguments\": {\"b\": 2}, \"name\": \"add\"}", "the arguments of 'add' are invalid: `a` is missing"),
        ("{\"name\": \"add\", \"arguments\": {\"a\": x}}", "the call cannot be parsed"),
        ("{\"name\": \"add\"\0", "the call cannot be parsed"),
    ] {
        let first = format!("I look.\n<tool_call>\n{invalid}\n</tool_call>\0");
        let valid = format!("I look.\n{RIGHT}\0");
        let result = simulate(&[&first, &valid], &json!({"block": ["delete"]}));
        assert_eq!(result.logs, [format!("{why}; retrying")]);
        assert_eq!((result.text, result.retracted, result.controls), (format!("I look.\n{RIGHT}"), 0, 1));
    }
}

#[test]
fn only_invalid_second_call_is_removed() {
    let invalid = format!("{RIGHT}\n<tool_call>\n{{\"name\": \"x\", \"arguments\": {{}}}}\n</tool_call>\0");
    let result = simulate(&[&invalid, &format!("{RIGHT}\n{RIGHT}\0")], &json!({}));
    assert_eq!((result.text, result.retracted, result.controls), (format!("{RIGHT}\n{RIGHT}"), 0, 1));
}

#[test]
fn field_then_decides_after_the_last_retry() {
    let invalid = "<tool_call>\n{\"name\": \"x\", \"arguments\": {}}\n</tool_call>\0";
    let result = simulate(&[invalid; 9], &json!({"max_retries": 2}));
    assert!(!result.text.starts_with('<'), "{result:?}");
    assert_eq!(result.logs[2], "unknown tool 'x'; known tools: add, delete; replacing it with text");
    let result = simulate(&[invalid; 9], &json!({"max_retries": 2, "then": "error"}));
    assert_eq!(
        result.error.as_deref(),
        Some("tool-guard: gave up after 2 retries: unknown tool 'x'; known tools: add, delete")
    );
    let result = simulate(&[invalid; 9], &json!({"max_retries": 1, "then": "keep"}));
    assert_eq!(result.text, invalid.trim_end_matches('\0'));
    assert_eq!(result.controls, 1);
}

#[test]
fn call_is_kept_if_a_constraint_requires_one() {
    let pattern = r#"<tool_call>\n\{"name": "(add|delete)", "arguments": \{\}\}\n</tool_call>"#;
    let call = "<tool_call>\n{\"name\": \"delete\", \"arguments\": {}}\n</tool_call>";
    let mut mods: [(&dyn ModFactory, Value); 2] = [
        (&ToolGuard, config(&json!({"block": ["add", "delete"], "max_retries": 0}))),
        (&Regex, json!({"pattern": pattern})),
    ];
    for _ in 0..2 {
        let result = Simulation { script: call.into(), ..Simulation::default() }.run_mods(&mods);
        assert_eq!((result.text.as_str(), result.ended), (call, true), "{result:?}");
        let outcomes = ["replacing it with text", "keeping it, because a constraint permits only a call"];
        assert_eq!(result.logs, outcomes.map(|outcome| format!("the tool 'delete' is blocked; {outcome}")));
        mods.reverse();
    }
}

#[test]
fn errors_name_field() {
    for (config, message) in [
        (json!({}), "`tools` is missing, and the request has no tools"),
        (
            json!({"tools": [{"function": {}}]}),
            "`tools` must be a list of {\"type\": \"function\", \"function\": {\"name\": …, \"parameters\": {…}}}, got {\"function\":{}} in it",
        ),
        (
            json!({"tools": [{"name": "add", "parameters": [1]}]}),
            "`tools`: the parameters of 'add' must be a JSON schema (an object), got [1]",
        ),
        (config(&json!({"then": "stop"})), "`then` must be one of \"text\", \"error\", \"keep\", got \"stop\""),
    ] {
        assert_eq!(ToolGuard.start(&config, &run()).err().unwrap(), message);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn blocked_call_never_remains(seed: u64, cut in 0usize..60) {
        let call = "Well. <tool_call>{\"name\": \"delete\", \"arguments\": {}}</tool_call>";
        let script = &call[..cut.min(call.len())];
        let result = Simulation { script: script.into(), seed, alphabet: "{}\"namedlt: <>/_colrgus,", max_tokens: 120, ..Simulation::default() }
            .run_mods(&[(&ToolGuard, config(&json!({"block": ["delete"], "max_retries": 1})))]);
        prop_assert!(!result.text.contains("\"delete\", \"arguments\": {"), "{:?}", result);
        prop_assert_eq!(result.retracted, 0);
    }
}
