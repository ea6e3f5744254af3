//! Conversations: messages dropped when the context is full, and state kept between turns.

use super::{first_layer_agrees, long, rows, with_attention};
use crate::engine::{CONTEXT, added_at, model, request_tokens, test_engine, with_mod};
use thunder::engine::{Overflow, Request};
use thunder::events::{EvictedMessage, FinishReason, Span, TokenId, TraceItem};
use thunder::mods::Action;

/// Returns a conversation in `ChatML`, as tokens and spans; the contents are tokens of one letter.
fn chat(messages: &[(&str, Vec<TokenId>)]) -> (Vec<TokenId>, Vec<Span>) {
    let encode = |text: &str| model().vocabulary().encode(text, false, true);
    let (mut tokens, mut spans): (Vec<TokenId>, Vec<Span>) = (Vec::new(), Vec::new());
    let mut own = 0;
    let template =
        |spans: &mut Vec<Span>, from: u32, to: u32| spans.push(Span { role: "template".into(), start: from, end: to });
    for (role, content) in messages {
        tokens.extend(encode(&format!("<|im_start|>{role}\n")));
        let start = tokens.len() as u32;
        template(&mut spans, own, start);
        tokens.extend(content);
        own = tokens.len() as u32;
        spans.push(Span { role: (*role).into(), start, end: own });
        tokens.extend(encode("<|im_end|>\n"));
    }
    tokens.extend(encode("<|im_start|>assistant\n"));
    template(&mut spans, own, tokens.len() as u32);
    (tokens, spans)
}

fn conversation(messages: &[(&str, Vec<TokenId>)], max_tokens: u32) -> Request {
    let (tokens, spans) = chat(messages);
    let mut request = request_tokens(tokens, max_tokens);
    request.spans = spans;
    request.overflow = Overflow::Evict;
    request
}

fn roles(evicted: &[EvictedMessage]) -> Vec<&str> {
    evicted.iter().map(|one| one.role.as_str()).collect()
}

#[tokio::test]
async fn whole_messages_are_dropped_and_reported() {
    let mut test_engine = test_engine(1, true).await;
    let mut messages = vec![
        ("system", long(0, 20)),
        ("user", long(1, 60)),
        ("assistant", long(2, 60)),
        ("user", long(3, 60)),
        ("assistant", long(4, 60)),
        ("user", long(5, 60)),
    ];
    let result = test_engine.run(with_attention(conversation(&messages, 200))).await;
    let finish = &result.end.finish;
    assert_eq!((finish.reason, finish.usage.completion_tokens), (FinishReason::Length, 200), "{:?}", finish.message);
    assert!(finish.truncated && finish.evicted_tokens >= 120);
    assert_eq!(roles(&finish.evicted), ["user", "assistant"]);
    assert_eq!((finish.evicted[0].tokens, finish.evicted[1].tokens), (60, 60));
    assert!(finish.evicted[0].text.starts_with(&model().vocabulary().decode(&long(1, 4))));
    // The rest equals the conversation without its first turn, token for token.
    let without: Vec<_> = [&messages[..1], &messages[3..]].concat();
    let (mut expected, _) = chat(&without);
    expected.extend(result.generated());
    expected.pop();
    assert_eq!(test_engine.engine.slot_tokens(&thunder::events::Scope::All, 0).await.unwrap().tokens, expected);
    let row = rows(&result).pop().unwrap();
    assert_eq!(row.0, expected.len());
    // The client still sends all messages: the dropped ones are dropped again, and the rest is found in the cache.
    let answer = result.generated();
    let held = expected.len() as u32;
    messages.push(("assistant", answer));
    messages.push(("user", long(6, 10)));
    let result = test_engine.run(with_attention(conversation(&messages, 5))).await;
    assert_eq!(result.end.finish.usage.cached_tokens, held);
    assert_eq!(roles(&result.end.finish.evicted), ["user", "assistant"]);
    let without: Vec<_> = [&messages[..1], &messages[3..]].concat();
    first_layer_agrees(&result, &chat(&without).0).await;
}

