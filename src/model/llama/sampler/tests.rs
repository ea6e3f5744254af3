//! Comparison of the chain with llama.cpp's own, stage by stage over the whole vocabulary.

mod avoided;
mod grammar;
mod large_values;

use super::*;
use crate::model::llama::Model;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;
use llama_cpp_2::token::logit_bias::LlamaLogitBias;
use proptest::prelude::*;
use std::path::Path;
use std::sync::LazyLock;

static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny.gguf");
    Model::load(&path, &crate::model::llama::ModelOptions::default(), |_| true).unwrap()
});

/// Builds the chain like llama-server.
fn reference(sampling: &SamplingParams) -> LlamaSampler {
    let count = MODEL.vocabulary().len() as i32;
    let keep = sampling.min_keep;
    let bias: Vec<LlamaLogitBias> =
        sampling.logit_bias.iter().map(|&(token, bias)| LlamaLogitBias::new(LlamaToken::new(token), bias)).collect();
    let mut chain = vec![LlamaSampler::logit_bias(count, &bias)];
    match sampling.mirostat {
        1 => {
            chain.push(LlamaSampler::temp(sampling.temperature));
            let (tau, eta) = (sampling.mirostat_tau, sampling.mirostat_eta);
            chain.push(LlamaSampler::mirostat(count, sampling.seed, tau, eta, 100));
        }
        2 => {
            chain.push(LlamaSampler::temp(sampling.temperature));
            chain.push(LlamaSampler::mirostat_v2(sampling.seed, sampling.mirostat_tau, sampling.mirostat_eta));
        }
        _ => {
            for stage in &sampling.samplers {
                chain.push(match stage {
                    SamplerStage::Penalties => LlamaSampler::penalties(
                        count,
                        sampling.repeat_last_n,
                        sampling.repeat_penalty,
                        sampling.frequency_penalty,
                        sampling.presence_penalty,
                    ),
                    SamplerStage::Dry => LlamaSampler::dry(
                        &MODEL.llama,
                        sampling.dry_multiplier,
                        sampling.dry_base,
                        sampling.dry_allowed_length,
                        sampling.dry_penalty_last_n,
                        &sampling.dry_sequence_breakers,
                    ),
                    SamplerStage::TopNSigma => LlamaSampler::top_n_sigma(sampling.top_n_sigma),
                    SamplerStage::TopK => LlamaSampler::top_k(sampling.top_k),
                    SamplerStage::TypicalP => LlamaSampler::typical(sampling.typical_p, keep),
                    SamplerStage::TopP => LlamaSampler::top_p(sampling.top_p, keep),
                    SamplerStage::MinP => LlamaSampler::min_p(sampling.min_p, keep),
                    SamplerStage::Xtc => {
                        LlamaSampler::xtc(sampling.xtc_probability, sampling.xtc_threshold, keep, sampling.seed)
                    }
                    SamplerStage::Infill => continue,
                    SamplerStage::Temperature | SamplerStage::AdaptiveP => LlamaSampler::temp_ext(
                        sampling.temperature,
                        sampling.dynatemp_range,
                        sampling.dynatemp_exponent,
                    ),
                });
            }
            chain.push(LlamaSampler::dist(sampling.seed));
        }
    }
    LlamaSampler::chain(chain, true)
}

/// Returns the logits of a step, generated from a seed: a few high ones over noise, all different.
fn logits(seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..MODEL.vocabulary().len()).map(|_| if next() < 0.05 { 8.0 * next() } else { 3.0 * next() - 4.0 }).collect()
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let off = |on: std::ops::Range<f32>, off: f32| prop_oneof![2 => Just(off), 1 => on];
    let stages = Just(SamplerStage::DEFAULT.to_vec()).prop_shuffle().prop_flat_map(|stages| {
        let count = stages.len();
        prop_oneof![Just(SamplerStage::DEFAULT.to_vec()), proptest::sample::subsequence(stages, 0..=count)]
    });
    let filters = (
        off(0.5..0.99, 1.0),
        off(0.01..0.2, 0.0),
        off(0.3..0.95, 1.0),
        off(0.5..2.0, -1.0),
        prop_oneof![Just(0), Just(40), 1..60i32, Just(300)],
        0usize..4,
    );
    let repetition = (
        off(1.05..1.5, 1.0),
        off(-0.5..1.0, 0.0),
        off(-0.5..1.0, 0.0),
        prop_oneof![Just(64), 1..20i32],
        off(0.5..2.0, 0.0),
        0..4i32,
    );
    let rest = (
        prop_oneof![Just(0.8), Just(0.0), Just(1.0), 0.3f32..1.8],
        off(0.1..0.5, 0.0),
        off(0.2..1.0, 0.0),
        prop_oneof![4 => Just(0u8), 1 => Just(1), 1 => Just(2)],
        any::<u32>(),
        proptest::collection::btree_map(0i32..300, prop_oneof![-5f32..5.0, Just(f32::NEG_INFINITY)], 0..5),
    );
    (stages, filters, repetition, rest).prop_map(|(samplers, filters, repetition, rest)| SamplingParams {
        samplers,
        top_p: filters.0,
        min_p: filters.1,
        typical_p: filters.2,
        top_n_sigma: filters.3,
        top_k: filters.4,
        min_keep: filters.5,
        repeat_penalty: repetition.0,
        presence_penalty: repetition.1,
        frequency_penalty: repetition.2,
        repeat_last_n: repetition.3,
        dry_multiplier: repetition.4,
        dry_allowed_length: repetition.5,
        temperature: rest.0,
        dynatemp_range: rest.1,
        xtc_probability: rest.2,
        mirostat: rest.3,
        seed: rest.4 & 0x7fff_ffff,
        logit_bias: rest.5.into_iter().collect(),
        ..SamplingParams::default()
    })
}

