//! The logit lens compared with the reference.

use super::reference::Reference;
use super::variant::{Kind, LAYERS, Variant};
use super::{F32_CACHE, attention_request, tokens};
use crate::engine::{CompletedRun, request_tokens, test_engine_of};
use thunder::engine::{DrafterKind, Request, SpeculationOptions, SubmitError};
use thunder::events::{Event, EventType, LogitLens, TraceItem};
use thunder::model::llama::AttentionCapture;

/// Maximum deviation of a logit per maximum deviation of an attention value.
const LOGIT_SCALE: f64 = 20.0;

/// Compares the lens of a `ForwardPass` event with the reference, which has computed the last token of the sequence.
pub fn assert_near(event: &Event, reference: &Reference, tolerance: f64) {
    let measured = event.measured.as_ref().unwrap();
    let lens = measured.lens.as_ref().expect("every step has a lens");
    assert!(lens.layers.iter().copied().eq(0..LAYERS as u16), "{:?}", lens.layers);
    assert_eq!(lens.logits.len(), LAYERS);
    for (layer, logits) in lens.logits.iter().enumerate() {
        let expected = reference.lens(layer);
        assert_eq!((logits.len(), measured.model.len()), (5, 5));
        for (&logit, alternative) in logits.iter().zip(&measured.model) {
            let expected = expected[alternative.token as usize];
            // 16-bit floats have 11 significant bits.
            let tolerance = LOGIT_SCALE * tolerance + expected.abs() / 2048.0;
            assert!(
                (f64::from(logit) - expected).abs() < tolerance,
                "{:?}: layer {layer}, token {}: {logit} instead of {expected}",
                reference.kind,
                alternative.token
            );
        }
    }
}

/// Returns the lenses of all steps of a run.
fn lenses(result: &CompletedRun) -> Vec<Option<&LogitLens>> {
    let steps = result.items.iter().filter_map(|item| match item {
        TraceItem::Event(event) if event.event_type == EventType::ForwardPass => Some(event),
        _ => None,
    });
    steps.map(|event| event.measured.as_ref().and_then(|measured| measured.lens.as_deref())).collect()
}

#[tokio::test]
async fn lens_is_the_same_without_attention_and_with_accepted_drafts() {
    let variant = Variant::new(Kind::Llama);
    let prompt = tokens(1, 40).repeat(3);
    let request = || Request { lens: true, ..request_tokens(prompt.clone(), 40) };
    let mut plain = test_engine_of(variant.model(), 1, true, |options| F32_CACHE.set(options)).await;
    let expected = plain.run(request()).await;
    assert!(lenses(&expected).iter().all(Option::is_some));
    let with_attention = plain.run(attention_request(prompt.clone(), 40)).await;
    assert_eq!(lenses(&with_attention), lenses(&expected));
    let without = plain.run(request_tokens(prompt.clone(), 40)).await;
    assert!(lenses(&without).iter().all(Option::is_none), "no lens was requested");
    let mut drafting = test_engine_of(variant.model(), 1, true, |options| {
        F32_CACHE.set(options);
        options.speculation =
            SpeculationOptions { drafter: DrafterKind::Ngram, min_match: 1, adaptive: false, ..Default::default() };
    })
    .await;
    let drafted = drafting.run(request()).await;
    assert!(drafted.end.finish.drafts.accepted > 5, "{:?}", drafted.end.finish.drafts);
    let (drafted, expected) = (lenses(&drafted), lenses(&expected));
    assert_eq!(drafted.len(), expected.len());
    for (drafted, expected) in drafted.iter().zip(&expected) {
        let (drafted, expected) = (drafted.expect("every step has a lens"), expected.unwrap());
        let pairs = drafted.logits.iter().flatten().zip(expected.logits.iter().flatten());
        pairs.for_each(|(a, b)| assert!((a - b).abs() < 0.05, "{a} instead of {b}"));
    }
}

#[tokio::test]
async fn lens_has_up_to_64_tokens() {
    let mut test_engine = test_engine_of(Variant::new(Kind::Qwen2).model(), 1, true, |_| {}).await;
    let request = Request { lens: true, alternatives: 100, ..request_tokens(tokens(1, 9), 2) };
    let result = test_engine.run(request).await;
    for lens in lenses(&result) {
        assert!(lens.expect("every step has a lens").logits.iter().all(|layer| layer.len() == 64));
    }
}

#[tokio::test]
async fn lens_is_refused_without_capture() {
    let variant = Variant::new(Kind::Llama);
    let test_engine = test_engine_of(variant.model(), 1, true, |options| {
        options.attention = AttentionCapture::Off;
    })
    .await;
    let refused = test_engine.engine.submit(Request { lens: true, ..request_tokens(vec![5], 2) }).await;
    assert!(matches!(refused, Err(SubmitError::LensOff)));
}
