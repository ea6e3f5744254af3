//! Tests of the schemas of functions and answers, in every format of calls.

use super::{END, answer_format, constraint, follow, formats, read, vocabulary, walk};
use crate::model::chat::answer::{AnswerFormat, ToolDefinition};
use crate::model::chat::family::ModelFamily;
use crate::model::chat::pattern::Placeholder;
use crate::model::chat::syntax::{AnswerSyntax, CallShape};
use crate::model::chat::tools::{self, ToolChoice};
use crate::model::grammar::{Constraint, GrammarCompiler, GrammarSource};
use serde_json::{Value, json};
use std::sync::Arc;

/// Returns the format of one call of the function `set`.
fn format_with(syntax: &AnswerSyntax, parameters: &Value, strict: bool) -> AnswerFormat {
    let tools = vec![ToolDefinition { name: "set".into(), parameters: parameters.clone(), strict }];
    AnswerFormat { tools, single: true, ..answer_format(syntax) }
}

/// Returns the arguments of required calls that are generated with different draws.
fn arguments(syntax: &AnswerSyntax, parameters: &Value, strict: bool) -> Vec<Value> {
    let answer_format = format_with(syntax, parameters, strict);
    let vocabulary = vocabulary(&[]);
    let constraint = constraint(&answer_format, &ToolChoice::Required, None, false, &vocabulary).unwrap();
    (0..4u16)
        .map(|draw| {
            let text = walk(&constraint, &vocabulary, &[draw * 7; 30]);
            let message = read(&answer_format, &text);
            assert_eq!(message.calls.len(), 1, "{parameters} {text}");
            serde_json::from_str(&message.calls[0].arguments).unwrap_or_else(|_| panic!("{parameters} {text}"))
        })
        .collect()
}

/// Returns the field and the message of a constraint's error.
fn error(constraint: &Constraint) -> Option<(String, String)> {
    let error = GrammarCompiler::new(vocabulary(&[])).start_matcher(constraint).err()?;
    let (field, error) = constraint.locate_error(error);
    Some((field.to_owned(), error.to_string()))
}

/// Returns the message of the error for a required call of a strict function.
fn rejection(syntax: &AnswerSyntax, parameters: &Value) -> Option<String> {
    let answer_format = format_with(syntax, parameters, true);
    match tools::constraint(&answer_format, &ToolChoice::Required, None, false, &vocabulary(&[])) {
        Ok(constraint) => error(&constraint?).map(|(_, message)| message),
        Err(error) => Some(error.to_string()),
    }
}

fn writes_json(syntax: &AnswerSyntax) -> bool {
    !matches!(syntax.calls[0].shape, CallShape::Tagged(_) | CallShape::Braces { .. } | CallShape::Python)
}

fn required(syntax: &AnswerSyntax, parameters: &Value, strict: bool) -> Constraint {
    let answer_format = format_with(syntax, parameters, strict);
    constraint(&answer_format, &ToolChoice::Required, None, false, &vocabulary(&[])).unwrap()
}

#[test]
fn arguments_follow_references_and_combinations() {
    let city = json!({"properties": {"city": {"enum": ["Ulm", "Bern"]}}, "required": ["city"]});
    let day = json!({"properties": {"day": {"enum": [1, 2]}}, "required": ["day"]});
    for (parameters, expected) in [
        (json!({"$ref": "#/$defs/Q", "$defs": {"Q": city}}), vec![vec!["city"]]),
        (json!({"allOf": [city, {"$ref": "#/$defs/D"}], "$defs": {"D": day}}), vec![vec!["city", "day"]]),
        (
            json!({"type": "object", "anyOf": [city, {"$ref": "#/$defs/D"}], "$defs": {"D": day}}),
            vec![vec!["city"], vec!["day"]],
        ),
    ] {
        for syntax in formats() {
            for arguments in arguments(&syntax, &parameters, true) {
                let names: Vec<&str> = arguments.as_object().unwrap().keys().map(String::as_str).collect();
                // The components of `allOf` permit other members in JSON.
                assert!(expected.iter().any(|keys| names.starts_with(keys)), "{arguments}");
                assert!(arguments["city"].is_string() || arguments["day"].is_u64(), "{arguments}");
            }
        }
    }
}

