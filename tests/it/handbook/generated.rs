//! Parts of the handbook that are generated: the flags, the built-in mods, and the example configurations.

use super::{ROOT, pages};
use clap::builder::PossibleValue;
use clap::{Arg, CommandFactory};
use regex::{Captures, Regex};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;

/// Compares the part of a page between two comments with the generated text; `UPDATE_DOCS=1` writes it instead.
pub fn assert_generated(page: &str, name: &str, generated: &str) {
    let path = pages().join(page);
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(&format!("<!-- {name} -->\n")).unwrap();
    let (written, after) = rest.split_once(&format!("<!-- /{name} -->")).unwrap();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}<!-- {name} -->\n{generated}<!-- /{name} -->{after}")).unwrap();
    } else {
        assert!(written == generated, "templates/docs/{page} is out of date; run the test with UPDATE_DOCS=1");
    }
}

#[test]
fn handbook_lists_every_flag_of_serve() {
    let command = thunder::cli::Cli::command();
    let serve = command.find_subcommand("serve").unwrap();
    let mut groups: Vec<(String, String)> = Vec::new();
    let global = command.get_arguments().filter(|flag| flag.is_global_set());
    for flag in serve.get_arguments().chain(global).filter(|flag| flag.get_id() != "help" && !flag.is_hide_set()) {
        let heading = flag.get_help_heading().unwrap_or("General").to_owned();
        if groups.iter().all(|(known, _)| *known != heading) {
            groups.push((heading.clone(), String::new()));
        }
        let (_, rows) = groups.iter_mut().find(|(known, _)| *known == heading).unwrap();
        rows.push_str(&flag_row(flag));
    }
    let mut table = String::new();
    for (heading, rows) in groups {
        write!(table, "## {heading}\n\n| Flag | Default | Meaning |\n|---|---|---|\n{rows}\n").unwrap();
    }
    assert_generated("flags.md", "flags", &table);
}

/// Returns the row of a flag: names with the placeholder of the value, default, help with the possible values and an
/// environment variable with another name.
fn flag_row(flag: &Arg) -> String {
    let short = flag.get_short().map(|short| format!("`-{short}` ")).unwrap_or_default();
    let long = flag.get_long().unwrap();
    let help = flag.get_help().unwrap().to_string().replace('\n', " ").replace('|', "\\|").replace('<', "\\<");
    let mut help = mark_flags(&help);
    match flag.get_env().map(|name| name.to_string_lossy()) {
        Some(name) if name == format!("THUNDER_{}", long.to_uppercase().replace('-', "_")) => {}
        Some(name) => write!(help, " [environment: `{name}`]").unwrap(),
        None => help.push_str(" [no environment variable]"),
    }
    if !flag.get_action().takes_values() {
        return format!("| {short}`--{long}` |  | {help} |\n");
    }
    let default: Vec<_> = flag.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = if default.is_empty() { String::new() } else { format!("`{}`", default.join(",")) };
    let placeholder: Vec<String> = flag.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect();
    let placeholder = placeholder.join(" ");
    let possible = flag.get_possible_values();
    let mut values: Vec<&str> =
        possible.iter().filter(|value| !value.is_hide_set()).map(PossibleValue::get_name).collect();
    if values.is_empty() && placeholder.contains('|') {
        values = placeholder.split('|').collect();
    }
    if values.is_empty() {
        return format!("| {short}`--{long} {placeholder}` | {default} | {help} |\n");
    }
    let values = values.join("`, `");
    let (help, note) = help.rfind(" [").map_or((&*help, ""), |at| help.split_at(at));
    format!("| {short}`--{long}` | {default} | {help}; values: `{values}`{note} |\n")
}

/// Puts the names of flags in backticks.
fn mark_flags(help: &str) -> String {
    let code_or_flag = Regex::new(r"`[^`]*`|(^|[\s(])(--?[A-Za-z][A-Za-z0-9-]*)").unwrap();
    code_or_flag
        .replace_all(help, |found: &Captures| match found.get(2) {
            Some(flag) => format!("{}`{}`", &found[1], flag.as_str()),
            None => found[0].to_owned(),
        })
        .into_owned()
}

#[test]
fn handbook_describes_every_built_in_mod() {
    let mods = thunder::mods::ModRegistry::with_builtin().list();
    let mut table = String::from("| Mod | Effect |\n|---|---|\n");
    let mut sections = String::new();
    for known in &mods {
        writeln!(table, "| [`{0}`](#{0}) | {1} |", known.name, known.description).unwrap();
        let example = json!({"name": known.name, "config": known.config});
        write!(
            sections,
            "## `{}`\n\n{}\n\n{}\n\n{}\n```json\n{example}\n```\n\n",
            known.name,
            known.description,
            known.documentation,
            field_table(&known.schema)
        )
        .unwrap();
    }
    assert_generated("built-in-mods.md", "mods", &table);
    assert_generated("built-in-mods.md", "mod-sections", &sections);
}

/// Returns the table of a mod's configuration.
fn field_table(schema: &Value) -> String {
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let mut table = String::from("| Field | Type | Default | Meaning |\n|---|---|---|---|\n");
    for (field, property) in schema["properties"].as_object().unwrap() {
        let default = match property.get("default") {
            Some(default) => format!("`{default}`"),
            None if required.contains(&json!(field)) => "required".to_owned(),
            None => String::new(),
        };
        let meaning = property["description"].as_str().unwrap();
        writeln!(table, "| `{field}` | {} | {default} | {meaning} |", type_text(property)).unwrap();
    }
    table
}

/// Returns the type of a JSON schema in words, e.g. "integer, 1 to 1000".
fn type_text(schema: &Value) -> String {
    if let Some(values) = schema["enum"].as_array() {
        let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
        return values.join(", ");
    }
    match (kind(schema, "").as_str(), &schema["minimum"], &schema["maximum"]) {
        ("array", ..) => format!("list of {}", kind(&schema["items"], "s")),
        ("object", ..) if schema["additionalProperties"].is_object() => {
            format!("object of {}", kind(&schema["additionalProperties"], "s"))
        }
        (kind, Value::Null, Value::Null) => kind.to_owned(),
        (kind, min, Value::Null) => format!("{kind} of at least {min}"),
        (kind, min, max) => format!("{kind}, {min} to {max}"),
    }
}

/// Returns the types that a JSON schema permits, each with the ending.
fn kind(schema: &Value, ending: &str) -> String {
    let kinds = match &schema["type"] {
        Value::Array(kinds) => kinds.iter().collect(),
        kind => vec![kind],
    };
    let kinds: Vec<String> = kinds.iter().map(|kind| format!("{}{ending}", kind.as_str().unwrap())).collect();
    kinds.join(" or ")
}

#[test]
fn handbook_shows_the_example_of_haproxy() {
    let example = std::fs::read_to_string(Path::new(ROOT).join("tests/examples/haproxy.cfg")).unwrap();
    assert_generated("several-servers.md", "haproxy", &format!("```text\n{example}```\n"));
}

#[test]
fn handbook_shows_the_example_of_systemd() {
    let example = std::fs::read_to_string(Path::new(ROOT).join("tests/examples/thunder.service")).unwrap();
    assert_generated("operating.md", "unit", &format!("```text\n{example}```\n"));
}
