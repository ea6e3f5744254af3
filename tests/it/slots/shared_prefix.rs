//! A prefix that a slot in use has, or is computing, is copied and not computed again.

use super::{assert_first_layer_equals, irregular_tokens, with_attention};
use crate::engine::exact_model::exact_engine;
use crate::engine::{TestEngine, follow, model, request_tokens, test_engine_of, test_engine_with};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thunder::engine::Request;
use thunder::events::{RunEnd, TokenId};
use thunder::model::Model;
use thunder::model::llama::{AdapterSet, ModelOptions, ScaledAdapter};

/// Returns 300 tokens that all prompts have and 20 tokens that depend on the seed.
fn prompt_of_branch(seed: i32) -> Vec<TokenId> {
    [irregular_tokens(1, 300), irregular_tokens(seed, 20)].concat()
}

/// Returns the answer to a prompt on an engine without other runs.
async fn answer_alone(prompt: Vec<TokenId>) -> String {
    exact_engine(1, |_| {}).await.run(request_tokens(prompt, 12)).await.text
}

/// Submits requests that run at the same time. Returns their texts and ends.
async fn run_all(test_engine: &TestEngine, requests: Vec<Request>) -> Vec<(String, Arc<RunEnd>)> {
    let mut runs = Vec::new();
    for request in requests {
        runs.push(test_engine.engine.submit(request).await.unwrap());
    }
    let mut results = Vec::new();
    for run in runs {
        results.push(follow(run.output).await);
    }
    results
}

fn cached(results: &[(String, Arc<RunEnd>)]) -> Vec<u32> {
    results.iter().map(|(_, end)| end.finish.usage.cached_tokens).collect()
}

#[tokio::test]
async fn prefix_of_a_slot_in_use_is_copied() {
    let test_engine = exact_engine(2, |options| options.cache_ram_bytes = 0).await;
    let mut active = test_engine.engine.submit(request_tokens(prompt_of_branch(2), 150)).await.unwrap();
    // When the first token arrives, the prompt has been computed.
    active.output.recv().await.unwrap();
    let copied = run_all(&test_engine, vec![request_tokens(prompt_of_branch(3), 12)]).await;
    assert_eq!(cached(&copied), [300]);
    assert_eq!(copied[0].0, answer_alone(prompt_of_branch(3)).await);
    let (text, end) = follow(active.output).await;
    assert_eq!(end.finish.usage.completion_tokens, 150);
    let alone = exact_engine(1, |_| {}).await.run(request_tokens(prompt_of_branch(2), 150)).await;
    assert!(alone.text.ends_with(&text), "the copy must not affect the run");
}

#[tokio::test]
async fn prefix_that_is_being_computed_is_awaited() {
    for attention in [false, true] {
        let test_engine = exact_engine(4, |options| options.cache_ram_bytes = 0).await;
        let requests = (2..6).map(|seed| {
            let request = request_tokens(prompt_of_branch(seed), 12);
            if attention { with_attention(request) } else { request }
        });
        let results = run_all(&test_engine, requests.collect()).await;
        assert_eq!(cached(&results), [0, 300, 300, 300]);
        for (seed, (text, _)) in (2..6).zip(&results) {
            assert_eq!(*text, answer_alone(prompt_of_branch(seed)).await);
        }
    }
}

#[tokio::test]
async fn attention_rows_of_a_copied_prefix_are_exact() {
    let mut test_engine = test_engine_with(2, true, |options| options.cache_ram_bytes = 0).await;
    let mut active = test_engine.engine.submit(request_tokens(prompt_of_branch(2), 150)).await.unwrap();
    active.output.recv().await.unwrap();
    let result = test_engine.run(with_attention(request_tokens(prompt_of_branch(3), 4))).await;
    assert_eq!(result.end.finish.usage.cached_tokens, 300);
    assert_first_layer_equals(&result, &prompt_of_branch(3)).await;
}

#[tokio::test]
async fn prefix_is_computed_if_a_copy_is_slower_or_disabled() {
    let test_engine = test_engine_with(2, false, |options| options.cache_ram_bytes = 0).await;
    let short = |seed| [irregular_tokens(1, 60), irregular_tokens(seed, 100)].concat();
    // The first run is still active when the second one gets its slot.
    let results = run_all(&test_engine, vec![request_tokens(short(2), 300), request_tokens(short(3), 12)]).await;
    assert_eq!(cached(&results), [0, 0]);
    let fresh = |seed| Request { cache_prompt: false, ..request_tokens(prompt_of_branch(seed), 12) };
    assert_eq!(cached(&run_all(&test_engine, vec![fresh(2), fresh(3)]).await), [0, 0]);
}

#[tokio::test]
async fn prefix_of_other_adapters_is_not_shared() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models");
    let adapter = (root.join("tiny-lora.gguf"), 1.0);
    let options = ModelOptions { adapters: vec![adapter], ..ModelOptions::default() };
    let model = Arc::new(Model::load(&root.join("tiny.gguf"), &options, |_| true).unwrap());
    let test_engine = test_engine_of(model, 3, false, |options| options.cache_ram_bytes = 0).await;
    let adapted = |scale: f32, seed| Request {
        adapters: Some(AdapterSet::new([ScaledAdapter { id: 0, scale }])),
        ..request_tokens(prompt_of_branch(seed), 12)
    };
    let results = run_all(&test_engine, vec![adapted(1.0, 2), adapted(0.5, 3), adapted(1.0, 4)]).await;
    assert_eq!(cached(&results), [0, 0, 300]);
}

#[tokio::test]
async fn four_branches_with_shared_prefix_take_less_than_half_the_time() {
    let test_engine = test_engine_of(model(), 4, false, |options| {
        options.cache_ram_bytes = 0;
        options.ctx_size = 4096;
        options.batch_size = 2048;
        options.ubatch_size = 512;
    })
    .await;
    // Other programs can only make a round slower, so the shortest times of several rounds are compared.
    let mut times = [Duration::MAX; 2];
    for round in 0..12 {
        for (time, shares) in times.iter_mut().zip([true, false]) {
            // Each round has other tokens, so that no slot has any of them.
            let prefix = irregular_tokens(100 * round + i32::from(shares) * 17, 3900);
            let prompt = |seed| [prefix.clone(), irregular_tokens(seed, 100)].concat();
            let requests =
                (0..4).map(|seed| Request { cache_prompt: shares, ..request_tokens(prompt(round + seed), 1) });
            let begun = Instant::now();
            let results = run_all(&test_engine, requests.collect()).await;
            *time = begun.elapsed().min(*time);
            let expected = if shares { [0, 3900, 3900, 3900] } else { [0; 4] };
            assert_eq!(cached(&results), expected);
        }
        if round >= 1 && 2 * times[0] < times[1] {
            return;
        }
    }
    panic!("shared {:?}, each computed {:?}", times[0], times[1]);
}
