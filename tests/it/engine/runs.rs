//! Runs without mods: numbering, stops, streams that share batches, clients that go or do not read.

use super::{added_at, bench, follow, model, request, with_mod};
use std::sync::Arc;
use thunder::engine::Request;
use thunder::events::{EventType, FinishReason, Item};
use thunder::mods::Action;

#[tokio::test]
async fn a_plain_run_is_numbered_without_holes_and_repeats() {
    let mut bench = bench(1, false).await;
    let first = bench.tell(request("The sky is", 12)).await;
    let orders: Vec<i32> = first
        .items
        .iter()
        .filter_map(|item| match item {
            Item::Event(event) => Some(event.sequence_order),
            _ => None,
        })
        .collect();
    assert_eq!(orders, (0..orders.len() as i32).collect::<Vec<_>>());
    assert_eq!(
        first.events()[..4],
        [(EventType::Prefilled, 0), (EventType::ForwardPass, 1), (EventType::Sampled, 1), (EventType::Added, 1)]
    );
    assert_eq!(first.end.finish.reason, FinishReason::Length);
    assert_eq!(first.end.finish.usage.completion_tokens, 12);
    assert_eq!(first.text, first.end.finish.text);
    let again = bench.tell(request("The sky is", 12)).await;
    assert_eq!(first.generated(), again.generated());
    assert!(again.end.finish.usage.cached_tokens > 0, "the second run begins with the state of the first");
}

#[tokio::test]
async fn a_control_token_is_text_where_the_request_says_so() {
    let mut bench = bench(1, false).await;
    let vocabulary = Arc::clone(model().vocabulary());
    let tokens = vocabulary.encode("a<|im_start|>b", false, true);
    let marker = *tokens.iter().find(|&&token| vocabulary.is_control(token)).unwrap();
    for (visible, text) in [(vec![], "ab"), (vec![marker], "a<|im_start|>b")] {
        let tokens = tokens.clone();
        let told = bench
            .tell(with_mod(Request { visible, ..request("The sky is", 8) }, true, move |call| {
                if added_at(call, 1) { Action::ForceOutput(tokens.clone()) } else { Action::Noop }
            }))
            .await;
        assert_eq!(told.end.finish.text, text);
    }
}

#[tokio::test]
async fn streams_decode_together_and_agree_with_a_run_alone() {
    let mut alone = bench(1, false).await;
    let prompts = ["The sky is", "Once upon a time there was a small house", "1 2 3", "{\"a\":"];
    let mut expected = Vec::new();
    for prompt in prompts {
        expected.push(alone.tell(request(prompt, 20)).await.text);
    }
    let together = bench(4, false).await;
    let runs = prompts.map(|prompt| {
        let engine = together.engine.clone();
        tokio::spawn(async move { follow(engine.submit(request(prompt, 20)).await.unwrap().output).await.0 })
    });
    for (run, expected) in runs.into_iter().zip(expected) {
        assert_eq!(run.await.unwrap(), expected);
    }
}

#[tokio::test]
async fn a_client_that_goes_ends_its_run_and_frees_the_slot() {
    let mut bench = bench(1, false).await;
    let mut endless = request("The sky is", 400);
    endless.limits.max_steps = 4000;
    let generation = bench.engine.submit(endless).await.unwrap();
    drop(generation.output);
    let told =
        tokio::time::timeout(std::time::Duration::from_secs(20), bench.tell(request("The sky is", 3))).await.unwrap();
    assert_eq!(told.generated().len(), 3);
}

#[tokio::test]
async fn a_client_that_does_not_read_pauses_only_itself() {
    let mut bench = bench(2, false).await;
    let mut slow = request("The sky is", 450);
    slow.limits.max_steps = 4000;
    let slow = bench.engine.submit(slow).await.unwrap();
    let told = bench.tell(request("Quick", 20)).await;
    assert_eq!(told.generated().len(), 20);
    let (_, end) = follow(slow.output).await;
    assert_eq!(end.finish.usage.completion_tokens, 450);
}

#[tokio::test]
async fn stop_strings_and_limits_end_where_they_should() {
    let mut bench = bench(1, false).await;
    let plain = bench.tell(request("The sky is", 20)).await;
    let chars: Vec<char> = plain.text.chars().collect();
    let stop: String = chars[chars.len() / 2..chars.len() / 2 + 2].iter().collect();
    let mut asked = request("The sky is", 20);
    asked.limits.stop = vec![stop.clone()];
    let told = bench.tell(asked).await;
    assert_eq!(told.end.finish.reason, FinishReason::Stop);
    assert_eq!(told.end.finish.stop_string.as_deref(), Some(stop.as_str()));
    assert_eq!(told.text, plain.text[..plain.text.find(&stop).unwrap()]);
    let mut asked = request("The sky is", 20);
    asked.limits.stop_tokens = vec![plain.generated()[3]];
    let told = bench.tell(asked).await;
    assert_eq!(told.end.finish.reason, FinishReason::Stop);
    let mut long = request("The sky is", 100_000);
    long.limits.max_steps = 1_000_000;
    let told = bench.tell(long).await;
    assert!(told.end.finish.message.as_ref().unwrap().contains("512"), "{:?}", told.end.finish);
}
