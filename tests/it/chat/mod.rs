//! Conversations with a real model: reasoning, tool calls, several answers, continued messages. Its weights are random,
//! so a mod forces the answers that tests depend on.

mod formats;
mod reasoning;
mod templates;

use super::harness::{Server, server, with_fields};
use formats::assert_arguments_match;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

pub fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Oakford", "Zürich"]}, "celsius": {"type": "boolean"}},
            "required": ["city", "celsius"], "additionalProperties": false}}},
        {"type": "function", "function": {"name": "add", "parameters": {
            "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}}},
    ])
}

/// Two calls with text before them, in the syntax of the tiny model's family.
pub const CALLS: &str = "I look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\", \"celsius\": true}}\n\
                         </tool_call>\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2}}\n</tool_call>";

/// Returns a mod that forces this answer.
pub fn forced_answer(text: &str) -> Value {
    json!([{ "name": "force-prefix", "config": { "text": format!("{text}<|im_end|>") } }])
}

#[expect(clippy::needless_pass_by_value, reason = "callers write json!(…) in place")]
fn chat(fields: Value) -> Value {
    with_fields(json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 400, "seed": 7}), &fields)
}

/// Returns the chunks of a streamed answer.
async fn chunks(body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = true.into();
    let events = server().await.stream(CHAT, &body).await;
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    events[..events.len() - 1].iter().map(|data| serde_json::from_str(data).unwrap()).collect()
}

/// Returns the answer that a client assembles from chunks.
fn assemble(chunks: &[Value], answer: u64) -> Value {
    let (mut content, mut reasoning, mut calls, mut reason) =
        (String::new(), String::new(), Vec::<Value>::new(), Value::Null);
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()).filter(|c| c["index"] == answer)
    {
        let delta = &choice["delta"];
        content.push_str(delta["content"].as_str().unwrap_or_default());
        reasoning.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            if call.get("id").is_some() {
                assert_eq!(index, calls.len());
                assert_eq!(call["type"], "function");
                calls.push(json!({"name": call["function"]["name"], "arguments": ""}));
            } else {
                assert!(call["function"].get("name").is_none());
                let text = calls[index]["arguments"].as_str().unwrap().to_owned();
                calls[index]["arguments"] = (text + call["function"]["arguments"].as_str().unwrap()).into();
            }
        }
        if !choice["finish_reason"].is_null() {
            assert_eq!(delta, &json!({}));
            reason = choice["finish_reason"].clone();
        }
    }
    json!({"content": content, "reasoning": reasoning, "calls": calls, "reason": reason})
}

#[tokio::test]
async fn tool_calls_are_separated_from_text() {
    let body = chat(json!({"tools": tools(), "mods": forced_answer(CALLS)}));
    let answer = server().await.answer(CHAT, &body).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &json!("I look.")));
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls[0]["function"]["name"], "get_weather");
    assert_eq!(calls[0]["function"]["arguments"], "{\"city\": \"Zürich\", \"celsius\": true}");
    assert_eq!(calls[1]["function"], json!({"name": "add", "arguments": "{\"a\": 2}"}));
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    let streamed = assemble(&chunks(&body).await, 0);
    assert_eq!(streamed["content"], "I look.");
    assert_eq!(streamed["reason"], "tool_calls");
    for (streamed, whole) in streamed["calls"].as_array().unwrap().iter().zip(calls) {
        assert_eq!(streamed, &whole["function"]);
    }
}

#[tokio::test]
async fn arguments_are_streamed_while_they_are_generated() {
    // Every token is sampled, because forced tokens are sent together.
    let body = chat(json!({"tools": tools(), "tool_choice": "required", "temperature": 2.0}));
    let chunks = chunks(&body).await;
    let pieces = chunks.iter().filter(|chunk| chunk["choices"][0]["delta"]["tool_calls"].is_array()).count();
    assert!(pieces > 3, "{chunks:?}");
}

