//! The state of slots: what is saved, restored, shifted, reused or dropped, and that the model goes on exactly as it must. A state
//! that comes from outside is believed only when it fits.

use crate::engine::{
    Bench, CONTEXT, Told, added_at, bench, bench_with, follow, model, request, request_tokens, with_mod,
};
use bytes::Bytes;
use std::time::Duration;
use thunder::engine::{Overflow, Request, Ses1Error, SlotError};
use thunder::events::{Evicted, FinishReason, Item, Span, TokenId};
use thunder::model::llama::CacheType;
use thunder::mods::Action;

/// Tokens of a text that is long enough to be worth keeping.
fn long(seed: i32, len: usize) -> Vec<TokenId> {
    (0..len as i32).map(|index| 40 + (seed * 7 + index * index + 3 * index) % 500).collect()
}

fn in_slot(mut request: Request, slot: u32) -> Request {
    request.slot = Some(slot);
    request
}

fn with_attention(mut request: Request) -> Request {
    request.attention = true;
    request
}

/// Rows of attention, `[layer][head][position]`, and their lengths.
fn rows(told: &Told) -> Vec<(usize, Vec<f32>)> {
    told.items
        .iter()
        .filter_map(|item| match item {
            Item::Attention(step) => {
                let values = step.t0.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
                Some((step.row_len as usize, values))
            }
            _ => None,
        })
        .collect()
}

fn worst(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max)
}

fn logprobs(told: &Told) -> Vec<f32> {
    told.items
        .iter()
        .filter_map(|item| match item {
            Item::Event(event) => event.measured.as_ref(),
            _ => None,
        })
        .flat_map(|measured| measured.model.iter().map(|alternative| alternative.prob))
        .collect()
}

/// What a slot holds, and what it would say next.
async fn state_of(bench: &mut Bench, slot: u32) -> (Vec<TokenId>, Vec<TokenId>) {
    let tokens = bench.engine.slot_tokens(slot).await.unwrap().tokens;
    let mut prompt = tokens.clone();
    prompt.push(77);
    let told = bench.tell(in_slot(request_tokens(prompt, 6), slot)).await;
    assert_eq!(told.end.finish.usage.cached_tokens as usize, tokens.len());
    (tokens, told.generated())
}

#[tokio::test]
async fn a_restored_slot_goes_on_exactly_as_the_original() {
    for attention in [false, true] {
        let mut first = bench(2, attention).await;
        let ask = |request| if attention { with_attention(request) } else { request };
        let begun = first.tell(in_slot(request_tokens(long(1, 60), 8), 0)).await;
        let mut prompt = long(1, 60);
        prompt.extend(begun.generated());
        let saved = first.engine.save_slot(0).await.unwrap();
        assert_eq!(saved.tokens, 67, "the last token was drawn, and not decoded");
        let expected = first.tell(in_slot(ask(request_tokens(prompt.clone(), 12)), 0)).await;
        assert_eq!(expected.end.finish.usage.cached_tokens, 67);
        first.tell(in_slot(request_tokens(long(2, 90), 4), 0)).await;
        // Into another slot, and into an engine with another number of slots, as after a restart.
        let mut second = bench(3, attention).await;
        second.tell(in_slot(request_tokens(long(3, 100), 4), 2)).await;
        for (original, slot) in [(true, 1), (false, 2), (false, 0)] {
            let bench = if original { &mut first } else { &mut second };
            assert_eq!(bench.engine.restore_slot(slot, saved.block.clone()).await.unwrap(), 67);
            assert_eq!(bench.engine.slot_tokens(slot).await.unwrap().tokens, prompt[..67]);
            let told = bench.tell(in_slot(ask(request_tokens(prompt.clone(), 12)), slot)).await;
            assert_eq!(told.end.finish.usage.cached_tokens, 67);
            assert_eq!(told.generated(), expected.generated());
            assert_eq!(worst(&logprobs(&told), &logprobs(&expected)), 0.0);
            assert_eq!(rows(&told), rows(&expected));
            assert_eq!(rows(&told).len(), if attention { 12 } else { 0 });
        }
    }
}

