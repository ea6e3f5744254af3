//! Chat templates: control tokens, parts of earlier answers, and built-in templates.

use super::{CHAT, chat, tools};
use crate::harness::{Server, folder, server, thunder};
use serde_json::{Value, json};

/// A literal of a control token of the tests' model.
const CONTROL: &str = "<|im_end|>";

/// Returns the number of tokens that the literal of a control token adds to a prompt.
async fn added_tokens(path: &str, body: impl Fn(&str) -> Value) -> u64 {
    let server = server().await;
    let mut counts = Vec::new();
    for text in ["a", &format!("a{CONTROL}")] {
        let mut body = body(text);
        body["max_tokens"] = 1.into();
        let usage = server.answer(path, &body).await["usage"].clone();
        // Anthropic counts cached input tokens separately.
        let input = |name: &str| usage[name].as_u64();
        let of_anthropic = |cached| input("input_tokens").map(|input| input + cached);
        let cached = input("cache_read_input_tokens").unwrap_or_default();
        counts.push(input("prompt_tokens").or(of_anthropic(cached)).unwrap());
    }
    counts[1] - counts[0]
}

#[tokio::test]
async fn control_tokens_in_messages_are_text_on_every_route() {
    let server = server().await;
    let plain = server.answer("/tokenize", &json!({"content": format!("a{CONTROL}"), "parse_special": false})).await;
    let expected = plain["tokens"].as_array().unwrap().len() as u64 - 1;
    assert!(expected > 1);
    let user = |text: &str| json!([{"role": "user", "content": text}]);
    assert_eq!(added_tokens(CHAT, |text| json!({"messages": user(text)})).await, expected);
    assert_eq!(added_tokens("/v1/messages", |text| json!({"messages": user(text)})).await, expected);
    let input = |text: &str| json!({"input": text, "max_output_tokens": 1});
    assert_eq!(added_tokens("/v1/responses", input).await, expected);
    // The other roles, and descriptions of tools.
    let with_role = |role: &'static str| {
        move |text: &str| {
            json!({"messages": [{"role": "user", "content": "b"}, {"role": role, "content": text},
                                             {"role": "user", "content": "c"}]})
        }
    };
    for role in ["system", "assistant"] {
        assert_eq!(added_tokens(CHAT, with_role(role)).await, expected, "{role}");
    }
    let result = |text: &str| {
        let call = json!({"id": "1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}});
        json!({"tools": tools(), "messages": [{"role": "user", "content": "b"},
            {"role": "assistant", "content": null, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": text}]})
    };
    assert_eq!(added_tokens(CHAT, result).await, expected);
    let argument = |text: &str| {
        let arguments = json!({"a": text}).to_string();
        let call = json!({"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}});
        json!({"tools": tools(), "messages": [{"role": "user", "content": "b"},
            {"role": "assistant", "content": null, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "2"}]})
    };
    assert!(added_tokens(CHAT, argument).await > 1);
    let described = |text: &str| {
        let mut tools = tools();
        tools[0]["function"]["description"] = text.into();
        json!({"tools": tools, "messages": user("b")})
    };
    assert!(added_tokens(CHAT, described).await > 1);
    // A continued message.
    let continued =
        |text: &str| json!({"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": text}]});
    assert_eq!(added_tokens(CHAT, continued).await, expected);
}

/// A template that writes BOS and omits the reasoning of earlier answers.
const THINKING: &str = "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
    {{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}{{ '<|im_end|>\\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\
    {% if note %}{{ date_string }}|{{ datetime }}|{{ enable_thinking }}{% endif %}";

#[tokio::test]
async fn templates_drop_reasoning_and_write_bos() {
    let bos = server().await.answer("/tokenize", &json!({"content": "<|endoftext|>"})).await["tokens"][0].clone();
    let file = folder().join("template.jinja");
    std::fs::write(&file, THINKING).unwrap();
    let overridden = format!("tokenizer.ggml.add_bos_token=bool:true,tokenizer.ggml.bos_token_id=int:{bos}");
    let file = file.display().to_string();
    let server = Server::start(&["-c", "256", "-np", "1", "--override-kv", &overridden, "--chat-template-file", &file]);
    server.wait_ready().await;
    // The rendered prompt has no BOS, because `/completion` adds it.
    let prompt = server.answer("/apply-template", &chat(json!({}))).await["prompt"].as_str().unwrap().to_owned();
    assert_eq!(prompt, "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n");
    let completed = server.answer("/completion", &json!({"prompt": prompt, "n_predict": 1})).await;
    let answered = server.answer(CHAT, &chat(json!({"max_tokens": 1, "verbose": true}))).await;
    assert_eq!(completed["tokens_evaluated"], answered["usage"]["prompt_tokens"]);
    assert_eq!(answered["__verbose"]["prompt"], format!("<|endoftext|>{prompt}"));
    let tokens = server.answer("/tokenize", &json!({"content": prompt, "add_special": true})).await;
    assert_eq!(completed["tokens_evaluated"], tokens["tokens"].as_array().unwrap().len());
    let with_note = chat(json!({"chat_template_kwargs": {"note": true}}));
    let with_note = server.answer("/apply-template", &with_note).await["prompt"].as_str().unwrap().to_owned();
    let mut facts = with_note.rsplit('\n').next().unwrap().split('|');
    let dates = [facts.next().unwrap(), facts.next().unwrap()].map(|date| date.split(' ').count());
    assert_eq!((dates, facts.next()), ([3, 3], Some("True")), "{with_note}");

    // A turn whose answer contains `</think>` can be evicted, and the remaining messages are still cached.
    let long = "word ".repeat(60);
    let body =
        chat(json!({"max_tokens": 8, "ignore_eos": true, "temperature": 0, "context_policy": "evict", "messages": [
        {"role": "system", "content": "Brief."},
        {"role": "user", "content": format!("first {long}")},
        {"role": "assistant", "content": "a </think> b"},
        {"role": "user", "content": format!("second {long}")}, {"role": "assistant", "content": "two"},
        {"role": "user", "content": "third"}]}));
    let answer = server.answer(CHAT, &body).await;
    let evicted = answer["timings"]["evicted"].as_array().unwrap();
    let listed: Vec<_> =
        evicted.iter().map(|one| (one["role"].as_str().unwrap(), one["text"].as_str().unwrap())).collect();
    assert_eq!(listed.len(), 2, "{answer}");
    assert!(listed[0].1.starts_with("first word") && listed[1] == ("assistant", "b"), "{answer}");
    let again = server.answer(CHAT, &body).await;
    let prompt = again["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(again["timings"]["cache_n"], prompt - 1);
}

#[tokio::test]
async fn templates_of_llama_cpp_are_known_by_name() {
    let server = Server::start(&["-c", "256", "-np", "1", "--chat-template", "llama3"]);
    server.wait_ready().await;
    let messages = json!([{"role": "system", "content": "Brief."}, {"role": "user", "content": "Hello!"},
                          {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Bye."}]);
    let prompt = server.answer("/apply-template", &json!({"messages": messages})).await["prompt"].clone();
    let expected = "<|start_header_id|>system<|end_header_id|>\n\nBrief.<|eot_id|>\
                    <|start_header_id|>user<|end_header_id|>\n\nHello!<|eot_id|>\
                    <|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>\
                    <|start_header_id|>user<|end_header_id|>\n\nBye.<|eot_id|>\
                    <|start_header_id|>assistant<|end_header_id|>\n\n";
    assert_eq!(prompt, expected);
    let offered = json!({"messages": messages, "tools": tools()});
    let prompt = server.answer("/apply-template", &offered).await["prompt"].as_str().unwrap().to_owned();
    assert!(prompt.contains("Brief.\n\nYou may call these functions."), "{prompt}");
    let (_, props) = server.get("/props").await;
    assert_eq!(props["chat_template"], "llama3");
    let answer = server.answer(CHAT, &chat(json!({"max_tokens": 3, "ignore_eos": true}))).await;
    assert_eq!(answer["usage"]["completion_tokens"], 3);
}

#[test]
fn chat_template_flag_accepts_the_names_of_llama_cpp() {
    let mut names = thunder::model::llama::chat_template_names();
    names.sort();
    assert_eq!(names, thunder::config::CHAT_TEMPLATES);
}

#[test]
fn unknown_template_error_lists_names() {
    let mut command = thunder();
    command.args(["serve", "--chat-template", "llama33", "--data-dir"]).arg(folder());
    let error = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(
        error.contains("got 'llama33'; the names are: ") && error.contains("command-r, ") && error.contains("llama3, "),
        "{error}"
    );
}
