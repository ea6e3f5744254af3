//! Conversations: messages dropped when the context is full, and state kept between turns.

use super::{assert_first_layer_equals, irregular_tokens, rows, with_attention};
use crate::engine::{CONTEXT, added_at, follow, model, request_tokens, test_engine, with_mod};
use std::time::Duration;
use thunder::engine::{Overflow, Request, RunActivity, SubmitError};
use thunder::events::{EvictedMessage, FinishReason, Scope, Span, TokenId, TraceItem};
use thunder::mods::Action;

/// Returns a conversation in `ChatML`, as tokens and spans.
fn chat(messages: &[(&str, Vec<TokenId>)]) -> (Vec<TokenId>, Vec<Span>) {
    let (mut tokens, mut spans): (Vec<TokenId>, Vec<Span>) = (Vec::new(), Vec::new());
    let mut content_end = 0;
    let template =
        |spans: &mut Vec<Span>, from: u32, to: u32| spans.push(Span { role: "template".into(), start: from, end: to });
    for (role, content) in messages {
        tokens.extend(encode(&format!("<|im_start|>{role}\n")));
        let start = tokens.len() as u32;
        template(&mut spans, content_end, start);
        tokens.extend(content);
        content_end = tokens.len() as u32;
        spans.push(Span { role: (*role).into(), start, end: content_end });
        tokens.extend(encode("<|im_end|>\n"));
    }
    tokens.extend(encode("<|im_start|>assistant\n"));
    template(&mut spans, content_end, tokens.len() as u32);
    (tokens, spans)
}

fn conversation(messages: &[(&str, Vec<TokenId>)], max_tokens: u32) -> Request {
    let (tokens, spans) = chat(messages);
    let mut request = request_tokens(tokens, max_tokens);
    request.spans = spans;
    request.overflow = Overflow::Evict;
    request
}

fn encode(text: &str) -> Vec<TokenId> {
    model().vocabulary().encode_markup(text)
}

/// Returns a conversation whose run generates this answer.
fn answered(messages: &[(&str, Vec<TokenId>)], answer: &[TokenId]) -> Request {
    let mut request = conversation(messages, CONTEXT);
    request.limits.ignore_eos = false;
    let forced = [answer, &encode("<|im_end|>")].concat();
    with_mod(request, false, move |call| {
        if added_at(call, 1) { Action::Backtrack { n: 1, tokens: forced.clone() } } else { Action::Noop }
    })
}

fn roles(evicted: &[EvictedMessage]) -> Vec<&str> {
    evicted.iter().map(|one| one.role.as_str()).collect()
}

#[tokio::test]
async fn full_context_drops_messages_and_reports_them() {
    let mut test_engine = test_engine(1, true).await;
    let mut messages = vec![
        ("system", irregular_tokens(0, 20)),
        ("user", irregular_tokens(1, 60)),
        ("assistant", irregular_tokens(2, 60)),
        ("user", irregular_tokens(3, 60)),
        ("assistant", irregular_tokens(4, 60)),
        ("user", irregular_tokens(5, 60)),
    ];
    let result = test_engine.run(with_attention(conversation(&messages, 200))).await;
    let finish = &result.end.finish;
    assert_eq!((finish.reason, finish.usage.completion_tokens), (FinishReason::Length, 200), "{:?}", finish.message);
    assert!(finish.truncated && finish.evicted_tokens >= 120);
    assert_eq!(roles(&finish.evicted), ["user", "assistant"]);
    assert_eq!((finish.evicted[0].tokens, finish.evicted[1].tokens), (60, 60));
    assert!(finish.evicted[0].text.starts_with(&model().vocabulary().decode(&irregular_tokens(1, 4))));
    // The slot has the tokens of the conversation without its first turn.
    let without: Vec<_> = [&messages[..1], &messages[3..]].concat();
    let (mut expected, _) = chat(&without);
    expected.extend(result.generated());
    expected.pop();
    assert_eq!(test_engine.engine.slot_tokens(&Scope::All, 0).await.unwrap().tokens, expected);
    let row = rows(&result).pop().unwrap();
    assert_eq!(row.0, expected.len());
    // The client still sends all messages. The same messages are dropped again, and the others are cached.
    let answer = result.generated();
    let slot_length = expected.len() as u32;
    messages.push(("assistant", answer));
    messages.push(("user", irregular_tokens(6, 10)));
    let result = test_engine.run(with_attention(conversation(&messages, 5))).await;
    assert_eq!(result.end.finish.usage.cached_tokens, slot_length);
    assert_eq!(roles(&result.end.finish.evicted), ["user", "assistant"]);
    let without: Vec<_> = [&messages[..1], &messages[3..]].concat();
    assert_first_layer_equals(&result, &chat(&without).0).await;
}

