//! `/completion`: fields of requests and answers.

use super::reference;
use crate::harness::{Server, server, with_fields};
use serde_json::{Value, json};

pub const PATH: &str = "/completion";

#[expect(clippy::needless_pass_by_value, reason = "callers write json!(…) in place")]
pub fn body(fields: Value) -> Value {
    with_fields(json!({"prompt": "Once upon a time", "n_predict": 12, "temperature": 0, "ignore_eos": true}), &fields)
}

async fn tokens(server: &Server, text: &str) -> Vec<i32> {
    let answer = server.answer("/tokenize", &json!({"content": text})).await;
    serde_json::from_value(answer["tokens"].clone()).unwrap()
}

fn ids(value: &Value) -> Vec<i32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn events(data: &[String]) -> Vec<Value> {
    data.iter().map(|data| serde_json::from_str(data).unwrap()).collect()
}

#[tokio::test]
async fn greedy_answer_equals_llama_cpp() {
    let server = server().await;
    let prompt = tokens(server, "Once upon a time").await;
    let answer = server.answer(PATH, &body(json!({"return_tokens": true, "n_probs": 3, "ignore_eos": false}))).await;
    let output = ids(&answer["tokens"]);
    let (expected, logprobs) = reference::greedy(&prompt, output.len());
    assert_eq!(output, expected);
    let text = server.answer("/detokenize", &json!({"tokens": output})).await;
    if answer["stop_type"] == "limit" {
        assert_eq!(text["content"], answer["content"]);
    }
    for (entry, (token, logprob)) in answer["completion_probabilities"]
        .as_array()
        .unwrap()
        .iter()
        .zip(output.iter().zip(&logprobs[prompt.len() - 1..]))
    {
        assert_eq!(entry["id"], *token);
        assert!((entry["logprob"].as_f64().unwrap() - logprob).abs() < 2e-3, "{entry} {logprob}");
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!((top.len(), &top[0]["id"]), (3, &entry["id"]));
        assert!(top.iter().all(|other| other["bytes"].is_array() && other["logprob"].is_number()));
    }
}

#[tokio::test]
async fn answer_has_the_fields_of_llama_server() {
    let server = server().await;
    let answer = server.answer(PATH, &body(json!({"seed": 5, "stop": ["never said"]}))).await;
    let keys: Vec<&str> = answer.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        keys,
        [
            "index",
            "content",
            "tokens",
            "id_slot",
            "stop",
            "model",
            "tokens_predicted",
            "tokens_evaluated",
            "generation_settings",
            "prompt",
            "has_new_line",
            "truncated",
            "stop_type",
            "stopping_word",
            "tokens_cached",
            "timings",
            "thunder"
        ]
    );
    let evaluated = answer["tokens_evaluated"].as_u64().unwrap();
    assert_eq!(answer["tokens"], json!([]));
    assert_eq!(answer["prompt"], "Once upon a time");
    assert_eq!(
        (&answer["stop"], &answer["stop_type"], &answer["truncated"]),
        (&json!(true), &json!("limit"), &json!(false))
    );
    assert_eq!(answer["tokens_predicted"], 12);
    assert_eq!(answer["tokens_cached"], evaluated + 11);
    assert!(answer["id_slot"].as_u64().unwrap() < 4);
    let settings = &answer["generation_settings"];
    assert_eq!(
        (&settings["seed"], &settings["n_predict"], &settings["stop"]),
        (&json!(5), &json!(12), &json!(["never said"]))
    );
    assert_eq!(settings["temperature"], 0.0);
    assert_eq!(settings["ignore_eos"], true);
    assert_eq!(settings["logit_bias"][0]["bias"], Value::Null);
    assert!(settings.as_object().unwrap().len() >= 44, "{settings}");
    let timings = &answer["timings"];
    assert_eq!(timings["prompt_n"].as_u64().unwrap() + timings["cache_n"].as_u64().unwrap(), evaluated);
    assert_eq!(timings["predicted_n"], 12);
    let (ms, rate) = (timings["predicted_ms"].as_f64().unwrap(), timings["predicted_per_second"].as_f64().unwrap());
    assert!((rate - 11_000.0 / ms).abs() < 1e-6 * rate, "the first token is generated with the prompt: {timings}");
    let run = server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await;
    assert_eq!(run["run"]["surface"], "llama_server");
}

