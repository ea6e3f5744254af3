use super::{ToolChoice, after_reasoning};
use crate::model::chat::answer::{AnswerFormat, AnswerMessage, AnswerParser, ToolDefinition};
use crate::model::chat::family::ModelFamily;
use crate::model::chat::syntax::AnswerSyntax;
use crate::model::grammar::{Constraint, GrammarCompiler, GrammarError, GrammarSource, MAX_SOURCE_BYTES};
use crate::model::{SpecialTokens, Vocabulary};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use std::sync::Arc;

mod schemas;

const END: i32 = 256;

/// Returns a vocabulary with one token per byte, and one for each of these literals.
fn vocabulary(literals: &[&str]) -> Arc<Vocabulary> {
    let literals: Vec<String> = std::iter::once(&"<end>").chain(literals).map(|text| (*text).to_owned()).collect();
    let bytes = (0..=255u8).map(|byte| Box::from([byte]));
    let pieces = bytes.chain(literals.iter().map(|literal| Box::from(literal.as_bytes()))).collect();
    let control = (0..256 + literals.len()).map(|token| token >= 256).collect();
    let encode = move |text: &str, _, _| match literals.iter().position(|literal| *literal == text) {
        Some(at) => vec![256 + at as i32],
        None => text.bytes().map(i32::from).collect(),
    };
    Arc::new(Vocabulary::new(pieces, control, vec![END], SpecialTokens::default(), encode))
}

fn answer_format(format: &AnswerSyntax) -> AnswerFormat {
    let tool = |name: &str, parameters: Value| ToolDefinition { name: name.into(), parameters, strict: true };
    AnswerFormat {
        syntax: format.clone().into(),
        tools: vec![
            tool(
                "weather",
                json!({"type": "object", "properties": {"city": {"enum": ["Ulm", "Bern"]}, "dry": {"type": "boolean"}},
                       "required": ["city", "dry"], "additionalProperties": false}),
            ),
            tool(
                "add",
                json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/digit"}}, "required": ["a"],
                       "additionalProperties": false, "$defs": {"digit": {"enum": [1, 2]}}}),
            ),
        ],
        separates_reasoning: true,
        thinking: false,
        single: false,
    }
}

/// Returns the constraint of a choice whose schemas are supported.
fn constraint(
    answer_format: &AnswerFormat,
    choice: &ToolChoice,
    answer: Option<&Constraint>,
    may_think: bool,
    vocabulary: &Vocabulary,
) -> Option<Constraint> {
    super::constraint(answer_format, choice, answer, may_think, vocabulary).unwrap()
}

/// Generates text under a constraint until it is complete and all `draws` are used. Each draw selects a permitted
/// token.
fn walk(constraint: &Constraint, vocabulary: &Arc<Vocabulary>, draws: &[u16]) -> String {
    let grammars = GrammarCompiler::new(Arc::clone(vocabulary));
    let mut matcher = grammars.start_matcher(constraint).unwrap_or_else(|error| panic!("{error}\n{constraint:?}"));
    let mut text = Vec::new();
    for step in 0..4000usize {
        let mask = matcher.mask().unwrap().unwrap();
        if mask.is_allowed(END as u32) && step >= draws.len() {
            break;
        }
        let allowed: Vec<i32> =
            (0..vocabulary.len() as i32).filter(|&token| token != END && mask.is_allowed(token as u32)).collect();
        if allowed.is_empty() {
            break;
        }
        let draw = draws.get(step).copied().map_or(step * 7, usize::from);
        let token = allowed[draw % allowed.len()];
        let piece = vocabulary.piece(token);
        matcher.accept(token, piece);
        text.extend_from_slice(piece);
    }
    String::from_utf8_lossy(&text).into_owned()
}

fn read(answer_format: &AnswerFormat, text: &str) -> AnswerMessage {
    let mut parser = AnswerParser::new(Arc::new(answer_format.clone()));
    parser.push(text);
    parser.finish();
    parser.message().clone()
}

fn check(message: &AnswerMessage, text: &str) {
    assert!(!message.calls.is_empty() && message.content.trim().is_empty(), "{text}\n{message:?}");
    for call in &message.calls {
        let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| panic!("{text}"));
        match call.name.as_str() {
            "weather" => assert!(arguments["city"].is_string() && arguments["dry"].is_boolean(), "{text}"),
            "add" => assert!(arguments["a"] == 1 || arguments["a"] == 2, "{text}"),
            other => panic!("{other} in {text}"),
        }
    }
}

