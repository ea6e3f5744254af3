//! Captured attention, hidden states and the logit lens equal an independent forward pass in 64-bit floats: every row, head and layer, for
//! every way in which tokens enter the cache. Rows are indexed by the tokens of the sequence, not by the cells of the cache.

mod client;
mod control;
pub mod gguf;
mod hidden_states;
mod lens;
mod long_inputs;
mod quantized;
pub mod recurrent;
mod reference;
pub mod variant;

use crate::engine::{CompletedRun, TestEngine, act_once, added_at, request_tokens, test_engine_of, with_mod};
use reference::{Reference, Rounding};
use std::collections::BTreeMap;
use thunder::engine::{EngineOptions, Overflow, Request};
use thunder::events::{EventType, StoredHeads, TokenId, TraceItem};
use thunder::model::llama::{AttentionCapture, CacheType};
use thunder::mods::Action;
use thunder::trace::attention::{decode_head, decode_head_table};
use variant::{HEADS, Kind, Variant};

/// A way to capture attention, and the maximum deviation of a value.
#[derive(Debug, Clone, Copy)]
struct Mode {
    capture: AttentionCapture,
    in_effect: AttentionCapture,
    cache: CacheType,
    /// Maximum deviation from the attention without any rounding.
    tolerance: f64,
    /// Maximum deviation from the attention of rounded keys, values and queries, which llama.cpp uses. Flash attention
    /// also adds values in 16 bits, which changes the inputs of later layers.
    rounded_tolerance: f64,
}

const FLASH: Mode = Mode {
    capture: AttentionCapture::Flash,
    in_effect: AttentionCapture::Flash,
    cache: CacheType::F16,
    tolerance: 2e-3,
    rounded_tolerance: 2e-3,
};
const F16_CACHE: Mode = Mode {
    capture: AttentionCapture::On,
    in_effect: AttentionCapture::On,
    cache: CacheType::F16,
    tolerance: 2e-3,
    rounded_tolerance: 1e-3,
};
const F32_CACHE: Mode = Mode {
    capture: AttentionCapture::Auto,
    in_effect: AttentionCapture::On,
    cache: CacheType::F32,
    tolerance: 2e-4,
    rounded_tolerance: 1e-5,
};
/// CUDA has no flash attention for heads as small as those of the variants; [`quantized`] tests it with wider heads.
const MODES: &[Mode] = if cfg!(feature = "cuda") { &[F16_CACHE, F32_CACHE] } else { &[FLASH, F16_CACHE, F32_CACHE] };

/// Returns an irregular sequence of byte tokens.
fn tokens(seed: i32, len: usize) -> Vec<TokenId> {
    (0..len as i32).map(|index| 3 + (seed * 31 + index * index * 7 + 13 * index) % 250).collect()
}

fn attention_request(prompt: Vec<TokenId>, max_tokens: u32) -> Request {
    Request { attention: true, lens: true, ..request_tokens(prompt, max_tokens) }
}

async fn test_engine(variant: &Variant, parallel: u32, mode: Mode) -> TestEngine {
    test_engine_of(variant.model(), parallel, true, |options: &mut EngineOptions| {
        options.batch_size = 64;
        options.ubatch_size = 32;
        mode.set(options);
    })
    .await
}

impl Mode {
    fn set(self, options: &mut EngineOptions) {
        options.attention = self.capture;
        options.cache_type_k = self.cache;
        options.cache_type_v = self.cache;
    }

    /// Returns the values that llama.cpp rounds with this cache.
    fn rounding(self) -> Rounding {
        Rounding { cache: self.cache == CacheType::F16, gelu: true }
    }
}