#[test]
fn references_outside_definitions_point_to_the_same_schema() {
    let child = json!({"anyOf": [{"$ref": "#"}, {"$ref": "#/properties/b~1%63"}, {"type": "null"}]});
    let properties = json!({"a": {"$ref": "#/properties/b~1%63"}, "b/c": {"const": {"$ref": "#"}}, "child": child});
    let parameters = json!({"$id": "https://example.org/x", "properties": properties, "required": ["a"]});
    let value = "{\"$ref\":\"#\"}";
    let coder = |arguments: &str| format!("<tool_call>\n<function=set>\n{arguments}</function>\n</tool_call>");
    let tagged = |key: &str, value: &str| format!("<parameter={key}>\n{value}\n</parameter>\n");
    let vocabulary = vocabulary(&[]);
    for (child, fits) in [
        ("null".to_owned(), true),
        (value.to_owned(), true),
        (format!("{{\"a\":{value}}}"), true),
        (format!("{{\"a\":{value},\"child\":{{\"a\":{value},\"child\":null}}}}"), true),
        ("{\"a\":null}".to_owned(), false),
        ("{\"name\":\"set\"}".to_owned(), false),
    ] {
        let call = coder(&(tagged("a", value) + &tagged("child", &child)));
        let constraint = required(&ModelFamily::QwenCoder.syntax(), &parameters, true);
        assert_eq!(follow(&constraint, &vocabulary, &[&call]).0, fits, "{call}");
        let call = format!("{{\"name\":\"set\",\"parameters\":{{\"a\":{value},\"child\":{child}}}}}");
        let answer_format = format_with(&ModelFamily::Llama3.syntax(), &parameters, true);
        let auto = self::constraint(&answer_format, &ToolChoice::Auto, None, false, &vocabulary).unwrap();
        assert_eq!(follow(&auto, &vocabulary, &[&call]).0, fits, "{call}");
    }
}

#[test]
fn references_to_nested_schemas_copy_each_schema_once() {
    let mut nested = json!({"const": "innermost"});
    let mut references = vec![json!({"$ref": "#/$defs/%61"}), json!({"type": "null"})];
    for level in 0..20 {
        nested = json!({"type": "object", "properties": {"a": nested}, "required": ["a"]});
        references.push(json!({"$ref": format!("#/$defs/a{}", "/properties/a".repeat(level))}));
    }
    let parameters = json!({"properties": {"x": {"anyOf": references}}, "required": ["x"], "$defs": {"a": nested}});
    let constraint = required(&ModelFamily::QwenCoder.syntax(), &parameters, true);
    let GrammarSource::Lark(text) = &constraint.source else { panic!("the grammar is Lark") };
    assert_eq!(text.matches("innermost").count(), 1, "{text}");
    for (value, fits) in [("{\"a\":\"innermost\"}", true), ("null", true), ("{\"a\":null}", false)] {
        let call =
            format!("<tool_call>\n<function=set>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>");
        assert_eq!(follow(&constraint, &vocabulary(&[]), &[&call]).0, fits, "{call}");
    }
}

#[test]
fn unresolved_references_of_values_are_rejected() {
    let (number, anchored) = (json!({"type": "integer"}), json!({"$anchor": "city", "type": "string"}));
    for (reference, is_resolved) in
        [("#/$defs/C", true), ("#city", true), ("#/$defs/0", false), ("#/items", false), ("https://example.org", false)]
    {
        let properties = json!({"a": {"$ref": reference}, "b": number, "c": {"$ref": "#/$defs/C"}});
        let parameters = json!({"properties": properties, "required": ["a"], "$defs": {"C": anchored}});
        for syntax in formats().iter().filter(|syntax| !writes_json(syntax)) {
            let message = rejection(syntax, &parameters);
            let names_reference = |message: &String| message.contains(&format!("got \"{reference}\""));
            assert_eq!(message.as_ref().map(names_reference), (!is_resolved).then_some(true), "{message:?}");
        }
    }
}

#[test]
fn work_ends_at_the_first_rejected_reference() {
    let property = |number: usize| (format!("k{number}"), json!({"items": {"$ref": "#/$defs/b"}, "$ref": "#/x"}));
    let properties: serde_json::Map<String, Value> = (0..1000).map(property).collect();
    let forms = vec![json!({}); 32];
    let parameters = json!({"properties": properties, "anyOf": forms, "$defs": {"b": {"enum": vec![0; 50_000]}}});
    let start = std::time::Instant::now();
    let message = rejection(&ModelFamily::QwenCoder.syntax(), &parameters).unwrap();
    assert!(message.contains("got \"#/x\""), "{message}");
    assert!(start.elapsed() < std::time::Duration::from_mins(1), "{:?}", start.elapsed());
}

