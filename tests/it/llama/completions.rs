//! `/v1/completions`: several prompts and answers, echo, and probabilities in the format of evaluation harnesses.

use super::reference;
use crate::harness::{server, with_fields};
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";

#[expect(clippy::needless_pass_by_value, reason = "callers write json!(…) in place")]
fn body(fields: Value) -> Value {
    with_fields(json!({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": true}), &fields)
}

#[tokio::test]
async fn several_prompts_and_answers_are_choices_in_order() {
    let server = server().await;
    let texts = async |fields: Value| {
        let answer = server.answer(PATH, &body(fields)).await;
        let choices = answer["choices"].as_array().unwrap().clone();
        let indices: Vec<u64> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
        assert_eq!(indices, (0..choices.len() as u64).collect::<Vec<_>>());
        (choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect::<Vec<_>>(), answer)
    };
    let (sky, alone) = texts(json!({"prompt": "The sky is"})).await;
    let (both, together) = texts(json!({"prompt": ["Once upon a time", "The sky is"]})).await;
    assert_eq!((both.len(), &both[1]), (2, &sky[0]));
    let (four, counted) =
        texts(json!({"prompt": ["Once upon a time", "The sky is"], "n": 2, "best_of": 2, "temperature": 1.5})).await;
    assert_eq!(four.len(), 4);
    assert!(four[0] != four[1] && four[2] != four[3]);
    assert_eq!(counted["usage"]["prompt_tokens"], together["usage"]["prompt_tokens"], "a prompt is counted once");
    assert_eq!((&counted["usage"]["completion_tokens"], &alone["usage"]["completion_tokens"]), (&json!(32), &json!(8)));
    assert_eq!(counted["thunder"]["run_ids"].as_array().unwrap().len(), 4);
}

#[tokio::test]
async fn echo_returns_prompt_with_probabilities() {
    let server = server().await;
    let tokens = server.answer("/tokenize", &json!({"content": "Once upon a time, the baker"})).await["tokens"].clone();
    let ids: Vec<i32> = serde_json::from_value(tokens.clone()).unwrap();
    for (count, prompt) in [(0, tokens.clone()), (1, json!([tokens])), (3, json!("Once upon a time, the baker"))] {
        let request = body(json!({"prompt": prompt, "echo": true, "logprobs": 1, "max_tokens": count}));
        let answer = server.answer(PATH, &request).await;
        let choice = &answer["choices"][0];
        let text = choice["text"].as_str().unwrap();
        assert!(text.starts_with("Once upon a time, the baker"), "{text}");
        let logprobs = &choice["logprobs"];
        let (_, expected) = reference::greedy(&ids, count);
        let values = logprobs["token_logprobs"].as_array().unwrap();
        assert_eq!((values.len(), &values[0]), (ids.len() + count, &Value::Null));
        for (value, expected) in values[1..].iter().zip(&expected) {
            assert!((value.as_f64().unwrap() - expected).abs() < 2e-3, "{value} {expected}");
        }
        let pieces: String = logprobs["tokens"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
        assert!(pieces.starts_with("Once upon a time, the baker"), "{pieces}");
        assert_eq!(logprobs["text_offset"][0], 0);
        let tops = logprobs["top_logprobs"].as_array().unwrap();
        assert_eq!((tops.len(), &tops[0]), (values.len(), &Value::Null));
        // lm-evaluation-harness reads from this whether a token was the most probable one.
        for ((top, token), value) in tops.iter().zip(logprobs["tokens"].as_array().unwrap()).zip(values).skip(1) {
            assert_eq!(&top[token.as_str().unwrap()], value, "{top}");
        }
        assert_eq!(logprobs["content"].as_array().unwrap().len(), values.len());
        assert_eq!(answer["usage"]["completion_tokens"], count);
    }
}

#[tokio::test]
async fn stream_echoes_prompt_first() {
    let server = server().await;
    let request = body(json!({"echo": true, "logprobs": 2}));
    let whole = server.answer(PATH, &request).await;
    let mut streamed = request;
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    let events = server.stream(PATH, &streamed).await;
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let chunks: Vec<Value> =
        events[..events.len() - 1].iter().map(|data| serde_json::from_str(data).unwrap()).collect();
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, whole["choices"][0]["text"]);
    let joined = |list: &str| {
        let lists = chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"][list].as_array());
        lists.flatten().cloned().collect::<Vec<Value>>()
    };
    let expected = &whole["choices"][0]["logprobs"];
    assert_eq!(json!(joined("tokens")), expected["tokens"]);
    assert_eq!(json!(joined("text_offset")), expected["text_offset"]);
    assert_eq!(joined("token_logprobs").len(), expected["token_logprobs"].as_array().unwrap().len());
    let [.., finish, usage] = &chunks[..] else { panic!("too few chunks") };
    assert_eq!(finish["choices"][0]["finish_reason"], "length");
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(8)));
    assert!(chunks[0]["thunder"]["run_id"].is_string());
}

#[tokio::test]
async fn text_offsets_are_the_same_in_a_stream() {
    let server = server().await;
    let text = server.answer(PATH, &body(json!({}))).await["choices"][0]["text"].as_str().unwrap().to_owned();
    let start_of_stop = text.chars().filter(char::is_ascii_alphabetic).nth(4).unwrap();
    for fields in [
        json!({"mods": ["force_control"]}),
        // The stream holds back a part of a token, because it may be the start of the stop string.
        json!({"stop": [format!("{start_of_stop}\u{7f}")]}),
        json!({"echo": true}),
    ] {
        let mut request = with_fields(body(json!({"logprobs": 1})), &fields);
        let choice = server.answer(PATH, &request).await["choices"][0].clone();
        let (text, logprobs) = (choice["text"].as_str().unwrap(), &choice["logprobs"]);
        let offsets: Vec<usize> = serde_json::from_value(logprobs["text_offset"].clone()).unwrap();
        for (token, &offset) in logprobs["tokens"].as_array().unwrap().iter().zip(&offsets) {
            let token = token.as_str().unwrap();
            let rest: String = text.chars().skip(offset).collect();
            assert!(token == "<|im_start|>" || rest.starts_with(token), "{fields}: {token:?} at {offset} of {text:?}");
        }
        request["stream"] = true.into();
        let events = server.stream(PATH, &request).await;
        let chunks = events.iter().filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap());
        let streamed: Vec<Value> = chunks
            .filter_map(|chunk: Value| chunk["choices"][0]["logprobs"]["text_offset"].as_array().cloned())
            .flatten()
            .collect();
        assert_eq!(json!(streamed), json!(offsets), "{fields}");
    }
}