#[tokio::test]
async fn streamed_answer_equals_complete_answer() {
    let server = server().await;
    let whole = server.answer(PATH, &body(json!({"return_tokens": true, "n_probs": 2}))).await;
    let pieces = events(&server.stream(PATH, &body(json!({"stream": true, "n_probs": 2}))).await);
    let (last, pieces) = pieces.split_last().unwrap();
    let text: String = pieces.iter().map(|piece| piece["content"].as_str().unwrap()).collect();
    assert_eq!(text, whole["content"]);
    let output: Vec<i32> = pieces.iter().flat_map(|piece| ids(&piece["tokens"])).collect();
    assert_eq!(json!(output), whole["tokens"]);
    assert!(pieces.iter().all(|piece| piece["stop"] == false && piece["completion_probabilities"].is_array()));
    let probabilities: Vec<&Value> =
        pieces.iter().flat_map(|piece| piece["completion_probabilities"].as_array().unwrap()).collect();
    let whole_probabilities = whole["completion_probabilities"].as_array().unwrap();
    assert_eq!(probabilities.len(), whole_probabilities.len());
    for (piece, whole) in probabilities.iter().zip(whole_probabilities) {
        assert_eq!((&piece["id"], &piece["token"]), (&whole["id"], &whole["token"]));
        assert_eq!(piece["top_logprobs"].as_array().unwrap().len(), 2);
    }
    assert_eq!(pieces.last().unwrap()["tokens_predicted"], 12);
    assert_eq!((&last["stop"], &last["content"], &last["tokens"]), (&json!(true), &json!(""), &json!([])));
    assert_eq!(last["stop_type"], "limit");
    assert!(last.get("completion_probabilities").is_none());
}

#[tokio::test]
async fn tokens_include_those_of_a_stop_string() {
    let server = server().await;
    let whole = ids(&server.answer(PATH, &body(json!({"return_tokens": true}))).await["tokens"]);
    let stop = server.answer("/detokenize", &json!({"tokens": whole[3..5]})).await["content"].clone();
    let fields = json!({"return_tokens": true, "stop": [stop], "n_probs": 1});
    let answer = server.answer(PATH, &body(fields.clone())).await;
    assert_eq!((&answer["stop_type"], &answer["stopping_word"]), (&json!("word"), &stop));
    let predicted = answer["tokens_predicted"].as_u64().unwrap() as usize;
    assert_eq!(ids(&answer["tokens"]), whole[..predicted]);
    assert!(answer["completion_probabilities"].as_array().unwrap().len() < predicted);
    let mut streamed = body(fields);
    streamed["stream"] = true.into();
    let pieces = events(&server.stream(PATH, &streamed).await);
    let tokens: Vec<i32> = pieces.iter().flat_map(|piece| ids(&piece["tokens"])).collect();
    assert_eq!(tokens, whole[..predicted]);
}

#[tokio::test]
async fn prompt_can_be_evaluated_without_generation() {
    let server = server().await;
    let answer = server.answer(PATH, &body(json!({"n_predict": 0}))).await;
    assert_eq!((&answer["content"], &answer["tokens_predicted"]), (&json!(""), &json!(0)));
    assert_eq!(answer["stop_type"], "limit");
    assert!(answer["tokens_evaluated"].as_u64().unwrap() > 0);
}

#[tokio::test]
async fn prompt_accepts_text_tokens_and_mixture() {
    let server = server().await;
    let (first, second) = (tokens(server, "Once upon").await, tokens(server, " a time").await);
    let all: Vec<Value> = first.iter().chain(&second).map(|&id| json!(id)).collect();
    let mixed: Vec<Value> = first.iter().map(|&id| json!(id)).chain([json!(" a time")]).collect();
    let expected = server.answer(PATH, &body(json!({"prompt": all}))).await["content"].clone();
    for prompt in
        [json!(mixed), json!([all.clone()]), json!({"prompt_string": "Once upon a time"}), json!(["Once upon a time"])]
    {
        let answer = server.answer(PATH, &body(json!({"prompt": prompt}))).await;
        assert!(answer.is_object(), "one answer for one prompt: {prompt}");
        assert_eq!(answer["content"], expected, "{prompt}");
    }
}