#[tokio::test]
async fn oldest_turns_of_a_long_prompt_are_dropped_first() {
    let mut test_engine = test_engine(1, true).await;
    let turns: Vec<_> = (0..8)
        .flat_map(|turn| [("user", irregular_tokens(2 * turn, 50)), ("assistant", irregular_tokens(2 * turn + 1, 50))])
        .collect();
    let mut messages = vec![("system", irregular_tokens(99, 20))];
    messages.extend(turns);
    messages.push(("user", irregular_tokens(50, 20)));
    let result = test_engine.run(with_attention(conversation(&messages, 6))).await;
    assert_eq!(result.end.finish.usage.completion_tokens, 6);
    let evicted = roles(&result.end.finish.evicted);
    assert!(!evicted.is_empty() && evicted.len().is_multiple_of(2) && evicted.len() < 16, "{evicted:?}");
    let remaining: Vec<_> = [&messages[..1], &messages[1 + evicted.len()..]].concat();
    let (prompt, _) = chat(&remaining);
    assert!(prompt.len() <= CONTEXT as usize * 3 / 4);
    assert_eq!(result.end.finish.usage.prompt_tokens as usize, prompt.len());
    assert_first_layer_equals(&result, &prompt).await;
    // The same request uses the cache, although the client sends all messages.
    let again = test_engine.run(conversation(&messages, 6)).await;
    assert_eq!(again.end.finish.usage.cached_tokens as usize, prompt.len() - 1);
    assert_eq!(again.generated(), result.generated());
    let too_long = [
        ("system", irregular_tokens(1, 400)),
        ("user", irregular_tokens(2, 50)),
        ("assistant", irregular_tokens(3, 50)),
        ("user", irregular_tokens(4, 50)),
    ];
    let error = test_engine.engine.submit(conversation(&too_long, 5)).await.unwrap_err();
    assert!(matches!(error, SubmitError::NothingToDrop { context: 512, .. }), "{error}");
    let mut stopping = conversation(&messages, 5);
    stopping.overflow = Overflow::Stop;
    assert!(test_engine.engine.submit(stopping).await.is_err());
    let mut without_messages = request_tokens(irregular_tokens(1, 100), 600);
    without_messages.limits.max_steps = 10_000;
    without_messages.overflow = Overflow::Evict;
    let result = test_engine.run(without_messages).await;
    assert_eq!(
        result.end.finish.message.as_deref(),
        Some(
            "the context of 512 tokens is full, and no message is left that can be dropped: system messages, the last user \
             message and the last answer are kept"
        )
    );
    assert!(result.end.finish.truncated);
}

#[tokio::test]
async fn messages_are_dropped_only_at_some_turns() {
    let mut test_engine = test_engine(1, false).await;
    let mut messages = vec![("system", irregular_tokens(0, 20))];
    let (mut evictions, mut evicted) = (0, 0);
    for turn in 0..14 {
        messages.push(("user", irregular_tokens(turn, 40)));
        let result = test_engine.run(conversation(&messages, 20)).await;
        let finish = &result.end.finish;
        if finish.evicted_tokens == evicted {
            // Only the new message and the template around it are not cached.
            let new = finish.usage.prompt_tokens - finish.usage.cached_tokens;
            assert!(turn == 0 || new < 70, "turn {turn}: {finish:?}");
        } else {
            evictions += 1;
            evicted = finish.evicted_tokens;
            let usage = finish.usage;
            assert!(2 * usage.cached_tokens > usage.prompt_tokens, "the remaining messages must be cached: {usage:?}");
        }
        messages.push(("assistant", result.generated()));
    }
    assert!((1..=5).contains(&evictions), "{evictions} evictions");
}

