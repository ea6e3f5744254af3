//! Optional check for maintainers: chat templates of real models render as in Jinja2, and messages are located in the
//! text.
//!
//! It needs `THUNDER_CHAT_TEMPLATES`, a folder of `.jinja` files such as llama.cpp's `models/templates`, and
//! `THUNDER_JINJA_PYTHON`, a Python with jinja2. `THUNDER_CHAT_TEMPLATES_REPORT` names a file for the table of results.

use super::{ChatTemplate, RenderOptions, messages};
use chrono::DateTime;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/render_chat_templates.py");

/// A conversation and its render options.
struct Case {
    name: &'static str,
    messages: Value,
    tools: Option<Value>,
    variables: Map<String, Value>,
}

fn cases() -> Vec<Case> {
    let tools = json!([
        {"type": "function", "function": {"name": "get_weather", "description": "Weather of a \"city\".",
            "parameters": {"type": "object", "required": ["city"], "properties": {
                "city": {"type": "string", "description": "Its name."},
                "unit": {"type": "string", "enum": ["C", "F"]}, "days": {"type": "integer"}}}}},
        {"type": "function", "function": {"name": "now", "description": "The time.",
            "parameters": {"type": "object", "properties": {}}}},
    ]);
    let user = |text: &str| json!({"role": "user", "content": text});
    let says = |text: &str| json!({"role": "assistant", "content": text});
    let system = json!({"role": "system", "content": "Be short."});
    let call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments.to_string()}});
    let calls = |content: &str, calls: Value| json!({"role": "assistant", "content": content, "tool_calls": calls});
    let result =
        |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "name": "get_weather", "content": text});
    let oakford = call("abcdef012", "get_weather", json!({"city": "Oakford \"é\"", "days": 2, "unit": "C"}));
    let with_reasoning = json!({"role": "assistant", "content": "Four.", "reasoning_content": "2 + 2 is 4."});
    let case =
        |name, messages, tools: Option<&Value>| Case { name, messages, tools: tools.cloned(), variables: Map::new() };
    let mut cases = vec![
        case("plain", json!([user("Hi")]), None),
        case("system", json!([system, user("Hi\nthere")]), None),
        case("turns", json!([system, user("One?"), says("Yes."), user("Two?"), says(" No. "), user("Three?")]), None),
        case("tools", json!([user("Weather?")]), Some(&tools)),
        case("tools and system", json!([system, user("Weather?")]), Some(&tools)),
        case("call", json!([user("Weather?"), calls("", json!([oakford])), result("abcdef012", "rain")]), Some(&tools)),
        case(
            "call after text",
            json!([
                user("Weather?"),
                calls("Let me look.", json!([oakford])),
                result("abcdef012", "{\"sky\": \"rain\"}"),
                says("Rain."),
                user("Thanks")
            ]),
            Some(&tools),
        ),
        case(
            "calls",
            json!([
                user("Weather?"),
                calls("", json!([oakford, call("abcdef013", "now", json!({}))])),
                result("abcdef012", "rain"),
                result("abcdef013", "noon"),
                says("Rain at noon."),
                user("Thanks")
            ]),
            Some(&tools),
        ),
        case("reasoning", json!([user("2 + 2?"), with_reasoning, user("And 3 + 3?")]), None),
        case("reasoning marker in text", json!([user("1?"), says("a </think> b"), user("2?")]), None),
        case(
            "markers in text",
            json!([
                user("What is </think>?"),
                says("<think>\nhm\n</think>\n\nIt ends reasoning."),
                user("<tool_response>no</tool_response>")
            ]),
            None,
        ),
        case("no thinking", json!([user("Hi")]), None),
    ];
    if let Some(last) = cases.last_mut() {
        last.variables.insert("enable_thinking".into(), false.into());
    }
    cases
}

/// Result of one conversation in one template.
enum Outcome {
    Equal { all_found: bool },
    BothRefuse,
    Differs(String),
}