#[tokio::test]
async fn a_state_that_does_not_fit_is_refused_and_changes_nothing() {
    let mut bench = bench(2, true).await;
    bench.tell(in_slot(request_tokens(long(1, 50), 4), 0)).await;
    bench.tell(in_slot(request_tokens(long(2, 70), 4), 1)).await;
    let block = bench.engine.save_slot(0).await.unwrap().block.to_vec();
    let before = state_of(&mut bench, 1).await;
    let tokens = u32::from_le_bytes(block[4..8].try_into().unwrap()) as usize;
    let kv = 8 + 4 * tokens;
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut block = block.clone();
        change(&mut block);
        Bytes::from(block)
    };
    // A checksum is no secret: whoever forges a number forges it too.
    let forged = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut block = block.clone();
        change(&mut block);
        let sum = kv + 48;
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        hash.update(&block[..sum]);
        hash.update(&block[sum + 8..]);
        block[sum..sum + 8].copy_from_slice(&hash.digest().to_le_bytes());
        Bytes::from(block)
    };
    let put =
        |at: usize, value: u32| move |block: &mut Vec<u8>| block[at..at + 4].copy_from_slice(&value.to_le_bytes());
    let state = kv + 56;
    let cells = state + 4;
    let numbers = cells + 12 * tokens;
    let hostile = [
        (Bytes::new(), "does not begin with 'SES1'"),
        (changed(&|block| block[0] = b'X'), "does not begin with 'SES1'"),
        (changed(&|block| block.truncate(6)), "the state has 6 bytes"),
        (changed(&|block| block.truncate(100)), "its head says"),
        (changed(&|block| block.truncate(kv + 20)), "its head says"),
        (changed(&|block| block.truncate(block.len() - 1)), "its head says"),
        (changed(&|block| block.push(0)), "1 bytes behind its end"),
        (changed(&put(4, u32::MAX)), "4294967295 tokens, the context of a slot holds 512"),
        (changed(&put(4, 513)), "513 tokens"),
        (changed(&put(4, tokens as u32 - 1)), "THKV"),
        (changed(&put(8, 640)), "token 0 of the state is 640"),
        (changed(&put(12, u32::MAX)), "token 1 of the state is -1"),
        (changed(&put(8, 41)), "checksum"),
        (changed(&|block| block[kv] = b'X'), "THKV"),
        (changed(&put(kv + 4, 9)), "version 9"),
        (changed(&|block| block[kv + 8] ^= 1), "another model"),
        (changed(&|block| block[kv + 24..kv + 32].copy_from_slice(b"q8_0\0\0\0\0")), "q8_0 keys"),
        (changed(&put(kv + 40, 7)), "bytes behind its end"),
        (changed(&put(kv + 44, 7)), "its head says"),
        (changed(&|block| *block.last_mut().unwrap() ^= 1), "checksum"),
        (forged(&put(state, 3)), "3 cells for"),
        (forged(&put(state, u32::MAX)), "cells for"),
        (forged(&put(cells, 5)), "cell 0 of the KV data has position 5"),
        (forged(&put(cells + 12, u32::MAX)), "cell 1 of the KV data has position -1"),
        (forged(&put(cells + 4, 2)), "the number of sequences of a cell is 2"),
        (forged(&put(numbers, 0)), "flash attention"),
        (forged(&put(numbers + 4, u32::MAX)), "the number of layers"),
        (forged(&put(numbers + 8, 64)), "the rotation of keys"),
        (forged(&put(numbers + 16, 8)), "the type of keys is q8_0, here it is f16"),
        (forged(&put(numbers + 20, 8)), "the size of a key"),
        (forged(&put(numbers + 24, 1)), "the size of a key"),
    ];
    for (block, reason) in hostile {
        let error = bench.engine.restore_slot(1, block).await.unwrap_err();
        assert!(matches!(error, SlotError::State(_)), "{error:?}");
        assert!(error.to_string().contains(reason), "{error} should say {reason}");
    }
    let mut after = state_of(&mut bench, 1).await;
    // What it said before stands behind the tokens that were there.
    after.0.truncate(before.0.len());
    assert_eq!(after.0, before.0);
    assert_eq!(bench.engine.restore_slot(1, Bytes::from(block.clone())).await.unwrap(), tokens);
    // The other layout of values.
    let mut flash = crate::engine::bench(1, false).await;
    let error = flash.engine.restore_slot(0, Bytes::from(block)).await.unwrap_err();
    assert!(error.to_string().contains("flash attention on or off"), "{error}");
    assert_eq!(flash.tell(request("The sky is", 3)).await.generated().len(), 3);
}

