//! Tests of calls with arguments in tags.

use super::{answer_format, apply, calls, read_in};
use crate::model::chat::answer::{AnswerFormat, AnswerMessage, AnswerParser, ToolDefinition};
use crate::model::chat::family::ModelFamily;
use crate::model::chat::pattern::Placeholder;
use crate::model::chat::syntax::{AnswerSyntax, CallForm, CallShape, Tags};
use serde_json::{Value, json};
use std::sync::Arc;

const FAMILIES: [ModelFamily; 2] = [ModelFamily::QwenCoder, ModelFamily::Glm45];

/// Returns the format for the tool `add`, which has the argument `value` with this schema.
fn format_with(family: ModelFamily, schema: &Value) -> AnswerFormat {
    let parameters = json!({
        "type": "object",
        "properties": {"value": schema},
        "$defs": {"Name": {"type": "string"}, "Unit": {"enum": ["C", "F"], "type": "string"}},
    });
    let tools = vec![ToolDefinition { name: "add".into(), parameters, strict: false }];
    AnswerFormat { tools, ..answer_format(family) }
}

/// Returns a call up to the end of the argument's value, and the rest of the call.
fn call_with(family: ModelFamily, value: &str) -> (String, &'static str) {
    match family {
        ModelFamily::QwenCoder => (
            format!("<tool_call>\n<function=add>\n<parameter=value>\n{value}"),
            "\n</parameter>\n</function>\n</tool_call>",
        ),
        _ => (format!("<tool_call>add\n<arg_key>value</arg_key>\n<arg_value>{value}"), "</arg_value>\n</tool_call>"),
    }
}

#[test]
fn text_argument_has_type_of_its_schema() {
    let optional = json!({"anyOf": [{"type": "string"}, {"type": "null"}], "default": null});
    let nullable = json!({"type": ["string", "null"]});
    for (schema, written, value) in [
        (&json!({"type": "string"}), "5551234", json!("5551234")),
        (&json!({"type": "string"}), "\"a\"", json!("\"a\"")),
        (&json!({"type": "string"}), "null", json!("null")),
        (&optional, "5551234", json!("5551234")),
        (&optional, "True", json!("True")),
        (&optional, "{\"a\": 1}", json!("{\"a\": 1}")),
        (&optional, "\"a\\nb\"", json!("a\nb")),
        (&optional, "\"null\"", json!("null")),
        (&optional, "null", Value::Null),
        (&nullable, "[1]", json!("[1]")),
        (&nullable, "null", Value::Null),
        (&json!({"$ref": "#/$defs/Name"}), "1e3", json!("1e3")),
        (&json!({"$ref": "#/$defs/Unit"}), "null", json!("null")),
        (&json!({"allOf": [{"$ref": "#/$defs/Name"}]}), "\"1\"", json!("1")),
        (&json!({"enum": ["1", "2"]}), "1", json!("1")),
        (&json!({"enum": ["1", "2"]}), "\"1\"", json!("1")),
        (&json!({"const": "5"}), "5", json!("5")),
        (&json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}), "5", json!(5)),
        (&json!({"type": "integer"}), "5", json!(5)),
        (&json!({}), "True", json!(true)),
        (&json!({}), "Zürich", json!("Zürich")),
    ] {
        for family in FAMILIES {
            let (start, end) = call_with(family, written);
            let text = format!("{start}{end}");
            let answer_format = format_with(family, schema);
            let expected = [("add", json!({"value": value}))];
            let message = read_in(&answer_format, [text.as_str()], false);
            assert_eq!(calls(&message), expected, "{family:?} {schema} {written}");
            let each: Vec<String> = text.chars().map(String::from).collect();
            assert_eq!(
                read_in(&answer_format, each.iter().map(String::as_str), false),
                message,
                "{family:?} {written}"
            );
        }
    }
}

#[test]
fn argument_has_type_of_referenced_additional_or_restricted_schema() {
    let text = json!({"type": "string"});
    let object = |value: &Value| json!({"properties": {"value": value}});
    let code = json!({"type": "string", "pattern": "^[0-9]+$"});
    for (parameters, strict, written, value) in [
        (json!({"additionalProperties": text}), false, "5", json!("5")),
        (json!({"$ref": "#/$defs/Q", "$defs": {"Q": object(&text)}}), false, "5", json!("5")),
        (json!({"allOf": [object(&text), {"properties": {"other": {}}}]}), false, "5", json!("5")),
        (json!({"anyOf": [object(&text), object(&text)]}), false, "\"5\"", json!("\"5\"")),
        (json!({"anyOf": [object(&text), object(&json!({"type": "integer"}))]}), false, "5", json!(5)),
        (json!({"anyOf": [object(&text), object(&json!({"type": "null"}))]}), false, "5", json!("5")),
        (json!({"allOf": [object(&text), object(&json!({"type": ["string", "integer"]}))]}), false, "5", json!("5")),
        (json!({"$ref": "#/$defs/Q%3CR%3E", "$defs": {"Q<R>": object(&text)}}), false, "5", json!("5")),
        (object(&code), false, "\"5\"", json!("\"5\"")),
        (object(&code), true, "\"5\"", json!("5")),
        (object(&text), true, "\"5\"", json!("\"5\"")),
    ] {
        for family in FAMILIES {
            let (start, end) = call_with(family, written);
            let tools = vec![ToolDefinition { name: "add".into(), parameters: parameters.clone(), strict }];
            let message =
                read_in(&AnswerFormat { tools, ..answer_format(family) }, [format!("{start}{end}").as_str()], false);
            assert_eq!(calls(&message), [("add", json!({"value": value}))], "{family:?} {parameters} {written}");
        }
    }
}

