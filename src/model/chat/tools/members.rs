//! Grammar for arguments that are not written as one JSON object, but as separate members.

use super::definitions::standalone;
use super::grammar::GrammarWriter;
use super::object_forms::{NO_OBJECT, ObjectForm};
use crate::model::chat::pattern::{PatternPart, Placeholder};
use crate::model::chat::syntax::Tags;
use crate::model::grammar::schema::restricts_text;
use serde_json::Value;

/// Maximum nesting of values that are not written as JSON.
const MAX_DEPTH: usize = 12;

/// Maximum items of a list, and members with keys that the schema does not list.
const MAX_ITEMS: usize = 100;

/// Key of a member that the schema does not list.
const ANY_KEY: &str = "/[A-Za-z_][0-9A-Za-z_.-]{0,63}/";

/// Format of members.
#[derive(Clone, Copy)]
pub(super) enum MemberFormat<'a> {
    /// `key:value`, with strings in these quotes.
    Braces(&'a str),
    /// Each member in separate tags.
    Elements(&'a Tags),
    /// `key=value`, with values in JSON.
    Python,
}

/// The arguments that members belong to.
#[derive(Clone, Copy)]
pub(super) struct Members<'a> {
    /// Schema of the arguments.
    pub(super) root: &'a Value,
    /// True if the arguments must follow the schema.
    pub(super) strict: bool,
    /// Format.
    pub(super) format: MemberFormat<'a>,
}

impl MemberFormat<'_> {
    /// Returns the text between two members.
    fn separator(self) -> &'static str {
        match self {
            Self::Braces(_) => "\",\"",
            Self::Elements(_) => "",
            Self::Python => "\", \"",
        }
    }

    /// Returns true if a grammar can describe a member with any key: tags after the value do not repeat the key.
    fn permits_any_key(self) -> bool {
        !matches!(self, Self::Elements(tags) if is_nested(tags))
    }
}

impl Members<'_> {
    /// Returns true if a string of this schema is written as text, not in JSON, and may be any text. Without `strict`,
    /// restrictions of the text are ignored, because models write text in this format.
    fn is_text(&self, schema: &Value) -> bool {
        schema["type"] == "string" && strings(schema).is_none() && !(self.strict && restricts_text(schema))
    }

    /// Returns true if the items of a list of this schema are written in the format of members.
    fn is_list(&self, schema: &Value) -> bool {
        const RESTRICTIONS: &[&str] = &["minItems", "maxItems", "prefixItems", "uniqueItems", "contains", "not", "if"];
        let is_restricted = RESTRICTIONS.iter().any(|keyword| schema.get(*keyword).is_some());
        schema["type"] == "array" && schema["items"].is_object() && !(self.strict && is_restricted)
    }
}