fn input<'a>(logits: &'a [f32], sequence: &'a [TokenId]) -> SamplerInput<'a> {
    SamplerInput { logits, allowed: None, sequence, temperature: None }
}

/// A change of an answer.
#[derive(Debug, Clone)]
enum AnswerChange {
    Draw,
    Force,
    Backtrack(usize),
    /// The context was full and tokens were evicted.
    Shift,
}

fn answer_change() -> impl Strategy<Value = AnswerChange> {
    prop_oneof![5 => Just(AnswerChange::Draw), 1 => Just(AnswerChange::Force), 2 => (1usize..9).prop_map(AnswerChange::Backtrack), 1 => Just(AnswerChange::Shift)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn same_seed_samples_the_same_tokens_as_llama_cpp(sampling in sampling(), begin in proptest::collection::vec(0i32..6, 0..30)) {
        // llama.cpp keeps banned tokens among the candidates, which some stages count; here they are removed.
        let bans = sampling.top_n_sigma > 0.0 || sampling.logit_bias.iter().any(|bias| bias.1 == f32::NEG_INFINITY);
        prop_assume!(
            !bans || (sampling.typical_p >= 1.0 && sampling.dynatemp_range == 0.0 && sampling.xtc_probability == 0.0)
        );
        let mut theirs = reference(&sampling);
        let mut ours = Sampler::new(&sampling, MODEL.vocabulary());
        let mut candidates = Candidates::default();
        let mut sequence = begin;
        theirs.accept_many(sequence.iter().map(|&token| LlamaToken::new(token)));
        for step in 0..12 {
            // A small vocabulary, so that there is something to penalize.
            let mut logits = logits(u64::from(sampling.seed) + step);
            logits.iter_mut().take(6).for_each(|logit| *logit += 6.0);
            let draw = ours.sample(&input(&logits, &sequence), &mut candidates).unwrap();
            let all = logits.iter().enumerate().map(|(id, &logit)| LlamaTokenData::new(LlamaToken::new(id as i32), logit, 0.0));
            let mut array = LlamaTokenDataArray::from_iter(all, false);
            theirs.apply(&mut array);
            let selected = &array.data[array.selected.unwrap()];
            prop_assert_eq!(draw.token, selected.id().0, "step {}: {:?}", step, draw.stages);
            theirs.accept(LlamaToken::new(draw.token));
            sequence.push(draw.token);
            ours.accept(draw.token, sequence.len());
        }
    }

    #[test]
    fn backtracked_tokens_have_no_effect_on_sampling(
        sampling in sampling(),
        adaptive: bool,
        last_n in prop_oneof![Just(-1), Just(9), Just(64)],
        moves in proptest::collection::vec((any::<u64>(), answer_change()), 1..30),
    ) {
        let mut sampling = SamplingParams { repeat_last_n: last_n, dry_penalty_last_n: last_n, ..sampling };
        if adaptive {
            sampling.samplers.push(SamplerStage::AdaptiveP);
            sampling.adaptive_target = 0.3;
        }
        let adaptive_state = |sampler: &Sampler| sampler.adaptive.as_ref().map(Adaptive::state);
        let mut ours = Sampler::new(&sampling, MODEL.vocabulary());
        let mut candidates = Candidates::default();
        let mut sequence = vec![1, 2, 3];
        // The state after each token of the answer, and the number of evicted tokens.
        let mut states = vec![adaptive_state(&ours)];
        let mut total_evicted = 0;
        for (seed, answer_change) in moves {
            match answer_change {
                AnswerChange::Draw | AnswerChange::Force => {
                    let draw = ours.sample(&input(&logits(seed), &sequence), &mut candidates).unwrap();
                    // A mod may insert another token there.
                    let forced = matches!(answer_change, AnswerChange::Force);
                    let token = if forced { draw.token + 1 } else { draw.token };
                    sequence.push(token);
                    ours.accept(token, states.len());
                    if forced {
                        prop_assert_eq!(adaptive_state(&ours), *states.last().unwrap());
                    }
                    states.push(adaptive_state(&ours));
                }
                AnswerChange::Backtrack(count) => {
                    let count = count.min(sequence.len() - 3);
                    sequence.truncate(sequence.len() - count);
                    states.truncate(states.len() - count);
                    ours.rewind(states.len() - 1);
                }
                AnswerChange::Shift => {
                    let evicted = (sequence.len() - 3) / 2;
                    sequence.drain(3..3 + evicted);
                    total_evicted += evicted;
                }
            }
            prop_assert_eq!(states.len() - 1, total_evicted + sequence.len() - 3);
            prop_assert_eq!(adaptive_state(&ours), *states.last().unwrap());
        }
        // A sampler that saw only the remaining tokens leaves the same candidates; which one is drawn depends on the
        // seed.
        if sampling.xtc_probability > 0.0 {
            return Ok(());
        }
        let mut fresh = Sampler::new(&sampling, MODEL.vocabulary());
        fresh.adaptive.clone_from(&ours.adaptive);
        let logits = logits(7);
        let mut others = Candidates::default();
        ours.sample(&input(&logits, &sequence), &mut candidates).unwrap();
        fresh.sample(&input(&logits, &sequence), &mut others).unwrap();
        prop_assert_eq!(candidates.top(50), others.top(50));
    }

    #[test]
    fn only_allowed_tokens_are_sampled(sampling in sampling(), allowed in proptest::collection::btree_set(0usize..300, 1..8), seed: u64) {
        let mut words = vec![0u32; MODEL.vocabulary().len().div_ceil(32)];
        allowed.iter().for_each(|token| words[token / 32] |= 1 << (token % 32));
        let logits = logits(seed);
        let mut sampler = Sampler::new(&sampling, MODEL.vocabulary());
        let drawn = sampler.sample(&SamplerInput { allowed: Some(&words), ..input(&logits, &[1, 2]) }, &mut Candidates::default());
        let banned = |token: usize| sampling.logit_bias.iter().any(|&(other, bias)| other == token as i32 && bias == f32::NEG_INFINITY);
        match drawn {
            Some(draw) => {
                prop_assert!(allowed.contains(&(draw.token as usize)) && !banned(draw.token as usize));
                prop_assert_eq!(draw.stages[0], ("grammar", allowed.len() as u32));
            }
            None => prop_assert!(allowed.iter().all(|&token| banned(token))),
        }
    }
}

#[test]
fn mirostat_state_rewinds() {
    let sampling = SamplingParams { mirostat: 2, seed: 3, ..SamplingParams::default() };
    let mut sampler = Sampler::new(&sampling, MODEL.vocabulary());
    let mut candidates = Candidates::default();
    let mut left = Vec::new();
    for step in 0..6usize {
        let logits = logits(step as u64);
        let draw = sampler.sample(&input(&logits, &[]), &mut candidates).unwrap();
        left.push(draw.stages.last().copied());
        sampler.accept(draw.token, step + 1);
    }
    // Return to the state after the second token; a token that a mod forced does not change it.
    sampler.rewind(2);
    sampler.accept(5, 3);
    let draw = sampler.sample(&input(&logits(2), &[]), &mut candidates).unwrap();
    assert_eq!(draw.stages.last().copied(), left[2]);
}

#[test]
fn adaptive_p_samples_near_its_target() {
    let sampling = |target| SamplingParams {
        samplers: vec![SamplerStage::AdaptiveP],
        adaptive_target: target,
        seed: 11,
        ..SamplingParams::default()
    };
    // Probabilities of 0.6, 0.3, 0.1.
    let logits: Vec<f32> = [0.6f32, 0.3, 0.1].map(f32::ln).to_vec();
    let mut counts = [0; 3];
    let mut sampler = Sampler::new(&sampling(0.3), MODEL.vocabulary());
    for length in 1..=200 {
        let draw = sampler.sample(&input(&logits, &[]), &mut Candidates::default()).unwrap();
        assert_eq!(draw.stages, [("adaptive-p", 3)]);
        counts[draw.token as usize] += 1;
        sampler.accept(draw.token, length);
    }
    assert!(counts[1] > counts[0] && counts[1] > counts[2], "{counts:?}");
    let mut off = Sampler::new(&sampling(-1.0), MODEL.vocabulary());
    assert!(off.sample(&input(&logits, &[]), &mut Candidates::default()).unwrap().stages.is_empty());
}

#[test]
fn stage_names_and_letters_equal_llama_servers() {
    for name in ["top_k", "top-k", "topk", "TOP_K"] {
        assert_eq!(SamplerStage::from_name(name), Some(SamplerStage::TopK));
    }
    assert_eq!(SamplerStage::from_name("nucleus"), Some(SamplerStage::TopP));
    assert_eq!(SamplerStage::from_name("typ"), Some(SamplerStage::TypicalP));
    assert_eq!(SamplerStage::from_name("nothing"), None);
    assert_eq!(
        "edskypmxt".chars().map(SamplerStage::from_letter).collect::<Option<Vec<_>>>(),
        Some(SamplerStage::DEFAULT.to_vec())
    );
    assert_eq!([SamplerStage::from_letter('i'), SamplerStage::from_name("infill")], [Some(SamplerStage::Infill); 2]);
    assert_eq!(serde_json::to_value(SamplerStage::DEFAULT).unwrap()[4], "typ_p");
}

#[test]
fn nothing_is_sampled_if_every_token_is_banned() {
    let bans = (0..MODEL.vocabulary().len() as i32).map(|token| (token, f32::NEG_INFINITY)).collect();
    for temperature in [0.0, 0.8] {
        let sampling = SamplingParams { temperature, logit_bias: Vec::clone(&bans), ..SamplingParams::default() };
        let mut sampler = Sampler::new(&sampling, MODEL.vocabulary());
        assert_eq!(sampler.sample(&input(&logits(1), &[]), &mut Candidates::default()), None);
    }
}

#[test]
fn repeated_draws_leave_the_state_of_the_draws() {
    let vocabulary = MODEL.vocabulary();
    let defaults = SamplingParams::default();
    for sampling in [
        SamplingParams { seed: 3, ..defaults.clone() },
        SamplingParams { seed: 4, temperature: 0.0, ..defaults.clone() },
        SamplingParams { seed: 5, xtc_probability: 0.5, xtc_threshold: 0.05, ..defaults.clone() },
        SamplingParams { seed: 6, mirostat: 2, mirostat_tau: 3.0, ..defaults.clone() },
        SamplingParams { seed: 7, mirostat: 1, ..defaults.clone() },
        SamplingParams { seed: 8, top_k: 1, ..defaults },
    ] {
        let logits: Vec<f32> = (0..vocabulary.len()).map(|token| ((token * 7919) % 101) as f32 / 9.0).collect();
        let input = SamplerInput { logits: &logits, allowed: None, sequence: &[1], temperature: None };
        let mut candidates = Candidates::default();
        let mut original = Sampler::new(&sampling, vocabulary);
        let mut draws = Vec::new();
        for length in 1..=40 {
            let draw = original.sample(&input, &mut candidates).unwrap();
            original.accept(draw.token, length);
            draws.push(draw);
        }
        for kept in [0, 1, 17, 39] {
            let mut again = Sampler::new(&sampling, vocabulary);
            for (index, draw) in draws[..kept].iter().enumerate() {
                let stages: Vec<_> = draw
                    .stages
                    .iter()
                    .map(|&(name, left)| crate::events::StageCount { name: name.into(), left })
                    .collect();
                again.repeat_draw(draw.token, Some(draw.prob), &stages);
                again.accept(draw.token, index + 1);
            }
            for (index, draw) in draws.iter().enumerate().skip(kept) {
                assert_eq!(again.sample(&input, &mut candidates).as_ref(), Some(draw), "{sampling:?} {kept} {index}");
                again.accept(draw.token, index + 1);
            }
        }
    }
}

#[test]
fn new_sampler_continues_the_random_numbers_of_the_previous_one() {
    let vocabulary = MODEL.vocabulary();
    let params = SamplingParams { seed: 5, xtc_probability: 0.5, xtc_threshold: 0.05, ..SamplingParams::default() };
    let logits: Vec<f32> = (0..vocabulary.len()).map(|token| ((token * 7919) % 101) as f32 / 9.0).collect();
    let input = SamplerInput { logits: &logits, allowed: None, sequence: &[1], temperature: None };
    let mut candidates = Candidates::default();
    let (mut previous, mut same) = (Sampler::new(&params, vocabulary), Sampler::new(&params, vocabulary));
    for _ in 0..11 {
        assert_eq!(previous.sample(&input, &mut candidates), same.sample(&input, &mut candidates));
    }
    let mut new = Sampler::new(&params, vocabulary);
    new.inherit_state(&mut previous, &params, &params);
    for step in 0..20 {
        assert_eq!(new.sample(&input, &mut candidates), same.sample(&input, &mut candidates), "{step}");
    }
}