#[tokio::test]
async fn numbers_that_are_none_end_the_run_and_not_the_server() {
    let mut bench = bench(1, true).await;
    bench.tell(request_tokens(long(1, 50), 4)).await;
    let mut block = bench.engine.save_slot(0).await.unwrap().block.to_vec();
    let tokens = u32::from_le_bytes(block[4..8].try_into().unwrap()) as usize;
    let prompt: Vec<TokenId> =
        block[8..8 + 4 * tokens].chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
    let sum = 8 + 4 * tokens + 48;
    for byte in block.iter_mut().skip(sum + 8 + 4 + 12 * tokens + 16 + 12).take(16 * tokens) {
        *byte = 0xff;
    }
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    hash.update(&block[..sum]);
    hash.update(&block[sum + 8..]);
    block[sum..sum + 8].copy_from_slice(&hash.digest().to_le_bytes());
    bench.engine.restore_slot(0, Bytes::from(block)).await.unwrap();
    let mut asked = request_tokens([prompt.as_slice(), &[99]].concat(), 5);
    asked.sampling.temperature = 1.0;
    let told = bench.tell(asked).await;
    assert_eq!(told.end.finish.reason, FinishReason::Error);
    assert!(told.end.finish.message.as_ref().unwrap().contains("not numbers"), "{:?}", told.end.finish);
    assert!(bench.engine.slot_tokens(0).await.unwrap().tokens.is_empty());
    assert_eq!(bench.tell(request("The sky is", 3)).await.end.finish.reason, FinishReason::Length);
}

#[tokio::test]
async fn an_empty_slot_can_be_saved_and_restored() {
    let mut bench = bench(1, false).await;
    let empty = bench.engine.save_slot(0).await.unwrap();
    assert_eq!(empty.tokens, 0);
    bench.tell(request("The sky is", 3)).await;
    assert_eq!(bench.engine.restore_slot(0, empty.block).await.unwrap(), 0);
    assert!(bench.engine.slot_tokens(0).await.unwrap().tokens.is_empty());
    assert!(matches!(bench.engine.save_slot(1).await, Err(SlotError::NoSuchSlot { slot: 1, slots: 1 })));
}

#[test]
fn the_flags_name_the_types_that_there_are() {
    let flags = thunder::config::CacheType::ALL.map(thunder::config::CacheType::as_str);
    assert_eq!(CacheType::ALL.map(CacheType::as_str), flags);
}

#[tokio::test]
async fn a_state_belongs_to_its_type_of_cache() {
    let wide = |options: &mut thunder::engine::Options| {
        options.cache_type_k = CacheType::F32;
        options.cache_type_v = CacheType::F32;
    };
    let mut first = bench_with(1, true, wide).await;
    let expected = first.tell(request_tokens(long(1, 64), 20)).await;
    let mut prompt = long(1, 64);
    prompt.extend(&expected.generated()[..10]);
    first.tell(request_tokens(prompt.clone(), 1)).await;
    let saved = first.engine.save_slot(0).await.unwrap();
    let mut second = bench_with(2, true, wide).await;
    second.engine.restore_slot(1, saved.block.clone()).await.unwrap();
    let told = second.tell(in_slot(request_tokens(prompt, 10), 1)).await;
    assert_eq!(told.generated(), expected.generated()[10..]);
    let narrow = bench(1, true).await;
    let error = narrow.engine.restore_slot(0, saved.block).await.unwrap_err();
    assert!(matches!(error, SlotError::State(Ses1Error::CacheType { .. })), "{error}");
    assert!(error.to_string().contains("f32 keys and f32 values, this server keeps f16"), "{error}");
}

/// The same tokens in a fresh slot: what the first layer looks at is the same, since it sees tokens and positions only. Later
/// layers know what the removed tokens meant.
async fn first_layer_agrees(told: &Told, prompt: &[TokenId]) {
    let mut fresh = bench(1, true).await;
    let mut tokens = prompt.to_vec();
    for (index, (len, row)) in rows(told).into_iter().enumerate() {
        assert_eq!(len, tokens.len(), "a row is as long as what is left of the sequence");
        let expected = fresh.tell(with_attention(request_tokens(tokens.clone(), 1))).await;
        let (_, expected) = rows(&expected).remove(0);
        let first_layer = row.len() / 4;
        let off = worst(&row[..first_layer], &expected[..first_layer]);
        assert!(off < 4e-3, "row {index}: the first layer is off by {off}");
        for one in row.chunks_exact(len) {
            assert!((one.iter().sum::<f32>() - 1.0).abs() < 1e-3);
        }
        tokens.push(told.generated()[index]);
    }
}