impl GrammarWriter<'_> {
    /// Adds rules for the members of an object, and returns the expression for them.
    pub(super) fn add_members(&mut self, rule: &str, schema: &Value, members: Members<'_>, depth: usize) -> String {
        if self.is_full() {
            return String::new();
        }
        let forms = ObjectForm::all(schema, members.root).unwrap_or_else(|reason| {
            self.reject_if_strict(members, &reason);
            Vec::new()
        });
        if let Some(keyword) = forms.iter().find_map(ObjectForm::unsupported_keyword) {
            self.reject_if_strict(members, &unsupported(keyword));
        }
        let mut alternatives = Vec::new();
        for (index, form) in forms.iter().enumerate() {
            if self.is_full() {
                break;
            }
            alternatives.extend(self.add_form(&format!("{rule}_form_{index}"), form, members, depth));
        }
        if alternatives.is_empty() {
            self.reject_if_strict(members, NO_OBJECT);
            alternatives.extend(self.add_form(&format!("{rule}_form"), &ObjectForm::any(), members, depth));
        }
        format!("({})", alternatives.join(" | "))
    }

    /// Rejects the schema if the arguments must follow it. Without `strict`, any members are permitted instead.
    fn reject_if_strict(&mut self, members: Members<'_>, reason: &str) {
        if members.strict {
            self.reject(reason);
        }
    }

    /// Adds rules for the members of one form of an object; those that are not required may be omitted. Returns `None` if
    /// a required member is not permitted.
    fn add_form(&mut self, rule: &str, form: &ObjectForm<'_>, members: Members<'_>, depth: usize) -> Option<String> {
        let mut properties = form.properties().peekable();
        let lists_properties = properties.peek().is_some();
        let mut names = Vec::new();
        for (index, (key, schema, is_required)) in properties.enumerate() {
            match schema {
                _ if self.is_full() => break,
                Value::Bool(false) if is_required => return None,
                Value::Bool(false) => continue,
                _ => {}
            }
            let value = format!("{rule}_{index}");
            let member = self.add_member(&value, Some(key), &schema, members, depth);
            let name = format!("{value}_member");
            self.add_rule(&name, &member);
            names.push((name, is_required));
        }
        let additional = form.schema(None);
        let (min, max) = form.property_counts();
        if lists_properties || additional == Value::Bool(false) || max == 0 || !members.format.permits_any_key() {
            let required = names.iter().filter(|(_, is_required)| *is_required).count();
            for (keyword, is_enforced) in [("minProperties", required >= min), ("maxProperties", names.len() <= max)] {
                if !is_enforced {
                    self.reject_if_strict(members, &unsupported(keyword));
                }
            }
            return Some(self.add_sequence(rule, &names, members.format.separator()));
        }
        if min > max {
            return None;
        }
        if min > MAX_ITEMS {
            self.reject_if_strict(members, &format!("`minProperties` must be at most {MAX_ITEMS}, got {min}"));
        }
        let (min, max) = (min.min(MAX_ITEMS), max.min(MAX_ITEMS));
        let member = self.add_member(&format!("{rule}_any"), None, &additional, members, depth);
        self.add_rule(&format!("{rule}_each"), &member);
        let (separator, optional) = (members.format.separator(), if min == 0 { "?" } else { "" });
        let range = format!("{{{},{}}}", min.saturating_sub(1), max - 1);
        Some(format!("({rule}_each ({separator} {rule}_each){range}){optional}"))
    }

    /// Adds rules for members in this order, separated by `separator` unless it is empty.
    fn add_sequence(&mut self, rule: &str, members: &[(String, bool)], separator: &str) -> String {
        if separator.is_empty() && !members.is_empty() {
            let members = members.iter().map(|(name, required)| format!("{name}{}", if *required { "" } else { "?" }));
            return members.collect::<Vec<_>>().join(" ");
        }
        // Iterates from the last member. Collects the members that may follow another, and those that may come first.
        let (mut later, mut first) = (String::new(), "\"\"".to_owned());
        for (index, (name, required)) in members.iter().enumerate().rev() {
            let begin = format!("{name} {later}");
            let follow = format!("({separator} {name}){} {later}", if *required { "" } else { "?" });
            let (first_rule, later_rule) = (format!("{rule}_first_{index}"), format!("{rule}_later_{index}"));
            self.add_rule(&first_rule, &if *required { begin } else { format!("{begin} | {first}") });
            self.add_rule(&later_rule, &follow);
            (first, later) = (first_rule, later_rule);
        }
        first
    }

    /// Adds rules for a member with this key, or with any key.
    fn add_member(
        &mut self,
        rule: &str,
        key: Option<&str>,
        schema: &Value,
        members: Members<'_>,
        depth: usize,
    ) -> String {
        let key_text = key.map_or(ANY_KEY.to_owned(), |key| Value::from(key).to_string());
        let tags = match members.format {
            MemberFormat::Braces(_) => {
                return format!("{key_text} \":\" {}", self.add_value(rule, schema, members, depth));
            }
            MemberFormat::Python => return format!("{key_text} \"=\" {}", self.add_json(rule, schema, members.root)),
            MemberFormat::Elements(tags) => tags,
        };
        let before = self.pattern(tags.before_key.parts(), "");
        let middle = self.type_marker(tags, schema, members);
        let close = tags.after_value.replace(Placeholder::Key.mark(), key.unwrap_or_default());
        let head = format!("{before} {key_text} {middle}");
        if members.is_text(schema) {
            self.add_text_until(rule, &close);
            return format!("{head} {rule}");
        }
        let value = self.add_value(rule, schema, members, depth);
        let line = if tags.lines { "\"\\n\"" } else { "" };
        format!("{head} {value} {line} {}", self.literal(&close))
    }

    /// Returns the text between key and value, with the value's type in it.
    fn type_marker(&self, tags: &Tags, schema: &Value, members: Members<'_>) -> String {
        let json = match schema["type"].as_str() {
            _ if strings(schema).is_some() || members.is_text(schema) => "string",
            Some("integer") => "number",
            // Written in JSON.
            Some("string") | None => "object",
            Some(name) => name,
        };
        let found = tags.type_names.iter().find(|(name, _)| *name == json).or(tags.type_names.last());
        let mark = PatternPart::Placeholder(Placeholder::TypeName);
        let parts = tags.middle.parts().iter().map(|part| match (part, found) {
            (part, Some((_, written))) if *part == mark => PatternPart::Text(written.clone()),
            (part, _) => part.clone(),
        });
        self.pattern(&parts.collect::<Vec<_>>(), "")
    }

    /// Adds rules for a value, and returns the expression for it.
    fn add_value(&mut self, rule: &str, schema: &Value, members: Members<'_>, depth: usize) -> String {
        if let Some(strings) = strings(schema) {
            let quote =
                if let MemberFormat::Braces(quote) = members.format { self.literal(quote) } else { String::new() };
            let texts: Vec<String> =
                strings.iter().map(|text| format!("{quote} {} {quote}", Value::from(*text))).collect();
            return format!("({})", texts.join(" | "));
        }
        let is_inner = depth < MAX_DEPTH;
        let is_object = is_inner && schema["type"] == "object" && schema["properties"].is_object();
        let is_list = is_inner && members.is_list(schema);
        match members.format {
            MemberFormat::Braces(quote) if members.is_text(schema) => {
                self.add_text_until(rule, quote);
                format!("{} {rule}", self.literal(quote))
            }
            MemberFormat::Braces(_) if is_object => {
                format!("\"{{\" {} \"}}\"", self.add_members(rule, schema, members, depth + 1))
            }
            MemberFormat::Braces(_) if is_list => {
                let item = self.add_value(&format!("{rule}_item"), &schema["items"], members, depth + 1);
                self.add_rule(&format!("{rule}_each"), &item);
                format!("\"[\" ({rule}_each (\",\" {rule}_each){{0,{}}})? \"]\"", MAX_ITEMS - 1)
            }
            MemberFormat::Elements(tags) if is_nested(tags) && is_object => {
                self.add_members(rule, schema, members, depth + 1)
            }
            MemberFormat::Elements(tags) if is_nested(tags) && is_list => {
                let item = self.add_member(&format!("{rule}_item"), Some("item"), &schema["items"], members, depth + 1);
                self.add_rule(&format!("{rule}_each"), &item);
                format!("{rule}_each{{0,{MAX_ITEMS}}}")
            }
            _ => self.add_json(rule, schema, members.root),
        }
    }

    /// Adds a rule for a value in JSON, and returns its name.
    fn add_json(&mut self, rule: &str, schema: &Value, root: &Value) -> String {
        let name = format!("{rule}_json");
        if self.is_full() {
            return name;
        }
        match standalone(schema, root) {
            Ok(schema) => self.add_rule(&name, &format!("%json {schema}")),
            Err(reason) => self.reject(&reason),
        }
        name
    }
}

/// Returns the reason why a schema with this keyword is rejected.
fn unsupported(keyword: &str) -> String {
    format!(
        "`{keyword}` is not supported in the schema of an object that the model does not write as JSON; remove the keyword \
         or `\"strict\": true`"
    )
}

/// Returns true if objects and lists are also written in tags.
fn is_nested(tags: &Tags) -> bool {
    tags.after_value.contains(Placeholder::Key.mark())
}

/// Returns the strings that a value may be, if the schema lists them.
fn strings(schema: &Value) -> Option<Vec<&str>> {
    match (&schema["enum"], &schema["const"]) {
        (Value::Array(values), _) => values.iter().map(Value::as_str).collect(),
        (_, Value::String(text)) => Some(vec![text]),
        _ => None,
    }
}