#[tokio::test]
async fn oldest_turns_of_a_long_prompt_are_dropped_first() {
    let mut test_engine = test_engine(1, true).await;
    let turns: Vec<_> =
        (0..8).flat_map(|turn| [("user", long(2 * turn, 50)), ("assistant", long(2 * turn + 1, 50))]).collect();
    let mut messages = vec![("system", long(99, 20))];
    messages.extend(turns);
    messages.push(("user", long(50, 20)));
    let result = test_engine.run(with_attention(conversation(&messages, 6))).await;
    assert_eq!(result.end.finish.usage.completion_tokens, 6);
    let evicted = roles(&result.end.finish.evicted);
    assert!(!evicted.is_empty() && evicted.len().is_multiple_of(2) && evicted.len() < 16, "{evicted:?}");
    let left: Vec<_> = [&messages[..1], &messages[1 + evicted.len()..]].concat();
    let (prompt, _) = chat(&left);
    assert!(prompt.len() <= CONTEXT as usize * 3 / 4);
    assert_eq!(result.end.finish.usage.prompt_tokens as usize, prompt.len());
    first_layer_agrees(&result, &prompt).await;
    // The same request finds its state again, although the client sent all messages.
    let again = test_engine.run(conversation(&messages, 6)).await;
    assert_eq!(again.end.finish.usage.cached_tokens as usize, prompt.len() - 1);
    assert_eq!(again.generated(), result.generated());
    let too_much = [("system", long(1, 400)), ("user", long(2, 50)), ("assistant", long(3, 50)), ("user", long(4, 50))];
    let error = test_engine.engine.submit(conversation(&too_much, 5)).await.unwrap_err().to_string();
    assert!(error.contains("may be dropped") && error.contains("512"), "{error}");
    let mut stopping = conversation(&messages, 5);
    stopping.overflow = Overflow::Stop;
    assert!(test_engine.engine.submit(stopping).await.is_err());
    let mut flat = request_tokens(long(1, 100), 600);
    flat.limits.max_steps = 10_000;
    flat.overflow = Overflow::Evict;
    let result = test_engine.run(flat).await;
    assert!(
        result.end.finish.message.as_ref().unwrap().contains("no message is left"),
        "{:?}",
        result.end.finish.message
    );
    assert!(result.end.finish.truncated);
}

#[tokio::test]
async fn messages_are_not_dropped_at_every_turn() {
    let mut test_engine = test_engine(1, false).await;
    let mut messages = vec![("system", long(0, 20))];
    let (mut evictions, mut gone) = (0, 0);
    for turn in 0..14 {
        messages.push(("user", long(turn, 40)));
        let result = test_engine.run(conversation(&messages, 20)).await;
        let finish = &result.end.finish;
        if finish.evicted_tokens == gone {
            // Only the new message is not cached, with a few tokens of the template around it.
            let new = finish.usage.prompt_tokens - finish.usage.cached_tokens;
            assert!(turn == 0 || new < 70, "turn {turn}: {finish:?}");
        } else {
            evictions += 1;
            gone = finish.evicted_tokens;
            let usage = finish.usage;
            assert!(2 * usage.cached_tokens > usage.prompt_tokens, "the rest is shifted: {usage:?}");
        }
        messages.push(("assistant", result.generated()));
    }
    assert!((1..=5).contains(&evictions), "{evictions} evictions");
}

#[tokio::test]
async fn reasoning_is_kept_between_turns() {
    let mut test_engine = test_engine(1, true).await;
    let encode = |text: &str| model().vocabulary().encode(text, false, true);
    let first = [("user", encode("Say hello"))];
    let spoken = encode("<think>They want me to say it.</think>\n\nHello there");
    let end = encode("<|im_end|>");
    let mut requested = conversation(&first, 200);
    requested.limits.ignore_eos = false;
    let forced = [spoken.clone(), end].concat();
    let result = test_engine
        .run(with_mod(requested, false, move |call| {
            if added_at(call, 1) { Action::Backtrack { n: 1, tokens: forced.clone() } } else { Action::Noop }
        }))
        .await;
    assert_eq!(result.end.finish.reason, FinishReason::Stop);
    let held = test_engine.engine.slot_tokens(&thunder::events::Scope::All, 0).await.unwrap().tokens;
    let (prompt, _) = chat(&first);
    assert_eq!(held, [prompt, spoken.clone(), encode("<|im_end|>")].concat());
    let second = [first[0].clone(), ("assistant", encode("Hello there")), ("user", encode("Again"))];
    // A saved state contains it as well, also in another engine.
    let saved = test_engine.engine.save_slot(&thunder::events::Scope::All, 0).await.unwrap();
    let mut other = crate::engine::test_engine(2, true).await;
    other.engine.restore_slot(None, 1, saved.block).await.unwrap();
    let mut there = conversation(&second, 4);
    there.slot = Some(1);
    let there = other.run(there).await;
    assert_eq!(there.end.finish.usage.cached_tokens as usize, held.len());
    let result = test_engine.run(with_attention(conversation(&second, 4))).await;
    assert_eq!(result.end.finish.usage.cached_tokens as usize, held.len());
    assert_eq!(there.generated(), result.generated());
    let as_generated = [first[0].clone(), ("assistant", spoken), second[2].clone()];
    let (expected, _) = chat(&as_generated);
    assert_eq!(result.end.finish.usage.prompt_tokens as usize, expected.len());
    first_layer_agrees(&result, &expected).await;
    let prompt = result.items.iter().find_map(|item| match item {
        TraceItem::Event(event) => event.measured.as_ref()?.prompt.as_ref(),
        _ => None,
    });
    assert_eq!(prompt.unwrap().tokens, expected, "the trace contains the input of the model");
    let changed = [first[0].clone(), ("assistant", encode("Hello here")), ("user", encode("Again"))];
    let result = test_engine.run(conversation(&changed, 4)).await;
    assert_eq!(result.end.finish.usage.prompt_tokens as usize, chat(&changed).0.len());
}