/// Returns the formats of every family, the older formats of two of them, and formats derived from templates.
fn formats() -> Vec<AnswerSyntax> {
    let families = [
        ModelFamily::Hermes,
        ModelFamily::QwenCoder,
        ModelFamily::Llama3,
        ModelFamily::Functionary,
        ModelFamily::Mistral,
        ModelFamily::Glm4,
        ModelFamily::Glm45,
        ModelFamily::DeepSeek,
        ModelFamily::Kimi,
        ModelFamily::CommandR,
        ModelFamily::Phi,
        ModelFamily::Nemotron,
        ModelFamily::Harmony,
        ModelFamily::Gemma,
        ModelFamily::Plain,
    ];
    let mut formats: Vec<AnswerSyntax> = families.iter().map(|family| family.syntax()).collect();
    formats.extend([AnswerSyntax::from_markers("[TOOL_CALLS]"), AnswerSyntax::from_markers("<｜tool▁calls▁begin｜>")]);
    formats.extend(crate::model::chat::derive::tests::formats().into_iter().map(|(_, format)| (*format).clone()));
    formats
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]

    /// Every answer sampled under the grammar parses as calls that follow the schemas, with the family's markers as
    /// tokens or as text.
    #[test]
    fn every_answer_under_the_grammar_is_a_call(draws: Vec<u16>, first in any::<bool>()) {
        for format in formats() {
            let answer_format = AnswerFormat { single: first, ..answer_format(&format) };
            for vocabulary in [vocabulary(&[]), vocabulary(&format.markers())] {
                let constraint = constraint(&answer_format, &ToolChoice::Required, None, false, &vocabulary).unwrap();
                let text = walk(&constraint, &vocabulary, &draws);
                let message = read(&answer_format, &text);
                check(&message, &text);
                prop_assert!(!first || message.calls.len() == 1);
            }
        }
    }
}

/// Returns the constraint for a required call of one tool.
fn required(format: &AnswerSyntax, parameters: Value, vocabulary: &Vocabulary) -> Constraint {
    let tools = vec![ToolDefinition { name: "set".into(), parameters, strict: true }];
    let answer_format = AnswerFormat { tools, ..answer_format(format) };
    constraint(&answer_format, &ToolChoice::Required, None, false, vocabulary).unwrap()
}

#[test]
fn grammar_contains_only_definitions_that_are_referenced() {
    let vocabulary = vocabulary(&[]);
    let numbers: Vec<Value> = (0..4000).map(Value::from).collect();
    let definitions = json!({
        "unused": {"enum": numbers},
        "level": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/list"}]},
        "list": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/level"}},
    });
    assert!(definitions.to_string().len() > 15_000);
    let mut properties: Map<String, Value> =
        (0..20).map(|index| (format!("flag_{index}"), json!({"type": "boolean"}))).collect();
    properties.insert("level".into(), json!({"$ref": "#/$defs/level"}));
    let parameters = json!({"type": "object", "properties": properties, "required": ["level"],
                            "additionalProperties": false, "$defs": definitions});
    for family in [ModelFamily::QwenCoder, ModelFamily::Glm45] {
        let constraint = required(&family.syntax(), parameters.clone(), &vocabulary);
        let GrammarSource::Lark(text) = &constraint.source else { panic!("the grammar is Lark") };
        assert!(!text.contains("3999") && text.contains("\"maxItems\":2"), "{family:?}: {text}");
        GrammarCompiler::new(Arc::clone(&vocabulary)).start_matcher(&constraint).unwrap();
    }
}

#[test]
fn grammar_that_is_too_long_is_rejected() {
    let vocabulary = vocabulary(&[]);
    let numbers: Vec<Value> = (0..4000).map(Value::from).collect();
    let properties: Map<String, Value> =
        (0..2000).map(|index| (format!("level_{index}"), json!({"$ref": "#/$defs/level"}))).collect();
    let parameters = json!({"type": "object", "properties": properties, "$defs": {"level": {"enum": numbers}}});
    let constraint = required(&ModelFamily::QwenCoder.syntax(), parameters, &vocabulary);
    let GrammarSource::Lark(text) = &constraint.source else { panic!("the grammar is Lark") };
    assert!(text.len() < 2 * MAX_SOURCE_BYTES, "{}", text.len());
    let error = GrammarCompiler::new(Arc::clone(&vocabulary)).start_matcher(&constraint).unwrap_err();
    assert!(matches!(error, GrammarError::TooLong { .. }), "{error}");
}

