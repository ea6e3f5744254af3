use crate::model::chat::answer::{AnswerFormat, AnswerMessage, AnswerParser, ToolDefinition};
use crate::model::chat::family::ModelFamily;
use crate::model::chat::syntax::CallShape;
use crate::model::chat::{ChatTemplate, RenderOptions};
use chrono::DateTime;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Environment variable with a directory of templates, e.g. those of llama.cpp.
const DIRECTORY: &str = "THUNDER_CHAT_TEMPLATES";

/// Templates with ambiguous output: unescaped quotes; text as reasoning, or as a separate message.
const EXCEPTIONS: [&str; 3] = ["LFM2.5-8B-A1B", "openai-gpt-oss-120b", "NVIDIA-Nemotron-Nano-v2"];

fn tools() -> Value {
    let parameters = json!({"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string", "description": "City."},
        "days": {"type": "integer", "description": "Days."},
        "exact": {"type": "boolean", "description": "Exact."},
        "where": {"type": "object", "description": "Where.", "additionalProperties": {"type": "string"}, "properties": {"zip": {"type": "string", "description": "Zip."}}},
        "units": {"type": "array", "description": "Units.", "items": {"type": "string"}}}});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "description": "What it does.", "parameters": parameters}});
    json!([tool("get_weather"), tool("add")])
}

fn answer_format(template: &ChatTemplate, single: bool) -> AnswerFormat {
    let tools = tools().as_array().unwrap().clone();
    let tool = |tool: &Value| ToolDefinition {
        name: tool["function"]["name"].as_str().unwrap().to_owned(),
        parameters: tool["function"]["parameters"].clone(),
        strict: false,
    };
    AnswerFormat {
        syntax: template.syntax(),
        tools: tools.iter().map(tool).collect(),
        separates_reasoning: true,
        thinking: false,
        single,
    }
}

fn options(add_generation_prompt: bool) -> RenderOptions {
    let mut variables = Map::new();
    variables.insert("enable_thinking".into(), true.into());
    variables.insert("thinking".into(), true.into());
    variables.insert("reasoning_effort".into(), "high".into());
    RenderOptions {
        tools: Some(tools()),
        add_generation_prompt,
        continue_final: false,
        variables,
        now: DateTime::UNIX_EPOCH,
    }
}

/// Renders an answer: the text that the model would have written.
fn written(template: &ChatTemplate, message: &Value) -> Result<(String, bool), String> {
    let user = json!({"role": "user", "content": "UUU"});
    let all = template.render(&json!([user, message]), &options(false)).map_err(|error| error.to_string())?.text;
    let begun = template.render(&json!([user]), &options(true)).map_err(|error| error.to_string())?;
    let after = |text: &str| text.rfind("UUU").map(|at| text[at + 3..].to_owned()).unwrap_or_default();
    let (all, prompt) = (after(&all), after(&begun.text));
    let from = if all.starts_with(&prompt) { prompt.len() } else { super::segments::common_start(&all, &prompt) };
    // Text after the end of the model's turn does not belong to the answer.
    let rest = &all[from..];
    let end = rest.find("<|END_OF_TURN_TOKEN|>").unwrap_or(rest.len());
    Ok((rest[..end].to_owned(), begun.thinking && rest.contains("RRR")))
}

fn read(answer_format: &AnswerFormat, parts: &[String]) -> AnswerMessage {
    let mut parser = AnswerParser::new(Arc::new(answer_format.clone()));
    for part in parts {
        parser.push(part);
    }
    parser.finish();
    parser.message().clone()
}

fn calls(message: &AnswerMessage) -> Vec<(String, Value)> {
    message
        .calls
        .iter()
        .map(|call| (call.name.clone(), serde_json::from_str(&call.arguments).unwrap_or_default()))
        .collect()
}

