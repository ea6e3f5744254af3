//! Very large logits and very low temperatures.

use super::{MODEL, input};
use crate::model::llama::sampler::{Candidates, Sampler, SamplerInput, SamplingParams};

const BEST: usize = 5;

#[test]
fn highest_logit_is_sampled_for_very_large_logits_and_low_temperatures() {
    for (others, best) in [(0.0, f32::MAX), (-f32::MAX, f32::MAX), (-f32::MAX, 0.0), (10.0, 30.0)] {
        for (top_k, temperature) in [(0, 0.7), (0, 1e-12), (0, f32::MIN_POSITIVE), (40, 0.7), (40, f32::MIN_POSITIVE)] {
            let mut logits = vec![others; MODEL.vocabulary().len()];
            logits[BEST] = best;
            let sampling = SamplingParams { top_k, top_p: 1.0, min_p: 0.0, temperature, ..SamplingParams::default() };
            for temperature in [None, Some(temperature)] {
                let input = SamplerInput { temperature, ..input(&logits, &[1]) };
                let draw = Sampler::new(&sampling, MODEL.vocabulary()).sample(&input, &mut Candidates::default());
                assert_eq!(draw.map(|draw| draw.token), Some(BEST as i32), "{best} {others} {top_k} {temperature:?}");
            }
        }
    }
}

#[test]
fn token_is_sampled_if_all_logits_are_very_low() {
    let logits = vec![-f32::MAX; MODEL.vocabulary().len()];
    let sampling = SamplingParams { top_k: 0, top_p: 1.0, min_p: 0.0, temperature: 0.7, ..SamplingParams::default() };
    let mut sampler = Sampler::new(&sampling, MODEL.vocabulary());
    let draw = sampler.sample(&input(&logits, &[1]), &mut Candidates::default());
    assert!(draw.is_some_and(|draw| draw.prob.is_finite()));
}
