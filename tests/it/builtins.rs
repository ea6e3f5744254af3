//! The built-in mods over HTTP, on a model with random weights: each mod works as documented for any text.

use super::harness::{ErrorTable, Server, model, recorded_items, server, with_fields};
use serde_json::{Value, json};
use thunder::events::{ActionType, TraceItem};
use thunder::model::Model;
use thunder::model::llama::ModelOptions;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Returns a request whose answer is random text and never ends by itself.
#[expect(clippy::needless_pass_by_value, reason = "callers write json!(…) in place")]
fn body(seed: u32, mods: Value) -> Value {
    json!({"messages": [{"role": "user", "content": "Hello!"}], "prompt": "Once upon a time", "seed": seed, "mods": mods,
        "temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 150, "ignore_eos": true})
}

fn text(answer: &Value) -> &str {
    let choice = &answer["choices"][0];
    choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap_or_default()
}

/// Returns the text of an answer that a mod must stop.
async fn stopped_text(server: &Server, path: &str, body: &Value) -> String {
    let answer = server.answer(path, body).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
    text(&answer).to_owned()
}

fn logs(items: &[TraceItem]) -> Vec<&str> {
    let lines = items.iter().filter_map(|item| match item {
        TraceItem::ModLog(log) => Some(log.log_message.as_str()),
        _ => None,
    });
    lines.collect()
}

fn backtracks(items: &[TraceItem]) -> usize {
    items
        .iter()
        .filter(|item| matches!(item, TraceItem::Action(action) if action.action_type == ActionType::Backtrack))
        .count()
}

#[tokio::test]
async fn mods_constrain_the_answer() {
    let server = server().await;
    let schema = json!({"type": "object", "properties": {"size": {"enum": ["small", "large"]}, "sure": {"type": "boolean"}},
        "required": ["size", "sure"], "additionalProperties": false});
    let mut outputs = std::collections::BTreeSet::new();
    for seed in 0..5 {
        for path in [CHAT, COMPLETIONS] {
            let with_mod = |name: &str, config: Value| body(seed, json!([{"name": name, "config": config}]));
            let text = stopped_text(server, path, &with_mod("json-schema", json!({"schema": schema}))).await;
            let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
            assert!(
                ["small", "large"].contains(&value["size"].as_str().unwrap()) && value["sure"].is_boolean(),
                "{text}"
            );
            let date =
                stopped_text(server, path, &with_mod("regex", json!({"pattern": "[0-9]{4}-(0[1-9]|1[0-2])"}))).await;
            assert!(date.len() == 7 && date[..4].parse::<u32>().is_ok() && date.as_bytes()[4] == b'-', "{date}");
            let gbnf = json!({"gbnf": "root ::= (\"yes\" | \"no\") [.!]"});
            let lark = json!({"lark": "start: (\"yes\" | \"no\") /[.!]/"});
            for grammar in [gbnf, lark] {
                let output = stopped_text(server, path, &with_mod("grammar", grammar)).await;
                assert!(["yes.", "no.", "yes!", "no!"].contains(&output.as_str()), "{output}");
                outputs.insert(output);
            }
            let choice =
                stopped_text(server, path, &with_mod("choices", json!({"choices": ["red", "green", "blue-green"]})))
                    .await;
            assert!(["red", "green", "blue-green"].contains(&choice.as_str()), "{choice}");
        }
    }
    assert!(outputs.len() > 1, "every seed has the same answer: {outputs:?}");
}

#[tokio::test]
async fn constraints_and_bans_combine_in_any_order() {
    let server = server().await;
    let schema = json!({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": false});
    let mut mods = vec![
        json!({"name": "json-schema", "config": {"schema": schema}}),
        json!({"name": "regex", "config": {"pattern": "\\{\"name\": ?\"[a-f]{4,8}\"\\}"}}),
        json!({"name": "ban-phrases", "config": {"phrases": ["ab", "CC", "e\"}"], "max_retries": 500}}),
    ];
    for seed in 0..9 {
        let text = stopped_text(server, COMPLETIONS, &body(seed, json!(mods))).await;
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
        let name = value["name"].as_str().unwrap();
        assert!((4..=8).contains(&name.len()) && name.bytes().all(|byte| (b'a'..=b'f').contains(&byte)), "{text}");
        assert!(!name.contains("ab") && !name.contains("cc") && !name.ends_with('e'), "{text}");
        mods.rotate_left(1);
    }
}

#[tokio::test]
async fn banned_phrase_is_kept_if_a_constraint_requires_it() {
    let server = server().await;
    let schema = json!({"type": "object", "properties": {"date": {"type": "boolean"}}, "required": ["date"], "additionalProperties": false});
    let ban = json!({"name": "ban-phrases", "config": {"phrases": ["date"]}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "day", "strict": true, "schema": schema}});
    for fields in [
        json!({"response_format": format, "mods": [ban]}),
        json!({"grammar": "root ::= \"{\\\"date\\\": \" (\"true\" | \"false\") \"}\"", "mods": [ban]}),
        json!({"mods": [ban, {"name": "json-schema", "config": {"schema": schema}}]}),
        json!({"mods": [{"name": "json-schema", "config": {"schema": schema}}, ban]}),
    ] {
        let answer = server.answer(CHAT, &with_fields(body(3, json!([])), &fields)).await;
        let value: Value = serde_json::from_str(text(&answer)).unwrap_or_else(|error| panic!("{error}: {answer}"));
        assert!(value["date"].is_boolean(), "{value}");
        let items = recorded_items(server, answer["thunder"]["run_id"].as_str().unwrap()).await;
        assert_eq!(logs(&items), ["'date' is kept: no other token is possible at its beginning"]);
    }
}

#[tokio::test]
async fn phrases_are_banned_and_replaced_as_whole_words() {
    let server = server().await;
    let output = async |name: &str, config: Value, forced: &str| {
        let mods = json!([{"name": "force-prefix", "config": {"text": format!("{forced}<|im_end|>")}}, {"name": name, "config": config}]);
        text(&server.answer(COMPLETIONS, &body(1, mods)).await).to_owned()
    };
    let replace = json!({"replace": {"cat": "dog"}, "whole_words": true});
    assert_eq!(output("replace-phrase", replace, "A Cat, a category, a cat").await, "A dog, a category, a dog");
    let banned = output("ban-phrases", json!({"phrases": ["cat"], "whole_words": true}), "A category of cat").await;
    assert!(banned.starts_with("A category of ") && !banned["A category of ".len()..].starts_with("cat "), "{banned}");
    let unchanged = output("ban-phrases", json!({"phrases": ["cat"], "whole_words": true}), "A category").await;
    assert_eq!(unchanged, "A category");
}

#[tokio::test]
async fn reasoning_budget_ends_the_reasoning() {
    let server = server().await;
    for seed in 0..3 {
        let mods = json!([{"name": "force-prefix", "config": {"text": "<think>\n"}},
            {"name": "think-budget", "config": {"tokens": 6, "message": " Enough."}}]);
        let mut body = body(seed, mods);
        body["max_tokens"] = json!(60);
        let answer = server.answer(CHAT, &body).await;
        let message = &answer["choices"][0]["message"];
        assert!(message["reasoning_content"].as_str().unwrap().ends_with(" Enough."), "{message}");
        assert!(!message["content"].as_str().unwrap().is_empty(), "{message}");
        let items = recorded_items(server, answer["thunder"]["run_id"].as_str().unwrap()).await;
        // The number is not compared, because the forced line break after the marker also counts.
        assert!(logs(&items)[0].starts_with("reasoning ended after "), "{:?}", logs(&items));
    }
}

#[tokio::test]
async fn prefix_is_forced_after_tokens_of_earlier_mods() {
    let server = server().await;
    let prefix = |text: &str| json!({"name": "force-prefix", "config": {"text": text}});
    let mods = json!([prefix("The first beginning."), prefix("The second beginning.")]);
    let answer = server.answer(COMPLETIONS, &body(1, mods)).await;
    let first = text(&answer).find("The first beginning.");
    let second = text(&answer).find("The second beginning.");
    assert!(first.is_some() && second > first, "{answer}");

    let budget = json!({"name": "think-budget", "config": {"tokens": 0, "begin": "((", "end": "))"}});
    let mut request = body(1, json!([budget, prefix("The only beginning.")]));
    request["prompt"] = json!("Once upon a time ((");
    let answer = server.answer(COMPLETIONS, &request).await;
    let (end, beginning) = (text(&answer).find("))"), text(&answer).find("The only beginning."));
    assert!(end.is_some() && beginning > end, "{answer}");
}

#[tokio::test]
async fn most_probable_choice_is_the_answer() {
    let server = server().await;
    let choices = ["a cat", "the bird", "an old dog", "x"];
    let special = Model::load(&model(), &ModelOptions::default(), |_| true).unwrap().vocabulary().special();
    let end = special.eot.or(special.eos).unwrap();
    let prompt = server.answer("/tokenize", &json!({"content": "Once upon a time"})).await["tokens"].clone();
    let length = prompt.as_array().unwrap().len();
    let mut totals = Vec::new();
    for choice in choices {
        let tokens = server.answer("/tokenize", &json!({"content": choice})).await["tokens"].clone();
        let sequence: Vec<&Value> = [&prompt, &tokens].iter().flat_map(|part| part.as_array().unwrap()).collect();
        let mut sequence = json!(sequence);
        sequence.as_array_mut().unwrap().push(json!(end));
        let request = json!({"prompt": sequence, "echo": true, "logprobs": 1, "max_tokens": 0});
        let answer = server.answer(COMPLETIONS, &request).await;
        let values = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
        totals.push((values[length..].iter().map(|value| value.as_f64().unwrap()).sum::<f64>(), choice));
    }
    let best = totals.iter().max_by(|a, b| a.0.total_cmp(&b.0)).unwrap().1;
    let mods = json!([{"name": "choices", "config": {"choices": choices, "pick": "most-probable"}}]);
    let answer = server.answer(COMPLETIONS, &body(1, mods.clone())).await;
    let items = recorded_items(server, answer["thunder"]["run_id"].as_str().unwrap()).await;
    assert_eq!(text(&answer), best, "{totals:?} {:?}", logs(&items));
    for (total, choice) in &totals {
        let (_, rest) = logs(&items)[0].split_once(&format!("{choice:?} ")).unwrap();
        let logged: f64 = rest.split([' ', ':']).next().unwrap().parse().unwrap();
        assert!((logged - total).abs() < 0.02, "{totals:?} {:?}", logs(&items));
    }
    let mut streamed = body(1, mods);
    streamed["stream"] = json!(true);
    let events = server.stream(COMPLETIONS, &streamed).await;
    assert!(events.iter().all(|event| !event.contains("retract")), "text was retracted: {events:?}");
}

#[tokio::test]
async fn choice_that_another_mod_removes_is_replaced_with_the_next_best() {
    let server = server().await;
    let choices = ["yes", "no"];
    let mut mods = vec![json!({"name": "choices", "config": {"choices": choices, "pick": "most-probable"}})];
    let best = text(&server.answer(CHAT, &body(1, json!(mods))).await).to_owned();
    let other = choices.into_iter().find(|choice| *choice != best).unwrap();
    mods.push(json!({"name": "ban-phrases", "config": {"phrases": [best]}}));
    for _ in 0..2 {
        assert_eq!(stopped_text(server, CHAT, &body(1, json!(mods))).await, other);
        mods.reverse();
    }
    mods.push(json!({"name": "ban-phrases", "config": {"phrases": [other]}}));
    let (status, answer) = server.post(CHAT, &body(1, json!(mods))).await;
    let message = format!("another mod removed {other:?}, the last one of the choices");
    assert_eq!((status, &answer["error"]["message"]), (422, &json!(message)), "{answer}");
}

#[tokio::test]
async fn low_confidence_tokens_are_retried() {
    // Without other runs and without cache, so that both answers are computed in the same batches.
    let server = &Server::start(&["--parallel", "1"]);
    server.wait_ready().await;
    let mods = json!([{"name": "retry-low-confidence", "config": {"window": 4, "mean_logprob": -0.1, "tries": 2}}]);
    let mut request = body(3, mods);
    request["max_tokens"] = json!(24);
    request["cache_prompt"] = json!(false);
    let answer = server.answer(COMPLETIONS, &request).await;
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    let items = recorded_items(server, answer["thunder"]["run_id"].as_str().unwrap()).await;
    // Six windows, each sampled again twice; if the best attempt was not the last, it is restored.
    assert!((12..=18).contains(&backtracks(&items)), "{}", backtracks(&items));
    request["stream"] = json!(true);
    let events = server.stream(COMPLETIONS, &request).await;
    assert!(events.iter().all(|event| !event.contains("retract")), "{events:?}");
    let chunks = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
    let streamed: String =
        chunks.map(|chunk| chunk["choices"][0]["text"].as_str().unwrap_or_default().to_owned()).collect();
    assert_eq!(streamed, text(&answer));
}

#[tokio::test]
async fn stop_rules_end_the_answer() {
    let server = server().await;
    let rule = |config: Value| json!([{"name": "stop-rules", "config": config}]);
    let answer = server.answer(COMPLETIONS, &body(5, rule(json!({"tokens": 5})))).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["completion_tokens"], 5);
    let output = stopped_text(server, COMPLETIONS, &body(6, rule(json!({"regex": "[aeiou]"})))).await;
    assert_eq!(output.find(|c| "aeiou".contains(c)), Some(output.len() - 1), "{output}");
    let forced = |text: &str, config: Value| json!([{"name": "force-prefix", "config": {"text": text}}, {"name": "stop-rules", "config": config}]);
    let mods = forced("One is 1.0. Two! Three", json!({"sentences": 2}));
    assert_eq!(stopped_text(server, CHAT, &body(7, mods)).await, "One is 1.0. Two!");
    let mods = forced("a\n b\n b\nb\nc\n", json!({"repeated_lines": 3}));
    assert_eq!(stopped_text(server, CHAT, &body(7, mods)).await, "a\n b\n b\nb");
    let mods = rule(json!({"mean_logprob": -0.01, "window": 3}));
    let answer = server.answer(COMPLETIONS, &body(8, mods)).await;
    assert_eq!(
        (&answer["usage"]["completion_tokens"], &answer["choices"][0]["finish_reason"]),
        (&json!(3), &json!("stop"))
    );
}

#[tokio::test]
async fn invalid_tool_calls_are_blocked() {
    let server = server().await;
    let forced = |call: &str, config: Value| {
        let mut body = body(
            1,
            json!([
                {"name": "force-prefix", "config": {"text": format!("I look.\n<tool_call>\n{call}\n</tool_call>")}},
                {"name": "tool-guard", "config": config},
            ]),
        );
        body["tools"] = super::chat::tools();
        body["max_tokens"] = json!(60);
        body
    };
    for (call, config, reason) in [
        ("{\"name\": \"rm\", \"arguments\": {}}", json!({}), "unknown tool 'rm'; known tools: get_weather, add"),
        (
            "{\"name\": \"add\", \"arguments\": {\"a\": 3}}",
            json!({"max_retries": 0}),
            "the arguments of 'add' are invalid: `a` must be one of 1, 2, got 3",
        ),
        ("{\"name\": \"add\", \"arguments\": {\"a\": 1}}", json!({"block": ["add"]}), "the tool 'add' is blocked"),
    ] {
        let mut request = forced(call, config);
        let answer = server.answer(CHAT, &request).await;
        let message = &answer["choices"][0]["message"];
        assert!(message.get("tool_calls").is_none(), "{message}");
        assert!(message["content"].as_str().unwrap().starts_with("I look."), "{message}");
        let items = recorded_items(server, answer["thunder"]["run_id"].as_str().unwrap()).await;
        assert!(logs(&items)[0].starts_with(reason), "{:?}", logs(&items));
        request["stream"] = json!(true);
        let events = server.stream(CHAT, &request).await;
        assert!(
            events.iter().all(|event| !event.contains("tool_calls\":[") && !event.contains("retract")),
            "{events:?}"
        );
    }
    let request = forced("{\"name\": \"add\", \"arguments\": {\"a\": 2}}", json!({"block": ["get_weather"]}));
    let answer = server.answer(CHAT, &request).await;
    assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"], "{\"a\": 2}");
    let with_error = forced("{\"name\": \"rm\", \"arguments\": {}}", json!({"max_retries": 0, "then": "error"}));
    let (status, answer) = server.post(CHAT, &with_error).await;
    let message = "tool-guard: gave up after 0 retries: unknown tool 'rm'; known tools: get_weather, add";
    assert_eq!((status, &answer["error"]["message"]), (422, &json!(message)), "{answer}");
}

#[tokio::test]
async fn invalid_tool_call_is_kept_if_the_request_requires_one() {
    let server = server().await;
    for (seed, then) in [(1, "text"), (2, "text"), (3, "keep"), (4, "error")] {
        let guard = json!({"block": ["get_weather", "add"], "max_retries": 1, "then": then});
        let fields = json!({"tools": super::chat::tools(), "tool_choice": "required", "parallel_tool_calls": false,
            "max_tokens": 400});
        let request = with_fields(body(seed, json!([{"name": "tool-guard", "config": guard}])), &fields);
        let (status, answer) = server.post(CHAT, &request).await;
        if then == "error" {
            assert_eq!(status, 422, "{answer}");
            continue;
        }
        assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("tool_calls")), "{answer}");
        let items = recorded_items(server, answer["thunder"]["run_id"].as_str().unwrap()).await;
        let outcome =
            if then == "text" { "; keeping it, because a constraint permits only a call" } else { "; keeping it" };
        assert!(logs(&items).last().unwrap().ends_with(outcome), "{:?}", logs(&items));
    }
}