#[tokio::test]
async fn a_shifted_slot_has_its_tokens_in_order() {
    for parallel in [1, 2] {
        let mut bench = bench(parallel, true).await;
        let slot = parallel - 1;
        for (keep, discard) in [(10, 20), (0, 15), (1, 50)] {
            bench.tell(in_slot(request_tokens(long(1, 80), 4), slot)).await;
            let mut expected = bench.engine.slot_tokens(slot).await.unwrap().tokens;
            assert_eq!(expected.len(), 83);
            assert_eq!(bench.engine.shift_slot(slot, keep, discard).await.unwrap(), 83 - discard);
            expected.drain(keep..keep + discard);
            assert_eq!(bench.engine.slot_tokens(slot).await.unwrap().tokens, expected);
            // A state has its cells in order: a copy goes on as the original does.
            let saved = bench.engine.save_slot(slot).await.unwrap();
            let mut prompt = expected.clone();
            prompt.extend([50, 60, 70]);
            let told = bench.tell(with_attention(in_slot(request_tokens(prompt.clone(), 4), slot))).await;
            assert_eq!(told.end.finish.usage.cached_tokens as usize, expected.len());
            first_layer_agrees(&told, &prompt).await;
            bench.engine.restore_slot(slot, saved.block).await.unwrap();
            let again = bench.tell(with_attention(in_slot(request_tokens(prompt, 4), slot))).await;
            assert_eq!((again.generated(), rows(&again)), (told.generated(), rows(&told)));
            bench.engine.erase_slot(slot).await.unwrap();
        }
        bench.tell(in_slot(request_tokens(long(1, 40), 1), slot)).await;
        for (keep, discard) in [(0, 41), (41, 1), (usize::MAX, 2)] {
            let error = bench.engine.shift_slot(slot, keep, discard).await.unwrap_err();
            assert!(matches!(error, SlotError::Range { tokens: 40, .. }), "{error}");
        }
        assert_eq!(bench.engine.shift_slot(slot, 30, 10).await.unwrap(), 30, "the end needs no shift");
        assert_eq!(bench.engine.shift_slot(slot, 0, 30).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn a_busy_slot_is_waited_for_and_a_caller_who_goes_is_forgotten() {
    let bench = bench(2, false).await;
    let mut endless = in_slot(request("The sky is", 400), 0);
    endless.limits.max_steps = 4000;
    let busy = bench.engine.submit(endless.clone()).await.unwrap();
    let waiting = tokio::spawn({
        let engine = bench.engine.clone();
        async move { engine.slot_tokens(0).await.unwrap().tokens.len() }
    });
    let given_up = tokio::time::timeout(Duration::from_millis(1), bench.engine.erase_slot(0)).await;
    assert!(given_up.is_err(), "the slot was not busy");
    // Another run that wants this slot waits too, and lets those pass that do not care.
    let pinned = bench.engine.submit(in_slot(request("Later", 3), 0)).await.unwrap();
    let free = bench.engine.submit(request("Anywhere", 3)).await.unwrap();
    follow(free.output).await;
    assert!(!waiting.is_finished());
    drop(busy);
    assert!(waiting.await.unwrap() > 0, "nobody who went away has erased it");
    follow(pinned.output).await;
    let refused = bench.engine.submit(in_slot(request("x", 1), 2)).await.unwrap_err().to_string();
    assert_eq!(refused, "there is no slot 2; the slots are 0 to 1");
}

#[tokio::test]
async fn a_prompt_begins_behind_what_a_slot_holds() {
    let mut bench = bench_with(2, false, |options| options.cache_ram_bytes = 0).await;
    let cached = |told: &Told| told.end.finish.usage.cached_tokens;
    let whole = bench.tell(request_tokens(long(1, 100), 1)).await;
    assert_eq!(cached(&whole), 0);
    assert_eq!(cached(&bench.tell(request_tokens(long(1, 100), 1)).await), 99, "one token is always evaluated");
    let mut diverged = long(1, 100);
    diverged.truncate(70);
    diverged.extend(long(5, 30));
    let told = bench.tell(request_tokens(diverged.clone(), 8)).await;
    assert_eq!(cached(&told), 70, "only what differs is thrown away");
    let mut uncached = request_tokens(diverged, 8);
    uncached.cache_prompt = false;
    let fresh = bench.tell(uncached).await;
    assert_eq!((cached(&fresh), fresh.generated()), (0, told.generated()));
    // Below a tenth of the prompt, the other slot is taken, and this one keeps what it has.
    let mut barely = long(1, 9);
    barely.extend(long(8, 111));
    assert_eq!(cached(&bench.tell(request_tokens(barely, 1)).await), 9);
    assert_eq!(cached(&bench.tell(request_tokens(long(1, 75), 1)).await), 70);
}

#[tokio::test]
async fn pieces_of_a_state_are_moved_up_when_asked_for() {
    let mut bench = bench(1, true).await;
    bench.tell(request_tokens([long(1, 30), long(7, 20), long(2, 40)].concat(), 1)).await;
    let prompt = [long(1, 30), long(2, 40), vec![99, 98]].concat();
    let mut asked = with_attention(request_tokens(prompt.clone(), 3));
    asked.cache_reuse = 16;
    let told = bench.tell(asked).await;
    assert_eq!(told.end.finish.usage.cached_tokens, 70);
    first_layer_agrees(&told, &prompt).await;
    let plain = bench.tell(request_tokens([long(1, 30), long(2, 20)].concat(), 3)).await;
    assert_eq!(plain.end.finish.usage.cached_tokens, 49);
}

#[tokio::test]
async fn a_state_that_would_be_lost_is_kept_in_the_machines_memory() {
    let expected =
        bench(1, true).await.tell(with_attention(request_tokens([long(1, 120), long(3, 5)].concat(), 6))).await;
    for (bytes, kept) in [(64 << 20, 120), (0, 0)] {
        let mut bench = bench_with(1, true, |options| options.cache_ram_bytes = bytes).await;
        bench.tell(request_tokens(long(1, 120), 1)).await;
        for other in 2..5 {
            bench.tell(request_tokens(long(other, 110), 3)).await;
        }
        let told = bench.tell(with_attention(request_tokens([long(1, 120), long(3, 5)].concat(), 6))).await;
        assert_eq!(told.end.finish.usage.cached_tokens, kept);
        assert_eq!(told.generated(), expected.generated());
        for ((_, a), (_, b)) in rows(&told).iter().zip(&rows(&expected)) {
            assert!(worst(a, b) < 2e-3);
        }
    }
}

#[tokio::test]
async fn a_full_context_ends_the_answer_or_shifts() {
    let mut bench = bench(1, true).await;
    let mut endless = request_tokens(long(1, 100), 800);
    endless.limits.max_steps = 10_000;
    let stopped = bench.tell(endless.clone()).await;
    assert_eq!(stopped.end.finish.reason, FinishReason::Length);
    assert!(stopped.end.finish.truncated && stopped.end.finish.evicted_tokens == 0);
    assert_eq!(stopped.generated().len(), CONTEXT as usize - 100);
    endless.overflow = Overflow::Shift { keep: Some(20), discard: 0 };
    let shifted = bench.tell(with_attention(endless.clone())).await;
    let finish = &shifted.end.finish;
    assert_eq!(
        (finish.reason, finish.usage.completion_tokens, finish.usage.prompt_tokens),
        (FinishReason::Length, 800, 100)
    );
    // (512 - 20) / 2 each time, until 900 tokens have passed.
    assert!(finish.truncated && finish.evicted_tokens == 2 * 246, "{finish:?}");
    assert_eq!(shifted.generated()[..400], stopped.generated()[..400]);
    assert_eq!(shifted.text, model().vocabulary().decode(&shifted.generated()));
    let rows = rows(&shifted);
    assert_eq!(rows.len(), 800);
    assert!(rows.iter().all(|(len, _)| *len < CONTEXT as usize));
    // What the cache holds is what the run's sequence became.
    let held = bench.engine.slot_tokens(0).await.unwrap().tokens;
    let sequence = [long(1, 100), shifted.generated()].concat();
    assert_eq!(held[..20], sequence[..20]);
    assert_eq!(held[20..], sequence[sequence.len() - (held.len() - 20) - 1..sequence.len() - 1]);
    let mut next = held.clone();
    next.push(99);
    let told = bench.tell(with_attention(request_tokens(next.clone(), 2))).await;
    first_layer_agrees(&told, &next).await;
    let ranges: Vec<(u32, u32)> = shifted
        .items
        .iter()
        .filter_map(|item| match item {
            Item::Event(event) => event.measured.as_ref()?.evicted.as_ref(),
            _ => None,
        })
        .flat_map(|eviction| eviction.ranges.clone())
        .collect();
    assert_eq!(ranges, [(20, 266), (20, 266)], "the trace says what went");
}

#[tokio::test]
async fn a_mod_that_takes_back_after_a_shift_takes_back_what_is_there() {
    let mut bench = bench(1, false).await;
    let mut asked = request_tokens(long(1, 100), 700);
    asked.limits.max_steps = 10_000;
    asked.overflow = Overflow::Shift { keep: Some(10), discard: 0 };
    let done = std::sync::atomic::AtomicBool::new(false);
    let told = bench
        .tell(with_mod(asked, false, move |call| {
            if call.event_type() == thunder::events::EventType::Added
                && call.sequence.len() == 400
                && call.generated().len() > 300
                && !done.swap(true, std::sync::atomic::Ordering::Relaxed)
            {
                return Action::Backtrack { n: 5, tokens: vec![60, 61] };
            }
            Action::Noop
        }))
        .await;
    assert_eq!(told.end.finish.usage.completion_tokens, 700);
    assert_eq!(told.text, told.end.finish.text);
    assert_eq!(told.text, model().vocabulary().decode(&told.generated()));
}

/// A conversation in `ChatML`, as tokens and spans; the contents are tokens of one letter.
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

fn roles(evicted: &[Evicted]) -> Vec<&str> {
    evicted.iter().map(|one| one.role.as_str()).collect()
}

#[tokio::test]
async fn whole_messages_go_and_the_client_is_told() {
    let mut bench = bench(1, true).await;
    let mut messages = vec![
        ("system", long(0, 20)),
        ("user", long(1, 60)),
        ("assistant", long(2, 60)),
        ("user", long(3, 60)),
        ("assistant", long(4, 60)),
        ("user", long(5, 60)),
    ];
    let told = bench.tell(with_attention(conversation(&messages, 200))).await;
    let finish = &told.end.finish;
    assert_eq!((finish.reason, finish.usage.completion_tokens), (FinishReason::Length, 200), "{:?}", finish.message);
    assert!(finish.truncated && finish.evicted_tokens >= 120);
    assert_eq!(roles(&finish.evicted), ["user", "assistant"]);
    assert_eq!((finish.evicted[0].tokens, finish.evicted[1].tokens), (60, 60));
    assert!(finish.evicted[0].text.starts_with(&model().vocabulary().decode(&long(1, 4))));
    // What is left is the conversation without its first turn, token for token.
    let without: Vec<_> = [&messages[..1], &messages[3..]].concat();
    let (mut expected, _) = chat(&without);
    expected.extend(told.generated());
    expected.pop();
    assert_eq!(bench.engine.slot_tokens(0).await.unwrap().tokens, expected);
    let row = rows(&told).pop().unwrap();
    assert_eq!(row.0, expected.len());
    // The client goes on sending everything: what went is left out again, and the rest is found.
    let answer = told.generated();
    let held = expected.len() as u32;
    messages.push(("assistant", answer));
    messages.push(("user", long(6, 10)));
    let told = bench.tell(with_attention(conversation(&messages, 5))).await;
    assert_eq!(told.end.finish.usage.cached_tokens, held);
    assert_eq!(roles(&told.end.finish.evicted), ["user", "assistant"]);
    let without: Vec<_> = [&messages[..1], &messages[3..]].concat();
    first_layer_agrees(&told, &chat(&without).0).await;
}

#[tokio::test]
async fn a_prompt_that_is_too_long_loses_its_oldest_turns_first() {
    let mut bench = bench(1, true).await;
    let turns: Vec<_> =
        (0..8).flat_map(|turn| [("user", long(2 * turn, 50)), ("assistant", long(2 * turn + 1, 50))]).collect();
    let mut messages = vec![("system", long(99, 20))];
    messages.extend(turns);
    messages.push(("user", long(50, 20)));
    let told = bench.tell(with_attention(conversation(&messages, 6))).await;
    assert_eq!(told.end.finish.usage.completion_tokens, 6);
    let evicted = roles(&told.end.finish.evicted);
    assert!(!evicted.is_empty() && evicted.len().is_multiple_of(2) && evicted.len() < 16, "{evicted:?}");
    let left: Vec<_> = [&messages[..1], &messages[1 + evicted.len()..]].concat();
    let (prompt, _) = chat(&left);
    assert!(prompt.len() <= CONTEXT as usize * 3 / 4);
    assert_eq!(told.end.finish.usage.prompt_tokens as usize, prompt.len());
    first_layer_agrees(&told, &prompt).await;
    // The same again finds its state, although the client sent everything.
    let again = bench.tell(conversation(&messages, 6)).await;
    assert_eq!(again.end.finish.usage.cached_tokens as usize, prompt.len() - 1);
    assert_eq!(again.generated(), told.generated());
    let too_much = [("system", long(1, 400)), ("user", long(2, 50)), ("assistant", long(3, 50)), ("user", long(4, 50))];
    let error = bench.engine.submit(conversation(&too_much, 5)).await.unwrap_err().to_string();
    assert!(error.contains("may be dropped") && error.contains("512"), "{error}");
    let mut stopping = conversation(&messages, 5);
    stopping.overflow = Overflow::Stop;
    assert!(bench.engine.submit(stopping).await.is_err());
    let mut flat = request_tokens(long(1, 100), 600);
    flat.limits.max_steps = 10_000;
    flat.overflow = Overflow::Evict;
    let told = bench.tell(flat).await;
    assert!(told.end.finish.message.as_ref().unwrap().contains("no message is left"), "{:?}", told.end.finish.message);
    assert!(told.end.finish.truncated);
}

#[tokio::test]
async fn messages_do_not_go_at_every_turn() {
    let mut bench = bench(1, false).await;
    let mut messages = vec![("system", long(0, 20))];
    let (mut evictions, mut gone) = (0, 0);
    for turn in 0..14 {
        messages.push(("user", long(turn, 40)));
        let told = bench.tell(conversation(&messages, 20)).await;
        let finish = &told.end.finish;
        if finish.evicted_tokens == gone {
            // Only the new message was not there yet; what the template writes around it is a few tokens more.
            let new = finish.usage.prompt_tokens - finish.usage.cached_tokens;
            assert!(turn == 0 || new < 70, "turn {turn}: {finish:?}");
        } else {
            evictions += 1;
            gone = finish.evicted_tokens;
            let usage = finish.usage;
            assert!(2 * usage.cached_tokens > usage.prompt_tokens, "what stays is moved up: {usage:?}");
        }
        messages.push(("assistant", told.generated()));
    }
    assert!((1..=5).contains(&evictions), "{evictions} evictions");
}

#[tokio::test]
async fn thinking_is_not_lost_between_turns() {
    let mut bench = bench(1, true).await;
    let encode = |text: &str| model().vocabulary().encode(text, false, true);
    let first = [("user", encode("Say hello"))];
    let spoken = encode("<think>They want me to say it.</think>\n\nHello there");
    let end = encode("<|im_end|>");
    let mut asked = conversation(&first, 200);
    asked.limits.ignore_eos = false;
    let forced = [spoken.clone(), end].concat();
    let told = bench
        .tell(with_mod(asked, false, move |call| {
            if added_at(call, 1) { Action::Backtrack { n: 1, tokens: forced.clone() } } else { Action::Noop }
        }))
        .await;
    assert_eq!(told.end.finish.reason, FinishReason::Stop);
    let held = bench.engine.slot_tokens(0).await.unwrap().tokens;
    let (prompt, _) = chat(&first);
    assert_eq!(held, [prompt, spoken.clone(), encode("<|im_end|>")].concat());
    let second = [first[0].clone(), ("assistant", encode("Hello there")), ("user", encode("Again"))];
    let told = bench.tell(with_attention(conversation(&second, 4))).await;
    assert_eq!(told.end.finish.usage.cached_tokens as usize, held.len());
    let as_generated = [first[0].clone(), ("assistant", spoken), second[2].clone()];
    let (expected, _) = chat(&as_generated);
    assert_eq!(told.end.finish.usage.prompt_tokens as usize, expected.len());
    first_layer_agrees(&told, &expected).await;
    let prompt = told.items.iter().find_map(|item| match item {
        Item::Event(event) => event.measured.as_ref()?.prompt.as_ref(),
        _ => None,
    });
    assert_eq!(prompt.unwrap().tokens, expected, "the trace shows what the model saw");
    let changed = [first[0].clone(), ("assistant", encode("Hello here")), ("user", encode("Again"))];
    let told = bench.tell(conversation(&changed, 4)).await;
    assert_eq!(told.end.finish.usage.prompt_tokens as usize, chat(&changed).0.len());
}
