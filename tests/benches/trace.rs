//! Cost of pure functions: encoding a step of attention, parsing a document of 256 tokens, and converting it into
//! columns.
//!
//! `cargo bench --bench trace`

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use thunder::trace::attention::AttentionEncoder;
use thunder::trace::columns;
use thunder::trace::document::Document;
use thunder::trace::fold::Fold;

/// Layers, heads and positions of a small model at two context lengths, and of a larger model.
const SHAPES: [(usize, usize, usize); 3] = [(24, 14, 256), (24, 14, 1024), (28, 28, 4096)];

fn attention(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attention");
    for (layers, heads, row_len) in SHAPES {
        let mut rows: Vec<f32> =
            (0..layers * heads * row_len).map(|i| ((i * 7919 % 1000) as f32 / 80.0 - 12.0).exp()).collect();
        for row in rows.chunks_exact_mut(row_len) {
            let sum: f32 = row.iter().sum();
            row.iter_mut().for_each(|value| *value /= sum);
        }
        let mut encoder = AttentionEncoder::new();
        group.throughput(Throughput::Bytes(4 * rows.len() as u64));
        group.bench_function(format!("{layers}x{heads}x{row_len}"), |bench| {
            bench.iter(|| encoder.encode(black_box(&rows), layers, heads, row_len));
        });
    }
}

/// Returns a document as an external engine posts it, with 20 candidates per step and one call per event.
fn payload() -> Vec<u8> {
    let (mut events, mut calls) = (Vec::new(), Vec::new());
    for step in 0..256 {
        let top: Vec<_> = (0..20).map(|i| serde_json::json!({"token": 100 * i + step, "prob": 0.04})).collect();
        for (offset, kind) in ["ForwardPass", "Sampled", "Added"].into_iter().enumerate() {
            let order = 3 * step + offset;
            let mut event = serde_json::json!({"event_type": kind, "step": step, "sequence_order": order});
            match offset {
                0 => event["top_tokens"] = top.clone().into(),
                1 => (event["sampled_token"], event["token_text"]) = (step.into(), " there".into()),
                _ => event["added_tokens"] = serde_json::json!([step]),
            }
            events.push(event);
            calls.push(
                serde_json::json!({"event_sequence_order": order, "mod_name": "m", "event_type": kind, "step": step,
                                          "execution_time_ms": 1.25}),
            );
        }
    }
    serde_json::json!({"request": {"request_id": "bench"}, "events": events, "mod_calls": calls})
        .to_string()
        .into_bytes()
}

fn document(criterion: &mut Criterion) {
    let payload = payload();
    let mut group = criterion.benchmark_group("document");
    group.throughput(Throughput::Bytes(payload.len() as u64));
    group.bench_function("parse", |bench| bench.iter(|| Document::parse(black_box(&payload))));
    let document = Document::parse(&payload).expect("the payload is valid");
    group.bench_function("fingerprint", |bench| bench.iter(|| document.fingerprint()));
    let items = document.items();
    group.bench_function("fold to columns", |bench| {
        bench.iter(|| {
            let mut fold = Fold::new();
            items.iter().for_each(|item| fold.apply(item));
            columns::encode(&fold)
        });
    });
}

criterion_group!(benches, attention, document);
criterion_main!(benches);
