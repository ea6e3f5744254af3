//! Suggestions of sentences to remove from the context.

use super::{PATH, connect, generate_request, send, tokens_of, until_done};
use crate::harness::{Server, server};
use serde_json::json;
use yawc::Options;

#[tokio::test]
async fn sentences_with_little_attention_are_suggested() {
    let server = server().await;
    let prompt = tokens_of(server, "The sky is blue. The sea is deep. What is deep?").await;
    let sentences = json!([{"turn_id": 7, "sentence_id": 3, "start": 1, "end": 4}]);
    let fields =
        json!({"suggest_pruning": true, "prune_below": 1.0, "sentences": sentences, "return_attention": false});
    let mut socket = connect(server, PATH, Options::default()).await;
    send(&mut socket, &generate_request(&prompt, &fields)).await;
    let messages = until_done(&mut socket).await;
    let suggestion = &messages[messages.len() - 2].0;
    assert_eq!(suggestion["type"], "pruning_suggestion");
    let one = &suggestion["prunable_sentences"][0];
    assert_eq!(
        (&one["turn_id"], &one["sentence_id"], &one["start"], &one["end"]),
        (&json!(7), &json!(3), &json!(1), &json!(4))
    );
    assert!((0.0..1.0).contains(&one["max_attention"].as_f64().unwrap()));
    assert!(messages[0].0.get("attention").is_none());
    let without_sentences = json!({"suggest_pruning": true, "prune_below": 1.0, "request_id": null});
    let answer = server.answer("/api/v1/generate", &generate_request(&prompt, &without_sentences)).await;
    let ends: Vec<u64> =
        answer["pruning_suggestion"].as_array().unwrap().iter().map(|one| one["end"].as_u64().unwrap()).collect();
    assert_eq!(
        (ends.len(), ends.last()),
        (3, Some(&(prompt.len() as u64))),
        "by default, sentences end at full stops and question marks"
    );
    let chat = tokens_of(server, "<|im_start|>user\nWhat is deep?<|im_end|>\n<|im_start|>assistant\n").await;
    let answer = server.answer("/api/v1/generate", &generate_request(&chat, &without_sentences)).await;
    let [question] = &answer["pruning_suggestion"].as_array().unwrap()[..] else { panic!("{answer}") };
    let [start, end] = ["start", "end"].map(|name| question[name].as_u64().unwrap() as usize);
    let text = server.answer("/api/v1/detokenize", &json!({"token_ids": chat[start..end]})).await;
    assert_eq!(text["text"], "What is deep?", "the template is in no sentence");
    // An empty answer attends to no token, so there are no suggestions.
    let first = &server.answer("/api/v1/generate", &generate_request(&prompt, &json!({"request_id": null}))).await;
    let empty_answer = json!({"suggest_pruning": true, "prune_below": 1.0, "request_id": null,
                              "stop_tokens": [first["generated_tokens"][0]["token_id"]]});
    let answer = server.answer("/api/v1/generate", &generate_request(&prompt, &empty_answer)).await;
    assert_eq!((&answer["generated_tokens"], &answer["pruning_suggestion"]), (&json!([]), &json!([])));
}

#[tokio::test]
async fn steps_after_a_context_shift_do_not_count_for_sentences() {
    let server = Server::start(&["--ctx-size", "256", "--parallel", "1"]);
    server.wait_ready().await;
    let prompt: Vec<i64> = (0..250).map(|index| 40 + index * index % 200).collect();
    // After the shift, the newest tokens are at the positions of the second sentence.
    let sentences = json!([{"turn_id": 0, "sentence_id": 0, "start": 1, "end": 100}, {"turn_id": 0, "sentence_id": 1, "start": 100, "end": 150}]);
    let mut suggestions = Vec::new();
    for policy in ["stop", "shift"] {
        let fields = json!({"suggest_pruning": true, "prune_below": 1.0, "sentences": sentences, "max_new_tokens": 20,
                            "context_policy": policy, "request_id": policy});
        let answer = server.answer("/api/v1/generate", &generate_request(&prompt, &fields)).await;
        let tokens = answer["generated_tokens"].as_array().unwrap().len();
        assert_eq!(tokens, if policy == "stop" { 6 } else { 20 });
        suggestions.push(answer["pruning_suggestion"].clone());
    }
    assert_eq!(suggestions[0].as_array().unwrap().len(), 2);
    assert_eq!(suggestions[0], suggestions[1]);
}
