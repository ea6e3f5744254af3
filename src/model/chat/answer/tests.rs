mod properties;
mod tagged;

use super::{AnswerDelta, AnswerFormat, AnswerMessage, AnswerParser, ToolCall, ToolDefinition};
use crate::model::chat::family::ModelFamily;
use serde_json::json;
use std::sync::Arc;

fn answer_format(family: ModelFamily) -> AnswerFormat {
    let tool = |name: &str| ToolDefinition {
        name: name.into(),
        parameters: json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
        strict: false,
    };
    AnswerFormat {
        syntax: family.syntax().into(),
        tools: vec![tool("get_weather"), tool("add")],
        separates_reasoning: true,
        thinking: false,
        single: false,
    }
}

/// Applies deltas like a client.
fn apply(client: &mut AnswerMessage, deltas: Vec<AnswerDelta>) {
    let cut = |text: &mut String, chars: usize| {
        for _ in 0..chars {
            text.pop().expect("the text is not empty");
        }
    };
    for piece in deltas {
        match piece {
            AnswerDelta::Reasoning(text) => client.reasoning.push_str(&text),
            AnswerDelta::Content(text) => client.content.push_str(&text),
            AnswerDelta::Call(name) => client.calls.push(ToolCall { name, arguments: String::new(), complete: false }),
            AnswerDelta::Arguments(text) => client.calls.last_mut().unwrap().arguments.push_str(&text),
            AnswerDelta::CallEnd => client.calls.last_mut().unwrap().complete = true,
            AnswerDelta::Retract(retracted) => {
                cut(&mut client.reasoning, retracted.reasoning);
                cut(&mut client.content, retracted.content);
                client.calls.truncate(client.calls.len().checked_sub(retracted.calls).unwrap());
            }
        }
    }
}

fn read_in<'a>(answer_format: &AnswerFormat, parts: impl IntoIterator<Item = &'a str>, cut: bool) -> AnswerMessage {
    let mut parser = AnswerParser::new(Arc::new(answer_format.clone()));
    let mut client = AnswerMessage::default();
    for part in parts {
        apply(&mut client, parser.push(part));
    }
    apply(&mut client, if cut { parser.finish_cut() } else { parser.finish() });
    assert_eq!(&client, parser.message());
    client
}

fn read(family: ModelFamily, text: &str) -> AnswerMessage {
    read_in(&answer_format(family), [text], false)
}

fn calls(message: &AnswerMessage) -> Vec<(&str, serde_json::Value)> {
    let parsed = |call: &ToolCall| serde_json::from_str(&call.arguments).unwrap_or_else(|_| panic!("{call:?}"));
    message.calls.iter().map(|call| (call.name.as_str(), parsed(call))).collect()
}