#[tokio::test]
async fn invalid_configuration_error_names_the_field() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for (name, config) in [
        ("think-budget", json!({"tokens": "many"})),
        ("json-schema", json!({"schema": {"type": "array", "uniqueItems": true}})),
        ("regex", json!({"pattern": "[0-9"})),
        ("grammar", json!({"gbnf": "root ::= y"})),
        ("choices", json!({"choices": []})),
        ("retry-low-confidence", json!({"tries": 0})),
        ("stop-rules", json!({})),
        ("tool-guard", json!({})),
        ("ban-phrases", json!({"phrases": ["a"], "whole_word": true})),
    ] {
        let answer = server.post(CHAT, &body(1, json!([{"name": name, "config": config}]))).await;
        assert_eq!(answer.1["error"]["param"], "mods", "{}", answer.1);
        errors.add(format!("{name}: {config}"), &answer);
    }
    insta::assert_snapshot!("mod_configuration_errors", errors);
}

#[tokio::test]
async fn mod_list_describes_each_mod_and_its_fields() {
    let (_, list) = server().await.get("/api/v1/mods").await;
    let built_in = |description: &&Value| description["language"] == "rust";
    let mut count = 0;
    for description in list["mods"].as_array().unwrap().iter().filter(built_in) {
        assert!(description["documentation"].as_str().unwrap().len() > 30, "{description}");
        assert_eq!(description["schema"]["type"], "object", "{description}");
        for (field, schema) in description["schema"]["properties"].as_object().unwrap() {
            assert!(schema["description"].is_string(), "{}: {field}", description["name"]);
        }
        count += 1;
    }
    assert_eq!(count, 15);
}