#[tokio::test]
async fn text_that_is_not_a_call_is_returned_unchanged() {
    for text in [
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": Zürich}}\n</tool_call>",
        "a <tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1",
        "{\"name\": \"add\"}",
    ] {
        let body = chat(json!({"tools": tools(), "mods": forced_answer(text)}));
        let answer = server().await.answer(CHAT, &body).await;
        let choice = &answer["choices"][0];
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(text), &json!("stop")));
        assert!(choice["message"].get("tool_calls").is_none());
        assert_eq!(assemble(&chunks(&body).await, 0)["content"], text);
    }
    // Without tools, text is never parsed as a call.
    let answer = server().await.answer(CHAT, &chat(json!({"mods": forced_answer(CALLS)}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], CALLS);
    let none = chat(json!({"mods": forced_answer(CALLS), "tools": tools(), "tool_choice": "none"}));
    assert_eq!(server().await.answer(CHAT, &none).await["choices"][0]["message"]["content"], CALLS);
}

#[tokio::test]
async fn start_of_invalid_call_is_retracted_from_stream() {
    let server = server().await;
    // The forced start of the call is sent before the sampled rest makes the call invalid.
    let body = chat(json!({"tools": tools(), "max_tokens": 60, "ignore_eos": true, "temperature": 2.0, "seed": 3,
        "mods": [{"name": "force-prefix",
                  "config": {"text": "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": "}}]}));
    let whole = server.answer(CHAT, &body).await;
    let content = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(content.starts_with("<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": "), "{content}");
    let chunks = chunks(&body).await;
    let retracted_calls: u64 =
        chunks.iter().filter_map(|chunk| chunk.pointer("/thunder/retract/tool_calls")?.as_u64()).sum();
    assert_eq!(retracted_calls, 1);
    assert_eq!(assemble(&chunks, 0)["content"], content);
}

#[tokio::test]
async fn answer_can_be_sent_back_as_history() {
    let server = server().await;
    let body = chat(json!({"tools": tools(), "mods": forced_answer(CALLS)}));
    let prompt = server.answer("/apply-template", &body).await["prompt"].as_str().unwrap().to_owned();
    let message = server.answer(CHAT, &body).await["choices"][0]["message"].clone();
    let mut next = body.clone();
    let result = json!({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"});
    next["messages"].as_array_mut().unwrap().extend([message, result]);
    let continued = server.answer("/apply-template", &next).await["prompt"].as_str().unwrap().to_owned();
    assert!(continued.starts_with(&format!("{prompt}{CALLS}<|im_end|>\n")), "{continued}");
    server.answer(CHAT, &next).await;
}

#[tokio::test]
async fn several_answers_are_generated_for_one_request() {
    let server = server().await;
    let body = chat(json!({"n": 3, "max_tokens": 12, "temperature": 2.0, "ignore_eos": true}));
    let answer = server.answer(CHAT, &body).await;
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    assert_eq!(answer["usage"]["completion_tokens"], 36);
    assert_eq!(answer["thunder"]["run_ids"].as_array().unwrap().len(), 3);
    assert_ne!(choices[0]["message"]["content"], choices[1]["message"]["content"]);
    let chunks = chunks(&body).await;
    for index in 0..3 {
        let streamed = assemble(&chunks, index);
        assert!(!streamed["content"].as_str().unwrap().is_empty() && streamed["reason"] == "length");
    }
    assert!(chunks.last().unwrap()["timings"].is_object());
    assert_eq!(chunks.iter().filter(|chunk| chunk.get("timings").is_some()).count(), 1);
}

#[tokio::test]
async fn message_can_be_continued() {
    let server = server().await;
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer"}]);
    let prompt = async |fields: Value| {
        let body = with_fields(json!({"messages": messages}), &fields);
        server.answer("/apply-template", &body).await["prompt"].as_str().unwrap().to_owned()
    };
    assert!(prompt(json!({})).await.ends_with("<|im_start|>assistant\nThe answer"));
    for continues in [json!(true), json!("content"), json!("reasoning_content")] {
        let prompt = prompt(json!({"continue_final_message": continues})).await;
        assert!(prompt.ends_with("<|im_start|>assistant\nThe answer"), "{prompt}");
    }
    assert!(
        prompt(json!({"continue_final_message": false}))
            .await
            .ends_with("The answer<|im_end|>\n<|im_start|>assistant\n")
    );
    assert!(
        prompt(json!({"add_generation_prompt": true})).await.ends_with("The answer<|im_end|>\n<|im_start|>assistant\n")
    );
    assert!(prompt(json!({"add_generation_prompt": false})).await.ends_with("The answer<|im_end|>\n"));
    for (body, param) in [
        (
            json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": true}),
            "continue_final_message",
        ),
        (json!({"messages": [{"role": "user", "content": "a"}], "continue_final_message": true}), "messages[0].role"),
    ] {
        let (status, answer) = server.post(CHAT, &body).await;
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{answer}");
    }
}

#[tokio::test]
async fn verbose_answer_has_prompt_and_settings() {
    let server = server().await;
    let body = chat(json!({"verbose": true, "mods": forced_answer("Yes.")}));
    let answer = server.answer(CHAT, &body).await;
    let verbose = &answer["__verbose"];
    let prompt = server.answer("/apply-template", &body).await["prompt"].clone();
    assert_eq!((&verbose["prompt"], &verbose["content"]), (&prompt, &json!("Yes.")));
    assert_eq!(verbose["stop_type"], "eos");
    assert!(server.answer(CHAT, &chat(json!({"mods": forced_answer("Yes.")}))).await.get("__verbose").is_none());
}

#[tokio::test]
async fn fields_of_llama_server_apply_to_chat() {
    let server = server().await;
    let none = server.answer(CHAT, &chat(json!({"max_tokens": 0}))).await;
    assert_eq!(
        (&none["usage"]["completion_tokens"], &none["choices"][0]["finish_reason"]),
        (&json!(0), &json!("length"))
    );
    for (request, alternatives) in [
        (json!({"logprobs": true}), 20),
        (json!({"n_probs": 3}), 3),
        (json!({"top_logprobs": 0}), 0),
        (json!({"logprobs": true, "top_logprobs": 25}), 25),
    ] {
        let body = with_fields(chat(json!({"max_tokens": 1, "ignore_eos": true})), &request);
        let logprobs = &server.answer(CHAT, &body).await["choices"][0]["logprobs"];
        let found = logprobs["content"][0]["top_logprobs"].as_array().map_or(0, Vec::len);
        assert_eq!(found, alternatives, "{request}: {logprobs}");
    }
    let chunks = chunks(&chat(json!({"max_tokens": 4, "ignore_eos": true, "timings_per_token": true,
                                     "return_progress": true, "cache_prompt": false})))
    .await;
    // Clients read the first choice of every chunk.
    assert!(chunks.iter().all(|chunk| chunk["choices"][0]["delta"].is_object()), "{chunks:?}");
    let progress: Vec<&Value> =
        chunks.iter().map(|chunk| &chunk["prompt_progress"]).filter(|p| p.is_object()).collect();
    assert!(progress.iter().any(|progress| progress["processed"] == progress["total"]), "{progress:?}");
    let generated: Vec<u64> = chunks
        .iter()
        .filter(|chunk| chunk["choices"][0]["delta"]["content"].is_string())
        .map(|chunk| chunk["timings"]["predicted_n"].as_u64().unwrap())
        .collect();
    assert!(generated.is_sorted() && generated.last() == Some(&4), "{generated:?}");
    let settings = &server.answer(CHAT, &chat(json!({"verbose": true, "top_k": 7, "max_tokens": 3}))).await["__verbose"]
        ["generation_settings"];
    assert_eq!((&settings["top_k"], &settings["n_predict"], &settings["seed"]), (&json!(7), &json!(3), &json!(7)));
    let sent = json!({"verbose": true, "max_tokens": 1, "n_keep": 5, "n_discard": 6, "n_cache_reuse": 7,
                      "grammar": "root ::= \"a\"", "speculative.n_max": 3});
    let settings = &server.answer(CHAT, &chat(sent.clone())).await["__verbose"]["generation_settings"];
    for name in ["n_keep", "n_discard", "n_cache_reuse", "grammar", "speculative.n_max"] {
        assert_eq!(settings[name], sent[name], "{name}");
    }
}

#[tokio::test]
async fn invalid_conversation_error_names_field() {
    let server = server().await;
    let function = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    let message = |message: Value| json!({"messages": [{"role": "user", "content": "a"}, message]});
    for (fields, param) in [
        (json!({"tools": [5]}), "tools[0]"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (function(json!({})), "tools[0].function.name"),
        (function(json!({"name": "a b"})), "tools[0].function.name"),
        (function(json!({"name": "f", "parameters": "x"})), "tools[0].function.parameters"),
        (function(json!({"name": "f", "strict": "x"})), "tools[0].function.strict"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "nope"}}}), "tool_choice"),
        (json!({"tools": tools(), "logprobs": true, "stream": true}), "logprobs"),
        (json!({"tools": tools(), "grammar": "root ::= \"a\""}), "grammar"),
        (json!({"grammar": "root ::= \"a\"", "json_schema": {}}), "json_schema"),
        (json!({"response_format": {"type": "xml"}}), "response_format"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
        (json!({"reasoning_format": "loud"}), "reasoning_format"),
        (json!({"reasoning_budget_tokens": -2}), "reasoning_budget_tokens"),
        (json!({"reasoning_budget_message": 1, "reasoning_budget": 1}), "reasoning_budget_message"),
        (json!({"lora": [{"id": 0, "scale": 1}]}), "lora[0]"),
        (json!({"n": 0}), "n"),
        (json!({"chat_template_kwargs": {"enable_thinking": "yes"}}), "chat_template_kwargs.enable_thinking"),
        (message(json!({"role": "user", "content": 1})), "messages[1].content"),
        (message(json!({"role": "user"})), "messages[1].content"),
        (message(json!({"role": "assistant", "tool_calls": 1})), "messages[1].tool_calls"),
        (message(json!({"role": "assistant", "tool_calls": [{}]})), "messages[1].tool_calls[0].function.name"),
    ] {
        let (status, answer) = server.post(CHAT, &chat(fields.clone())).await;
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{fields}: {answer}");
    }
}

#[tokio::test]
async fn template_of_another_family_determines_the_answer_format() {
    const TEMPLATE: &str = "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}{% for c in \
                            m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|eot_id|>{% endfor %}{{ tools | tojson if tools }}\
                            {% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|><think>\n{% endif %}";
    let server = Server::start(&["--chat-template", TEMPLATE]);
    server.wait_ready().await;
    let call = "{\"name\": \"add\", \"parameters\": {\"a\": 1}}";
    let body = chat(json!({"tools": tools(), "mods": forced_answer(&format!("hm\n</think>\n{call}"))}));
    let answer = server.answer(CHAT, &body).await;
    let message = &answer["choices"][0]["message"];
    // The prompt opened the reasoning, and the call needs no marker.
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("hm"), &Value::Null), "{answer}");
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "add", "arguments": "{\"a\": 1}"}));
    let forced = chat(json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "add"}},
                             "temperature": 3.0, "mods": [{"name": "force-prefix", "config": {"text": "so</think>"}}]}));
    let answer = server.answer(CHAT, &forced).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!(
        (&message["reasoning_content"], message["tool_calls"].as_array().map(Vec::len)),
        (&json!("so"), Some(1)),
        "{answer}"
    );
    assert_arguments_match(&message["tool_calls"][0]);
}
