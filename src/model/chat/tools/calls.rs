//! Calls from their beginning, as each family writes them.

use super::grammar::{Grammar, REPEATED, SPACE, laid_out};
use crate::model::chat::answer::Tool;
use crate::model::chat::family::{CallShape, Family, Tags};
use serde_json::{Map, Value, json};
use std::fmt::Write;

impl Grammar<'_> {
    /// Rules for the calls; the expression that stands for one or several of them. Without `opened` the block's first marker
    /// was written already.
    pub(super) fn calls(&mut self, tools: &[&Tool], several: bool, opened: bool) -> String {
        let names: Vec<String> = (0..tools.len()).map(|index| format!("call_{index}")).collect();
        for (name, tool) in names.iter().zip(tools) {
            let call = self.call(name, tool);
            self.rule(name, &call);
        }
        self.rule("call", &names.join(" | "));
        let format = self.reading.format;
        let open = self.literal(format.open.first().copied().unwrap_or_default());
        let close = self.literal(format.close.first().copied().unwrap_or_default());
        let first = if opened { open.as_str() } else { "" };
        let (one, more) = match (format.family, format.call) {
            // A list in one block.
            (Family::Mistral | Family::Phi | Family::Nemotron | Family::CommandR, CallShape::Json { .. }) => {
                let more = if several { format!(" (\",\" \" \"? call){REPEATED}") } else { String::new() };
                (format!("{first} \" \"? \"[\" call{more} \"]\" {close}"), String::new())
            }
            // Calls one after another in one block.
            (Family::DeepSeek | Family::Kimi, _) => {
                let more = if several { format!(" (\"\\n\"? call){REPEATED}") } else { String::new() };
                (format!("{first} call{more} {close}"), String::new())
            }
            (Family::Llama3, _) if opened => ("call".into(), "/;[ \\n]?/ call".into()),
            (Family::Glm4, _) => ("call".into(), "\"\\n\" call".into()),
            (_, CallShape::Channel) => ("call".into(), String::new()),
            (Family::Mistral | Family::Functionary, _) => (format!("{first} call"), format!("{open} call")),
            _ => (
                format!("{first} {SPACE} call {SPACE} {close}"),
                format!("{SPACE} {open} {SPACE} call {SPACE} {close}"),
            ),
        };
        let more = if several && !more.is_empty() { format!(" ({more}){REPEATED}") } else { String::new() };
        self.rule("calls", &format!("{one}{more}"));
        "calls".into()
    }

    fn call(&mut self, rule: &str, tool: &Tool) -> String {
        let format = self.reading.format;
        let name = tool.name.as_str();
        let arguments = format!("{rule}_arguments");
        if let CallShape::Tagged(tags) = format.call {
            return self.tagged(rule, tool, tags);
        }
        self.rule(&arguments, &format!("%json {}", laid_out(&parameters(tool))));
        match format.call {
            CallShape::Json { name: key, arguments: arguments_key } => {
                let head = format!("\"{key}\": {}, \"{arguments_key}\": ", Value::from(name));
                if format.family == Family::CommandR {
                    let head = Value::from(format!("\", {head}")).to_string();
                    return format!("\"{{\\\"tool_call_id\\\": \\\"\" /[0-9]{{1,2}}/ {head} {arguments} \"}}\"");
                }
                format!("{} {arguments} \"}}\"", Value::from(format!("{{{head}")))
            }
            CallShape::Named { before, between, also, after } => {
                let before = self.literal(before);
                let (head, tail) = match format.family {
                    Family::Kimi => {
                        (format!("{} /[0-9]{{1,2}}/", Value::from(format!("functions.{name}:"))), String::new())
                    }
                    Family::DeepSeek if also.contains(&"```json") => {
                        let separator = self.literal(between);
                        let rest = Value::from(format!("{name}\n```json\n"));
                        let head = format!("\"function\" {separator} {rest}");
                        let after = self.literal(after.last().copied().unwrap_or_default());
                        return format!("{before} {head} {arguments} \"\\n```\" {after}");
                    }
                    _ => (Value::from(name).to_string(), String::new()),
                };
                let between = self.literal(between);
                let after = self.literal(after.last().copied().unwrap_or_default());
                format!("{before} {head}{tail} {between} {arguments} {after}")
            }
            CallShape::Channel => {
                let (channel, message) = (self.literal("<|channel|>"), self.literal("<|message|>"));
                let constrain = self.literal("<|constrain|>");
                let to = Value::from(format!("commentary to=functions.{name} "));
                format!("{channel} {to} {constrain} \"json\" {message} {arguments}")
            }
            CallShape::Tagged(_) => String::new(),
        }
    }

    fn tagged(&mut self, rule: &str, tool: &Tool, tags: Tags) -> String {
        let none = Map::new();
        let schema = &tool.parameters;
        let properties = schema["properties"].as_object().unwrap_or(&none);
        let required = |key: &str| schema["required"].as_array().is_some_and(|keys| keys.iter().any(|k| k == key));
        let mut body = format!(
            "{} {} {} {SPACE}",
            self.literal(tags.name.0),
            Value::from(tool.name.as_str()),
            self.literal(tags.name.1)
        );
        for (index, (key, property)) in properties.iter().enumerate() {
            let value = format!("{rule}_value_{index}");
            let close = self.literal(tags.value.1);
            if property["type"] == "string" && property.get("enum").is_none() {
                self.until(&value, tags.value.1);
            } else {
                let mut schema_of = property.as_object().cloned().unwrap_or_default();
                for definitions in ["$defs", "definitions"] {
                    if let Some(found) = schema.get(definitions) {
                        schema_of.insert(definitions.into(), found.clone());
                    }
                }
                let json = format!("{value}_json");
                self.rule(&json, &format!("%json {}", laid_out(&Value::Object(schema_of))));
                self.rule(&value, &format!("{json} {SPACE} {close}"));
            }
            let opened = format!(
                "{} {} {} {SPACE} {}",
                self.literal(tags.key.0),
                Value::from(key.as_str()),
                self.literal(tags.key.1),
                self.literal(tags.value.0)
            );
            let parameter = format!("{opened} {value} {SPACE}");
            let _ = if required(key) { write!(body, " {parameter}") } else { write!(body, " ({parameter})?") };
        }
        format!("{body} {}", self.literal(tags.end))
    }
}

/// The schema of a tool's arguments.
pub(super) fn parameters(tool: &Tool) -> Value {
    if tool.strict || tool.parameters.as_object().is_some_and(|schema| !schema.is_empty()) {
        tool.parameters.clone()
    } else {
        json!({"type": "object"})
    }
}
