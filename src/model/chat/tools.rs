//! Tool calls that must come: from the family's format, the functions' schemas and the request's choice to a grammar.
//!
//! A grammar written here can only be followed by answers that [`super::answer`] reads as calls of these functions.

use super::answer::{Reading, Tool};
use super::family::{CallShape, Family, Tags};
use crate::model::Vocabulary;
use crate::model::grammar::{Constraint, Source, Trigger, token_reference};
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// The request's field that errors name.
const FIELD: &str = "tools";

/// A blank or a line break that may be.
const SPACE: &str = "/[ \\n]/?";

/// How many further calls one answer may make: a model that finds no end shall find one.
const REPEATED: &str = "{0,31}";

/// What a request says about calling functions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Choice {
    /// The model decides.
    #[default]
    Auto,
    /// There are no calls.
    None,
    /// There is at least one call.
    Required,
    /// This function is called, once.
    Function(String),
}

/// What the answer must be so that the choice holds. `may_think` lets a thought come before the call; `answer` is a JSON
/// schema that an answer without a call must follow.
#[must_use]
pub fn constraint(
    reading: &Reading,
    choice: &Choice,
    answer: Option<&Value>,
    may_think: bool,
    vocabulary: &Vocabulary,
) -> Option<Constraint> {
    let chosen: Vec<&Tool> = match choice {
        Choice::None => return None,
        Choice::Function(name) => reading.tools.iter().filter(|tool| tool.name == *name).collect(),
        Choice::Auto | Choice::Required => reading.tools.iter().collect(),
    };
    if chosen.is_empty() {
        return None;
    }
    let mut grammar = Grammar { reading, vocabulary, rules: String::new() };
    let several = !reading.single && !matches!(choice, Choice::Function(_));
    match (choice, answer) {
        (Choice::Auto, None) => {
            if chosen.iter().all(|tool| !tool.strict) {
                return None;
            }
            let trigger = grammar.trigger(&chosen)?;
            let calls = grammar.own_calls(&chosen, several);
            Some(Constraint::new(FIELD, Source::Lark(grammar.finish(&calls))).lazy(trigger))
        }
        (Choice::Auto, Some(schema)) => {
            let calls = grammar.calls(&chosen, several, true);
            let lead = grammar.lead(may_think);
            grammar.rule("answer", &format!("%json {}", laid_out(schema)));
            Some(Constraint::new(FIELD, Source::Lark(grammar.finish(&format!("{lead}(answer | {calls})")))))
        }
        _ => {
            let calls = grammar.calls(&chosen, several, true);
            let lead = grammar.lead(may_think);
            Some(Constraint::new(FIELD, Source::Lark(grammar.finish(&format!("{lead}{calls}")))))
        }
    }
}

/// The same constraint for an answer that begins within a thought, which it leaves alone.
#[must_use]
pub fn behind_thought(constraint: Constraint, reading: &Reading, vocabulary: &Vocabulary) -> Constraint {
    if !reading.thinking || constraint.trigger.is_some() {
        return constraint;
    }
    let close = reading.format.thought.1;
    let trigger = match control(close, vocabulary) {
        Some(token) => Trigger::token(token),
        None => Trigger::text(close),
    };
    constraint.lazy(trigger)
}

struct Grammar<'a> {
    reading: &'a Reading,
    vocabulary: &'a Vocabulary,
    rules: String,
}