fn message(content: &str, reasoning: &str, calls: &[(&str, Value)]) -> Value {
    let mut message = json!({"role": "assistant", "content": content});
    if !reasoning.is_empty() {
        for field in ["reasoning_content", "reasoning", "thinking"] {
            message[field] = reasoning.into();
        }
    }
    if !calls.is_empty() {
        let call = |(index, (name, arguments)): (usize, &(&str, Value))| json!({"id": format!("call0000{index}"), "type": "function", "function": {"name": name, "arguments": arguments}});
        message["tool_calls"] = calls.iter().enumerate().map(call).collect();
    }
    message
}

/// Calls of LFM2, whose template does not render them.
const PYTHON: [&str; 2] = [
    "<|tool_call_start|>[get_weather(city=\"Ulm\", days=3, exact=False, where={\"zip\": \"89073\"}, units=['mm', 'C'])",
    ", add(city=\"Bern\")]<|tool_call_end|>",
];
/// Calls of Phi, whose template does not render them.
const OBJECTS: [&str; 2] = [
    "<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Ulm\", \"days\": 3, \"exact\": false, \"where\": \
     {\"zip\": \"89073\"}, \"units\": [\"mm\", \"C\"]}}",
    ", {\"name\": \"add\", \"arguments\": {\"city\": \"Bern\"}}]",
];

/// Parses the template's own rendering, in one piece and character by character, and returns the problems.
fn problems(source: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let template = match ChatTemplate::new(Some(source), "", "") {
        Ok(template) => template,
        Err(error) => return vec![error.to_string()],
    };
    let weather = (
        "get_weather",
        json!({"city": "Ulm, \"it's\" <b>", "days": 3, "exact": true, "where": {"zip": "89073"},
                                          "units": ["mm", "C"]}),
    );
    let plain = (
        "get_weather",
        json!({"city": "Ulm", "days": 3, "exact": false, "where": {"zip": "89073"}, "units": ["mm", "C"]}),
    );
    let add = ("add", json!({"city": "Bern"}));
    for (what, content, reasoning, known) in [
        ("one", "", "", vec![plain.clone()]),
        ("quotes", "", "", vec![weather.clone()]),
        ("two", "", "", vec![plain.clone(), add.clone()]),
        ("text and call", "CCC", "", vec![add.clone()]),
        ("reasoning and call", "", "RRR", vec![add.clone()]),
        ("reasoning and text", "CCC", "RRR", vec![]),
        ("text", "CCC", "", vec![]),
    ] {
        let mut problem =
            |found: &dyn std::fmt::Display, text: &str| problems.push(format!("{what}: {found} in {text:?}"));
        let (text, thinking) = match written(&template, &message(content, reasoning, &known)) {
            Ok(written) => written,
            // Some accept one call at a time.
            Err(error) if what == "two" && error.contains("single tool-calls") => continue,
            Err(error) => {
                problem(&format!("cannot be rendered: {error}"), "");
                continue;
            }
        };
        let unrendered = !known.is_empty() && !text.contains(known[0].0);
        if unrendered && !content.is_empty() {
            continue;
        }
        // Some templates do not render calls, but describe them in the system message or rely on training.
        let text = match template.syntax().family {
            ModelFamily::Lfm2 if unrendered => PYTHON[..known.len()].concat(),
            ModelFamily::Phi if unrendered => OBJECTS[..known.len()].concat(),
            _ => text,
        };
        let known = match &template.syntax().family {
            ModelFamily::Lfm2 | ModelFamily::Phi if unrendered => {
                vec![plain.clone(), add.clone()][..known.len()].to_vec()
            }
            _ => known,
        };
        let answer_format = AnswerFormat { thinking, ..answer_format(&template, false) };
        let whole = read(&answer_format, std::slice::from_ref(&text));
        let characters: Vec<String> = text.chars().map(String::from).collect();
        if read(&answer_format, &characters) != whole {
            problem(&"streamed differs", &text);
        }
        let expected: Vec<(String, Value)> =
            known.iter().map(|(name, arguments)| ((*name).to_owned(), arguments.clone())).collect();
        let rendered = expected.iter().filter(|(name, _)| text.contains(name.as_str())).count();
        if calls(&whole) != expected[..rendered] || (rendered == 0 && !known.is_empty()) {
            problem(&format!("calls {:?}", calls(&whole)), &text);
        }
        let expected_part = |word: &'static str| if text.contains(word) { word } else { "" };
        if whole.reasoning != expected_part(reasoning) {
            problem(&format!("reasoning {:?}", whole.reasoning), &text);
        }
        let content_text = whole.content.trim();
        let content_text = content_text.trim_end_matches(|c: char| c != 'C');
        if content_text != expected_part(content) {
            problem(&format!("text {:?}", whole.content), &text);
        }
        if rendered == 2 {
            let single = AnswerFormat { single: true, ..answer_format.clone() };
            if calls(&read(&single, std::slice::from_ref(&text))) != expected[..1] {
                problem(&"two calls where one was requested", &text);
            }
        }
    }
    problems
}