#[test]
fn named_function_is_called_once() {
    for format in formats() {
        let vocabulary = vocabulary(&format.markers());
        let answer_format = answer_format(&format);
        for (name, draw) in [("weather", 0), ("add", 1)] {
            let choice = ToolChoice::Function(name.into());
            let constraint = constraint(&answer_format, &choice, None, false, &vocabulary).unwrap();
            let message = read(&answer_format, &walk(&constraint, &vocabulary, &[draw; 9]));
            assert_eq!(message.calls.iter().map(|call| call.name.as_str()).collect::<Vec<_>>(), [name]);
        }
    }
}

#[test]
fn open_reasoning_precedes_the_call() {
    for vocabulary in [vocabulary(&[]), vocabulary(&["<think>", "</think>"])] {
        let answer_format = AnswerFormat { thinking: true, ..answer_format(&ModelFamily::Hermes.syntax()) };
        let constraint = constraint(&answer_format, &ToolChoice::Required, None, false, &vocabulary).unwrap();
        let grammars = GrammarCompiler::new(Arc::clone(&vocabulary));
        let mut matcher = grammars.start_matcher(&constraint).unwrap();
        let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
        let close = vocabulary.encode_markup("</think>");
        let text = "so it is <b>add</b>".bytes().map(i32::from).chain(close).chain(call.bytes().map(i32::from));
        for token in text {
            assert!(matcher.mask().unwrap().unwrap().is_allowed(token as u32), "{token}");
            matcher.accept(token, vocabulary.piece(token));
        }
        assert!(matcher.mask().unwrap().unwrap().is_allowed(END as u32));
    }
}

#[test]
fn auto_choice_constrains_only_strict_functions() {
    let vocabulary = vocabulary(&["<tool_call>"]);
    let mut answer_format = answer_format(&ModelFamily::Hermes.syntax());
    let auto = constraint(&answer_format, &ToolChoice::Auto, None, false, &vocabulary).unwrap();
    assert_eq!(auto.trigger.unwrap().tokens.len(), 1);
    assert_eq!(constraint(&answer_format, &ToolChoice::None, None, false, &vocabulary), None);
    for tool in &mut answer_format.tools {
        tool.strict = false;
    }
    assert_eq!(constraint(&answer_format, &ToolChoice::Auto, None, false, &vocabulary), None);
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]});
    let form = Constraint::new("response_format", GrammarSource::JsonSchema(schema));
    let either = constraint(&answer_format, &ToolChoice::Auto, Some(&form), false, &vocabulary).unwrap();
    let text = walk(&either, &vocabulary, &[0]);
    assert!(text.starts_with('{') || text.starts_with("<tool_call>"), "{text}");
}

/// Returns true if the matcher accepts all pieces, and true if the grammar is active after them.
fn follow(constraint: &Constraint, vocabulary: &Arc<Vocabulary>, pieces: &[&str]) -> (bool, bool) {
    let grammars = GrammarCompiler::new(Arc::clone(vocabulary));
    let mut matcher = grammars.start_matcher(constraint).unwrap_or_else(|error| panic!("{error}\n{constraint:?}"));
    let mut fits = true;
    for token in pieces.iter().flat_map(|piece| vocabulary.encode_markup(piece)) {
        let piece = vocabulary.piece(token);
        let allowed = matcher.mask().unwrap().is_none_or(|mask| mask.is_allowed(token as u32));
        fits &= allowed && matcher.permits(token, piece);
        matcher.accept(token, piece);
    }
    (fits, matcher.is_active())
}

