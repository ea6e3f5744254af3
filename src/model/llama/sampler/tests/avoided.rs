//! Tokens that mods avoid.

use super::{MODEL, input, logits, sampling};
use crate::events::TokenId;
use crate::model::llama::sampler::{
    AVOIDED_TOKEN_BIAS, Candidates, Sampler, SamplerInput, SamplerStage, SamplingParams,
};
use proptest::prelude::*;

#[test]
fn penalties_do_not_raise_avoided_tokens() {
    let mut logits = logits(1);
    logits[5] += AVOIDED_TOKEN_BIAS;
    let sampling = SamplingParams {
        samplers: vec![SamplerStage::Penalties, SamplerStage::Dry, SamplerStage::AdaptiveP],
        repeat_penalty: 0.01,
        repeat_last_n: 64,
        dry_multiplier: -1e6,
        dry_allowed_length: 1,
        adaptive_target: 0.0,
        ..SamplingParams::default()
    };
    let allowed = [1 << 5 | 1 << 6];
    let input = SamplerInput { allowed: Some(&allowed), ..input(&logits, &[7, 5, 7]) };
    let draw = Sampler::new(&sampling, MODEL.vocabulary()).sample(&input, &mut Candidates::default());
    assert_eq!(draw.unwrap().token, 6);
}

#[test]
fn late_penalties_change_logits_that_a_low_temperature_scaled() {
    let mut logits = logits(1);
    (logits[5], logits[6]) = (-9.0, -10.5);
    let sampling = SamplingParams {
        samplers: vec![SamplerStage::Temperature, SamplerStage::Penalties],
        temperature: 0.001,
        repeat_penalty: 1.3,
        repeat_last_n: 64,
        ..SamplingParams::default()
    };
    let allowed = [1 << 5 | 1 << 6];
    let input = SamplerInput { allowed: Some(&allowed), ..input(&logits, &[5, 6]) };
    let draw = Sampler::new(&sampling, MODEL.vocabulary()).sample(&input, &mut Candidates::default());
    assert_eq!(draw.unwrap().token, 5);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn avoided_tokens_are_only_sampled_if_no_others_can_be(
        sampling in sampling(),
        adaptive: bool,
        allowed in proptest::collection::btree_set(0usize..300, 1..8),
        avoided in proptest::collection::btree_set(0usize..300, 1..100),
        temperature in proptest::option::of(0f32..2.0),
        seed: u64,
    ) {
        let mut sampling = SamplingParams { logit_bias: Vec::new(), ..sampling };
        if adaptive {
            sampling.samplers.push(SamplerStage::AdaptiveP);
            sampling.adaptive_target = 0.3;
        }
        let mut words = vec![0u32; MODEL.vocabulary().len().div_ceil(32)];
        allowed.iter().for_each(|token| words[token / 32] |= 1 << (token % 32));
        let (mut with_bias, mut with_bans) = (logits(seed), logits(seed));
        for &token in &avoided {
            with_bias[token] += AVOIDED_TOKEN_BIAS;
            with_bans[token] = f32::NEG_INFINITY;
        }
        for mask in [None, Some(words.as_slice())] {
            let draw = |logits: &[f32]| {
                let input = SamplerInput { allowed: mask, temperature, ..input(logits, &[1, 2, 2]) };
                Sampler::new(&sampling, MODEL.vocabulary()).sample(&input, &mut Candidates::default())
            };
            let token = draw(&with_bias).expect("a token can be sampled").token;
            match draw(&with_bans) {
                Some(expected) => prop_assert_eq!(token, expected.token),
                None => prop_assert!(allowed.contains(&(token as usize)), "{}", token as TokenId),
            }
        }
    }
}