#[test]
fn calls_of_templates_in_a_directory_are_parsed() {
    let Ok(directory) = std::env::var(DIRECTORY) else {
        eprintln!("SKIPPED: {DIRECTORY} names no directory of chat templates");
        return;
    };
    let mut files: Vec<_> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "jinja"));
    files.sort();
    let mut wrong = Vec::new();
    for file in &files {
        let problems = problems(&std::fs::read_to_string(file).unwrap());
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        println!("{} {name}", if problems.is_empty() { "ok  " } else { "FAIL" });
        wrong.extend((!problems.is_empty()).then_some(name));
        for problem in problems {
            println!("       {problem}");
        }
    }
    println!("{} of {} templates", files.len() - wrong.len(), files.len());
    wrong.retain(|name| !EXCEPTIONS.contains(&name.as_str()));
    assert_eq!(wrong, Vec::<String>::new());
}

/// Small templates, each with a different form of calls.
const FORMS: [(&str, &str); 12] = [
    (
        "object",
        "{% for c in m.tool_calls %}{% if not loop.first %}\n{% endif %}<call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</call>{% endfor %}",
    ),
    (
        "objects in one block",
        "<calls>\n{% for c in m.tool_calls %}{\"tool\": \"{{ c.function.name }}\", \"input\": {{ c.function.arguments | tojson }}}\n{% endfor %}</calls>",
    ),
    (
        "list",
        "<calls>[{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}{\"id\": \"{{ loop.index0 }}\", \"name\": \"{{ c.function.name }}\", \"parameters\": {{ c.function.arguments | tojson }}}{% endfor %}]</calls>",
    ),
    (
        "name as key",
        "<calls>[{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}{\"{{ c.function.name }}\": {{ c.function.arguments | tojson }}}{% endfor %}]</calls>",
    ),
    (
        "named",
        "{% for c in m.tool_calls %}<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>{% endfor %}",
    ),
    (
        "named with id",
        "<calls>{% for c in m.tool_calls %}<begin>{{ c.id }}<name>{{ c.function.name }}<args>{{ c.function.arguments | tojson }}<end>{% endfor %}</calls>",
    ),
    (
        "numbered and fenced",
        "<calls>{% for c in m.tool_calls %}<begin>functions.{{ c.function.name }}:{{ loop.index0 }}\n```json\n{{ c.function.arguments | tojson }}\n```<end>{% endfor %}</calls>",
    ),
    (
        "tags on lines",
        "{% for c in m.tool_calls %}\n<call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</call>{% endfor %}",
    ),
    (
        "tags with types",
        "<calls>{% for c in m.tool_calls %}<invoke name=\"{{ c.function.name }}\" index=\"{{ loop.index }}\">{% for k, v in c.function.arguments.items() %}<arg key=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">{{ v if v is string else v | tojson }}</arg>{% endfor %}</invoke>{% endfor %}</calls>",
    ),
    (
        "elements",
        "{% macro xml(v) %}{% if v is mapping %}{% for k, w in v.items() %}]<ns>[<{{ k }}>{{ xml(w) }}]<ns>[</{{ k }}>{% endfor %}{% elif v is string %}{{ v }}{% elif v is iterable %}{% for w in v %}]<ns>[<item>{{ xml(w) }}]<ns>[</item>{% endfor %}{% else %}{{ v | tojson }}{% endif %}{% endmacro %}]<ns>[<calls>\n{% for c in m.tool_calls %}]<ns>[<invoke name=\"{{ c.function.name }}\">{{ xml(c.function.arguments) }}]<ns>[</invoke>\n{% endfor %}]<ns>[</calls>",
    ),
    (
        "braces",
        "{% macro value(v) %}{% if v is string %}<|'|>{{ v }}<|'|>{% elif v is mapping %}{{ '{' }}{% for k, w in v.items() %}{% if not loop.first %},{% endif %}{{ k }}:{{ value(w) }}{% endfor %}{{ '}' }}{% elif v is iterable %}[{% for w in v %}{% if not loop.first %},{% endif %}{{ value(w) }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}{% for c in m.tool_calls %}<|call>call:{{ c.function.name }}{{ value(c.function.arguments) }}<call|>{% endfor %}",
    ),
    (
        "Python",
        "{% macro value(v) %}{% if v is string %}{{ v | tojson }}{% else %}{{ v | tojson }}{% endif %}{% endmacro %}<|calls|>[{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{% if not loop.first %}, {% endif %}{{ k }}={{ value(v) }}{% endfor %}){% endfor %}]<|/calls|>",
    ),
];

