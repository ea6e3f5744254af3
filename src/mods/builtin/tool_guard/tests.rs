//! Tests of `tool-guard`.

use super::{ToolGuard, parse_tools};
use crate::model::chat::answer::{AnswerFormat, AnswerParser};
use crate::model::chat::family::ModelFamily;
use crate::mods::builtin::structured::Regex;
use crate::mods::builtin::testing::{ModHarness, Simulation, SimulationResult, run, run_of};
use crate::mods::{Action, ModFactory, RunView};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::Arc;

const RIGHT_IN_CHANNEL: &str = "<|channel|>commentary to=functions.add<|message|>{\"a\": 2}<|call|>";
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
    simulate_in(run(), scripts, more_fields)
}

fn simulate_in(run: Arc<RunView>, scripts: &[&str], more_fields: &Value) -> SimulationResult {
    let scripts: Vec<String> = scripts.iter().map(ToString::to_string).collect();
    Simulation {
        run,
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
fn call_beyond_the_permitted_number_is_ignored() {
    for (family, call) in [(ModelFamily::Hermes, RIGHT), (ModelFamily::Harmony, RIGHT_IN_CHANNEL)] {
        let view = run_of(family);
        let answer_format = AnswerFormat { single: true, ..(*view.answer_format).clone() };
        let view = Arc::new(RunView { answer_format: answer_format.into(), ..(*view).clone() });
        let text = format!("{call}{call}");
        let result = simulate_in(view, &[&format!("{text}\0")], &json!({}));
        assert_eq!((result.text, result.controls, result.logs), (text, 0, vec![]));
    }
}

#[test]
fn invalid_call_in_a_channel_is_retried() {
    let reasoning = "<|channel|>analysis<|message|>hm<|end|>";
    for (invalid, valid, why) in [
        (
            "<|start|>assistant<|channel|>commentary to=functions.sub <|constrain|>json<|message|>{}",
            "<|start|>assistant<|channel|>final<|message|>No.",
            "unknown tool 'sub'; known tools: add, delete",
        ),
        (
            "<|start|>assistant to=functions.delete<|channel|>commentary json<|message|>{}<|call|>",
            "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{\"a\": 2}<|call|>",
            "the tool 'delete' is blocked",
        ),
        (
            "<|channel|>commentary to=functions.add<|message|>{\"a\": 2.5}\0",
            "<|channel|>commentary to=functions.add<|message|>{\"a\": 2}",
            "the arguments of 'add' are invalid: `a` must be an integer, got 2.5",
        ),
        (
            "<|channel|>commentary to=functions.add<|message|>{\"a\": 2.5}<|start|>assistant",
            "<|channel|>commentary to=functions.add<|message|>{\"a\": 2}",
            "the arguments of 'add' are invalid: `a` must be an integer, got 2.5",
        ),
        (
            "<|channel|>commentary to=functions.add<|message|>{\"a\": x}<|call|>",
            "<|channel|>analysis<|message|>hm",
            "the call cannot be parsed",
        ),
        ("<|channel|>commentary to=functions.add<|message|>{\"a\"\0", RIGHT_IN_CHANNEL, "the call cannot be parsed"),
    ] {
        let (first, second) = (format!("{reasoning}{invalid}"), format!("{reasoning}{valid}"));
        let scripts = [first.as_str(), &format!("{second}\0")];
        let result = simulate_in(run_of(ModelFamily::Harmony), &scripts, &json!({"block": ["delete"]}));
        assert_eq!(result.logs, [format!("{why}; retrying")], "{invalid}");
        assert_eq!((result.text, result.retracted), (second, 0), "{invalid}");
    }
    // The prompt may contain the start of the header.
    let rest = "<|channel|>commentary json<|message|>{\"a\": 2}";
    let scripts = ["sub", "add"].map(|name| format!(" to=functions.{name}{rest}\0"));
    let result = simulate_in(run_of(ModelFamily::Harmony), &[&scripts[0], &scripts[1]], &json!({}));
    assert_eq!((result.text, result.controls), (scripts[1].trim_end_matches('\0').to_owned(), 1), "{:?}", result.logs);
}

#[test]
fn call_in_a_channel_is_replaced_with_text() {
    let call = "<|channel|>commentary to=functions.delete<|message|>{}\0";
    let text = "<|channel|>final<|message|>No.";
    let config = json!({"block": ["delete"], "max_retries": 1});
    let result = simulate_in(run_of(ModelFamily::Harmony), &[call, call, &format!("{text}\0")], &config);
    let outcomes = ["retrying", "replacing it with text"].map(|end| format!("the tool 'delete' is blocked; {end}"));
    assert_eq!((result.text.as_str(), result.logs.as_slice()), (text, outcomes.as_slice()));
}

#[test]
fn only_calls_and_headers_are_held_back_in_channels() {
    let mut harness = ModHarness::with_run(&ToolGuard, &config(&json!({})), run_of(ModelFamily::Harmony));
    let call = "commentary to=functions.add<|message|>{\"a\": 2}";
    for (text, held) in [
        ("<|channel|>", 0),
        ("analysis", "analysis".len()),
        ("<|message|>", 0),
        ("I look", 0),
        ("<|end|>", 0),
        ("<|start|>assistant", "<|start|>assistant".len()),
        ("<|channel|>", 0),
        (call, call.len()),
        ("<|call|>", 0),
        ("<|start|>assistant<|channel|>final<|message|>", 0),
        ("Done", 0),
    ] {
        assert!(harness.write_text(text).is_none());
        assert_eq!(harness.instance.holdback(), held, "{}", harness.text());
    }
}

#[test]
fn retry_temperature_ends_with_the_answer() {
    let is_retry = |harness: &mut ModHarness| {
        let action = harness.forward(&[]).action;
        matches!(action, Some(Action::AdjustedLogits { temperature: Some(1.0), .. }))
    };
    let (hermes, harmony) = (ModelFamily::Hermes, ModelFamily::Harmony);
    let invalid = "<tool_call>\n{\"name\": \"x\", \"arguments\": {";
    let invalid_in_channel = "<|channel|>commentary to=functions.x<|message|>";
    for (family, invalid, start, rest) in [
        (hermes, invalid, "", "No"),
        (hermes, invalid, "<tool_call>\n{", "\"name\": \"add\", \"arguments\": {\"a\": 2}}"),
        (harmony, invalid_in_channel, "final", "<|message|>No"),
        (harmony, invalid_in_channel, "commentary", " to=functions.add<|message|>{\"a\": 2}<|call|>"),
    ] {
        let mut harness = ModHarness::with_run(&ToolGuard, &config(&json!({})), run_of(family));
        assert!(!is_retry(&mut harness));
        assert!(matches!(harness.write_text(invalid).unwrap().action, Some(Action::Backtrack { .. })));
        harness.write_text(start);
        assert!(is_retry(&mut harness), "{start}");
        harness.write_text(rest);
        assert!(!is_retry(&mut harness), "{rest}");
    }
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
    fn blocked_call_never_remains(seed: u64, cut in 0usize..60, in_channel: bool) {
        let (family, call, alphabet) = if in_channel {
            (
                ModelFamily::Harmony,
                "<|channel|>commentary to=functions.delete<|message|>{}<|call|>",
                "comentary finlsghu=.d{}<|>",
            )
        } else {
            (
                ModelFamily::Hermes,
                "Well. <tool_call>{\"name\": \"delete\", \"arguments\": {}}</tool_call>",
                "{}\"namedlt: <>/_colrgus,",
            )
        };
        let (script, view) = (call[..cut.min(call.len())].to_owned(), run_of(family));
        let config = config(&json!({"block": ["delete"], "max_retries": 1}));
        let simulation = Simulation { run: Arc::clone(&view), script, seed, alphabet, ..Simulation::default() };
        let result = Simulation { max_tokens: 120, ..simulation }.run_mods(&[(&ToolGuard, config)]);
        let tools = parse_tools(&[json!({"name": "delete"})]).unwrap();
        let mut parser = AnswerParser::new(AnswerFormat { tools, ..(*view.answer_format).clone() }.into());
        parser.push(&result.text);
        prop_assert!(parser.message().calls.iter().all(|call| call.name != "delete"), "{:?}", result);
        prop_assert_eq!(result.retracted, 0);
    }
}
