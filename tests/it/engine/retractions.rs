//! Backtracks after a context shift: the candidates equal those of a run that never had the removed tokens.

use super::{CONTEXT, CompletedRun, TestEngine, model, request_tokens, test_engine_with, with_mod};
use serde_json::Value;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use thunder::engine::{Limits, Overflow, Request, SamplerStage, SamplingParams};
use thunder::events::{Event, EventType, FinishReason, TraceItem};
use thunder::model::grammar::{Constraint, GrammarSource};
use thunder::mods::{Action, LogitEdit};

const PROMPT: usize = 8;
const SHORT_CONTEXT: u32 = 64;

async fn engine_with_short_context() -> TestEngine {
    const { assert!(SHORT_CONTEXT < CONTEXT) };
    test_engine_with(1, false, |options| options.ctx_size = SHORT_CONTEXT).await
}

fn shifting_request(keep: Option<usize>, tokens: u32, sampling: SamplingParams) -> Request {
    let request = request_tokens((5..5 + PROMPT as i32).collect(), tokens);
    Request {
        overflow: Overflow::Shift { keep, discard: 0 },
        limits: Limits { max_steps: 4000, ..request.limits },
        sampling,
        ..request
    }
}

/// Returns the same logits at every step, so that only the sampler's state can make a difference.
fn logits(vocabulary: usize) -> Vec<f32> {
    (0..vocabulary).map(|token| if token < 200 { 6.0 - 0.05 * token as f32 } else { -20.0 }).collect()
}

/// Returns each sampled event of a run with the number of tokens of the answer before it.
fn sampled_events(result: &CompletedRun) -> Vec<(usize, &Event)> {
    let mut length = 0;
    let mut sampled = Vec::new();
    for item in &result.items {
        match item {
            TraceItem::Event(event) if event.event_type == EventType::Sampled => sampled.push((length, event)),
            TraceItem::Event(event) => length += event.added_tokens.as_ref().map_or(0, Vec::len),
            TraceItem::Action(action) => {
                let details = action.details.as_ref().map(|details| serde_json::from_str::<Value>(details.get()));
                length -= details.map_or(0, |details| details.unwrap()["removed"].as_u64().unwrap_or(0) as usize);
            }
            _ => {}
        }
    }
    sampled
}

/// The best candidates with their probability in units of 1/100 000, and the number that each stage left.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Distribution {
    candidates: Vec<(i32, u32)>,
    stages: Vec<(String, u32)>,
}

fn distribution(event: &Event) -> Distribution {
    let measured = event.measured.as_ref().unwrap();
    let candidates = measured.after_sampler.iter().take(5).map(|one| (one.token, (1e5 * one.prob) as u32)).collect();
    let stages = measured.stages.iter().map(|stage| (stage.name.to_string(), stage.left)).collect();
    Distribution { candidates, stages }
}

#[tokio::test]
async fn retracted_tokens_do_not_affect_the_sampler() {
    let mirostat = |mirostat| SamplingParams { mirostat, mirostat_eta: 0.7, ..SamplingParams::default() };
    let adaptive =
        SamplingParams { samplers: vec![SamplerStage::AdaptiveP], adaptive_target: 0.1, ..SamplingParams::default() };
    let kinds = [("mirostat", mirostat(1)), ("mirostat-v2", mirostat(2)), ("adaptive-p", adaptive)];
    let mut test_engine = engine_with_short_context().await;
    // The context is full after 56 tokens of the answer, and then after every 28 tokens; each time 28 are removed.
    for (kind, sampling) in kinds {
        for (at, n) in [(30, 7), (60, 2), (60, 20), (57, 25), (88, 21), (120, 15), (142, 28)] {
            let sampling = SamplingParams { temperature: 1.0, seed: (at + n) as u32, ..sampling.clone() };
            let has_backtracked = AtomicBool::new(false);
            let request = with_mod(shifting_request(None, 150, sampling), false, move |call| match call.event_type() {
                EventType::ForwardPass => Action::AdjustedLogits {
                    edit: LogitEdit::Replace(logits(call.run.vocabulary.len())),
                    temperature: None,
                },
                EventType::Added if call.answer_len() == at && !has_backtracked.swap(true, Ordering::Relaxed) => {
                    Action::Backtrack { n: n as u32, tokens: Vec::new() }
                }
                _ => Action::Noop,
            });
            let result = test_engine.run(request).await;
            let events = sampled_events(&result);
            let at_retraction: Vec<_> = events.iter().filter(|(length, _)| *length == at - n).collect();
            assert_eq!(at_retraction.len(), 2, "{kind}: back at {at} by {n}");
            assert_eq!(
                distribution(at_retraction[0].1),
                distribution(at_retraction[1].1),
                "{kind}: back at {at} by {n}"
            );
            let distinct: HashSet<_> = events.iter().map(|(_, event)| distribution(event)).collect();
            assert!(distinct.len() > 20, "{kind}: the state of the sampler does not change");
        }
    }
}

#[tokio::test]
async fn sequence_is_never_empty_after_a_retraction() {
    let mut test_engine = engine_with_short_context().await;
    for event in [EventType::ForwardPass, EventType::Sampled, EventType::Added] {
        for tokens in [vec![], vec![9, 10]] {
            // After a shift that removes the prompt, a mod removes all tokens of the answer.
            let has_backtracked = AtomicBool::new(false);
            let request = with_mod(shifting_request(Some(0), 80, SamplingParams::default()), false, move |call| {
                if call.evicted > 0 && call.event_type() == event && !has_backtracked.swap(true, Ordering::Relaxed) {
                    assert_eq!(call.prompt_len, 0);
                    return Action::Backtrack { n: u32::MAX, tokens: tokens.clone() };
                }
                Action::Noop
            });
            let result = test_engine.run(request).await;
            let finish = &result.end.finish;
            assert_eq!((finish.reason, finish.usage.completion_tokens), (FinishReason::Length, 80), "{event:?}");
            assert_eq!(result.text, finish.text);
            let recorded = result.items.iter().find_map(|item| match item {
                TraceItem::Action(action) => action.backtrack_steps,
                _ => None,
            });
            assert_eq!(recorded, Some(i32::MAX));
        }
    }
}

#[tokio::test]
async fn forced_output_after_a_shift_starts_the_constraint_again() {
    let mut test_engine = engine_with_short_context().await;
    let output = model().vocabulary().encode_plain("xyz");
    let forced = output.clone();
    let constraint = Constraint::new("test", GrammarSource::Regex("a{2000}|xyz".into()));
    let letter = model().vocabulary().encode_plain("a")[0];
    let sampling = SamplingParams { logit_bias: vec![(letter, 100.0)], ..SamplingParams::default() };
    let request = Request {
        constraint: Some(constraint),
        ..with_mod(shifting_request(None, 150, sampling), false, move |call| {
            let is_after_shift = call.event_type() == EventType::Added && call.evicted > 0;
            if is_after_shift { Action::ForceOutput(forced.clone()) } else { Action::Noop }
        })
    };
    let result = test_engine.run(request).await;
    assert_eq!((result.text.as_str(), result.end.finish.reason), ("xyz", FinishReason::Stop));
    let last = result.items.iter().rev().find_map(|item| match item {
        TraceItem::Event(event) if event.added_tokens.as_ref() == Some(&output) => event.measured.as_ref(),
        _ => None,
    });
    assert_eq!(last.unwrap().note, None, "the constraint permits the forced output");
}
