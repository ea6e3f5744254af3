//! Grammars that start late, never end or permit no token.

use super::{model, request, test_engine};
use thunder::engine::{Request, SamplingParams};
use thunder::events::FinishReason;
use thunder::model::grammar::{Constraint, GrammarSource, Trigger};

#[tokio::test]
async fn lazy_constraint_applies_after_its_trigger() {
    let letter = model().vocabulary().encode_plain("a")[0];
    let request = |constraint| Request {
        constraint: Some(constraint),
        sampling: SamplingParams { logit_bias: vec![(letter, 100.0)], ..request("Hello", 1).sampling },
        ..request("Hello", 12)
    };
    let constraint = Constraint::new("test", GrammarSource::Regex("xyz".into()));
    let mut test_engine = test_engine(1, false).await;
    let triggered = test_engine.run(request(constraint.clone().lazy(Trigger::text("aaa")))).await;
    assert_eq!(triggered.text, "aaaxyz");
    assert_eq!(triggered.end.finish.reason, FinishReason::Stop);
    let by_token = test_engine.run(request(constraint.clone().lazy(Trigger::token(letter)))).await;
    assert_eq!(by_token.text, "axyz");
    let untriggered = test_engine.run(request(constraint.clone().lazy(Trigger::text("b")))).await;
    assert_eq!(untriggered.text, "a".repeat(12));
    let immediate = test_engine.run(request(constraint)).await;
    assert_eq!(immediate.text, "xyz");
}

#[tokio::test]
async fn broken_grammar_ends_only_its_own_run() {
    let mut test_engine = test_engine(2, false).await;
    // The grammar has no end, so the limit ends the run.
    let endless = Constraint::new("test", GrammarSource::Lark("start: \"a\" endless\nendless: \"b\" endless".into()));
    let limited = test_engine.run(Request { constraint: Some(endless), ..request("Hello", 200) }).await;
    assert!(limited.text.starts_with("ab"), "{}", limited.text);
    assert_eq!(limited.end.finish.reason, FinishReason::Length);
    let banned = model().vocabulary().encode_plain("x")[0];
    let impossible = Request {
        constraint: Some(Constraint::new("test", GrammarSource::Regex("x".into()))),
        sampling: SamplingParams { logit_bias: vec![(banned, f32::NEG_INFINITY)], ..SamplingParams::default() },
        ..request("Hello", 12)
    };
    let failed = test_engine.run(impossible).await;
    assert_eq!(failed.end.finish.reason, FinishReason::Error);
    assert_eq!(
        failed.end.finish.message.as_deref(),
        Some("no token can be drawn: mods, bans and biases leave no token that the constraint permits")
    );
    assert_eq!(test_engine.run(request("Hello", 3)).await.end.finish.reason, FinishReason::Length);
}
