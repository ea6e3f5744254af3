//! Grammar for required tool calls, in the format of the model's template.

use super::definitions::with_definitions;
use super::grammar::{GrammarWriter, REPEATED, with_bounded_whitespace};
use crate::model::chat::answer::ToolDefinition;
use crate::model::chat::pattern::{Pattern, PatternPart, Placeholder};
use crate::model::chat::syntax::{CallForm, CallShape, Tags};
use serde_json::{Map, Value, json};

/// Maximum nesting of values that are not written as JSON.
const MAX_DEPTH: usize = 12;

/// Format of values that are not JSON.
#[derive(Clone, Copy)]
enum ValueFormat<'a> {
    /// With strings in these quotes, and keys without quotes.
    Braces(&'a str),
    /// Each member in separate tags.
    Elements(&'a Tags),
}

impl GrammarWriter<'_> {
    /// Adds rules for the calls; returns the expression for one or several of them. `with_marker` is true if the
    /// grammar includes the marker before the calls.
    pub(super) fn add_calls(&mut self, tools: &[&ToolDefinition], several: bool, with_marker: bool) -> String {
        let form = self.answer_format.syntax.calls[0].clone();
        let (_, rest) = call_marker(&form);
        let (mut calls, mut first) = (Vec::new(), Vec::new());
        for (index, tool) in tools.iter().enumerate() {
            if self.is_full() {
                break;
            }
            let (call, body) = (format!("call_{index}"), format!("body_{index}"));
            let shape = self.add_shape(&call, tool, &form.shape);
            let after = self.pattern(form.after.parts(), &tool.name);
            self.add_rule(&body, &format!("{shape} {after}"));
            let before = self.pattern(form.before.parts(), &tool.name);
            self.add_rule(&call, &format!("{before} {body}"));
            if !with_marker && form.open.is_blank() {
                let rest = self.pattern(rest, &tool.name);
                self.add_rule(&format!("first_{index}"), &format!("{rest} {body}"));
                first.push(format!("first_{index}"));
            }
            calls.push(call);
        }
        self.add_rule("call", &calls.join(" | "));
        let mut one = "call".to_owned();
        if !first.is_empty() {
            self.add_rule("first", &first.join(" | "));
            "first".clone_into(&mut one);
        }
        let open = self.pattern(
            if with_marker {
                form.open.parts()
            } else if form.open.is_blank() {
                &[]
            } else {
                rest
            },
            "",
        );
        let close = self.pattern(form.close.parts(), "");
        let separator = self.pattern(form.separator.parts(), "");
        let more = if several { format!("({separator} call){REPEATED}") } else { String::new() };
        let (left, right) = if form.list { ("\"[\"", "\"]\"") } else { ("", "") };
        self.add_rule("calls", &format!("{open} {left} {one} {more} {right} {close}"));
        "calls".into()
    }

    /// Adds rules for the name and the arguments of a call, and returns the expression for them.
    fn add_shape(&mut self, rule: &str, tool: &ToolDefinition, shape: &CallShape) -> String {
        let named = |rest: &Pattern| [&[PatternPart::Placeholder(Placeholder::Name)], rest.parts()].concat();
        let name = Value::from(tool.name.as_str());
        let schema = parameters(tool);
        match shape {
            CallShape::Tagged(tags) => {
                let name = self.pattern(&named(&tags.after_name), &tool.name);
                let values = ValueFormat::Elements(tags);
                let members = self.add_members(rule, &schema, &schema, values, 0);
                return format!("{name} {members}");
            }
            CallShape::Braces { quote } => {
                let members = self.add_members(rule, &schema, &schema, ValueFormat::Braces(quote), 0);
                return format!("{name} \"{{\" {members} \"}}\"");
            }
            CallShape::Python => {
                let members = self.add_keyword_arguments(rule, &schema);
                return format!("{name} \"(\" {members} \")\"");
            }
            _ => {}
        }
        let arguments = format!("{rule}_arguments");
        self.add_rule(&arguments, &format!("%json {}", with_bounded_whitespace(&schema)));
        match shape {
            CallShape::Json(keys) => {
                let head = self.pattern(keys.head.parts(), &tool.name);
                let tail = self.pattern(keys.tail.parts(), &tool.name);
                format!("{head} {arguments} {tail}")
            }
            CallShape::Named { middle } => {
                let name = self.pattern(&named(middle), &tool.name);
                format!("{name} {arguments}")
            }
            CallShape::Channel => {
                let (channel, message) = (self.literal("<|channel|>"), self.literal("<|message|>"));
                let constrain = self.literal("<|constrain|>");
                let to = Value::from(format!("commentary to=functions.{} ", tool.name));
                format!("{channel} {to} {constrain} \"json\" {message} {arguments}")
            }
            _ => {
                let head = Value::from(format!("{{\"name\": {name}, \"parameters\": "));
                format!("{head} {arguments} \"}}\"")
            }
        }
    }

    /// Returns the expression for a pattern in a call of the function `name`, with as few literals as possible.
    pub(super) fn pattern(&self, parts: &[PatternPart], name: &str) -> String {
        let mut written: Vec<String> = Vec::new();
        let mut text = String::new();
        for part in parts {
            let word = match part {
                PatternPart::Text(part) | PatternPart::Space(part) => {
                    text.push_str(part);
                    continue;
                }
                PatternPart::Placeholder(Placeholder::Name) => {
                    text.push_str(name);
                    continue;
                }
                PatternPart::Placeholder(Placeholder::Index) => "/[0-9]{1,2}/",
                PatternPart::Placeholder(Placeholder::Id | Placeholder::Kind | Placeholder::Key) => "/[0-9A-Za-z]{9}/",
            };
            written.extend([self.literal(&std::mem::take(&mut text)), word.to_owned()]);
        }
        written.push(self.literal(&text));
        written.join(" ")
    }

    /// Adds rules for the members of an object; those that are not required may be omitted.
    fn add_members(
        &mut self,
        rule: &str,
        schema: &Value,
        root: &Value,
        values: ValueFormat<'_>,
        depth: usize,
    ) -> String {
        let none = Map::new();
        let properties = schema["properties"].as_object().unwrap_or(&none);
        let mut members = Vec::new();
        for (index, (key, property)) in properties.iter().enumerate() {
            if self.is_full() {
                break;
            }
            let value = format!("{rule}_{index}");
            let member = self.add_member(&value, key, property, root, values, depth);
            let name = format!("{value}_member");
            self.add_rule(&name, &member);
            members.push((name, is_required(schema, key)));
        }
        let comma = if matches!(values, ValueFormat::Braces(_)) { "\",\"" } else { "" };
        self.add_sequence(rule, &members, comma)
    }

    /// Adds rules for members in this order, separated by `comma` unless it is empty.
    fn add_sequence(&mut self, rule: &str, members: &[(String, bool)], comma: &str) -> String {
        if comma.is_empty() {
            let members = members.iter().map(|(name, required)| format!("{name}{}", if *required { "" } else { "?" }));
            return members.collect::<Vec<_>>().join(" ");
        }
        // Iterates from the last member. Collects the members that may follow another, and those that may come first.
        let (mut later, mut first) = (String::new(), "\"\"".to_owned());
        for (index, (name, required)) in members.iter().enumerate().rev() {
            let begin = format!("{name} {later}");
            let follow = format!("({comma} {name}){} {later}", if *required { "" } else { "?" });
            let (first_rule, later_rule) = (format!("{rule}_first_{index}"), format!("{rule}_later_{index}"));
            self.add_rule(&first_rule, &if *required { begin } else { format!("{begin} | {first}") });
            self.add_rule(&later_rule, &follow);
            (first, later) = (first_rule, later_rule);
        }
        if members.is_empty() { String::new() } else { first }
    }

    /// Adds rules for Python keyword arguments, `key=value`.
    fn add_keyword_arguments(&mut self, rule: &str, schema: &Value) -> String {
        let none = Map::new();
        let mut members = Vec::new();
        for (index, (key, property)) in schema["properties"].as_object().unwrap_or(&none).iter().enumerate() {
            let value = format!("{rule}_{index}");
            if self.is_full() {
                break;
            }
            self.add_rule(&value, &format!("%json {}", with_bounded_whitespace(&with_definitions(property, schema))));
            let name = format!("{value}_member");
            self.add_rule(&name, &format!("{} {value}", Value::from(format!("{key}="))));
            members.push((name, is_required(schema, key)));
        }
        self.add_sequence(rule, &members, "\", \"")
    }

    fn add_member(
        &mut self,
        rule: &str,
        key: &str,
        property: &Value,
        root: &Value,
        values: ValueFormat<'_>,
        depth: usize,
    ) -> String {
        let key_text = Value::from(key).to_string();
        match values {
            ValueFormat::Braces(_) => {
                let value = self.add_value(rule, property, root, values, depth);
                format!("{} {value}", Value::from(format!("{key}:")))
            }
            ValueFormat::Elements(tags) => {
                let before = self.pattern(tags.before_key.parts(), "");
                let middle = self.type_marker(tags, property);
                let close = tags.after_value.replace(Placeholder::Key.mark(), key);
                let head = format!("{before} {key_text} {middle}");
                let literal = self.literal(&close);
                let line = if tags.lines { "\"\\n\"" } else { "" };
                if is_text(property) {
                    self.add_text_until(rule, &close);
                    return format!("{head} {rule}");
                }
                let value = self.add_value(rule, property, root, values, depth);
                format!("{head} {value} {line} {literal}")
            }
        }
    }

    /// Returns the text between key and value, with the value's type in it.
    fn type_marker(&self, tags: &Tags, property: &Value) -> String {
        let json = match property["type"].as_str() {
            Some("integer") => "number",
            Some(kind) => kind,
            None if strings(property).is_some() => "string",
            None => "object",
        };
        let kind = tags.kinds.iter().find(|(kind, _)| *kind == json).or(tags.kinds.last());
        let mark = PatternPart::Placeholder(Placeholder::Kind);
        let parts = tags.middle.parts().iter().map(|part| match (part, kind) {
            (part, Some((_, kind))) if *part == mark => PatternPart::Text(kind.clone()),
            (part, _) => part.clone(),
        });
        self.pattern(&parts.collect::<Vec<_>>(), "")
    }

    /// Adds rules for a value, and returns the expression for it.
    fn add_value(&mut self, rule: &str, schema: &Value, root: &Value, values: ValueFormat<'_>, depth: usize) -> String {
        let deeper = depth < MAX_DEPTH;
        if let Some(strings) = strings(schema) {
            let quote = if let ValueFormat::Braces(quote) = values { self.literal(quote) } else { String::new() };
            let texts: Vec<String> =
                strings.iter().map(|text| format!("{quote} {} {quote}", Value::from(*text))).collect();
            return format!("({})", texts.join(" | "));
        }
        match (values, schema["type"].as_str()) {
            (ValueFormat::Braces(quote), Some("string")) => {
                self.add_text_until(rule, quote);
                format!("{} {rule}", self.literal(quote))
            }
            (ValueFormat::Braces(_), Some("object")) if deeper && schema["properties"].is_object() => {
                let members = self.add_members(rule, schema, root, values, depth + 1);
                format!("\"{{\" {members} \"}}\"")
            }
            (ValueFormat::Braces(_), Some("array")) if deeper && schema["items"].is_object() => {
                let item = self.add_value(&format!("{rule}_item"), &schema["items"], root, values, depth + 1);
                self.add_rule(&format!("{rule}_each"), &item);
                format!("\"[\" ({rule}_each (\",\" {rule}_each){{0,99}})? \"]\"")
            }
            (ValueFormat::Elements(tags), Some("object"))
                if is_nested(tags) && deeper && schema["properties"].is_object() =>
            {
                self.add_members(rule, schema, root, values, depth + 1)
            }
            (ValueFormat::Elements(tags), Some("array"))
                if is_nested(tags) && deeper && schema["items"].is_object() =>
            {
                let item = self.add_member(&format!("{rule}_item"), "item", &schema["items"], root, values, depth + 1);
                self.add_rule(&format!("{rule}_each"), &item);
                format!("{rule}_each{{0,99}}")
            }
            _ => {
                let json = format!("{rule}_json");
                self.add_rule(&json, &format!("%json {}", with_bounded_whitespace(&with_definitions(schema, root))));
                json
            }
        }
    }
}