#[tokio::test]
async fn several_prompts_return_list() {
    let server = server().await;
    let alone = server.answer(PATH, &body(json!({"prompt": "The sky is"}))).await;
    let all = server.answer(PATH, &body(json!({"prompt": ["Once upon a time", "The sky is", [40, 41]]}))).await;
    let all = all.as_array().unwrap();
    assert_eq!(all.len(), 3);
    assert_eq!(all[1]["content"], alone["content"]);
    let indices: Vec<u64> = all.iter().map(|answer| answer["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2]);

    let request = body(json!({"prompt": ["Once upon a time", "The sky is"], "stream": true}));
    let pieces = events(&server.stream(PATH, &request).await);
    let text: String =
        pieces.iter().filter(|piece| piece["index"] == 1).map(|piece| piece["content"].as_str().unwrap()).collect();
    assert_eq!(text, alone["content"]);
    assert_eq!(pieces.iter().filter(|piece| piece["stop"] == true).count(), 2);
}

#[tokio::test]
async fn several_answers_to_one_prompt_differ() {
    let server = server().await;
    let request = body(json!({"n_cmpl": 3, "temperature": 1.5, "seed": 11}));
    let all = server.answer(PATH, &request).await;
    let texts: Vec<&str> = all.as_array().unwrap().iter().map(|one| one["content"].as_str().unwrap()).collect();
    assert_eq!(texts.len(), 3);
    assert!(texts[0] != texts[1] && texts[1] != texts[2]);
    let alone = server.answer(PATH, &body(json!({"temperature": 1.5, "seed": 12}))).await;
    assert_eq!(alone["content"], texts[1], "each answer has its own seed");
}

#[tokio::test]
async fn stop_strings_end_answer_and_are_reported() {
    let server = server().await;
    let whole = server.answer(PATH, &body(json!({}))).await["content"].as_str().unwrap().to_owned();
    let chars: Vec<char> = whole.chars().collect();
    let readable = |word: &&[char]| word.iter().all(char::is_ascii_graphic);
    let word: String = chars.windows(2).skip(3).find(readable).unwrap().iter().collect();
    let answer = server.answer(PATH, &body(json!({"stop": [word.clone(), ""]}))).await;
    assert_eq!((&answer["stop_type"], &answer["stopping_word"]), (&json!("word"), &json!(word)));
    assert_eq!(answer["content"], whole[..whole.find(&word).unwrap()]);
}

#[tokio::test]
async fn end_token_is_counted_and_reported() {
    let server = server().await;
    let tokenized = server.answer("/tokenize", &json!({"content": "<|im_end|>"})).await;
    let end = tokenized["tokens"][0].as_i64().unwrap();
    let request = body(json!({"ignore_eos": false, "logit_bias": [[end, 1e9]], "return_tokens": true}));
    let answer = server.answer(PATH, &request).await;
    assert_eq!((&answer["stop_type"], &answer["content"]), (&json!("eos"), &json!("")));
    assert_eq!((&answer["tokens"], &answer["tokens_predicted"]), (&json!([end]), &json!(1)));
}

#[tokio::test]
async fn end_token_ends_answer_if_forced_tokens_have_no_room() {
    let server = server().await;
    let tokenized = server.answer("/tokenize", &json!({"content": "<|im_end|>"})).await;
    let end = tokenized["tokens"][0].as_i64().unwrap();
    let fields = json!({"ignore_eos": false, "logit_bias": [[end, 1e9]], "return_tokens": true, "n_predict": 1,
                        "mods": ["continue_after_end"]});
    let answer = server.answer(PATH, &body(fields.clone())).await;
    assert_eq!((&answer["stop_type"], &answer["content"]), (&json!("eos"), &json!("")), "{answer}");
    assert_eq!((&answer["tokens"], &answer["tokens_predicted"]), (&json!([end]), &json!(1)));
    let longer = server.answer(PATH, &with_fields(body(fields), &json!({"n_predict": 2}))).await;
    assert_eq!((&longer["stop_type"], &longer["tokens_predicted"]), (&json!("limit"), &json!(2)), "{longer}");
}

#[tokio::test]
async fn full_context_truncates_answer() {
    let server = server().await;
    let (_, props) = server.get("/props").await;
    let n_ctx = props["default_generation_settings"]["n_ctx"].as_u64().unwrap();
    let prompt = vec![40; n_ctx as usize - 5];
    let answer = server.answer(PATH, &body(json!({"prompt": prompt, "n_predict": -1}))).await;
    assert_eq!((&answer["truncated"], &answer["stop_type"]), (&json!(true), &json!("limit")));
    let prompt = vec![40; n_ctx as usize];
    let (status, answer) = server.post(PATH, &body(json!({"prompt": prompt}))).await;
    let error = &answer["error"];
    assert_eq!((status, &error["type"], &error["code"]), (400, &json!("exceed_context_size_error"), &json!(400)));
    assert_eq!((&error["n_prompt_tokens"], &error["n_ctx"]), (&json!(n_ctx), &json!(n_ctx)));
}

#[tokio::test]
async fn n_predict_precedes_other_length_fields() {
    let server = server().await;
    let request = body(json!({"n_predict": 2, "max_completion_tokens": 3, "max_tokens": 4,
                            "messages": [{"role": "user", "content": "Hello!"}]}));
    for path in [PATH, "/v1/completions", "/v1/chat/completions"] {
        let answer = server.answer(path, &request).await;
        assert_eq!(answer["timings"]["predicted_n"], 2, "{path}: {answer}");
    }
}

#[tokio::test]
async fn logit_bias_accepts_text_of_a_token() {
    let request = body(json!({"ignore_eos": false, "logit_bias": {"<|im_end|>": 1000}}));
    let answer = server().await.answer(PATH, &request).await;
    assert_eq!((&answer["stop_type"], &answer["content"]), (&json!("eos"), &json!("")), "{answer}");
    assert_eq!((&answer["tokens_predicted"], &answer["timings"]["predicted_n"]), (&json!(1), &json!(1)), "{answer}");
}

#[tokio::test]
async fn response_fields_selects_fields() {
    let server = server().await;
    let fields = json!(["content", "generation_settings/n_predict", "timings/predicted_n", "nowhere", "prompt/x"]);
    let answer = server.answer(PATH, &body(json!({"response_fields": fields}))).await;
    assert_eq!(answer["generation_settings/n_predict"], 12);
    assert_eq!(answer["timings/predicted_n"], 12);
    assert_eq!(answer.as_object().unwrap().len(), 3, "{answer}");
}

#[tokio::test]
async fn post_sampling_probs_are_returned() {
    let server = server().await;
    let request = body(json!({"n_probs": 50, "post_sampling_probs": true, "temperature": 0.7, "top_k": 4, "seed": 3}));
    let answer = server.answer(PATH, &request).await;
    let mut entries = answer["completion_probabilities"].as_array().unwrap().clone();
    // OpenAI's routes have these fields, too, with the names of llama-server.
    let fields = json!({"n_predict": 2, "messages": [{"role": "user", "content": "Hello!"}]});
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let answer = server.answer(path, &with_fields(request.clone(), &fields)).await;
        entries.extend(answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone());
    }
    assert_eq!(entries.len(), 12 + 2 + 2);
    for entry in &entries {
        let top = entry["top_probs"].as_array().unwrap();
        assert!((1..=4).contains(&top.len()), "{entry}");
        let sum: f64 = top.iter().map(|other| other["prob"].as_f64().unwrap()).sum();
        assert!((sum - 1.0).abs() < 1e-3, "{entry}");
        let own = top.iter().find(|other| other["id"] == entry["id"]).unwrap();
        assert_eq!(own["prob"], entry["prob"]);
        assert!(entry.get("logprob").is_none());
    }
}

#[tokio::test]
async fn chunks_have_progress_and_timings() {
    let server = server().await;
    let prompt: Vec<i32> = (0..600).map(|index| 40 + index % 50).collect();
    let request = body(json!({"prompt": prompt, "stream": true, "return_progress": true, "timings_per_token": true}));
    let pieces = events(&server.stream(PATH, &request).await);
    let progress: Vec<&Value> = pieces.iter().map(|piece| &piece["prompt_progress"]).filter(|p| !p.is_null()).collect();
    let last = progress.last().unwrap();
    assert_eq!((&last["total"], &last["processed"]), (&json!(600), &json!(600)));
    assert!(last["time_ms"].as_f64().unwrap() > 0.0 && last["cache"].is_number());
    let is_timed = |piece: &&Value| piece["timings"].is_object() && piece["prompt_progress"].is_null();
    let timed: Vec<&Value> = pieces.iter().filter(is_timed).collect();
    assert!(timed.len() > 3, "{pieces:?}");
    assert_eq!(
        timed[0]["timings"]["prompt_n"].as_u64().unwrap() + timed[0]["timings"]["cache_n"].as_u64().unwrap(),
        600
    );
}

#[tokio::test]
async fn time_limit_ends_answer_after_line_break() {
    let server = server().await;
    let line_break = server.answer("/tokenize", &json!({"content": "\n"})).await["tokens"][0].clone();
    let request = body(json!({"n_predict": 2000, "logit_bias": [[line_break, 100]], "t_max_predict_ms": 1}));
    let answer = server.answer(PATH, &request).await;
    assert_eq!((&answer["stop_type"], &answer["has_new_line"]), (&json!("limit"), &json!(true)));
    assert!(answer["tokens_predicted"].as_u64().unwrap() < 2000);
}

#[tokio::test]
async fn smaller_indentation_ends_infill() {
    let server = server().await;
    let line_break = server.answer("/tokenize", &json!({"content": "\n"})).await["tokens"][0].clone();
    let unlimited = server.answer(PATH, &body(json!({"logit_bias": [[line_break, 100]], "n_predict": 60}))).await;
    let answer =
        server.answer(PATH, &body(json!({"logit_bias": [[line_break, 100]], "n_predict": 60, "n_indent": 90}))).await;
    let (unlimited, text) = (unlimited["content"].as_str().unwrap(), answer["content"].as_str().unwrap());
    assert!(unlimited.starts_with(text) && text.matches('\n').count() == 1, "{text:?} {unlimited:?}");
    assert_eq!((&answer["stop_type"], &answer["truncated"]), (&json!("limit"), &json!(false)));
}

#[tokio::test]
async fn completions_route_has_the_format_of_llama_server() {
    let answer = server().await.answer("/completions", &body(json!({}))).await;
    assert_eq!(answer["stop_type"], "limit");
}
