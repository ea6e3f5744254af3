//! Text, KV state and trace agree after actions of mods.

use super::{act_once, added_at, is_at, model, request, request_tokens, test_engine, with_mod};
use std::sync::Mutex;
use thunder::engine::{Limits, Output, ReportOptions};
use thunder::events::{EventType, FinishReason, TokenId, TokenMeasurement, TraceItem};
use thunder::mods::{Action, Call};

/// Asserts that after the actions of a mod the model continues as after a prompt with the same tokens.
async fn assert_continues_as_after_a_prompt(
    handler: impl Fn(&Call<'_>) -> Action + Send + Sync + Clone + 'static,
    asynchronous: bool,
) {
    let mut test_engine = test_engine(1, false).await;
    let result = test_engine.run(with_mod(request("The sky is", 16), asynchronous, handler)).await;
    let generated = result.generated();
    assert_eq!(generated.len(), 16, "{:?}", result.end);
    assert_eq!(result.end.finish.usage.completion_tokens, 16);
    assert_eq!(result.text, result.end.finish.text);
    assert_eq!(result.text, model().vocabulary().decode(&generated));
    let mut prompt = model().vocabulary().encode_markup("The sky is");
    prompt.extend_from_slice(&generated[..10]);
    let fresh = test_engine.run(request_tokens(prompt, 6)).await;
    assert_eq!(fresh.generated(), generated[10..]);
}

#[tokio::test]
async fn backtrack_on_added_replaces_tokens() {
    for asynchronous in [false, true] {
        let backtrack = act_once(|call| added_at(call, 6), Action::Backtrack { n: 3, tokens: vec![40, 41] });
        assert_continues_as_after_a_prompt(backtrack, asynchronous).await;
    }
}

#[tokio::test]
async fn backtrack_without_tokens_samples_from_the_shortened_sequence() {
    let backtrack = act_once(|call| is_at(call, EventType::ForwardPass, 5), Action::Backtrack { n: 2, tokens: vec![] });
    assert_continues_as_after_a_prompt(backtrack, false).await;
}

#[tokio::test]
async fn forced_tokens_take_one_decode_and_have_probabilities() {
    for event in [EventType::ForwardPass, EventType::Sampled, EventType::Added] {
        let force = || act_once(move |call| is_at(call, event, 4), Action::ForceTokens(vec![50, 51, 52]));
        assert_continues_as_after_a_prompt(force(), true).await;
        let mut test_engine = test_engine(1, false).await;
        let result = test_engine.run(with_mod(request("The sky is", 16), false, force())).await;
        let forced: Vec<_> = result
            .items
            .iter()
            .filter_map(|item| match item {
                TraceItem::Event(e) if e.forced == Some(true) => Some(e),
                _ => None,
            })
            .collect();
        assert_eq!(forced.len(), 1);
        assert_eq!(forced[0].added_tokens.as_deref(), Some(&[50, 51, 52][..]));
        let tokens = &forced[0].measured.as_ref().unwrap().tokens;
        assert!(
            tokens.iter().all(|token| token.logprob.is_some() && token.rank.is_some_and(|rank| rank >= 1)),
            "{tokens:?}"
        );
    }
}

#[tokio::test]
async fn backtrack_on_sampled_has_its_own_step() {
    let mut test_engine = test_engine(1, false).await;
    let mut sampled = request("The sky is", 8);
    sampled.sampling.temperature = 1.5;
    let backtrack = act_once(|call| is_at(call, EventType::Sampled, 3), Action::Backtrack { n: 1, tokens: vec![] });
    let result = test_engine.run(with_mod(sampled, false, backtrack)).await;
    assert_eq!(result.generated().len(), 8);
    let steps: Vec<i32> =
        result.events().iter().filter(|(kind, _)| *kind == EventType::ForwardPass).map(|&(_, step)| step).collect();
    assert_eq!(steps, (1..=9).collect::<Vec<_>>(), "the removed token must have its own step");
}

#[tokio::test]
async fn force_output_replaces_the_answer_and_ends_the_run() {
    let mut test_engine = test_engine(1, false).await;
    let result = test_engine
        .run(with_mod(request("The sky is", 16), true, |call| {
            if added_at(call, 5) { Action::ForceOutput(vec![60, 61]) } else { Action::Noop }
        }))
        .await;
    assert_eq!(result.generated(), [60, 61]);
    assert_eq!(result.text, model().vocabulary().decode(&[60, 61]));
    assert_eq!(result.end.finish.reason, FinishReason::Stop);
}

#[tokio::test]
async fn action_not_permitted_for_its_event_is_a_mod_error() {
    let mut test_engine = test_engine(1, false).await;
    let result = test_engine
        .run(with_mod(request("The sky is", 4), false, |call| {
            if call.event_type() == EventType::Prefilled { Action::ForceTokens(vec![1]) } else { Action::Noop }
        }))
        .await;
    let call = result
        .items
        .iter()
        .find_map(|item| match item {
            TraceItem::ModCall(call) => Some(call),
            _ => None,
        })
        .unwrap();
    assert!(call.exception_occurred);
    let message = "InvalidActionError at Prefilled: ForceTokens is not permitted at this event";
    assert_eq!(call.exception_message.as_deref(), Some(message));
    assert_eq!(result.generated().len(), 4);
}

#[tokio::test]
async fn action_of_an_earlier_mod_supersedes_later_ones() {
    let mut test_engine = test_engine(1, false).await;
    let mut modified = with_mod(request("The sky is", 8), false, |call| {
        if added_at(call, 2) { Action::ForceTokens(vec![70]) } else { Action::Noop }
    });
    modified = with_mod(modified, true, |call| if added_at(call, 2) { Action::error("no") } else { Action::Noop });
    let result = test_engine.run(modified).await;
    assert_eq!(result.end.finish.reason, FinishReason::Length);
    assert_eq!(result.generated()[2], 70);
    let superseded = result.items.iter().any(|item| matches!(item, TraceItem::Action(action)
        if action.error_message.is_some() && action.details.as_ref().is_some_and(|d| d.get().contains("\"superseded\":true"))));
    assert!(superseded);
}

#[tokio::test]
async fn edited_logits_are_sampled_and_recorded() {
    let mut test_engine = test_engine(1, false).await;
    let result = test_engine
        .run(with_mod(request("The sky is", 3), true, |call| match call.event_type() {
            EventType::ForwardPass => Action::AdjustedLogits {
                edit: thunder::mods::LogitEdit::Set(vec![(99, 1000.0)]),
                temperature: Some(1.0),
            },
            _ => Action::Noop,
        }))
        .await;
    assert_eq!(result.generated(), [99, 99, 99]);
    let is_recorded = result
        .items
        .iter()
        .any(|item| matches!(item, TraceItem::Action(a) if a.details.as_ref().unwrap().get().contains("\"token\":99")));
    assert!(is_recorded);
}

#[tokio::test]
async fn mod_that_raises_max_tokens_raises_max_steps() {
    let mut test_engine = test_engine(1, false).await;
    let raise = |max_steps, has_requested_max_steps| {
        let mut raised = with_mod(request("The sky is", 2), false, |call| match call.event_type() {
            EventType::Prefilled => Action::AdjustedPrefill { tokens: call.sequence.to_vec(), max_tokens: Some(400) },
            _ => Action::Noop,
        });
        raised.limits = Limits { max_steps, has_requested_max_steps, ..raised.limits };
        raised
    };
    let default = Limits::new(2).max_steps;
    assert!(default < 400);
    let end = test_engine.run(raise(default, false)).await.end;
    let message = "a mod has set the limit of 400 tokens, which is reached";
    assert_eq!((end.finish.usage.completion_tokens, end.finish.message.as_deref()), (400, Some(message)));
    for steps in [5, default] {
        let end = test_engine.run(raise(steps, true)).await.end;
        assert_eq!(end.finish.usage.completion_tokens, steps, "the client's own limit remains");
    }
}

#[tokio::test]
async fn endless_backtracks_of_a_mod_end_the_run() {
    let mut test_engine = test_engine(1, false).await;
    let mut modified = with_mod(request("The sky is", 8), false, |call| {
        if call.event_type() == EventType::Added { Action::Backtrack { n: 1, tokens: vec![] } } else { Action::Noop }
    });
    modified.limits.max_steps = 20;
    let result = test_engine.run(modified).await;
    assert_eq!(result.end.finish.reason, FinishReason::Length);
    assert_eq!(
        result.end.finish.message.as_deref(),
        Some("the limit of 20 steps was reached with 0 tokens in the answer; a mod may backtrack endlessly")
    );
    assert_eq!(result.text, "");
}

#[tokio::test]
async fn tool_calls_and_errors_end_the_run() {
    let mut test_engine = test_engine(1, false).await;
    let result = test_engine
        .run(with_mod(request("The sky is", 8), false, |call| {
            if added_at(call, 2) {
                Action::ToolCalls(serde_json::json!({"function": {"name": "f", "arguments": "{}"}}))
            } else {
                Action::Noop
            }
        }))
        .await;
    assert_eq!(result.end.finish.reason, FinishReason::ToolCalls);
    assert_eq!(result.end.finish.tool_calls.as_ref().unwrap()[0]["function"]["name"], "f");
    let result = test_engine.run(with_mod(request("The sky is", 8), false, |_| Action::error("refused"))).await;
    assert_eq!(
        (result.end.finish.reason, result.end.finish.message.as_deref()),
        (FinishReason::Error, Some("refused"))
    );
}

/// A token may have only a part of a character and thus no text, so retractions count tokens and characters.
#[tokio::test]
async fn client_is_notified_of_retracted_tokens() {
    let split_characters: Vec<TokenId> = model().vocabulary().encode_markup("日本語");
    let test_engine = test_engine(1, false).await;
    for (seed, per_token) in (0..6).flat_map(|seed| [(seed, false), (seed, true)]) {
        let split_characters = split_characters.clone();
        let calls = Mutex::new(0u32);
        let mut modified = with_mod(request("The sky is", 24), false, move |call| {
            if call.event_type() != EventType::Added {
                return Action::Noop;
            }
            let mut calls = calls.lock().unwrap();
            *calls += 1;
            match *calls % 5 {
                0 => Action::Backtrack { n: 1 + seed % 4, tokens: Vec::new() },
                3 => Action::ForceTokens(split_characters[..=seed as usize % split_characters.len()].to_vec()),
                _ => Action::Noop,
            }
        });
        modified.sampling.seed = seed;
        modified.sampling.temperature = 1.5;
        modified.report = ReportOptions { per_token, ..modified.report };
        let mut generation = test_engine.engine.submit(modified).await.unwrap();
        let (mut result, mut text): (Vec<TokenMeasurement>, Vec<char>) = Default::default();
        let end = loop {
            match generation.output.recv().await.unwrap() {
                Output::Text(delta) => {
                    result.extend(delta.tokens.into_iter().map(|token| token.measurement));
                    text.extend(delta.text.chars());
                }
                Output::Retract { chars, tokens } => {
                    result.truncate(result.len() - tokens);
                    text.truncate(text.len() - chars);
                }
                Output::PromptProbabilities(_) | Output::PromptProgress(_) => {}
                Output::Ended(end) => break end,
            }
        };
        let case = format!("seed {seed}, per_token {per_token}");
        let token_texts: String = result.iter().map(|token| token.text.as_str()).collect();
        // With `per_token` a client receives the texts of the tokens, which lack incomplete characters.
        let expected = if per_token { &token_texts } else { &end.finish.text };
        assert_eq!(text.into_iter().collect::<String>(), *expected, "{case}");
        assert_eq!(result.len(), end.finish.usage.completion_tokens as usize, "{case}");
        let tokens: Vec<TokenId> = result.iter().map(|token| token.token).collect();
        assert_eq!(model().vocabulary().decode(&tokens), end.finish.text, "{case}");
    }
}
