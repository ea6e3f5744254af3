//! Speculative decoding with a draft model changes only the number of decodes. The main model has 32-bit weights and no
//! flash attention, so that results do not depend on the size of a batch.

use super::exact_model::{load, widened_model};
use super::speculation::{self, compare};
use super::{TestEngine, act_once, follow, is_at, model, options, request, request_tokens, test_engine_of, with_mod};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use thunder::engine::{
    AttentionCapture, DraftLimits, DraftModel, DrafterKind, Engine, EngineOptions, Overflow, Request, SamplingParams,
    SpeculationOptions,
};
use thunder::events::{EventType, TokenId, TraceItem};
use thunder::model::Model;
use thunder::mods::Action;
use tokio::sync::mpsc;

/// The main model, which is also a draft model that is always right.
static MAIN: LazyLock<Arc<Model>> = LazyLock::new(|| widened_model(0.0));
/// A draft model that is often right.
static SIMILAR: LazyLock<Arc<Model>> = LazyLock::new(|| widened_model(0.2));

/// Returns options to draft at every step.
fn draft_always(drafter: DrafterKind) -> SpeculationOptions {
    SpeculationOptions { drafter, max_draft: 6, min_match: 1, adaptive: false, ..SpeculationOptions::default() }
}

/// Sets a 32-bit cache and no flash attention.
fn set_exact_options(options: &mut EngineOptions) {
    speculation::set_exact_options(options);
    options.attention = AttentionCapture::On;
}

async fn plain_engine(parallel: u32) -> TestEngine {
    test_engine_of(Arc::clone(&MAIN), parallel, false, set_exact_options).await
}

async fn drafting_engine_with(parallel: u32, draft: &Arc<Model>, speculation: SpeculationOptions) -> TestEngine {
    test_engine_of(Arc::clone(&MAIN), parallel, false, |options| {
        set_exact_options(options);
        options.speculation = speculation;
        options.draft_model = Some(DraftModel::new(Arc::clone(draft)));
    })
    .await
}

async fn drafting_engine(parallel: u32, draft: &Arc<Model>) -> TestEngine {
    drafting_engine_with(parallel, draft, draft_always(DrafterKind::Model)).await
}

/// Returns a prompt of this number of tokens.
fn prompt(length: usize) -> Vec<TokenId> {
    (0..length as TokenId).map(|index| 5 + (index * 7 + index / 9) % 200).collect()
}

fn with_temperature(request: Request, temperature: f32) -> Request {
    Request { sampling: SamplingParams { temperature, seed: 11, ..SamplingParams::default() }, ..request }
}

#[tokio::test]
async fn draft_model_changes_neither_text_nor_trace() {
    let mut engines = (plain_engine(1).await, drafting_engine(1, &MAIN).await);
    let accepted = compare(&mut engines, "greedy", || request("the old fox", 120)).await;
    assert!(accepted > 90, "{accepted}");
    let sample = || with_temperature(request("the old fox", 120), 0.7);
    compare(&mut engines, "sampled", sample).await;
    let mut engines = (plain_engine(1).await, drafting_engine(1, &SIMILAR).await);
    let (mut accepted, mut drafted) = (0, 0);
    for text in ["the old fox", "one two three one two", "{\"a\": [1, 2"] {
        let case = || request(text, 120);
        accepted += compare(&mut engines, text, case).await;
        drafted += engines.1.run(case()).await.end.finish.drafts.drafted;
        compare(&mut engines, text, || with_temperature(case(), 0.5)).await;
    }
    assert!(accepted > 20 && accepted + 20 < drafted, "{accepted} of {drafted}");
}

#[tokio::test]
async fn prompt_longer_than_a_physical_batch_is_decoded_in_parts() {
    let mut engines = (plain_engine(1).await, drafting_engine(1, &MAIN).await);
    for length in [1, 4, 5, 64, 65, 66, 130, 400] {
        let case = || Request { cache_prompt: false, ..request_tokens(prompt(length), 60) };
        let accepted = compare(&mut engines, &format!("{length} tokens"), case).await;
        assert!(accepted > 35, "{length}: {accepted}");
    }
    // The draft model decodes 64 tokens of the prompt before each decode, so step 6 is the first with a draft.
    let other: Vec<TokenId> = prompt(300).into_iter().rev().collect();
    let run = engines.1.run(request_tokens(other, 40)).await;
    let first_draft = run.items.iter().find_map(|item| match item {
        TraceItem::Event(event) if event.event_type == EventType::Sampled => {
            event.measured.as_ref()?.drafted.map(|_| event.step)
        }
        _ => None,
    });
    assert_eq!(first_draft, Some(6));
}