#[test]
fn chat_templates_render_as_in_jinja2() {
    let (Some(folder), Some(python)) =
        (std::env::var_os("THUNDER_CHAT_TEMPLATES"), std::env::var_os("THUNDER_JINJA_PYTHON"))
    else {
        eprintln!("SKIPPED: THUNDER_CHAT_TEMPLATES and THUNDER_JINJA_PYTHON are not both set");
        return;
    };
    let mut sources: Vec<(String, String)> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "jinja"))
        .map(|path| (path.file_stem().unwrap().to_string_lossy().into_owned(), std::fs::read_to_string(&path).unwrap()))
        .collect();
    sources.sort();
    let cases = cases();
    let (mut ours, mut given) = (Vec::new(), Vec::new());
    for (_, source) in &sources {
        let template = ChatTemplate::new(Some(source), "<s>", "</s>");
        for case in &cases {
            let (text, context) = match &template {
                Ok(template) => rendered(template, case),
                Err(error) => (Err(error.to_string()), Value::Null),
            };
            ours.push(text);
            given.push(json!({"template": source, "context": context, "now": 0}));
        }
    }
    let theirs = in_python(&python, &given);
    let mut report = String::from("| template |");
    cases.iter().for_each(|case| write!(report, " {} |", case.name).unwrap());
    write!(report, "\n|---|{}\n", "---|".repeat(cases.len())).unwrap();
    let (mut wrong, mut equal, mut rejections, mut unfound) = (Vec::new(), 0, Vec::new(), 0);
    for (index, (name, _)) in sources.iter().enumerate() {
        write!(report, "| {name} |").unwrap();
        for (at, case) in cases.iter().enumerate() {
            let at = index * cases.len() + at;
            let cell = match outcome(&ours[at], &theirs[at]) {
                Outcome::Equal { all_found } => {
                    equal += 1;
                    unfound += usize::from(!all_found);
                    if all_found { "=".to_owned() } else { "=, messages not found".to_owned() }
                }
                Outcome::BothRefuse => {
                    let error = ours[at].as_ref().err();
                    rejections.push(format!("{name}, {}: {}", case.name, error.map_or("", String::as_str)));
                    "both refuse".to_owned()
                }
                Outcome::Differs(why) => {
                    wrong.push(format!("{name}, {}: {why}", case.name));
                    "differs".to_owned()
                }
            };
            write!(report, " {cell} |").unwrap();
        }
        report.push('\n');
    }
    writeln!(
        report,
        "\n{equal} equal, {} rejected by both, {} differ; in {unfound} the messages are not found",
        rejections.len(),
        wrong.len()
    )
    .unwrap();
    println!("{report}\n{}\n{}", wrong.join("\n"), rejections.join("\n"));
    if let Some(path) = std::env::var_os("THUNDER_CHAT_TEMPLATES_REPORT") {
        std::fs::write(path, &report).unwrap();
    }
    assert!(wrong.is_empty(), "{} renders differ", wrong.len());
}

/// Renders a case: the text, true if every user message was located in it, and the template's variables.
fn rendered(template: &ChatTemplate, case: &Case) -> (Result<(String, bool), String>, Value) {
    let options = RenderOptions {
        tools: case.tools.clone(),
        add_generation_prompt: true,
        continue_final: false,
        variables: case.variables.clone(),
        now: DateTime::UNIX_EPOCH,
    };
    let adapted = template.adapt(messages::normalize(&case.messages).unwrap(), options.tools.as_ref());
    let mut context = json!({
        "messages": adapted, "tools": options.tools, "add_generation_prompt": true, "bos_token": "<s>",
        "eos_token": "</s>", "enable_thinking": true, "date_string": "01 Jan 1970", "datetime": "Jan 01 1970",
    });
    for (name, value) in &options.variables {
        context[name] = value.clone();
    }
    let text = template.text(&adapted, &options).map_err(|error| error.to_string()).map(|text| {
        let users = adapted.iter().filter(|message| message["role"] == "user").count();
        let found = template.parts(&adapted, &options, &text).unwrap_or_default();
        (text, found.iter().filter(|part| part.role == "user").count() == users)
    });
    (text, context)
}

fn in_python(python: &std::ffi::OsStr, cases: &[Value]) -> Vec<Value> {
    let mut child =
        Command::new(python).arg(PYTHON).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("Python runs");
    let input = serde_json::to_vec(cases).unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || pipe.write_all(&input).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    serde_json::from_slice(&output.stdout).expect("Python writes JSON")
}

fn outcome(ours: &Result<(String, bool), String>, theirs: &Value) -> Outcome {
    match (ours, theirs["text"].as_str()) {
        (Ok((ours, found)), Some(theirs)) if ours == theirs => Outcome::Equal { all_found: *found },
        (Ok((ours, _)), Some(theirs)) => {
            let same = ours.bytes().zip(theirs.bytes()).take_while(|(a, b)| a == b).count();
            let around = |text: &str| {
                let bytes = &text.as_bytes()[same.saturating_sub(40)..(same + 60).min(text.len())];
                String::from_utf8_lossy(bytes).into_owned()
            };
            Outcome::Differs(format!("Thunder {:?}, Jinja2 {:?}", around(ours), around(theirs)))
        }
        (Err(_), None) => Outcome::BothRefuse,
        (Err(error), Some(_)) => Outcome::Differs(format!("rejected only by Thunder: {error}")),
        (Ok(_), None) => Outcome::Differs(format!("rejected only by Jinja2: {}", theirs["error"])),
    }
}
