//! Mods receive the same calls and change the same runs with and without drafts.

use super::{compare, drafting_engine, looping_request, plain_engine, sampled_request};
use crate::engine::slow_clients::with_silent_mod;
use crate::engine::{TestEngine, act_once, added_at, follow, is_at, with_mod};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use thunder::engine::SamplingParams;
use thunder::events::{DraftUsage, EventType, Fault, TokenId};
use thunder::mods::{Action, LogitEdit, Reply};

/// The name and the action of a mod that acts once.
type ModCase = (&'static str, Action);

#[tokio::test]
async fn mods_have_the_same_effect_with_drafts() {
    let mut engines = (plain_engine(1, false).await, drafting_engine(1, false).await);
    let tool_calls = serde_json::json!([{"function": {"name": "f"}}]);
    let cases: [ModCase; 7] = [
        ("nothing", Action::Noop),
        ("force", Action::ForceTokens(vec![40, 41, 40, 41])),
        ("backtrack", Action::Backtrack { n: 2, tokens: vec![44] }),
        ("retract", Action::Backtrack { n: 3, tokens: vec![] }),
        ("output", Action::ForceOutput(vec![50, 51])),
        ("calls", Action::ToolCalls(tool_calls)),
        ("error", Action::EmitError { message: "no".into(), fault: Fault::Request }),
    ];
    for asynchronous in [false, true] {
        for event in [EventType::ForwardPass, EventType::Sampled, EventType::Added] {
            for (name, action) in &cases {
                for generated in [9, 13] {
                    let case = format!("{name} at {event:?} {generated}, asynchronous {asynchronous}");
                    compare(&mut engines, &case, || {
                        let handler = act_once(move |call| is_at(call, event, generated), action.clone());
                        with_mod(looping_request(28), asynchronous, handler)
                    })
                    .await;
                }
            }
        }
        let edited = || {
            with_mod(looping_request(80), asynchronous, |call| match call.event_type() {
                EventType::ForwardPass => Action::AdjustedLogits {
                    edit: LogitEdit::Add(vec![(40 + call.generated_in_context().len() as i32 % 3, 9.0)]),
                    temperature: Some(0.2),
                },
                _ => Action::Noop,
            })
        };
        let accepted = compare(&mut engines, "adjusted logits", edited).await;
        assert!(accepted > 10, "{accepted}, asynchronous {asynchronous}");
        // A mod that changes nothing keeps all drafts, even if it replies asynchronously.
        let seen = Arc::new(AtomicU32::new(0));
        let accepted = compare(&mut engines, "observed", || {
            let seen = Arc::clone(&seen);
            with_mod(looping_request(100), asynchronous, move |call| {
                seen.fetch_add(u32::from(added_at(call, 50)), Ordering::Relaxed);
                Action::Noop
            })
        })
        .await;
        assert!(accepted > 30, "{accepted}");
        assert_eq!(seen.load(Ordering::Relaxed), 2, "the mod must be called once on each engine");
    }
}

/// Runs a request whose mod replies late, and pauses the run during each call if `pauses` is true. Returns the drafts.
async fn drafts_of_delayed_run(test_engine: &TestEngine, pauses: bool) -> DraftUsage {
    let mut request = looping_request(40);
    let pending_replies = with_silent_mod(&mut request, EventType::Added);
    let generation = test_engine.engine.submit(request).await.unwrap();
    let client = tokio::spawn(follow(generation.output));
    while !client.is_finished() {
        let reply = pending_replies.lock().unwrap().pop();
        if let Some(reply) = reply {
            if pauses {
                generation.control.pause(Duration::from_hours(1)).await.unwrap();
            }
            reply.reply(Reply::default());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        if pauses {
            // Fails after the last token.
            let _ = generation.control.resume().await;
        }
    }
    client.await.unwrap().1.finish.drafts
}

#[tokio::test]
async fn pause_during_a_mod_call_keeps_the_draft() {
    let test_engine = drafting_engine(1, false).await;
    let expected = drafts_of_delayed_run(&test_engine, false).await;
    assert!(expected.accepted > 5, "{expected:?}");
    assert_eq!(drafts_of_delayed_run(&test_engine, true).await, expected);
}

/// A change that a mod makes at one of its calls.
#[derive(Debug, Clone)]
enum Change {
    Force(Vec<TokenId>),
    Remove(u32, Vec<TokenId>),
    Prefer(TokenId),
}

fn change() -> impl Strategy<Value = Change> {
    let tokens = |size| proptest::collection::vec(40..46i32, size);
    prop_oneof![
        tokens(1..6).prop_map(Change::Force),
        (1u32..6, tokens(0..3)).prop_map(|(n, tokens)| Change::Remove(n, tokens)),
        (40..46i32).prop_map(Change::Prefer),
    ]
}

#[test]
fn random_mods_have_the_same_effect_with_drafts() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut engines = runtime.block_on(async { (plain_engine(2, false).await, drafting_engine(2, false).await) });
    let runs = (proptest::collection::btree_map(0usize..160, change(), 0..12), 0u32..3, any::<bool>(), 1u32..70);
    let mut runner = TestRunner::new_with_rng(
        ProptestConfig { cases: 60, ..ProptestConfig::default() },
        // The number of accepted tokens is compared with a limit.
        TestRng::deterministic_rng(RngAlgorithm::ChaCha),
    );
    let accepted = AtomicU32::new(0);
    let engines = std::cell::RefCell::new(&mut engines);
    let result = runner.run(&runs, |(changes, temperature, asynchronous, tokens)| {
        let request = || {
            let (changes, calls) = (changes.clone(), AtomicU32::new(0));
            let sampling =
                SamplingParams { temperature: 0.4 * temperature as f32, seed: 5, ..SamplingParams::default() };
            with_mod(sampled_request(sampling, tokens), asynchronous, move |call| {
                let number = calls.fetch_add(1, Ordering::Relaxed) as usize;
                match (changes.get(&number), call.event_type()) {
                    (_, EventType::Prefilled) | (None, _) => Action::Noop,
                    (Some(Change::Prefer(token)), EventType::ForwardPass) => {
                        Action::AdjustedLogits { edit: LogitEdit::Add(vec![(*token, 20.0)]), temperature: None }
                    }
                    (Some(Change::Prefer(token)), _) => Action::ForceTokens(vec![*token]),
                    (Some(Change::Force(tokens)), _) => Action::ForceTokens(tokens.clone()),
                    (Some(Change::Remove(n, tokens)), _) => Action::Backtrack { n: *n, tokens: tokens.clone() },
                }
            })
        };
        let count = runtime.block_on(compare(*engines.borrow_mut(), "random", request));
        accepted.fetch_add(count, Ordering::Relaxed);
        Ok(())
    });
    result.unwrap();
    assert!(accepted.load(Ordering::Relaxed) > 100, "{accepted:?}");
}