#[test]
fn text_argument_that_was_cut_off_keeps_quotes() {
    let text = json!({"type": "string"});
    let optional = json!({"anyOf": [{"type": "string"}, {"type": "null"}]});
    for (schema, written, arguments) in [
        (&text, "say \"hi\"", r#"{"value": "say \"hi\""#),
        (&text, "\"\"", r#"{"value": "\"\""#),
        (&text, "C:\\", r#"{"value": "C:\\"#),
        (&text, "", "{\"value\": \""),
        (&optional, "say \"hi\"", r#"{"value": "say \"hi\""#),
        (&optional, "\"say \\\"hi\\\"", r#"{"value": "say \"hi\""#),
        (&optional, "\"hi\"", r#"{"value": "hi""#),
        (&optional, "nul", "{\"value\": nul"),
        (&optional, "555", "{\"value\": \"555"),
        (&json!({"type": "integer"}), "55", "{\"value\": 55"),
        (&text, "<![CDATA[a \"b\" < c", r#"{"value": "a \"b\" < c"#),
        (&text, "<![CDATA[a]", "{\"value\": \"a"),
        (&text, "<![CDATA[a]]", "{\"value\": \"a"),
        (&text, "<![CDATA[a]]>", "{\"value\": \"a"),
        (&text, "<![CDATA[a]]]>", "{\"value\": \"a]"),
        (&text, "<![CDATA[", "{\"value\": \""),
        (&text, "<![CD", "{\"value\": \""),
        (&optional, "<![CDATA[nul", "{\"value\": \"nul"),
        (&json!({"type": "integer"}), "<![CDATA[55", "{\"value\": \"55"),
        (&json!({"type": "integer"}), "<![CDA", "{\"value\": "),
    ] {
        for family in FAMILIES {
            let (start, end) = call_with(family, written);
            // All starts of the end marker, `</parameter>` or `</arg_value>`.
            let close = end.find('>').unwrap();
            for len in 0..=close {
                let cut = format!("{start}{}", &end[..len]);
                let message = read_in(&format_with(family, schema), [cut.as_str()], true);
                let call = &message.calls[0];
                assert_eq!((call.arguments.as_str(), call.complete), (arguments, false), "{family:?} {cut}");
            }
        }
    }
}

#[test]
fn arguments_that_were_cut_off_are_prefix_of_complete_arguments() {
    let optional = json!({"anyOf": [{"type": "string"}, {"type": "null"}]});
    for (schema, written) in [
        (&json!({"type": "string"}), "a \"b\" \\ </par\n\"c\""),
        (&json!({"$ref": "#/$defs/Name"}), "a \"b\" \\ </par\n\"c\""),
        (&optional, "5551234 <\n\nx"),
        (&optional, "\"a \\\"b\\\" \\n\\u00e9 \\ud83d\\ude00\""),
        (&optional, "null"),
        (&json!({"type": "string"}), "<![CDATA[a < \"b\"]]>"),
        (&json!({"type": "integer"}), "<![CDATA[5]]>"),
    ] {
        for family in FAMILIES {
            let (start, end) = call_with(family, written);
            let (text, answer_format) = (format!("{start}{end}"), Arc::new(format_with(family, schema)));
            let complete = read_in(&answer_format, [text.as_str()], false);
            // The tags after the value may also be incomplete.
            for at in start.len() - written.len()..text.len() {
                let mut parser = AnswerParser::new(Arc::clone(&answer_format));
                let mut client = AnswerMessage::default();
                apply(&mut client, parser.push(&text[..at]));
                let sent = client.calls.first().map_or_else(String::new, |call| call.arguments.clone());
                apply(&mut client, parser.finish_cut());
                let cut = client.calls.first().map_or_else(String::new, |call| call.arguments.clone());
                assert!(cut.starts_with(&sent), "{family:?} {at} {sent} {cut}");
                assert!(complete.calls[0].arguments.starts_with(&cut), "{family:?} {at} {cut} {complete:?}");
            }
        }
    }
}

/// Returns the format of calls whose objects and lists are also in tags, for a tool with the argument `value`.
fn element_format(schema: &Value, lines: bool) -> AnswerFormat {
    let tags = Tags {
        after_name: ">".into(),
        before_key: "<".into(),
        middle: ">".into(),
        after_value: format!("</{}>", Placeholder::Key.mark()),
        type_names: Vec::new(),
        lines,
    };
    let form = CallForm::new("<call name=", CallShape::Tagged(tags), "</call>", "");
    let syntax = AnswerSyntax { calls: vec![form], ..ModelFamily::Hermes.syntax() };
    AnswerFormat { syntax: syntax.into(), ..format_with(ModelFamily::Hermes, schema) }
}

/// Returns the argument of a call in [`element_format`].
fn element_value(schema: &Value, written: &str) -> Value {
    let text = format!("<call name=add><value>{written}</value></call>");
    let message = read_in(&element_format(schema, false), [text.as_str()], false);
    let calls = calls(&message);
    assert_eq!(calls.len(), 1, "{message:?}");
    calls[0].1["value"].clone()
}

#[test]
fn unparsed_text_contains_tags() {
    for family in FAMILIES {
        for tag in ["</parameter>", "</arg_value>", "<value>", "]]"] {
            let text = format!("a {tag} b");
            let (start, end) = call_with(family, &format!("<![CDATA[{text}]]>"));
            let each: Vec<String> = format!("{start}{end}").chars().map(String::from).collect();
            let message = read_in(&format_with(family, &json!({})), each.iter().map(String::as_str), false);
            assert_eq!(calls(&message), [("add", json!({"value": text}))], "{family:?}");
        }
    }
    for tag in ["<value>", "</value>", "<city>", "</city>"] {
        let unparsed = format!("<![CDATA[a {tag} b]]>");
        let text = json!(format!("a {tag} b"));
        assert_eq!(element_value(&json!({}), &unparsed), text);
        if tag.contains("city") {
            assert_eq!(element_value(&json!({}), &format!("<city>{unparsed}</city>")), json!({"city": text}));
            let lines = format!("<call name=add><value>\n<city>\n{unparsed}\n</city>\n</value></call>");
            let message = read_in(&element_format(&json!({}), true), [lines.as_str()], false);
            assert_eq!(calls(&message), [("add", json!({"value": {"city": text}}))]);
        }
    }
}

#[test]
fn elements_have_types_of_referenced_schemas() {
    let address = json!({"type": "object", "properties": {
        "zip": {"$ref": "#/$defs/Name"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/Name"}},
        "next": {"anyOf": [{"$ref": "#/properties/value/$defs/address"}, {"type": "null"}]},
    }});
    // The definitions of `format_with` and one that refers to itself.
    let referenced = json!({"$ref": "#/properties/value/$defs/address", "$defs": {"address": address}});
    let inner = "<zip>1234</zip><tags><item>1</item><item>true</item></tags>";
    let value = json!({"zip": "1234", "tags": ["1", "true"]});
    assert_eq!(element_value(&address, inner), value);
    assert_eq!(element_value(&referenced, inner), value);
    assert_eq!(element_value(&json!({"allOf": [address]}), inner), value);
    let nested = format!("<zip>5</zip><next>{inner}</next>");
    assert_eq!(element_value(&referenced, &nested), json!({"zip": "5", "next": value}));
    assert_eq!(element_value(&json!({}), inner), json!({"zip": 1234, "tags": [1, true]}));
    // What was written decides between alternatives.
    let (list, object) = (json!({"type": "array", "items": {}}), json!({"type": "object"}));
    for alternatives in [json!([list, object]), json!([object, list])] {
        let schema = json!({"anyOf": alternatives});
        assert_eq!(element_value(&schema, "<a>1</a><b>2</b>"), json!({"a": 1, "b": 2}));
        assert_eq!(element_value(&schema, "<item>1</item><item>2</item>"), json!([1, 2]));
    }
    // A text is no list of elements.
    let code = json!({"type": "object", "properties": {"html": {"type": "string"}}});
    assert_eq!(element_value(&code, "<html><b>x</b></html>"), json!({"html": "<b>x</b>"}));
    let endless = json!({"$ref": "#/properties/value"});
    assert_eq!(element_value(&endless, "<a>1</a>"), json!({"a": 1}));
}

#[test]
fn malformed_elements_are_parsed_in_linear_time() {
    // Each level has text after its element, so it is no object.
    let written = (0..50).fold("x".to_owned(), |inner, level| format!("<k{level}>{inner}</k{level}>y"));
    assert_eq!(element_value(&json!({}), &written), json!(written));
}