/// For each family an answer with reasoning, text and two calls.
const ANSWERS: &[(ModelFamily, &str)] = &[
    (
        ModelFamily::Hermes,
        "<think>\nhm </think>\n\nI look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\"}}\n\
         </tool_call>\n<tool_call>{\"arguments\": {\"days\": 2}, \"name\": \"add\"}</tool_call>",
    ),
    (
        ModelFamily::QwenCoder,
        "<think>hm</think>I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n\
         </tool_call>\n<tool_call>\n<function=add>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        ModelFamily::Llama3,
        "<think>hm</think>I look.<|python_tag|>{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Zürich\"}}; \
         {\"type\": \"function\", \"name\": \"add\", \"parameters\": {\"days\": 2}}",
    ),
    (
        ModelFamily::Functionary,
        "<think>hm</think>I look.<function=get_weather>{\"city\": \"Zürich\"}</function><function=add>{\"days\": 2}</function>",
    ),
    (
        ModelFamily::Mistral,
        "[THINK]hm[/THINK]I look.[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\"}, \"id\": \
         \"abcdefghi\"}, {\"name\": \"add\", \"arguments\": {\"days\": 2}}]",
    ),
    (
        ModelFamily::Mistral,
        "[THINK]hm[/THINK]I look.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"Zürich\"}[TOOL_CALLS]add[ARGS]{\"days\": 2}",
    ),
    (ModelFamily::Glm4, "<think>hm</think>\nget_weather\n{\"city\": \"Zürich\"}\nadd\n{\"days\": 2}"),
    (
        ModelFamily::Glm45,
        "<think>hm</think>I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>\n\
         <tool_call>add<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
    ),
    (
        ModelFamily::DeepSeek,
        "<think>hm</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n\
         {\"city\": \"Zürich\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>add<｜tool▁sep｜>{\"days\": 2}<｜tool▁call▁end｜>\
         <｜tool▁calls▁end｜>",
    ),
    (
        ModelFamily::Kimi,
        "<think>hm</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>\
         {\"city\": \"Zürich\"}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{\"days\": 2}\
         <|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        ModelFamily::CommandR,
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>I look.<|END_RESPONSE|><|START_ACTION|>[\n{\"tool_call_id\": \"0\", \
         \"tool_name\": \"get_weather\", \"parameters\": {\"city\": \"Zürich\"}},\n{\"tool_call_id\": \"1\", \"tool_name\": \"add\", \
         \"parameters\": {\"days\": 2}}\n]<|END_ACTION|>",
    ),
    (
        ModelFamily::Phi,
        "<think>hm</think>I look.<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\"}}, \
         {\"type\": \"function\", \"function\": {\"name\": \"add\", \"arguments\": \"{\\\"days\\\": 2}\"}}]<|/tool_call|>",
    ),
    (
        ModelFamily::Nemotron,
        "<think>hm</think>I look.<TOOLCALL>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\"}}, \
         {\"name\": \"add\", \"arguments\": {\"days\": 2}}]</TOOLCALL>",
    ),
    (
        ModelFamily::Harmony,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant\
         <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Zürich\"}<|call|><|start|>assistant \
         to=functions.add<|channel|>commentary json<|message|>{\"days\": 2}<|call|>",
    ),
];

#[test]
fn answers_of_every_family_are_parsed() {
    for (family, text) in ANSWERS {
        let message = read(*family, text);
        assert_eq!(message.reasoning.trim(), "hm", "{family:?}");
        let expected = if *family == ModelFamily::Glm4 { "" } else { "I look." };
        assert_eq!(message.content, expected, "{family:?}");
        let expected = [("get_weather", json!({"city": "Zürich"})), ("add", json!({"days": 2}))];
        assert_eq!(calls(&message), expected, "{family:?}");
        assert!(message.calls.iter().all(|call| call.complete));
    }
}

#[test]
fn arguments_are_streamed() {
    let mut parser = AnswerParser::new(Arc::new(answer_format(ModelFamily::Hermes)));
    let shown = |deltas: Vec<AnswerDelta>| format!("{deltas:?}");
    assert_eq!(parser.push("<tool_call>\n{\"name\": \"add\", \"argu"), []);
    assert_eq!(
        shown(parser.push("ments\": {\"days\"")),
        shown(vec![AnswerDelta::Call("add".into()), AnswerDelta::Arguments("{\"days\"".into())])
    );
    assert_eq!(parser.push(": 1"), [AnswerDelta::Arguments(": 1".into())]);
    assert_eq!(parser.push("}}"), [AnswerDelta::Arguments("}".into()), AnswerDelta::CallEnd]);
    assert_eq!(parser.push("\n</tool_call>"), []);
}

#[test]
fn text_that_is_no_call_stays_unchanged() {
    for (family, text) in [
        (ModelFamily::Hermes, "a <tool_call>\n{\"name\": \"add\", \"arguments\": {\"days\" 1}}\n</tool_call> b"),
        (ModelFamily::Hermes, "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"days\": 1"),
        (ModelFamily::Hermes, "<tool_call>\n{\"name\": \"add\", \"arguments\": [1]}</tool_call>"),
        (ModelFamily::Hermes, "<tool_call>\n{\"arguments\": {}}</tool_call>"),
        (ModelFamily::Hermes, "say <tool_call> and </tool_call> around it"),
        (ModelFamily::Hermes, "  <tool_call>"),
        (ModelFamily::Hermes, "a < b and <tool"),
        (ModelFamily::QwenCoder, "<tool_call>\n<function=add>\n<parameter=days>\n1\n</function>"),
        (ModelFamily::Llama3, "{\"name\": \"Ann\", \"age\": 5}"),
        (ModelFamily::Llama3, "{\"name\": \"unknown\", \"parameters\": {}}"),
        (ModelFamily::Llama3, "<|python_tag|>print(1)"),
        (ModelFamily::Mistral, "[TOOL_CALLS][]"),
        (ModelFamily::Mistral, "[TOOL_CALLS]the weather"),
        (ModelFamily::Glm4, "get_weather is a function"),
        (ModelFamily::Glm4, "add\nand subtract"),
        (ModelFamily::Glm45, "<tool_call>add<arg_key>days</arg_key>2</tool_call>"),
        (ModelFamily::DeepSeek, "<｜tool▁calls▁begin｜>add"),
        (ModelFamily::Harmony, "no channel at all"),
        (ModelFamily::Harmony, "<|channel|>commentary to=functions.add<|message|>days: 1"),
        (ModelFamily::Harmony, "<|channel|>"),
    ] {
        let message = read(family, text);
        assert_eq!((message.content.as_str(), message.calls.len()), (text, 0), "{family:?}");
    }
}

#[test]
fn text_after_a_broken_call_is_parsed() {
    let message = read(
        ModelFamily::Hermes,
        "<tool_call>{\"name\": \"add\", oops <tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>",
    );
    assert_eq!(message.content, "<tool_call>{\"name\": \"add\", oops");
    assert_eq!(calls(&message), [("add", json!({}))]);
    let message = read(ModelFamily::Mistral, "[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {}}, {oops}] so");
    assert_eq!(message.content, ", {oops}] so");
    assert_eq!(calls(&message), [("add", json!({}))]);
}

#[test]
fn call_that_was_cut_off_stays_a_call() {
    for (family, text, arguments) in [
        (ModelFamily::Hermes, "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"days\": 1", "{\"days\": 1"),
        (ModelFamily::Mistral, "[TOOL_CALLS]add[ARGS]{\"city\": \"Zü", "{\"city\": \"Zü"),
        (ModelFamily::QwenCoder, "<tool_call><function=add><parameter=city>\nZü", "{\"city\": \"Zü"),
        (ModelFamily::Harmony, "<|channel|>commentary to=functions.add<|message|>{\"city\": \"Zü", "{\"city\": \"Zü"),
    ] {
        let message = read_in(&answer_format(family), [text], true);
        let call = &message.calls[0];
        assert_eq!((call.name.as_str(), call.arguments.as_str(), call.complete), ("add", arguments, false));
        assert_eq!(message.content, "");
    }
    let message = read_in(&answer_format(ModelFamily::Hermes), ["<tool_call>\n{\"name\": \"ad"], true);
    assert_eq!(message.content, "<tool_call>\n{\"name\": \"ad");
}

#[test]
fn header_that_was_cut_off_is_no_text() {
    let header = "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>";
    for len in "<|start|>".len()..header.len() {
        let text = format!("<|channel|>final<|message|>Hi<|end|>{}", &header[..len]);
        let message = read_in(&answer_format(ModelFamily::Harmony), [text.as_str()], true);
        assert_eq!((message.content.as_str(), message.calls.len()), ("Hi", 0), "{text}");
    }
}

#[test]
fn header_started_by_the_prompt_continues() {
    let message =
        read(ModelFamily::Harmony, " to=functions.add<|channel|>commentary json<|message|>{\"days\": 2}<|call|>");
    assert_eq!((calls(&message), message.content.as_str()), (vec![("add", json!({"days": 2}))], ""));
    for text in [" to=", " tomorrow", &format!(" to={}", "é".repeat(400))] {
        assert_eq!(read(ModelFamily::Harmony, text).content, text);
    }
}

#[test]
fn start_of_a_call_in_a_channel_is_known() {
    let call = "<|channel|>commentary to=functions.add<|message|>{\"days\"";
    for (text, unsent) in [
        ("", ""),
        ("<|start|>assistant t", "<|start|>assistant t"),
        ("<|start|>assistant to=functions.add<|channel|>", " to=functions.add<|channel|>"),
        (" to=functions", " to=functions"),
        ("<|channel|>commentary t", "commentary t"),
        (call, &call["<|channel|>".len()..]),
        (&format!("{call}: 2}}<|call|>"), ""),
        (&format!("{call}: days"), ""),
        ("<|channel|>analysis<|message|>hm <|e", "<|e"),
        ("<|channel|>final<|message|>to=functions.add", ""),
    ] {
        let mut parser = AnswerParser::new(Arc::new(answer_format(ModelFamily::Harmony)));
        parser.push(text);
        assert_eq!(&text[parser.unsent_from()..], unsent, "{text}");
    }
}

#[test]
fn malformed_calls_are_counted() {
    for (family, text, count) in [
        (ModelFamily::Hermes, "say <tool_call> and </tool_call> <tool_call>{\"name\": \"add\" ", 2),
        (ModelFamily::Llama3, "{\"name\": \"unknown\", \"parameters\": {}}", 0),
        (ModelFamily::Harmony, "<|channel|>commentary to=functions.add<|message|>days: 1", 1),
        (ModelFamily::Harmony, "<|channel|>commentary to=functions.add<|message|>{\"days\"", 1),
    ] {
        let mut parser = AnswerParser::new(Arc::new(answer_format(family)));
        parser.push(text);
        parser.finish();
        assert_eq!(parser.malformed_calls(), count, "{text}");
    }
    for (family, text) in ANSWERS {
        let mut parser = AnswerParser::new(Arc::new(AnswerFormat { single: true, ..answer_format(*family) }));
        parser.push(text);
        parser.finish();
        assert_eq!(parser.malformed_calls(), 0, "{family:?}");
    }
}

#[test]
fn repeated_end_of_reasoning_is_not_text() {
    let whole = "<think>hm</think>\n</think>\n\nFive.";
    for cut in (0..whole.len()).filter(|&at| whole.is_char_boundary(at)) {
        let mut parser = AnswerParser::new(Arc::new(answer_format(ModelFamily::Hermes)));
        parser.push(&whole[..cut]);
        parser.push(&whole[cut..]);
        parser.finish();
        let message = parser.message();
        assert_eq!((message.reasoning.as_str(), message.content.as_str()), ("hm", "Five."), "{cut}");
    }
    assert_eq!(read(ModelFamily::Hermes, "<think>hm</think> </thi").content, "</thi");
}

#[test]
fn reasoning_is_separated_only_if_requested() {
    let mut answer_format = answer_format(ModelFamily::Hermes);
    answer_format.thinking = true;
    let message = read_in(&answer_format, ["\nI thi", "nk\n</thi", "nk>\n\nYes"], false);
    assert_eq!((message.reasoning.as_str(), message.content.as_str()), ("I think", "Yes"));
    let message = read_in(&answer_format, ["<think>I think"], false);
    assert_eq!((message.reasoning.as_str(), message.content.as_str()), ("I think", ""));
    answer_format.separates_reasoning = false;
    let message = read_in(&answer_format, ["\nI think</think>Yes"], false);
    assert_eq!(message.content, "\nI think</think>Yes");
    let message = read(ModelFamily::Hermes, "Use <think> tags</think>");
    assert_eq!(message.content, "Use <think> tags</think>");
}

#[test]
fn nothing_is_a_call_without_tools() {
    for (family, text) in ANSWERS {
        let message = read_in(&AnswerFormat { tools: vec![], ..answer_format(*family) }, [*text], false);
        assert!(message.calls.is_empty());
        assert!(message.content.contains("get_weather"), "{family:?}: {message:?}");
    }
}

#[test]
fn only_the_first_call_counts_in_single_mode() {
    for (family, text) in ANSWERS {
        let message = read_in(&AnswerFormat { single: true, ..answer_format(*family) }, [*text], false);
        assert_eq!(calls(&message), [("get_weather", json!({"city": "Zürich"}))], "{family:?}");
        assert!(!message.content.contains("add"), "{family:?}: {message:?}");
    }
}

#[test]
fn built_in_tools_of_llama_are_calls() {
    let mut answer_format = answer_format(ModelFamily::Llama3);
    let message = read_in(&answer_format, ["<|python_tag|>get_weather.call(city=\"a, b\", days=3)"], false);
    assert_eq!(calls(&message), [("get_weather", json!({"city": "a, b", "days": 3}))]);
    answer_format.tools[0].name = "python".into();
    let message = read_in(&answer_format, ["<|python_tag|>print(\"x\")\n"], false);
    assert_eq!(calls(&message), [("python", json!({"code": "print(\"x\")\n"}))]);
}

#[test]
fn answer_format_is_restored_from_a_recording() {
    let template = "{{ '<|im_start|>' }}<tool_call>";
    let answer_format = AnswerFormat { thinking: true, single: true, ..AnswerFormat::plain(template) };
    let parameters = json!({"type": "object", "properties": {"city": {}}});
    for tools in [
        json!([{"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": true}}]),
        json!([{"name": "weather", "input_schema": parameters, "strict": true}]),
    ] {
        let back = AnswerFormat::from_recording(template, Some(&tools), &answer_format.to_recording());
        assert!(back.thinking && back.single && back.separates_reasoning);
        assert_eq!((back.tools[0].name.as_str(), &back.tools[0].parameters), ("weather", &parameters));
        assert!(back.tools[0].strict);
    }
    let plain = AnswerFormat::from_recording(template, None, &serde_json::Value::Null);
    assert!(plain.tools.is_empty() && !plain.thinking);
}

#[test]
fn byte_ranges_of_reasoning_are_known() {
    let ranges = |answer_format: AnswerFormat, parts: &[&str]| {
        let mut parser = AnswerParser::new(Arc::new(answer_format));
        for part in parts {
            parser.push(part);
        }
        let text = parts.concat();
        parser.reasoning_ranges().into_iter().map(|range| text[range].to_owned()).collect::<Vec<_>>()
    };
    let hermes = || answer_format(ModelFamily::Hermes);
    assert_eq!(ranges(hermes(), &["<thi", "nk>a b</thi", "nk>\n\nc"]), ["<think>a b</think>"]);
    assert_eq!(ranges(hermes(), &["\n<think>a ", "b"]), ["<think>a b"]);
    assert_eq!(ranges(AnswerFormat { thinking: true, ..hermes() }, &["a</think>c"]), ["a</think>"]);
    assert!(ranges(hermes(), &["no reasoning </think>"]).is_empty());
    let analysis = "<|channel|>analysis<|message|>a<|end|>";
    let answer = [analysis, "<|start|>assistant", analysis, "<|start|>assistant<|channel|>final<|message|>c"].concat();
    let second = format!("<|start|>assistant{analysis}");
    assert_eq!(ranges(answer_format(ModelFamily::Harmony), &[&answer]), [analysis, second.as_str()]);
    let mut parser = AnswerParser::new(Arc::new(hermes()));
    parser.push("<think>a</think>b");
    parser.retract(9);
    assert_eq!(parser.reasoning_ranges()[0], 0..8, "the reasoning continues");
}