#[test]
fn arguments_have_additional_members() {
    let parameters = json!({"additionalProperties": {"enum": ["a", "b"]}, "minProperties": 1, "maxProperties": 2});
    for syntax in formats() {
        if matches!(&syntax.calls[0].shape, CallShape::Tagged(tags) if tags.after_value.contains(Placeholder::Key.mark()))
        {
            continue;
        }
        for arguments in arguments(&syntax, &parameters, true) {
            let members = arguments.as_object().unwrap();
            assert!(!members.is_empty() && members.values().all(|value| value == "a" || value == "b"), "{arguments}");
        }
    }
    let vocabulary = vocabulary(&[]);
    let parameters = json!({"type": "object", "additionalProperties": {"type": "string"}});
    let syntax = ModelFamily::QwenCoder.syntax();
    let text = "<tool_call>\n<function=set>\n<parameter=X-Id>\n123\n</parameter>\n</function>\n</tool_call>";
    assert!(follow(&required(&syntax, &parameters, false), &vocabulary, &[text]).0);
    let message = read(&format_with(&syntax, &parameters, false), text);
    assert_eq!(message.calls[0].arguments, "{\"X-Id\": \"123\"}");
}

#[test]
fn restricted_text_of_strict_function_is_generated() {
    let parameters = json!({
        "type": "object",
        "properties": {"code": {"type": "string", "pattern": "^[0-9]{3}$"}, "day": {"type": "string", "format": "date"}},
        "required": ["code", "day"],
        "additionalProperties": false,
    });
    for syntax in formats() {
        for arguments in arguments(&syntax, &parameters, true) {
            let (code, day) = (arguments["code"].as_str().unwrap(), arguments["day"].as_str().unwrap());
            assert!(code.len() == 3 && code.bytes().all(|byte| byte.is_ascii_digit()), "{arguments}");
            assert!(day.len() == 10 && day.split('-').count() == 3, "{arguments}");
        }
    }
}

#[test]
fn arguments_are_an_object() {
    for (parameters, expected) in [
        (json!({}), json!({})),
        (Value::Null, json!({})),
        (json!({"properties": {"a": {"const": 1}}, "required": ["a"]}), json!({"a": 1})),
        (json!({"type": ["object", "null"], "properties": {"a": {"const": 1}}, "required": ["a"]}), json!({"a": 1})),
    ] {
        for syntax in formats() {
            for strict in [false, true] {
                for arguments in arguments(&syntax, &parameters, strict) {
                    assert_eq!(arguments, expected, "{parameters}");
                }
            }
        }
    }
}

#[test]
fn unsupported_keywords_are_rejected_only_in_strict_functions() {
    for property in [
        json!({"type": "array", "uniqueItems": true, "items": {"type": "string"}}),
        json!({"type": "object", "propertyNames": {"maxLength": 3}}),
        json!({"not": {"type": "null"}}),
    ] {
        let inner = json!({"type": "object", "properties": {"set": property}, "required": ["set"]});
        for parameters in [inner, json!({"type": "object", "properties": {"set": {"type": "null"}}, "not": {}})] {
            for syntax in formats() {
                assert_eq!(error(&required(&syntax, &parameters, false)), None, "{parameters}");
                let message = rejection(&syntax, &parameters).unwrap_or_else(|| panic!("{parameters}"));
                let reason = message.strip_prefix("the parameters of the function 'set': ").unwrap();
                assert!(reason.starts_with("Unimplemented keys") || reason.contains("` is not supported"), "{message}");
            }
        }
    }
    // These are not errors in any function.
    let (object, number) = (json!({"type": "object", "properties": {"a": {}}}), json!({"type": "integer"}));
    for property in [
        json!({"type": "string", "format": "password"}),
        json!({"type": "string", "format": "uri-reference"}),
        json!({"oneOf": [object, {"type": "object", "properties": {"b": number}}]}),
    ] {
        let parameters = json!({"type": "object", "properties": {"set": property}, "required": ["set"]});
        for syntax in formats() {
            assert_eq!(error(&required(&syntax, &parameters, true)), None, "{parameters}");
        }
    }
}