/// Compares every row of a run with the reference. Returns the number of rows.
fn compare(
    result: &CompletedRun,
    prompt: &[TokenId],
    reference: &mut Reference,
    tolerance: f64,
    can_shift: bool,
) -> usize {
    let mut rows: BTreeMap<i32, Vec<f32>> = BTreeMap::new();
    let mut head_rows: BTreeMap<i32, &[u8]> = BTreeMap::new();
    for item in &result.items {
        if let TraceItem::Attention(step) = item {
            assert_eq!(step.layer_ids[..], reference.kind.layers(), "every layer with attention must have a row");
            rows.insert(step.sequence_order, floats(&step.t0));
            head_rows.insert(step.sequence_order, &step.head_rows);
        }
    }
    let count = rows.len();
    let mut sequence = prompt.to_vec();
    for item in &result.items {
        match item {
            TraceItem::Event(event) => {
                let evicted = event.measured.as_ref().and_then(|measured| measured.evicted.as_ref());
                for &(start, end) in evicted.into_iter().flat_map(|evicted| evicted.ranges.iter().rev()) {
                    sequence.drain(start as usize..end as usize);
                    if can_shift {
                        reference.cut(start as usize..end as usize);
                    }
                }
                if event.event_type == EventType::ForwardPass
                    && let Some(row) = rows.remove(&event.sequence_order)
                {
                    assert_row_near(&row, reference, &sequence, tolerance);
                    assert_heads_near(head_rows[&event.sequence_order], reference, &sequence, tolerance);
                    lens::assert_near(event, reference, tolerance);
                }
                sequence.extend(event.added_tokens.iter().flatten());
            }
            TraceItem::Action(action) => {
                let details = action.details.as_ref().map(|details| details.get().to_owned()).unwrap_or_default();
                let details: serde_json::Value = serde_json::from_str(&details).unwrap_or_default();
                if let Some(removed) = details["removed"].as_u64() {
                    sequence.truncate(sequence.len() - removed as usize);
                }
            }
            _ => {}
        }
    }
    assert!(rows.is_empty(), "rows without a step: {:?}", rows.keys());
    count
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// Compares the row of the last token in each layer and head with the reference.
fn assert_row_near(row: &[f32], reference: &mut Reference, sequence: &[TokenId], tolerance: f64) {
    let (kind, len) = (reference.kind, sequence.len());
    let first_layer_tolerance = reference.first_layer_tolerance();
    let (expected, layers) = (reference.row(sequence), kind.layers());
    assert_eq!((row.len(), expected.len()), (layers.len() * HEADS * len, layers.len() * HEADS * len));
    for (index, (row, expected)) in row.chunks_exact(len).zip(expected.chunks_exact(len)).enumerate() {
        let (layer, head) = (layers[index / HEADS], index % HEADS);
        let tolerance = if layer == layers[0] { tolerance.min(first_layer_tolerance) } else { tolerance };
        let sum: f64 = row.iter().map(|&value| f64::from(value)).sum();
        // A sink has a share of the sum, but no position in the row.
        let valid_sums = if kind.has_sinks() { 0.0..1.0 - 1e-4 } else { 1.0 - 1e-4..1.0 + 1e-4 };
        assert!(valid_sums.contains(&sum), "{kind:?}: the row of {len} positions sums to {sum}");
        for (position, (&value, expected)) in row.iter().zip(expected).enumerate() {
            let deviation = (f64::from(value) - expected).abs();
            assert!(
                deviation < tolerance,
                "{kind:?}: row of {len}, layer {layer}, head {head}, position {position}: {value} instead of {expected}"
            );
        }
    }
}

/// Compares the stored rows of single heads with those of the reference.
fn assert_heads_near(stored: &[u8], reference: &mut Reference, sequence: &[TokenId], tolerance: f64) {
    let kind = reference.kind;
    let (layers, expected) = (kind.layers(), reference.row(sequence));
    for (layer, head) in decode_head_table(stored).unwrap() {
        let index = layers.iter().position(|&known| known == layer).unwrap() * HEADS + usize::from(head);
        let row = decode_head(stored, layer, head).unwrap().unwrap();
        assert_eq!(row.len(), sequence.len());
        let expected = &expected[index * sequence.len()..(index + 1) * sequence.len()];
        for (position, (&value, expected)) in row.iter().zip(expected).enumerate() {
            let deviation = (f64::from(value) - expected).abs();
            // 16-bit floats have 11 significant bits.
            assert!(
                deviation < tolerance + expected / 2048.0,
                "{kind:?}: layer {layer}, head {head}, position {position}: {value} instead of {expected}"
            );
        }
    }
}

/// Returns the tables of stored heads of all steps.
fn stored_tables(result: &CompletedRun) -> Vec<Vec<(u16, u16)>> {
    let steps = result.items.iter().filter_map(|item| match item {
        TraceItem::Attention(step) => Some(decode_head_table(&step.head_rows).unwrap()),
        _ => None,
    });
    steps.collect()
}

#[tokio::test]
async fn stored_heads_equal_a_forward_pass_in_64_bit_floats() {
    for kind in Kind::ALL {
        let variant = Variant::new(kind);
        let mut reference = Reference::new(&variant);
        let layers = kind.layers();
        let listed = [(layers[0], 1), (*layers.last().unwrap(), 0)];
        for &mode in MODES {
            let mut test_engine = test_engine(&variant, 1, mode).await;
            let prompt = tokens(1, 150);
            let request =
                Request { stored_heads: StoredHeads::Listed(listed.into()), ..attention_request(prompt.clone(), 6) };
            let result = test_engine.run(request).await;
            assert_eq!(compare(&result, &prompt, &mut reference, mode.tolerance, false), 6, "{kind:?}");
            assert_eq!(stored_tables(&result), vec![listed.to_vec(); 6]);
            let request = Request { stored_heads: StoredHeads::All, ..attention_request(prompt.clone(), 2) };
            let result = test_engine.run(request).await;
            assert_eq!(compare(&result, &prompt, &mut reference, mode.tolerance, false), 2, "{kind:?}");
            assert!(stored_tables(&result).iter().all(|table| table.len() == layers.len() * HEADS));
            let result = test_engine.run(attention_request(prompt.clone(), 1)).await;
            assert_eq!(stored_tables(&result), [[]], "no head was requested");
        }
    }
}

#[tokio::test]
async fn rows_equal_a_forward_pass_in_64_bit_floats() {
    for kind in Kind::ALL {
        let variant = Variant::new(kind);
        let mut reference = Reference::new(&variant);
        for &mode in MODES {
            // The prompt takes several physical batches, and each later token one.
            let mut test_engine = test_engine(&variant, 1, mode).await;
            assert_eq!(test_engine.engine.attention_capture(), mode.in_effect);
            let prompt = tokens(1, 150);
            let result = test_engine.run(attention_request(prompt.clone(), 10)).await;
            assert_eq!(compare(&result, &prompt, &mut reference, mode.tolerance, false), 10, "{kind:?}");
            let mut rounded = Reference::with_rounding(&variant, mode.rounding());
            assert_eq!(compare(&result, &prompt, &mut rounded, mode.rounded_tolerance, false), 10, "{kind:?}");
            // The beginning of the prompt is in the cache.
            let next = [&prompt[..100], &tokens(2, 21)[..]].concat();
            let result = test_engine.run(attention_request(next.clone(), 5)).await;
            assert!(result.end.finish.usage.cached_tokens > 0 || kind.cannot_be_cut(), "{kind:?}");
            assert_eq!(compare(&result, &next, &mut reference, mode.tolerance, false), 5);
            // A prompt of a single token.
            let result = test_engine.run(attention_request(vec![77], 3)).await;
            assert_eq!(compare(&result, &[77], &mut reference, mode.tolerance, false), 3);
        }
    }
}

#[tokio::test]
async fn rows_are_exact_with_concurrent_runs_and_after_a_backtrack() {
    for kind in Kind::ALL {
        let variant = Variant::new(kind);
        let mut reference = Reference::new(&variant);
        for &mode in MODES {
            let mut test_engine = test_engine(&variant, 3, mode).await;
            let others: Vec<_> =
                [tokens(5, 90), tokens(6, 7)].into_iter().map(|prompt| attention_request(prompt, 100)).collect();
            let mut running = Vec::new();
            for other in others {
                running.push(test_engine.engine.submit(other).await.unwrap());
            }
            let prompt = tokens(3, 70);
            let backtrack = act_once(|call| added_at(call, 5), Action::Backtrack { n: 3, tokens: vec![90, 91] });
            let request = with_mod(attention_request(prompt.clone(), 14), false, backtrack);
            let result = test_engine.run(request).await;
            assert!(compare(&result, &prompt, &mut reference, mode.tolerance, false) >= 14, "{kind:?}");
            drop(running);
        }
    }
}

#[tokio::test]
async fn rows_are_exact_after_a_context_shift() {
    for kind in Kind::ALL {
        let variant = Variant::new(kind);
        for &mode in MODES {
            let mut reference = Reference::new(&variant);
            let mut test_engine = test_engine_of(variant.model(), 1, true, |options| {
                options.ctx_size = 256;
                mode.set(options);
            })
            .await;
            let prompt = tokens(4, 245);
            let mut request = attention_request(prompt.clone(), 25);
            request.overflow = Overflow::Shift { keep: Some(10), discard: 100 };
            let result = test_engine.run(request).await;
            assert_eq!(result.end.finish.evicted_tokens, 100, "{:?}", result.end.finish);
            // Layers with a window cannot be shifted exactly, so their tokens are recomputed.
            let can_shift = !kind.cannot_be_cut();
            assert_eq!(compare(&result, &prompt, &mut reference, mode.tolerance, can_shift), 25, "{kind:?}");
        }
    }
}

#[tokio::test]
async fn rows_are_exact_after_restoring_a_state() {
    for kind in Kind::ALL {
        let variant = Variant::new(kind);
        for &mode in MODES {
            let mut reference = Reference::new(&variant);
            let mut first = test_engine(&variant, 1, mode).await;
            first.run(attention_request(tokens(8, 80), 4)).await;
            let saved_tokens = first.engine.slot_tokens(&thunder::events::Scope::All, 0).await.unwrap().tokens;
            let saved = first.engine.save_slot(&thunder::events::Scope::All, 0).await.unwrap();
            let mut second = test_engine(&variant, 2, mode).await;
            second.engine.restore_slot(None, 1, saved.block).await.unwrap();
            let prompt = [saved_tokens, tokens(9, 9)].concat();
            let mut request = attention_request(prompt.clone(), 6);
            request.slot = Some(1);
            let result = second.run(request).await;
            assert!(result.end.finish.usage.cached_tokens > 0 || kind.cannot_be_cut(), "{kind:?}");
            assert_eq!(compare(&result, &prompt, &mut reference, mode.tolerance, false), 6, "{kind:?}");
        }
    }
}