fn source(calls: &str) -> String {
    format!(
        "{{% if tools %}}<|tools|>{{{{ tools | tojson }}}}<|end|>{{% endif %}}{{% for m in messages %}}<|{{{{ m.role }}}}|>\
         {{% if m.reasoning_content %}}<think>{{{{ m.reasoning_content }}}}</think>{{% endif %}}{{{{ m.content or '' }}}}\
         {{% if m.tool_calls %}}{calls}{{% endif %}}<|end|>{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
    )
}

/// Returns the formats of templates with different forms of calls.
pub(in crate::model::chat) fn formats() -> Vec<(&'static str, Arc<crate::model::chat::syntax::AnswerSyntax>)> {
    FORMS
        .iter()
        .map(|(name, calls)| (*name, ChatTemplate::new(Some(&source(calls)), "", "").unwrap().syntax()))
        .collect()
}

#[test]
fn calls_of_every_form_are_parsed() {
    for (name, calls) in FORMS {
        assert_eq!(problems(&source(calls)), Vec::<String>::new(), "{name}");
    }
}

#[test]
fn form_is_derived_from_the_template() {
    for (name, format) in formats() {
        let form = &format.calls[0];
        let shape = match &form.shape {
            CallShape::Json(_) => "object",
            CallShape::Named { .. } => "named",
            CallShape::Tagged(_) => "tags",
            CallShape::Braces { .. } => "braces",
            CallShape::Python => "Python",
            other => panic!("{name}: {other:?}"),
        };
        let expected = match name {
            "object" | "objects in one block" | "list" | "name as key" => "object",
            "named" | "named with id" | "numbered and fenced" => "named",
            "tags on lines" | "tags with types" | "elements" => "tags",
            other => other,
        };
        assert_eq!((shape, format.reasoning_markers.open.as_str()), (expected, "<think>"), "{name}: {form:?}");
    }
}

#[test]
fn reasoning_of_every_form_is_separated_from_text() {
    for (open, close, text, end) in [
        ("<seed:think>", "</seed:think>\n", "", ""),
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ("<|channel>thought\n", "<channel|>", "", ""),
        ("<|think|>", "<|end|><|assistant|>", "<|content|>", ""),
        (" to=self<|message|>", "<|eom|><|assistant|>", " to=user<|message|>", ""),
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        ("[THINK]", "[/THINK]", "all\n", ""),
    ] {
        let source = format!(
            "{{{{ tools }}}}{{% for m in messages %}}{{% if m.role == 'user' %}}<|user|>{{{{ m.content }}}}<|end|>{{% else %}}<|assistant|>\
             {{% if m.reasoning %}}{open}{{{{ m.reasoning }}}}{close}{{% endif %}}{{% if m.content %}}{text}{{{{ m.content }}}}{end}{{% endif %}}\
             {{% for c in m.tool_calls or [] %}}<call>{{{{ {{'name': c.function.name, 'arguments': c.function.arguments}} | tojson }}}}</call>\
             {{% endfor %}}<|end|>{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
        );
        assert_eq!(problems(&source), Vec::<String>::new(), "{open}");
    }
}

