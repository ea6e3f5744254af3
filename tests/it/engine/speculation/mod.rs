//! Speculative decoding changes only the number of decodes: text, trace, limits, mods and random numbers are the same
//! as without it.

mod mods;

use super::{CompletedRun, TestEngine, follow, model, request, request_tokens, test_engine_with, with_mod};
use std::time::Duration;
use thunder::engine::{
    DraftLimits, DrafterKind, EngineOptions, Limits, Output, Overflow, Request, RunActivity, SamplingParams,
    SpeculationOptions,
};
use thunder::events::{EventType, FinishReason, Measurements, TokenId, TraceItem};
use thunder::model::grammar::{Constraint, GrammarSource};
use thunder::model::llama::CacheType;
use thunder::mods::{Action, Call, CallEvent, LogitEdit};

/// Options to draft after every match of one token, so that many drafts are accepted and many are rejected.
const DRAFT_ALWAYS: SpeculationOptions = SpeculationOptions {
    drafter: DrafterKind::Ngram,
    max_draft: 7,
    min_draft: 0,
    min_match: 1,
    min_probability: 0.0,
    adaptive: false,
};

/// Maximum difference between measurements of one position in batches of different sizes, in which products of 16-bit
/// values are rounded differently.
const TOLERANCE: f32 = 0.02;

/// Sets a 32-bit cache without saved states, so that results depend little on the size of a batch.
pub fn set_exact_options(options: &mut EngineOptions) {
    (options.cache_type_k, options.cache_type_v) = (CacheType::F32, CacheType::F32);
    options.cache_ram_bytes = 0;
}

async fn plain_engine(parallel: u32, attention: bool) -> TestEngine {
    test_engine_with(parallel, attention, set_exact_options).await
}

async fn drafting_engine(parallel: u32, attention: bool) -> TestEngine {
    test_engine_with(parallel, attention, |options| {
        set_exact_options(options);
        options.speculation = DRAFT_ALWAYS;
    })
    .await
}

/// Returns the description of a trace item, and its numbers that depend on the batch size.
pub fn describe(item: &TraceItem) -> (String, Vec<f32>) {
    let mut numbers = Vec::new();
    let text = match item {
        TraceItem::Event(event) => {
            let measured = event.measured.as_deref().unwrap();
            let Measurements { tokens, model, after_mods, after_sampler, entropy, .. } = measured;
            numbers.extend(entropy);
            numbers.extend(tokens.iter().flat_map(|token| [token.logprob, token.entropy]).flatten());
            numbers.extend([model, after_mods, after_sampler].into_iter().flatten().map(|candidate| candidate.prob));
            let texts: Vec<_> = tokens.iter().map(|token| (token.token, &token.text)).collect();
            let rest = (&measured.position, &measured.stopped_by, &measured.note, measured.ends_generation);
            let evicted = &measured.evicted;
            let event = (event.event_type, event.step, &event.sampled_token, &event.added_tokens, event.forced);
            format!("{event:?} {texts:?} {rest:?} {evicted:?}")
        }
        TraceItem::ModCall(call) => format!("{} {:?} {}", call.mod_name, call.event_type, call.exception_occurred),
        TraceItem::Action(action) => format!("{:?}", action.action_type),
        TraceItem::ModLog(log) => log.log_message.clone(),
        TraceItem::Attention(step) => {
            numbers.extend(step.t0.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())));
            format!("{} {}", step.sequence_order, step.row_len)
        }
    };
    (text, numbers)
}

/// Returns the items of a run. Attention comes last, because another thread encodes it.
fn trace(run: &CompletedRun) -> Vec<(String, Vec<f32>)> {
    let (attention, others): (Vec<_>, Vec<_>) =
        run.items.iter().partition(|item| matches!(item, TraceItem::Attention(_)));
    others.into_iter().chain(attention).map(describe).collect()
}

/// Asserts that text, trace and end of a run with drafts equal those of the run without drafts.
fn assert_same(plain: &CompletedRun, drafted: &CompletedRun, case: &str) {
    let (expected, found) = (trace(plain), trace(drafted));
    for (index, (expected, found)) in expected.iter().zip(&found).enumerate() {
        assert_eq!(expected.0, found.0, "{case}: item {index}");
        assert_eq!(expected.1.len(), found.1.len(), "{case}: item {index}, {}", expected.0);
        for (a, b) in expected.1.iter().zip(&found.1) {
            assert!((a - b).abs() <= TOLERANCE * a.abs().max(1.0), "{case}: {a} {b} in item {index}, {}", expected.0);
        }
    }
    assert_eq!(expected.len(), found.len(), "{case}");
    assert_eq!(plain.text, drafted.text, "{case}");
    let (a, b) = (&plain.end.finish, &drafted.end.finish);
    assert_eq!(
        (a.reason, &a.message, &a.stop_string, &a.text, &a.tool_calls, a.usage, a.truncated, a.evicted_tokens),
        (b.reason, &b.message, &b.stop_string, &b.text, &b.tool_calls, b.usage, b.truncated, b.evicted_tokens),
        "{case}"
    );
}