#[tokio::test]
async fn reasoning_is_kept_between_turns() {
    let mut test_engine = test_engine(1, true).await;
    let first = [("user", encode("Say hello"))];
    let answer = encode("<think>They want me to say it.</think>\n\nHello there");
    let result = test_engine.run(answered(&first, &answer)).await;
    assert_eq!(result.end.finish.reason, FinishReason::Stop);
    let slot_sequence = test_engine.engine.slot_tokens(&Scope::All, 0).await.unwrap().tokens;
    let (prompt, _) = chat(&first);
    assert_eq!(slot_sequence, [prompt, answer.clone(), encode("<|im_end|>")].concat());
    let second = [first[0].clone(), ("assistant", encode("Hello there")), ("user", encode("Again"))];
    // A saved state contains the reasoning, also in another engine.
    let saved = test_engine.engine.save_slot(&Scope::All, 0).await.unwrap();
    let mut other = crate::engine::test_engine(2, true).await;
    other.engine.restore_slot(None, 1, saved.block).await.unwrap();
    let mut request = conversation(&second, 4);
    request.slot = Some(1);
    let restored = other.run(request).await;
    assert_eq!(restored.end.finish.usage.cached_tokens as usize, slot_sequence.len());
    let result = test_engine.run(with_attention(conversation(&second, 4))).await;
    assert_eq!(result.end.finish.usage.cached_tokens as usize, slot_sequence.len());
    assert_eq!(restored.generated(), result.generated());
    let as_generated = [first[0].clone(), ("assistant", answer), second[2].clone()];
    let (expected, _) = chat(&as_generated);
    assert_eq!(result.end.finish.usage.prompt_tokens as usize, expected.len());
    assert_first_layer_equals(&result, &expected).await;
    let prompt = result.items.iter().find_map(|item| match item {
        TraceItem::Event(event) => event.measured.as_ref()?.prompt.as_ref(),
        _ => None,
    });
    assert_eq!(prompt.unwrap().tokens, expected, "the trace must contain the input of the model");
    let changed = [first[0].clone(), ("assistant", encode("Hello here")), ("user", encode("Again"))];
    let result = test_engine.run(conversation(&changed, 4)).await;
    assert_eq!(result.end.finish.usage.prompt_tokens as usize, chat(&changed).0.len());
}

#[tokio::test]
async fn restored_reasoning_leaves_room_for_the_answer() {
    let reasoned = [encode("<think>"), irregular_tokens(9, 360), encode("</think>\n\nHello there")].concat();
    for overflow in [Overflow::Stop, Overflow::Shift { keep: Some(0), discard: 0 }, Overflow::Evict] {
        // With the reasoning, the prompt leaves little room in the context, or does not fit into it.
        for question in [1, 110] {
            let mut test_engine = test_engine(1, false).await;
            let mut messages = vec![("user", irregular_tokens(1, 10))];
            test_engine.run(answered(&messages, &encode("Good day"))).await;
            messages.extend([("assistant", encode("Good day")), ("user", irregular_tokens(2, 10))]);
            test_engine.run(answered(&messages, &reasoned)).await;
            messages.extend([("assistant", encode("Hello there")), ("user", irregular_tokens(3, question))]);
            let prompt = chat(&messages).0;
            assert!(prompt.len() + reasoned.len() + 128 > CONTEXT as usize);
            let result = test_engine.run(Request { overflow, ..conversation(&messages, 150) }).await;
            let finish = &result.end.finish;
            assert_eq!(finish.usage.prompt_tokens as usize, prompt.len(), "{overflow:?}");
            assert_eq!(finish.usage.completion_tokens, 150, "{overflow:?}: {:?}", finish.message);
            assert!(!finish.truncated && finish.evicted_tokens == 0, "{overflow:?}");
        }
    }
}

#[tokio::test]
async fn preempted_run_keeps_the_history_of_its_conversation() {
    let mut test_engine = test_engine(1, false).await;
    let answer = encode("<think>They want me to say it.</think>\n\nHello there");
    let mut messages = vec![("user", encode("Say hello"))];
    test_engine.run(answered(&messages, &answer)).await;
    messages.extend([("assistant", encode("Hello there")), ("user", encode("Again"))]);
    let mut second = test_engine.engine.submit(conversation(&messages, 300)).await.unwrap();
    second.output.recv().await.unwrap();
    second.control.pause(Duration::ZERO).await.unwrap();
    while second.control.progress().await.unwrap().activity != RunActivity::Preempted {
        while second.output.try_recv().is_ok() {}
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    second.control.resume().await.unwrap();
    assert_eq!(follow(second.output).await.1.finish.usage.completion_tokens, 300);
    messages.extend([("assistant", encode("Hello")), ("user", encode("Once more"))]);
    let usage = test_engine.run(conversation(&messages, 4)).await.end.finish.usage;
    messages[1].1 = answer;
    assert_eq!(usage.prompt_tokens as usize, chat(&messages).0.len());
}