#[test]
fn hostile_templates_are_derived_in_bounded_time() {
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}";
    let braces = "{% for a in range(90000) %}{{ '{' }}{% endfor %}";
    let nested = "{% for a in range(20000) %}<{% endfor %}{% for c in m.tool_calls %}{{ c }}{% endfor %}";
    let echo = "{{ m }}{{ messages }}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.name }}{% endfor %}";
    let marks =
        "{% for c in m.tool_calls %}{{ c.function.name }}\u{f5a90}\u{f5a94}{{ c.function.arguments }}{% endfor %}";
    let keys = "{% for c in m.tool_calls %}{{ c.function.name }}{% for k in c.function.arguments %}{{ k }}{% endfor %}{% endfor %}";
    for calls in [loops, braces, nested, echo, marks, keys] {
        let template = ChatTemplate::new(Some(&source(calls)), "", "").unwrap();
        assert!(!template.syntax().calls.is_empty());
    }
    for whole in [loops, "{{ messages }}", "{{ messages[1].content }}", "", "{{ tools }}{{ messages[-1] }}"] {
        assert!(!ChatTemplate::new(Some(whole), "", "").unwrap().syntax().calls.is_empty());
    }
}

/// Returns a rendered answer of one of the forms, in which a part is replaced by random pieces of syntax.
fn broken() -> impl Strategy<Value = (usize, String)> {
    let mut answers = Vec::new();
    for (_, calls) in FORMS {
        let template = ChatTemplate::new(Some(&source(calls)), "", "").unwrap();
        let weather = ("get_weather", json!({"city": "Zürich", "where": {"zip": "1"}, "units": ["a", "b"]}));
        let message = message("text ", "hm", &[weather, ("add", json!({"days": 2}))]);
        answers.push(written(&template, &message).unwrap().0);
    }
    let noise = prop::sample::select(vec![
        "", "<", "]", "}", "\n", "</call>", "<calls>", "\"", "é", "'", "add", "<think>", "{", "[", ",", "x=",
    ]);
    let place = any::<prop::sample::Index>();
    (0..FORMS.len(), place.clone(), place, prop::collection::vec(noise, 0..6)).prop_map(
        move |(form, from, to, noise)| {
            let places: Vec<usize> = answers[form].char_indices().map(|(at, _)| at).collect();
            let (a, b) = (places[from.index(places.len())], places[to.index(places.len())]);
            let answer = &answers[form];
            (form, format!("{}{}{}", &answer[..a.min(b)], noise.concat(), &answer[a.max(b)..]))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// The result does not depend on the division into pieces.
    #[test]
    fn division_of_a_derived_answer_does_not_change_the_result((form, text) in broken(), cuts: Vec<prop::sample::Index>, single: bool) {
        static FORMATS: std::sync::LazyLock<Vec<ChatTemplate>> =
            std::sync::LazyLock::new(|| FORMS.iter().map(|(_, calls)| ChatTemplate::new(Some(&source(calls)), "", "").unwrap()).collect());
        let answer_format = answer_format(&FORMATS[form], single);
        let whole = read(&answer_format, std::slice::from_ref(&text));
        let each: Vec<String> = text.chars().map(String::from).collect();
        prop_assert_eq!(&read(&answer_format, &each), &whole);
        let places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        let mut at: Vec<usize> = cuts.iter().filter(|_| !places.is_empty()).map(|cut| places[cut.index(places.len())]).collect();
        at.extend([0, text.len()]);
        at.sort_unstable();
        let parts: Vec<String> = at.windows(2).map(|pair| text[pair[0]..pair[1]].to_owned()).collect();
        prop_assert_eq!(&read(&answer_format, &parts), &whole);
    }
}