/// The name and the action of a mod that acts once.
type ModCase = (&'static str, Action);

#[tokio::test]
async fn mods_have_the_same_effect_with_a_draft_model() {
    let mut engines = (plain_engine(1).await, drafting_engine(1, &MAIN).await);
    let cases: [ModCase; 5] = [
        ("nothing", Action::Noop),
        ("force", Action::ForceTokens(vec![40, 41, 40, 41, 42, 43])),
        ("backtrack", Action::Backtrack { n: 2, tokens: vec![44] }),
        ("retract", Action::Backtrack { n: 7, tokens: vec![] }),
        ("output", Action::ForceOutput(vec![50, 51])),
    ];
    for asynchronous in [false, true] {
        for event in [EventType::ForwardPass, EventType::Sampled, EventType::Added] {
            for (name, action) in &cases {
                for generated in [12, 13] {
                    let case = format!("{name} at {event:?} {generated}, asynchronous {asynchronous}");
                    let accepted = compare(&mut engines, &case, || {
                        let handler = act_once(move |call| is_at(call, event, generated), action.clone());
                        with_mod(request("a b c", 28), asynchronous, handler)
                    })
                    .await;
                    assert!(accepted > 3, "{case}: {accepted}");
                }
            }
        }
    }
}

#[test]
fn random_mods_have_the_same_effect_with_a_draft_model() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let engines = runtime.block_on(async { (plain_engine(2).await, drafting_engine(2, &SIMILAR).await) });
    let engines = std::cell::RefCell::new(engines);
    let change = (0u32..5, proptest::collection::vec(40..60i32, 0..4));
    let changes = proptest::collection::btree_map(3usize..120, change, 0..8);
    let runs = (changes, any::<bool>(), any::<bool>(), 1u32..60, 1usize..90);
    let mut runner = TestRunner::new_with_rng(
        ProptestConfig { cases: 40, ..ProptestConfig::default() },
        // The number of accepted tokens is compared with a limit.
        TestRng::deterministic_rng(RngAlgorithm::ChaCha),
    );
    let accepted = AtomicU32::new(0);
    let result = runner.run(&runs, |(changes, samples, asynchronous, tokens, length)| {
        let request = || {
            let (changes, calls) = (changes.clone(), AtomicU32::new(0));
            let plain = with_temperature(request_tokens(prompt(length), tokens), if samples { 0.5 } else { 0.0 });
            with_mod(plain, asynchronous, move |call| {
                let number = calls.fetch_add(1, Ordering::Relaxed) as usize;
                match (changes.get(&number), call.event_type()) {
                    (_, EventType::Prefilled) | (None, _) => Action::Noop,
                    (Some((0, tokens)), _) if tokens.is_empty() => Action::Noop,
                    (Some((0, tokens)), _) => Action::ForceTokens(tokens.clone()),
                    (Some((n, tokens)), _) => Action::Backtrack { n: *n, tokens: tokens.clone() },
                }
            })
        };
        let count = runtime.block_on(compare(&mut engines.borrow_mut(), "random", request));
        accepted.fetch_add(count, Ordering::Relaxed);
        Ok(())
    });
    result.unwrap();
    assert!(accepted.load(Ordering::Relaxed) > 100, "{accepted:?}");
}

#[tokio::test]
async fn shifted_context_is_decoded_again_by_the_draft_model() {
    let mut engines = (plain_engine(1).await, drafting_engine(1, &MAIN).await);
    for overflow in [Overflow::Stop, Overflow::Shift { keep: Some(4), discard: 0 }] {
        let near_full_context = || Request { overflow, ..request_tokens(prompt(480), 90) };
        let accepted = compare(&mut engines, &format!("{overflow:?}"), near_full_context).await;
        assert!(accepted > 10, "{overflow:?}: {accepted}");
    }
}

#[tokio::test]
async fn runs_that_share_batches_have_their_own_drafts() {
    let mut alone = plain_engine(1).await;
    let prompts = ["a b c a b c a b", "one two one two one", "x", "1 2 3 4 5 6 7 8", "la la la la la", "{\"a\":"];
    let request = |text: &str| request(text, 80);
    let mut expected = Vec::new();
    for text in prompts {
        expected.push(alone.run(request(text)).await);
    }
    for draft in [&MAIN, &SIMILAR] {
        let mut together = drafting_engine(4, draft).await;
        let runs = prompts.map(|text| {
            let engine = together.engine.clone();
            tokio::spawn(async move { follow(engine.submit(request(text)).await.unwrap().output).await })
        });
        let mut accepted = 0;
        for (run, expected) in runs.into_iter().zip(&expected) {
            let (text, end) = run.await.unwrap();
            assert_eq!(text, expected.text);
            accepted += end.finish.drafts.accepted;
        }
        assert!(accepted > 20, "{accepted}");
        // The next run in a slot reuses the prefix that its prompt shares with the previous prompt.
        for _ in 0..2 {
            let repeated = together.run(request(prompts[0])).await;
            assert_eq!((repeated.generated(), &repeated.text), (expected[0].generated(), &expected[0].text));
        }
    }
}