#[tokio::test]
async fn answer_reports_settings_if_requested() {
    let server = server().await;
    let request = body(json!({"verbose": true, "top_k": 7, "id_slot": 1, "n": 2}));
    let whole = server.answer(PATH, &request).await;
    let mut streamed = request;
    streamed["stream"] = true.into();
    let events = server.stream(PATH, &streamed).await;
    let last: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
    for answer in [whole, last] {
        let verbose = &answer["__verbose"];
        assert_eq!((&verbose["prompt"], &verbose["id_slot"]), (&json!("Once upon a time"), &json!(1)), "{answer}");
        assert_eq!((&verbose["generation_settings"]["top_k"], &verbose["stop_type"]), (&json!(7), &json!("limit")));
        let (prompt, predicted) = (verbose["tokens_evaluated"].as_u64().unwrap(), 8);
        assert_eq!(
            (&verbose["tokens_predicted"], &verbose["tokens_cached"]),
            (&json!(8), &json!(prompt + predicted - 1))
        );
    }
    assert!(server.answer(PATH, &body(json!({}))).await.get("__verbose").is_none());
}

#[tokio::test]
async fn unsupported_option_error_names_field() {
    let server = server().await;
    for (fields, status, param) in [
        (json!({"best_of": 2}), 400, "best_of"),
        (json!({"n": 0}), 400, "n"),
        (json!({"suffix": "the end"}), 501, "suffix"),
        (json!({"max_tokens": -2}), 400, "max_tokens"),
        (json!({"echo": "yes"}), 400, "echo"),
        (json!({"prompt": null}), 400, "prompt"),
        (json!({"prompt": [{}]}), 400, "prompt"),
        (json!({"prompt": ["a", 5.5]}), 400, "prompt"),
        (json!({"top_p": 3}), 400, "top_p"),
        (json!({"prompt": vec!["a"; 257]}), 400, "prompt"),
        (json!({"prompt": ["a", "b", "c"], "n": 128}), 400, "prompt"),
    ] {
        let (found, answer) = server.post(PATH, &body(fields.clone())).await;
        assert_eq!((found, answer["error"]["param"].as_str()), (status, Some(param)), "{fields}: {answer}");
    }
}