#[test]
fn strict_function_constrains_bare_calls() {
    let channel = ["<|channel|>", "commentary to=functions.", "weather ", "<|constrain|>", "json", "<|message|>"];
    let header = ["<|start|>", "assistant to=functions.add", "<|channel|>", "commentary json", "<|message|>"];
    let with = |head: &[&'static str], rest: &'static str| [head, &[rest][..]].concat();
    for (family, taken, refused, text) in [
        (
            ModelFamily::Llama3,
            vec![
                vec!["{\"name\": \"weather\", \"parameters\": {\"city\": \"Ulm\", \"dry\": true}}"],
                vec!["\n{ \"type\": \"function\",\n \"name\" : \"add\", \"parameters\": {\"a\": 2}}"],
                vec!["<|python_tag|>", "{\"name\": \"add\", \"parameters\": {\"a\": 1}}"],
                vec![
                    "{\"name\": \"add\", \"parameters\": {\"a\": 1}};\n",
                    "{\"name\": \"weather\", \"parameters\": {\"city\": \"Bern\", \"dry\": true}}",
                ],
            ],
            vec!["{\"name\": \"add\", \"parameters\": {\"a\": 3}}"],
            vec!["{\"name\": \"Ann\", \"age\": 5}"],
        ),
        (
            ModelFamily::Glm4,
            vec![
                vec!["weather\n{\"city\": \"Bern\", \"dry\": false}"],
                vec!["<think>hm", "</think>", "\nadd\n{\"a\": 1}"],
                vec!["add\n{\"a\": 1}", "\nweather\n{\"city\": \"Bern\", \"dry\": false}"],
            ],
            vec!["add\n{\"b\": 1}"],
            vec!["weather is {"],
        ),
        (
            ModelFamily::Harmony,
            vec![with(&channel, "{\"city\": \"Ulm\", \"dry\": true}"), with(&header, "{\"a\": 1}")],
            with(&header, "{\"a\": 7}"),
            vec!["<|channel|>", "final", "<|message|>", "to=functions.add {"],
        ),
    ] {
        let format = family.syntax();
        let mut markers = format.markers();
        markers.retain(|marker| !marker.trim().is_empty());
        for vocabulary in [vocabulary(&[]), vocabulary(&markers)] {
            let answer_format = answer_format(&format);
            let auto = constraint(&answer_format, &ToolChoice::Auto, None, false, &vocabulary).unwrap();
            for call in &taken {
                assert_eq!(follow(&auto, &vocabulary, call), (true, true), "{family:?} {call:?}");
                let (text, message) = (call.concat(), read(&answer_format, &call.concat()));
                check(&message, &text);
                assert_eq!(message.calls.len(), if text.contains("add") && text.contains("weather") { 2 } else { 1 });
            }
            assert!(!follow(&auto, &vocabulary, &refused).0, "{family:?} {refused:?}");
            assert_eq!(follow(&auto, &vocabulary, &text), (true, false), "{family:?} {text:?}");
            assert!(read(&answer_format, &text.concat()).calls.is_empty());
        }
    }
}

#[test]
fn constraint_begins_after_the_reasoning() {
    let vocabulary = vocabulary(&[]);
    let mut answer_format = answer_format(&ModelFamily::Hermes.syntax());
    let form = Constraint::new("json_schema", GrammarSource::JsonObject);
    assert!(after_reasoning(form.clone(), &answer_format, true, &vocabulary).trigger.is_none());
    answer_format.thinking = true;
    assert_eq!(after_reasoning(form, &answer_format, true, &vocabulary).trigger.unwrap().texts, ["</think>"]);
}

#[test]
fn constraint_applies_to_the_final_channel() {
    let analysis = ["<|channel|>", "analysis", "<|message|>", "a { or b", "<|end|>", "<|start|>", "assistant"];
    let last = ["<|channel|>", "final", "<|message|>", "{\"ok\": true}"];
    let announced = ["<|channel|>", "final ", "<|constrain|>", "json", "<|message|>", "{\"ok\": true}"];
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                        "additionalProperties": false});
    let format = ModelFamily::Harmony.syntax();
    for vocabulary in [vocabulary(&[]), vocabulary(&format.markers())] {
        let answer_format = answer_format(&format);
        let form = Constraint::new("response_format", GrammarSource::JsonSchema(schema.clone()));
        let json = after_reasoning(form, &answer_format, true, &vocabulary);
        for answer in [[&analysis[..], &last].concat(), last.to_vec(), announced.to_vec()] {
            assert_eq!(follow(&json, &vocabulary, &answer), (true, true), "{answer:?}");
            assert_eq!(read(&answer_format, &answer.concat()).content, "{\"ok\": true}");
        }
        for answer in [vec!["{\"ok\": true}"], [&last[..3], &["no"]].concat()] {
            assert!(!follow(&json, &vocabulary, &answer).0, "{answer:?}");
        }
        let form = Constraint::new("response_format", GrammarSource::JsonSchema(schema.clone()));
        let at_once = after_reasoning(form, &answer_format, false, &vocabulary);
        assert!(!follow(&at_once, &vocabulary, &analysis).0 && follow(&at_once, &vocabulary, &last).0);
        let form = Constraint::new("response_format", GrammarSource::JsonSchema(schema.clone()));
        let either = constraint(&answer_format, &ToolChoice::Auto, Some(&form), true, &vocabulary).unwrap();
        assert!(follow(&either, &vocabulary, &[&analysis[..], &last].concat()).0);
        let regex = after_reasoning(
            Constraint::new("regex", GrammarSource::Regex("[0-9]+".into())),
            &answer_format,
            true,
            &vocabulary,
        );
        assert_eq!(follow(&regex, &vocabulary, &[&analysis[..], &last[..3], &["17"]].concat()), (true, true));
        assert!(!follow(&regex, &vocabulary, &[&analysis[..], &last].concat()).0);
    }
}