#[tokio::test]
async fn draft_model_drafts_where_no_earlier_tokens_match() {
    let mut both = drafting_engine_with(1, &MAIN, draft_always(DrafterKind::NgramThenModel)).await;
    let mut ngrams = drafting_engine_with(1, &MAIN, draft_always(DrafterKind::Ngram)).await;
    let request = || request("the old fox", 100);
    let (both, ngrams) = (both.run(request()).await, ngrams.run(request()).await);
    assert_eq!(both.text, ngrams.text);
    let (both, ngrams) = (both.end.finish.drafts, ngrams.end.finish.drafts);
    assert!(both.accepted > ngrams.accepted, "{both:?} {ngrams:?}");
}

#[tokio::test]
async fn limits_of_drafts_apply_to_a_draft_model() {
    let mut test_engine = drafting_engine(1, &MAIN).await;
    let mut drafts = async |limits: DraftLimits| {
        test_engine.run(Request { drafts: limits, ..request("the old fox", 60) }).await.end.finish.drafts
    };
    let none = drafts(DraftLimits { max: Some(0), ..DraftLimits::default() }).await;
    assert_eq!((none.drafts, none.drafted), (0, 0));
    let short = drafts(DraftLimits { max: Some(2), ..DraftLimits::default() }).await;
    assert!(short.drafted > 20 && short.drafted <= 2 * short.drafts, "{short:?}");
    let certain = drafts(DraftLimits { min_probability: Some(0.999), ..DraftLimits::default() }).await;
    let any = drafts(DraftLimits::default()).await;
    assert!(certain.drafted < any.drafted / 2, "{certain:?} {any:?}");
    // Drafts below the minimum length are discarded.
    let limits = DraftLimits { min: Some(6), min_probability: Some(0.999), ..DraftLimits::default() };
    let long = drafts(limits).await;
    assert!(long.drafted <= certain.drafted && long.drafted.is_multiple_of(6), "{long:?}");
}

#[tokio::test]
async fn unprofitable_draft_model_is_rarely_used() {
    // The draft model takes as long as the main model, so each draft costs more than it saves.
    let mut test_engine =
        drafting_engine_with(1, &MAIN, SpeculationOptions { adaptive: true, ..draft_always(DrafterKind::Model) }).await;
    let run = test_engine.run(request("the old fox", 400)).await;
    assert!(run.end.finish.drafts.drafts < 200, "{:?}", run.end.finish.drafts);
}

#[tokio::test]
async fn memory_of_the_draft_model_is_released_with_the_engine() {
    let draft = widened_model(0.1);
    let released = Arc::downgrade(&draft);
    let mut test_engine = drafting_engine(2, &draft).await;
    assert!(test_engine.run(request("the old fox", 20)).await.end.finish.drafts.drafted > 0);
    drop(draft);
    test_engine.engine.stop().await;
    assert!(released.upgrade().is_some());
    drop(test_engine);
    assert!(released.upgrade().is_none());
}

async fn start_error(draft: Arc<Model>) -> String {
    let (recorder, _signals) = mpsc::channel(10);
    let mut options = options(1, false);
    options.speculation = draft_always(DrafterKind::Model);
    options.draft_model = Some(DraftModel::new(draft));
    Engine::start(model(), options, recorder).await.err().unwrap().to_string()
}

#[tokio::test]
async fn error_for_unusable_draft_model_names_its_file_and_reason() {
    let fixture = |path: &str| load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path));
    let cannot_remove = "it has recurrent layers or an attention window, so rejected tokens cannot be removed from its state; \
                         use a model without them";
    for (path, reason) in [
        (
            "models/demo.gguf",
            "its vocabulary has 2048 tokens, but the main model's has 640; the maximum difference is 128",
        ),
        ("memories/recurrent.gguf", cannot_remove),
        ("memories/window.gguf", cannot_remove),
    ] {
        let error = start_error(fixture(path)).await;
        assert!(error.ends_with(&format!("fixtures/{path} as the draft model: {reason}")), "{error}");
    }
}