/// Runs a request with and without drafts. Returns the number of accepted tokens.
pub async fn compare(engines: &mut (TestEngine, TestEngine), case: &str, request: impl Fn() -> Request) -> u32 {
    let expected = engines.0.run(request()).await;
    let found = engines.1.run(request()).await;
    assert_same(&expected, &found, case);
    assert_eq!(expected.end.finish.drafts.drafted, 0);
    found.end.finish.drafts.accepted
}

/// Replaces the logits by ones that depend on the last two tokens only, so that six tokens repeat themselves and no
/// probability depends on the size of a batch.
fn repeating_logits(call: &Call<'_>) -> Action {
    let CallEvent::ForwardPass { logits, .. } = call.event else { return Action::Noop };
    let last: i32 = call.sequence.iter().rev().take(2).zip([31, 17]).map(|(token, factor)| token * factor).sum();
    let mut values = vec![-30.0; logits.len()];
    (40..46).for_each(|token| values[token as usize] = ((last + 7 * token) % 11) as f32);
    Action::AdjustedLogits { edit: LogitEdit::Replace(values), temperature: None }
}

/// Returns a request whose answer repeats itself.
fn looping_request(tokens: u32) -> Request {
    with_mod(request("a b c a b c a b", tokens), false, repeating_logits)
}

fn sampled_request(sampling: SamplingParams, tokens: u32) -> Request {
    Request { sampling, ..looping_request(tokens) }
}

#[tokio::test]
async fn drafts_change_neither_text_nor_trace() {
    let mut engines = (plain_engine(1, false).await, drafting_engine(1, false).await);
    let mut accepted = compare(&mut engines, "greedy", || looping_request(200)).await;
    assert!(accepted > 50, "{accepted}");
    // At a low temperature, earlier tokens are repeated.
    let low_temperature = || SamplingParams { temperature: 0.3, seed: 11, ..SamplingParams::default() };
    accepted = compare(&mut engines, "sampled", || sampled_request(low_temperature(), 200)).await;
    assert!(accepted > 5, "{accepted}");
    for (case, sampling) in [
        ("temperature 1", SamplingParams { temperature: 1.0, seed: 3, ..SamplingParams::default() }),
        (
            "penalties",
            SamplingParams { repeat_penalty: 1.1, presence_penalty: 0.1, frequency_penalty: 0.1, ..low_temperature() },
        ),
        ("mirostat", SamplingParams { mirostat: 2, ..low_temperature() }),
        ("dry", SamplingParams { dry_multiplier: 0.8, ..low_temperature() }),
        ("xtc", SamplingParams { xtc_probability: 0.5, xtc_threshold: 0.1, ..low_temperature() }),
        ("adaptive", SamplingParams { adaptive_target: 0.5, ..low_temperature() }),
    ] {
        compare(&mut engines, case, || sampled_request(sampling.clone(), 120)).await;
    }
}

#[tokio::test]
async fn limits_within_a_draft_end_the_run() {
    let mut engines = (plain_engine(1, false).await, drafting_engine(1, false).await);
    for tokens in 1..24 {
        compare(&mut engines, &format!("{tokens} tokens"), || looping_request(tokens)).await;
    }
    let expected = engines.0.run(looping_request(60)).await;
    for from in (5..50).step_by(7) {
        let stop: String = expected.text.chars().skip(from).take(4).collect();
        let stopping = || {
            let looping = looping_request(60);
            Request { limits: Limits { stop: vec![stop.clone()], ..looping.limits }, ..looping }
        };
        compare(&mut engines, &format!("stop string {stop:?}"), stopping).await;
    }
    let long: Vec<TokenId> = (0..480).map(|index| 5 + index % 9).collect();
    for overflow in [Overflow::Stop, Overflow::Shift { keep: Some(4), discard: 0 }] {
        let near_full_context = || {
            let request = request_tokens(long.clone(), 90);
            with_mod(Request { overflow, ..request }, false, repeating_logits)
        };
        compare(&mut engines, &format!("{overflow:?}"), near_full_context).await;
    }
    let accepted = compare(&mut engines, "no drafts", || Request {
        drafts: DraftLimits { max: Some(0), ..DraftLimits::default() },
        ..looping_request(60)
    });
    assert_eq!(accepted.await, 0);
}

#[tokio::test]
async fn grammars_and_biases_hold_in_drafts() {
    let mut engines = (plain_engine(1, false).await, drafting_engine(1, false).await);
    for (grammar, tokens) in [
        (GrammarSource::Regex("(ab){5,60}xyz".into()), 100),
        (GrammarSource::Regex("[a-c]{30,90}".into()), 120),
        (GrammarSource::Lark("start: \"a\" endless\nendless: \"b\" endless".into()), 80),
    ] {
        let constrained =
            || Request { constraint: Some(Constraint::new("test", grammar.clone())), ..looping_request(tokens) };
        compare(&mut engines, &format!("{grammar:?}"), constrained).await;
    }
    let banned = model().vocabulary().encode_plain("a")[0];
    let biased = || {
        sampled_request(
            SamplingParams {
                temperature: 0.0,
                logit_bias: vec![(banned, f32::NEG_INFINITY)],
                ..SamplingParams::default()
            },
            80,
        )
    };
    compare(&mut engines, "bias", biased).await;
}