impl Grammar<'_> {
    fn rule(&mut self, name: &str, body: &str) {
        // Writing to a text cannot fail.
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    fn finish(self, start: &str) -> String {
        format!("start: {start}\n{}", self.rules)
    }

    /// A text in the grammar: the control token that it is, else its characters.
    fn literal(&self, text: &str) -> String {
        match control(text, self.vocabulary) {
            Some(_) => token_reference(self.vocabulary, text).unwrap_or_else(|| Value::from(text).to_string()),
            None if text.is_empty() => String::new(),
            None => Value::from(text).to_string(),
        }
    }

    /// What comes before the calls: the rest of a thought, or a thought that may be.
    fn lead(&mut self, may_think: bool) -> String {
        let format = self.reading.format;
        let (open, close) = format.thought;
        if !self.reading.thinking && !may_think {
            return String::new();
        }
        if format.call == CallShape::Channel {
            let (channel, message) = (self.literal("<|channel|>"), self.literal("<|message|>"));
            let start = self.literal("<|start|>");
            self.until("thought", "<|end|>");
            self.rule("lead", &format!("({channel} \"analysis\" {message} thought {start} \"assistant\")?"));
            return "lead ".into();
        }
        let open = self.literal(open);
        self.until("thought", close);
        if self.reading.thinking {
            self.rule("lead", "thought /[ \\n]{1,4}/?");
        } else {
            self.rule("lead", &format!("({open} thought /[ \\n]{{1,4}}/?)?"));
        }
        "lead ".into()
    }

    /// A rule for text up to a marker, the marker included.
    fn until(&mut self, name: &str, marker: &str) {
        let literal = self.literal(marker);
        if control(marker, self.vocabulary).is_some() {
            self.rule(name, &format!("/(?s:.+)/? {literal}"));
        } else {
            self.rule(&format!("{name}[suffix={literal}]"), "/(?s:.*)/");
        }
    }

    /// Rules for calls that the model makes by itself, behind what [`Self::trigger`] watches for.
    fn own_calls(&mut self, tools: &[&Tool], several: bool) -> String {
        let format = self.reading.format;
        let call = |grammar: &mut Self, (index, tool): (usize, &&Tool)| {
            let rule = format!("call_{index}");
            let body = match format.call {
                CallShape::Channel => grammar.addressed(&rule, tool),
                _ => whole_object(tool, format.call),
            };
            grammar.rule(&rule, &body);
            rule
        };
        match (format.family, format.call) {
            (Family::Llama3, CallShape::Json { .. }) => {
                let calls: Vec<String> = tools.iter().enumerate().map(|tool| call(self, tool)).collect();
                format!("{SPACE} ({}) {SPACE}", calls.join(" | "))
            }
            (_, CallShape::Channel) => {
                let calls: Vec<String> = tools.iter().enumerate().map(|tool| call(self, tool)).collect();
                calls.join(" | ")
            }
            _ => self.calls(tools, several, false),
        }
    }

    /// A call behind `to=functions.`, with whatever the rest of its header may be.
    fn addressed(&mut self, rule: &str, tool: &Tool) -> String {
        let arguments = format!("{rule}_arguments");
        self.rule(&arguments, &format!("%json {}", laid_out(&parameters(tool))));
        let (channel, message) = (self.literal("<|channel|>"), self.literal("<|message|>"));
        let (constrain, name) = (self.literal("<|constrain|>"), Value::from(tool.name.as_str()));
        format!("{name} ({channel} \"commentary\")? \" \"? {constrain}? \"json\"? {message} {arguments}")
    }

    /// Rules for the calls; the expression that stands for one or several of them. Without `opened` the block's first marker
    /// was written already.
    fn calls(&mut self, tools: &[&Tool], several: bool, opened: bool) -> String {
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
            (Family::Llama3, _) if opened => ("call".into(), String::new()),
            (Family::Glm4, _) | (_, CallShape::Channel) => ("call".into(), String::new()),
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

    /// What begins a block, or a call where it stands bare.
    fn trigger(&self, tools: &[&Tool]) -> Option<Trigger> {
        let format = self.reading.format;
        if format.call == CallShape::Channel {
            let texts = ["<|channel|>commentary to=functions.", "<|start|>assistant to=functions."];
            return Some(Trigger { texts: texts.map(str::to_owned).into(), ..Trigger::default() });
        }
        let block = format.open.first().map(|open| match control(open, self.vocabulary) {
            Some(token) => Trigger::token(token),
            None => Trigger::text(*open),
        });
        let names = tools.iter().map(|tool| tool.name.as_str());
        let openings: Vec<String> = match format.family {
            Family::Llama3 => names
                .flat_map(|name| {
                    ["{", "{\"type\":\"function\","].map(|before| format!("{before}\"name\":{}", Value::from(name)))
                })
                .collect(),
            Family::Glm4 => names.map(|name| format!("{name}{{")).collect(),
            _ => return block,
        };
        Some(Trigger {
            openings,
            behind: format.thought.1.to_owned(),
            only_behind: self.reading.thinking,
            ..block.unwrap_or_default()
        })
    }
}

/// The schema of a tool's arguments.
fn parameters(tool: &Tool) -> Value {
    if tool.strict || tool.parameters.as_object().is_some_and(|schema| !schema.is_empty()) {
        tool.parameters.clone()
    } else {
        json!({"type": "object"})
    }
}

/// A call as one object, in whatever white space the model has begun it.
fn whole_object(tool: &Tool, shape: CallShape) -> String {
    let CallShape::Json { name, arguments } = shape else { return String::new() };
    let mut parameters = parameters(tool);
    let mut schema = json!({
        "type": "object",
        "properties": { "type": { "const": "function" }, name: { "const": tool.name } },
        "required": [name, arguments],
        "additionalProperties": false,
        "x-guidance": { "whitespace_pattern": "[ \\n\\r\\t]{1,20}" },
    });
    for definitions in ["$defs", "definitions"] {
        if let Some(found) = parameters.as_object_mut().and_then(|schema| schema.remove(definitions)) {
            schema[definitions] = found;
        }
    }
    schema["properties"][arguments] = parameters;
    format!("%json {schema}")
}

/// The control token that the text is.
fn control(text: &str, vocabulary: &Vocabulary) -> Option<crate::events::TokenId> {
    match vocabulary.encode(text, false, true)[..] {
        [token] if vocabulary.is_control(token) => Some(token),
        _ => None,
    }
}

/// The schema with a bound on the white space between the parts of the JSON.
fn laid_out(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Value::Object(object) = &mut schema {
        object.entry("x-guidance").or_insert_with(|| json!({ "whitespace_pattern": " |\\n[ \\t]{0,20}" }));
    }
    schema
}

#[cfg(test)]
mod tests {
    use super::{Choice, behind_thought, constraint};
    use crate::model::chat::answer::{Message, Parser, Reading, Tool};
    use crate::model::chat::family::{CallShape, Family, Format};
    use crate::model::grammar::{Constraint, Grammars, Source};
    use crate::model::{Special, Vocabulary};
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use std::sync::Arc;

    const END: i32 = 256;

    /// One token a byte, and one for each of these literals.
    fn vocabulary(literals: &[&'static str]) -> Arc<Vocabulary> {
        let literals: Vec<&'static str> = std::iter::once("<end>").chain(literals.iter().copied()).collect();
        let bytes = (0..=255u8).map(|byte| Box::from([byte]));
        let pieces = bytes.chain(literals.iter().map(|literal| Box::from(literal.as_bytes()))).collect();
        let control = (0..256 + literals.len()).map(|token| token >= 256).collect();
        let encode = move |text: &str, _, _| match literals.iter().position(|literal| *literal == text) {
            Some(at) => vec![256 + at as i32],
            None => text.bytes().map(i32::from).collect(),
        };
        Arc::new(Vocabulary::new(pieces, control, vec![END], Special::default(), encode))
    }

    fn reading(format: Format) -> Reading {
        let tool = |name: &str, parameters: Value| Tool { name: name.into(), parameters, strict: true };
        Reading {
            format,
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
            thoughts: true,
            thinking: false,
            single: false,
        }
    }

    /// Follows a constraint, drawing each token with the next of `draws`, until it is complete and `draws` are used up.
    fn walk(constraint: &Constraint, vocabulary: &Arc<Vocabulary>, draws: &[u16]) -> String {
        let grammars = Grammars::new(Arc::clone(vocabulary));
        let mut follower = grammars.follow(constraint).unwrap_or_else(|error| panic!("{error}\n{constraint:?}"));
        let mut text = Vec::new();
        for step in 0..4000usize {
            let mask = follower.mask().unwrap().unwrap();
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
            follower.accept(token, piece);
            text.extend_from_slice(piece);
        }
        String::from_utf8_lossy(&text).into_owned()
    }

    fn read(reading: &Reading, text: &str) -> Message {
        let mut parser = Parser::new(Arc::new(reading.clone()));
        parser.push(text);
        parser.finish(false);
        parser.message().clone()
    }

    fn check(message: &Message, text: &str) {
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

    /// Every family, and the older ways of two of them.
    fn formats() -> Vec<Format> {
        let families = [
            Family::Hermes,
            Family::QwenCoder,
            Family::Llama3,
            Family::Functionary,
            Family::Mistral,
            Family::Glm4,
            Family::Glm45,
            Family::DeepSeek,
            Family::Kimi,
            Family::CommandR,
            Family::Phi,
            Family::Nemotron,
            Family::Harmony,
            Family::Gemma,
            Family::Plain,
        ];
        let mut formats: Vec<Format> = families.iter().map(|family| family.format()).collect();
        formats.extend([Format::of("[TOOL_CALLS]"), Format::of("<｜tool▁calls▁begin｜>")]);
        formats
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4))]

        /// Whatever a model draws under the grammar is read as calls that follow the schemas, whether the family's markers are
        /// tokens or text.
        #[test]
        fn what_the_grammar_allows_is_a_call(draws: Vec<u16>, first in any::<bool>()) {
            for format in formats() {
                let reading = Reading { single: first, ..reading(format) };
                for vocabulary in [vocabulary(&[]), vocabulary(&format.markers())] {
                    let constraint = constraint(&reading, &Choice::Required, None, false, &vocabulary).unwrap();
                    let text = walk(&constraint, &vocabulary, &draws);
                    let message = read(&reading, &text);
                    check(&message, &text);
                    prop_assert!(!first || message.calls.len() == 1);
                }
            }
        }
    }

    #[test]
    fn a_named_function_is_the_only_one() {
        for format in formats() {
            let vocabulary = vocabulary(&format.markers());
            let reading = reading(format);
            for (name, draw) in [("weather", 0), ("add", 1)] {
                let choice = Choice::Function(name.into());
                let constraint = constraint(&reading, &choice, None, false, &vocabulary).unwrap();
                let message = read(&reading, &walk(&constraint, &vocabulary, &[draw; 9]));
                assert_eq!(message.calls.iter().map(|call| call.name.as_str()).collect::<Vec<_>>(), [name]);
            }
        }
    }

    #[test]
    fn a_thought_that_has_begun_comes_before_the_call() {
        for vocabulary in [vocabulary(&[]), vocabulary(&["<think>", "</think>"])] {
            let reading = Reading { thinking: true, ..reading(Family::Hermes.format()) };
            let constraint = constraint(&reading, &Choice::Required, None, false, &vocabulary).unwrap();
            let grammars = Grammars::new(Arc::clone(&vocabulary));
            let mut follower = grammars.follow(&constraint).unwrap();
            let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
            let close = vocabulary.encode("</think>", false, true);
            let text = "so it is <b>add</b>".bytes().map(i32::from).chain(close).chain(call.bytes().map(i32::from));
            for token in text {
                assert!(follower.mask().unwrap().unwrap().is_allowed(token as u32), "{token}");
                follower.accept(token, vocabulary.piece(token));
            }
            assert!(follower.mask().unwrap().unwrap().is_allowed(END as u32));
        }
    }

    #[test]
    fn the_model_decides_unless_a_function_is_strict() {
        let vocabulary = vocabulary(&["<tool_call>"]);
        let mut reading = reading(Family::Hermes.format());
        let auto = constraint(&reading, &Choice::Auto, None, false, &vocabulary).unwrap();
        assert_eq!(auto.trigger.unwrap().tokens.len(), 1);
        assert_eq!(constraint(&reading, &Choice::None, None, false, &vocabulary), None);
        for tool in &mut reading.tools {
            tool.strict = false;
        }
        assert_eq!(constraint(&reading, &Choice::Auto, None, false, &vocabulary), None);
        let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]});
        let either = constraint(&reading, &Choice::Auto, Some(&schema), false, &vocabulary).unwrap();
        let text = walk(&either, &vocabulary, &[0]);
        assert!(text.starts_with('{') || text.starts_with("<tool_call>"), "{text}");
    }

    /// What a follower makes of a text: whether it was taken as a whole, and whether the grammar holds behind it.
    fn follow(constraint: &Constraint, vocabulary: &Arc<Vocabulary>, pieces: &[&str]) -> (bool, bool) {
        let grammars = Grammars::new(Arc::clone(vocabulary));
        let mut follower = grammars.follow(constraint).unwrap_or_else(|error| panic!("{error}\n{constraint:?}"));
        let mut fits = true;
        for token in pieces.iter().flat_map(|piece| vocabulary.encode(piece, false, true)) {
            let piece = vocabulary.piece(token);
            let allowed = follower.mask().unwrap().is_none_or(|mask| mask.is_allowed(token as u32));
            fits &= allowed && follower.permits(token, piece);
            follower.accept(token, piece);
        }
        (fits, follower.holds())
    }

    #[test]
    fn a_strict_function_holds_calls_that_have_no_marker() {
        let channel = ["<|channel|>", "commentary to=functions.", "weather ", "<|constrain|>", "json", "<|message|>"];
        let header = ["<|start|>", "assistant to=functions.add", "<|channel|>", "commentary json", "<|message|>"];
        let with = |head: &[&'static str], rest: &'static str| [head, &[rest][..]].concat();
        for (family, taken, refused, text) in [
            (
                Family::Llama3,
                vec![
                    vec!["{\"name\": \"weather\", \"parameters\": {\"city\": \"Ulm\", \"dry\": true}}"],
                    vec!["\n{ \"type\": \"function\",\n \"name\" : \"add\", \"parameters\": {\"a\": 2}}"],
                    vec!["<|python_tag|>", "{\"name\": \"add\", \"parameters\": {\"a\": 1}}"],
                ],
                vec!["{\"name\": \"add\", \"parameters\": {\"a\": 3}}"],
                vec!["{\"name\": \"Ann\", \"age\": 5}"],
            ),
            (
                Family::Glm4,
                vec![
                    vec!["weather\n{\"city\": \"Bern\", \"dry\": false}"],
                    vec!["<think>hm", "</think>", "\nadd\n{\"a\": 1}"],
                ],
                vec!["add\n{\"b\": 1}"],
                vec!["weather is {"],
            ),
            (
                Family::Harmony,
                vec![with(&channel, "{\"city\": \"Ulm\", \"dry\": true}"), with(&header, "{\"a\": 1}")],
                with(&header, "{\"a\": 7}"),
                vec!["<|channel|>", "final", "<|message|>", "to=functions.add {"],
            ),
        ] {
            let format = family.format();
            let mut markers = format.markers();
            markers.retain(|marker| !marker.trim().is_empty());
            for vocabulary in [vocabulary(&[]), vocabulary(&markers)] {
                let reading = reading(format);
                let auto = constraint(&reading, &Choice::Auto, None, false, &vocabulary).unwrap();
                for call in &taken {
                    assert_eq!(follow(&auto, &vocabulary, call), (true, true), "{family:?} {call:?}");
                    check(&read(&reading, &call.concat()), &call.concat());
                }
                assert!(!follow(&auto, &vocabulary, &refused).0, "{family:?} {refused:?}");
                assert_eq!(follow(&auto, &vocabulary, &text), (true, false), "{family:?} {text:?}");
                assert!(read(&reading, &text.concat()).calls.is_empty());
            }
        }
    }

    #[test]
    fn a_form_waits_for_the_end_of_a_thought() {
        let vocabulary = vocabulary(&[]);
        let mut reading = reading(Family::Hermes.format());
        let form = Constraint::new("json_schema", Source::JsonObject);
        assert!(behind_thought(form.clone(), &reading, &vocabulary).trigger.is_none());
        reading.thinking = true;
        assert_eq!(behind_thought(form, &reading, &vocabulary).trigger.unwrap().texts, ["</think>"]);
        assert!(matches!(Family::Harmony.format().call, CallShape::Channel));
    }
}
