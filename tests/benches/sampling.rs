//! Cost of sampling a token and of a grammar's mask, at vocabularies of 2 000, 32 000 and 150 000 tokens, without a
//! model.
//!
//! `cargo bench --bench sampling`; no threshold, since machines differ. `llama.cpp` is the same chain over all candidates.
#![expect(clippy::unwrap_used, reason = "a failed benchmark ends")]

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use llama_cpp_2::sampling::LlamaSampler;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::token::data::LlamaTokenData;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;
use serde_json::json;
use std::hint::black_box;
use std::sync::Arc;
use thunder::events::TokenId;
use thunder::model::grammar::{Constraint, GrammarCompiler, GrammarSource};
use thunder::model::llama::{Candidates, Sampler, SamplerInput, SamplingParams};
use thunder::model::{SpecialTokens, Vocabulary};

const SIZES: [usize; 3] = [2_000, 32_000, 150_000];

/// Returns a vocabulary of bytes, then words of two to eight letters with and without a preceding space, as in a real
/// vocabulary, and an end token.
fn vocabulary(size: usize) -> Arc<Vocabulary> {
    let mut pieces: Vec<Box<[u8]>> = (0..=255u8).map(|byte| vec![byte].into()).collect();
    let mut state = 1u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    while pieces.len() < size - 1 {
        let mut word = if next() % 2 == 0 { b" ".to_vec() } else { Vec::new() };
        let alphabet: &[u8] = if next() % 20 == 0 { b"{}[]\":,.0123456789" } else { b"etaoinshrdlucmfwypvbgkqjxz" };
        word.extend((0..2 + next() % 7).map(|_| alphabet[next() % alphabet.len()]));
        pieces.push(word.into());
    }
    pieces.push(b"<|end|>"[..].into());
    let control = (0..size).map(|token| token == size - 1).collect();
    let bytes = |text: &str, _, _| text.bytes().map(TokenId::from).collect();
    Arc::new(Vocabulary::new(pieces, control, vec![size as TokenId - 1], SpecialTokens::default(), bytes))
}

fn logits(size: usize) -> Vec<f32> {
    (0..size).map(|token| (token.wrapping_mul(2_654_435_761) % 10_007) as f32 / 1000.0 - 5.0).collect()
}

fn sampling(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("draw");
    for size in SIZES {
        let (vocabulary, logits) = (vocabulary(size), logits(size));
        let sequence: Vec<TokenId> = (0..400).map(|token| token % 97).collect();
        let kinds = [
            ("greedy", SamplingParams { temperature: 0.0, ..SamplingParams::default() }),
            ("default", SamplingParams::default()),
            ("penalties", SamplingParams { repeat_penalty: 1.1, ..SamplingParams::default() }),
            ("dry", SamplingParams { dry_multiplier: 0.8, dry_penalty_last_n: -1, ..SamplingParams::default() }),
            ("no top-k", SamplingParams { top_k: 0, ..SamplingParams::default() }),
            ("mirostat", SamplingParams { mirostat: 2, ..SamplingParams::default() }),
        ];
        for (name, sampling) in kinds {
            let mut sampler = Sampler::new(&sampling, &vocabulary);
            let mut candidates = Candidates::default();
            let input = SamplerInput { logits: &logits, allowed: None, sequence: &sequence, temperature: None };
            group.bench_function(BenchmarkId::new(name, size), |bencher| {
                bencher.iter(|| black_box(sampler.sample(&input, &mut candidates)));
            });
        }
        let mut chain = LlamaSampler::chain(
            [
                LlamaSampler::top_k(40),
                LlamaSampler::top_p(0.95, 0),
                LlamaSampler::min_p(0.05, 0),
                LlamaSampler::temp_ext(0.8, 0.0, 1.0),
                LlamaSampler::dist(0),
            ],
            true,
        );
        let mut array = LlamaTokenDataArray::new(Vec::with_capacity(size), false);
        group.bench_function(BenchmarkId::new("default, llama.cpp", size), |bencher| {
            bencher.iter(|| {
                array.data.clear();
                let all = (0..).zip(&logits);
                array.data.extend(all.map(|(id, &logit)| LlamaTokenData::new(LlamaToken::new(id), logit, 0.0)));
                (array.sorted, array.selected) = (false, None);
                chain.apply(&mut array);
                black_box(array.selected_token())
            });
        });
    }
}

fn masks(criterion: &mut Criterion) {
    let schema = json!({"type": "object", "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}},
    }, "required": ["name", "age"], "additionalProperties": false});
    let list = "root ::= \"[\" item (\",\" item)* \"]\"\nitem ::= [a-z]+ | \"(\" item \")\"";
    let mut group = criterion.benchmark_group("grammar");
    for size in SIZES {
        let vocabulary = vocabulary(size);
        let grammars = GrammarCompiler::new(Arc::clone(&vocabulary));
        for (name, source, text) in [
            (
                "schema",
                GrammarSource::JsonSchema(schema.clone()),
                "{\"name\": \"some text\", \"age\": 17, \"tags\": [\"a b\"]}",
            ),
            ("gbnf", GrammarSource::Gbnf(list.into()), "[abc,(def),((g)),hij]"),
        ] {
            let constraint = Constraint::new("bench", source);
            let fresh = grammars.start_matcher(&constraint).unwrap();
            // A mask and a token for every byte of a text; the mean is over the whole text.
            group.bench_function(BenchmarkId::new(format!("{name}: mask and token"), size), |bencher| {
                bencher.iter_custom(|rounds| {
                    let mut elapsed = std::time::Duration::ZERO;
                    for _ in 0..rounds {
                        let mut matcher = fresh.clone();
                        let begun = std::time::Instant::now();
                        for byte in text.bytes() {
                            black_box(matcher.mask().unwrap());
                            matcher.accept(byte.into(), &[byte]);
                        }
                        elapsed += begun.elapsed() / text.len() as u32;
                    }
                    elapsed
                });
            });
            group.bench_function(BenchmarkId::new(format!("{name}: known grammar"), size), |bencher| {
                bencher.iter(|| black_box(grammars.start_matcher(&constraint).unwrap()));
            });
        }
    }
    group.sample_size(10);
    for size in SIZES {
        let vocabulary = vocabulary(size);
        let constraint = Constraint::new("bench", GrammarSource::JsonSchema(schema.clone()));
        group.bench_function(BenchmarkId::new("first grammar of a model", size), |bencher| {
            bencher
                .iter(|| black_box(GrammarCompiler::new(Arc::clone(&vocabulary)).start_matcher(&constraint).unwrap()));
        });
    }
}

criterion_group!(benches, sampling, masks);
criterion_main!(benches);