/// Returns the marker before calls, and the rest of its pattern.
pub(super) fn call_marker(form: &CallForm) -> (String, &[PatternPart]) {
    let pattern: &Pattern = if form.open.is_blank() { &form.before } else { &form.open };
    let parts = pattern.parts();
    let begin = parts.iter().position(|part| !matches!(part, PatternPart::Space(_))).unwrap_or(parts.len());
    let placeholder = parts.iter().position(|part| matches!(part, PatternPart::Placeholder(_))).unwrap_or(parts.len());
    let mut end = placeholder.max(begin);
    while end > begin && matches!(parts[end - 1], PatternPart::Space(_)) {
        end -= 1;
    }
    let text = parts[begin..end].iter().map(|part| match part {
        PatternPart::Text(text) | PatternPart::Space(text) => text.as_str(),
        PatternPart::Placeholder(_) => "",
    });
    (text.collect(), &parts[end..])
}

/// Returns true if objects and lists are also written in tags.
fn is_nested(tags: &Tags) -> bool {
    tags.after_value.contains(Placeholder::Key.mark())
}

fn is_required(schema: &Value, key: &str) -> bool {
    schema["required"].as_array().is_some_and(|keys| keys.iter().any(|required| required == key))
}

/// Returns true if a value may be any text.
fn is_text(schema: &Value) -> bool {
    schema["type"] == "string" && strings(schema).is_none()
}

/// Returns the strings that a value may be, if the schema lists them.
fn strings(schema: &Value) -> Option<Vec<&str>> {
    match (&schema["enum"], &schema["const"]) {
        (Value::Array(values), _) => values.iter().map(Value::as_str).collect(),
        (_, Value::String(text)) => Some(vec![text]),
        _ => None,
    }
}

/// Returns the schema of a tool's arguments.
pub(super) fn parameters(tool: &ToolDefinition) -> Value {
    if tool.strict || tool.parameters.as_object().is_some_and(|schema| !schema.is_empty()) {
        tool.parameters.clone()
    } else {
        json!({"type": "object"})
    }
}