#[tokio::test]
async fn attention_of_drafted_tokens_equals_that_of_single_decodes() {
    let mut engines = (plain_engine(2, true).await, drafting_engine(2, true).await);
    for per_token in [false, true] {
        let accepted = compare(&mut engines, "attention", || {
            let mut captured = Request { attention: true, ..looping_request(60) };
            (captured.report.per_token, captured.report.attention_rows) = (per_token, per_token);
            captured
        })
        .await;
        assert!(accepted > 10, "{accepted}");
        let accepted = compare(&mut engines, "attention and a mod", || {
            let captured = Request { attention: true, ..looping_request(40) };
            with_mod(captured, true, |call| match call.event_type() {
                EventType::Sampled if call.generated_in_context().len() % 10 == 9 => Action::ForceTokens(vec![40, 41]),
                _ => Action::Noop,
            })
        })
        .await;
        assert!(accepted > 3, "{accepted}");
    }
}

#[tokio::test]
async fn streams_that_share_batches_have_their_own_drafts() {
    let mut alone = plain_engine(1, false).await;
    let prompts = ["a b c a b c a b", "one two one two one", "x", "1 2 3 4 5 6 7 8", "la la la la la", "{\"a\":"];
    let request = |prompt| with_mod(request(prompt, 90), false, repeating_logits);
    let mut expected = Vec::new();
    for prompt in prompts {
        expected.push(alone.run(request(prompt)).await);
    }
    let mut together = drafting_engine(4, false).await;
    let runs = prompts.map(|prompt| {
        let engine = together.engine.clone();
        tokio::spawn(async move { follow(engine.submit(request(prompt)).await.unwrap().output).await })
    });
    let mut accepted = 0;
    for (run, expected) in runs.into_iter().zip(&expected) {
        let (text, end) = run.await.unwrap();
        assert_eq!(text, expected.text);
        accepted += end.finish.drafts.accepted;
    }
    assert!(accepted > 50, "{accepted}");
    // A later prompt reuses the state of an earlier run without its rejected tokens.
    for cached in [false, true] {
        let repeated = together.run(request(prompts[0])).await;
        assert_eq!((repeated.generated(), repeated.text), (expected[0].generated(), expected[0].text.clone()));
        assert!(!cached || repeated.end.finish.usage.cached_tokens > 0);
    }
}

#[tokio::test]
async fn paused_run_continues_with_the_same_text() {
    let (mut plain, test_engine) = (plain_engine(1, false).await, drafting_engine(1, false).await);
    let expected = plain.run(looping_request(300)).await;
    for asynchronous in [false, true] {
        let mut generation =
            test_engine.engine.submit(with_mod(looping_request(300), asynchronous, |_| Action::Noop)).await.unwrap();
        let mut text = String::new();
        let mut outputs = 0;
        let end = loop {
            match generation.output.recv().await.unwrap() {
                Output::Text(delta) => text += &delta.text,
                Output::Ended(end) => break end,
                _ => {}
            }
            outputs += 1;
            if outputs % 40 == 0 {
                // The run gives up its slot and its KV state immediately.
                let Ok(paused) = generation.control.pause(Duration::ZERO).await else { continue };
                assert_ne!(paused.activity, RunActivity::Running);
                tokio::time::sleep(Duration::from_millis(5)).await;
                let _ = generation.control.resume().await;
            }
        };
        assert_eq!(
            (text, end.finish.reason),
            (expected.text.clone(), FinishReason::Length),
            "asynchronous {asynchronous}"
        );
        assert!(end.finish.drafts.accepted > 50, "{:?}", end.finish.drafts);
    }
}

#[tokio::test]
async fn drafts_are_counted_and_marked_in_the_trace() {
    let mut test_engine = test_engine_with(1, false, |options| {
        options.speculation = SpeculationOptions { drafter: DrafterKind::Ngram, ..SpeculationOptions::default() };
    })
    .await;
    let looping = test_engine.run(looping_request(200)).await;
    let drafts = looping.end.finish.drafts;
    assert!(drafts.drafts > 0 && drafts.accepted <= drafts.drafted, "{drafts:?}");
    let marked_tokens = |accepted: bool| {
        let is_marked = |item: &&TraceItem| match item {
            TraceItem::Event(event) => {
                let drafted = event.measured.as_ref().and_then(|measured| measured.drafted);
                drafted.is_some_and(|drafted| (Some(drafted) == event.sampled_token) == accepted)
            }
            _ => false,
        };
        looping.items.iter().filter(is_marked).count() as u32
    };
    assert_eq!(marked_tokens(true), drafts.accepted);
    assert!(marked_tokens(false) <= drafts.drafts);
    let counts = test_engine.engine.status().counts().total;
    assert_eq!(
        (counts.drafts, counts.drafted_tokens, counts.accepted_tokens),
        (u64::from(drafts.drafts), u64::from(drafts.drafted), u64::from(drafts.accepted))
    );
    assert!(test_engine.engine.speculates());
}