#[test]
fn members_that_no_grammar_enforces_are_rejected_only_in_strict_functions() {
    let number = json!({"type": "integer"});
    let many: Vec<Value> = (0..101).map(|_| json!({"properties": {"a": number}})).collect();
    for (parameters, reason) in [
        (json!({"$ref": "#city", "$defs": {"C": {"$anchor": "city", "properties": {"a": number}}}}), "got \"#city\""),
        (
            json!({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"a": number, "b": number},
                   "required": ["a", "b"], "dependentRequired": {"a": ["b"]}}),
            "`dependentRequired` is not supported",
        ),
        (json!({"allOf": many}), "must not combine more than 100 schemas"),
        (json!({"patternProperties": {"^x": number}}), "`patternProperties` is not supported"),
        (json!({"properties": {"a": number, "b": number}, "minProperties": 1}), "`minProperties` is not supported"),
        (json!({"properties": {"a": number, "b": number}, "maxProperties": 1}), "`maxProperties` is not supported"),
    ] {
        for syntax in formats().iter().filter(|syntax| !writes_json(syntax)) {
            let message = rejection(syntax, &parameters).unwrap_or_else(|| panic!("{parameters}"));
            assert!(message.contains(reason), "{message}");
            for arguments in arguments(syntax, &parameters, false) {
                assert!(arguments.is_object(), "{arguments}");
            }
        }
    }
    let listed: serde_json::Map<_, _> = (0..101).map(|index| (format!("p{index}"), number.clone())).collect();
    let closed = json!({"properties": {"a": number, "b": number}, "required": ["a"], "additionalProperties": false,
                        "minProperties": 1, "maxProperties": 2});
    for syntax in formats().iter().filter(|syntax| !writes_json(syntax)) {
        assert_eq!(rejection(syntax, &closed), None);
        assert_eq!(rejection(syntax, &json!({"properties": listed})), None);
    }
}

#[test]
fn bare_calls_follow_prepared_schemas() {
    let parameters = json!({"properties": {"a": {"const": 1}}, "required": ["a"], "$defs": {}});
    let answer_format = format_with(&ModelFamily::Llama3.syntax(), &parameters, true);
    let vocabulary = vocabulary(&[]);
    let auto = constraint(&answer_format, &ToolChoice::Auto, None, false, &vocabulary).unwrap();
    assert!(follow(&auto, &vocabulary, &["{\"name\":\"set\", \"parameters\": {\"a\":\n 1}}"]).0);
    for arguments in ["{\"a\": 1, \"b\": 2}", "5"] {
        let call = format!("{{\"name\": \"set\", \"parameters\": {arguments}}}");
        assert!(!follow(&auto, &vocabulary, &[&call]).0, "{call}");
    }
}

#[test]
fn error_names_the_field_of_the_schema() {
    let vocabulary = vocabulary(&[]);
    for syntax in [ModelFamily::Hermes.syntax(), ModelFamily::Harmony.syntax()] {
        let either = |schema: Value, parameters: Value| {
            let form = Constraint::new("response_format", GrammarSource::JsonSchema(schema));
            let answer_format = format_with(&syntax, &parameters, true);
            constraint(&answer_format, &ToolChoice::Auto, Some(&form), false, &vocabulary).unwrap()
        };
        let (field, message) = error(&either(json!({"type": "int"}), json!({"type": "object"}))).unwrap();
        assert_eq!((field.as_str(), message.as_str()), ("response_format", "Invalid type: int"));
        let (field, message) = error(&either(json!([1]), json!({"type": "object"}))).unwrap();
        assert_eq!(field, "response_format", "{message}");
        let wrong = json!({"properties": {"a": {"type": "int"}}, "required": ["a"]});
        let (field, message) = error(&either(json!({"type": "null"}), wrong)).unwrap();
        assert_eq!(
            (field.as_str(), message.as_str()),
            ("tools", "the parameters of the function 'set': Invalid type: int")
        );
        let password = json!({"type": "string", "format": "password"});
        assert_eq!(error(&either(password.clone(), json!({"properties": {"a": password}}))), None);
    }
}

#[test]
fn answer_is_closed_like_without_tools() {
    let schema = json!({"type": "object", "properties": {"ok": {"const": 1}}, "required": ["ok"]});
    let form = Constraint::new("response_format", GrammarSource::JsonSchema(schema));
    let vocabulary = vocabulary(&[]);
    let answer_format = answer_format(&ModelFamily::Hermes.syntax());
    let either = constraint(&answer_format, &ToolChoice::Auto, Some(&form), false, &vocabulary).unwrap();
    assert!(follow(&either, &vocabulary, &["{\"ok\": 1}"]).0);
    assert!(!follow(&either, &vocabulary, &["{\"ok\": 1, \"no\": 2}"]).0);
    let mut matcher = GrammarCompiler::new(Arc::clone(&vocabulary)).start_matcher(&either).unwrap();
    assert!(!matcher.mask().unwrap().unwrap().is_allowed(END as u32));
}
