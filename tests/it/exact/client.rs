//! Tokens and rows as a client receives them: complete, and equal with and without capture or drafts.

use super::reference::Reference;
use super::variant::{Kind, Variant};
use super::{F32_CACHE, FLASH, assert_row_near, attention_request, test_engine, tokens};
use crate::engine::{TestEngine, act_once, added_at, request_tokens, test_engine_of, with_mod};
use thunder::engine::{DrafterKind, EngineOptions, Output, ReportOptions, Request, SamplingParams, SpeculationOptions};
use thunder::events::{Alternative, EventType, TokenId, TraceItem};
use thunder::model::llama::AttentionCapture;
use thunder::mods::Action;

/// Returns the tokens and rows that a client has at the end of a run.
pub async fn client_tokens(test_engine: &TestEngine, mut request: Request) -> Vec<(TokenId, Option<Vec<f32>>)> {
    request.report = ReportOptions { per_token: true, attention_rows: true, ..ReportOptions::default() };
    let mut output = test_engine.engine.submit(request).await.unwrap().output;
    let mut tokens = Vec::new();
    while let Some(output) = output.recv().await {
        match output {
            Output::Text(delta) => {
                assert_eq!(delta.tokens.len(), delta.rows.len());
                let rows = delta.rows.into_iter().map(|row| row.map(|row| row.values.clone()));
                tokens.extend(delta.tokens.iter().map(|token| token.measurement.token).zip(rows));
            }
            Output::Retract { tokens: retracted, .. } => tokens.truncate(tokens.len() - retracted),
            Output::Ended(_) => return tokens,
            other => panic!("{other:?}"),
        }
    }
    panic!("the output ended before the run");
}

#[tokio::test]
async fn client_receives_a_row_for_every_token() {
    let variant = Variant::new(Kind::Qwen2);
    let mut reference = Reference::new(&variant);
    let test_engine = test_engine(&variant, 1, F32_CACHE).await;
    let prompt = tokens(3, 40);
    let backtrack = act_once(|call| added_at(call, 4), Action::Backtrack { n: 2, tokens: vec![90, 91, 92] });
    let request = with_mod(attention_request(prompt.clone(), 12), false, backtrack);
    let result = client_tokens(&test_engine, request).await;
    assert_eq!(result.len(), 12);
    assert_eq!(result[2..5].iter().map(|(token, _)| *token).collect::<Vec<_>>(), [90, 91, 92]);
    let mut sequence = prompt;
    for (token, row) in result {
        // The row before the first forced token was sent with the removed token, and retracted with it.
        if let Some(row) = row {
            assert_row_near(&row, &mut reference, &sequence, 2e-4);
        } else {
            assert_eq!(token, 90);
        }
        sequence.push(token);
    }
}

#[tokio::test]
async fn client_receives_stop_string_but_no_stop_token() {
    let variant = Variant::new(Kind::Llama);
    let mut test_engine = test_engine(&variant, 1, FLASH).await;
    let plain = test_engine.run(attention_request(tokens(3, 20), 10)).await.generated();
    let vocabulary = variant.model().vocabulary().clone();
    let mut request = attention_request(tokens(3, 20), 10);
    request.limits.stop_tokens = vec![plain[4]];
    let at = plain.iter().position(|&token| token == plain[4]).unwrap();
    let result = client_tokens(&test_engine, request).await;
    assert_eq!(result.iter().map(|(token, _)| *token).collect::<Vec<_>>(), plain[..at]);
    let readable = plain.iter().position(|&token| token >= 3 && vocabulary.piece(token).is_ascii()).unwrap();
    let mut request = attention_request(tokens(3, 20), 10);
    request.limits.stop = vec![vocabulary.decode(&[plain[readable]])];
    let result = client_tokens(&test_engine, request).await;
    assert_eq!(result.iter().map(|(token, _)| *token).collect::<Vec<_>>(), plain[..=readable]);
}

#[tokio::test]
async fn capture_changes_no_token() {
    for kind in Kind::ALL {
        let variant = Variant::new(kind);
        let mut test_engine = test_engine(&variant, 1, FLASH).await;
        let mut plain = request_tokens(tokens(11, 90), 40);
        plain.sampling = SamplingParams { seed: 5, temperature: 1.0, ..SamplingParams::default() };
        plain.cache_prompt = false;
        let mut captured = plain.clone();
        captured.attention = true;
        let expected = test_engine.run(plain).await.generated();
        assert_eq!(expected.len(), 40);
        assert_eq!(test_engine.run(captured.clone()).await.generated(), expected, "{kind:?}");
        let result = client_tokens(&test_engine, captured).await;
        assert_eq!(result.iter().map(|(token, _)| *token).collect::<Vec<_>>(), expected, "{kind:?}");
    }
}

/// Weights and cache have 32 bits, so that the size of a batch matters only for almost equally probable tokens. Models
/// with a window or a convolution decode without drafts.
#[tokio::test]
async fn drafts_change_no_token() {
    const BIAS: f32 = 9.0;
    const FAVORED: std::ops::Range<TokenId> = 20..28;
    let (mut drafting_kinds, mut compared) = (0, 0);
    for kind in Kind::ALL {
        let variant = Variant::new(kind);
        let start = |speculation| {
            test_engine_of(variant.model(), 1, false, move |options: &mut EngineOptions| {
                options.batch_size = 64;
                options.ubatch_size = 32;
                F32_CACHE.set(options);
                options.attention = AttentionCapture::Off;
                options.speculation = speculation;
            })
        };
        let always =
            SpeculationOptions { drafter: DrafterKind::Ngram, min_match: 1, adaptive: false, ..Default::default() };
        let (mut plain, mut drafting) = (start(SpeculationOptions::default()).await, start(always).await);
        let mut request = request_tokens(tokens(11, 90), 120);
        request.sampling.logit_bias = FAVORED.map(|token| (token, BIAS)).collect();
        request.alternatives = usize::from(u8::MAX) + 4;
        let expected = plain.run(request.clone()).await;
        let drafted = drafting.run(request).await;
        // Rounding may decide between the two best tokens if they are almost equally probable.
        let is_tie = |item: &TraceItem| match item {
            TraceItem::Event(event) if event.event_type == EventType::ForwardPass => {
                let measured = event.measured.as_ref().unwrap();
                let logit = |candidate: &Alternative| {
                    candidate.prob.ln() + if FAVORED.contains(&candidate.token) { BIAS } else { 0.0 }
                };
                let mut logits: Vec<f32> = measured.model.iter().map(logit).collect();
                logits.sort_by(|a, b| b.total_cmp(a));
                Some(logits[0] - logits[1] < 0.01)
            }
            _ => None,
        };
        let unambiguous = expected.items.iter().filter_map(is_tie).take_while(|is_tie| !is_tie).count();
        compared += unambiguous;
        assert_eq!(drafted.generated()[..unambiguous], expected.generated()[..unambiguous], "{kind:?}");
        let drafts = drafted.end.finish.drafts;
        assert_eq!(drafts.accepted > 5, drafting.engine.speculates(), "{kind:?} {drafts:?}");
        drafting_kinds += u32::from(drafting.engine.speculates());
    }
    assert!((3..Kind::ALL.len() as u32).contains(&drafting_kinds), "{drafting_kinds}");
    assert!(compared > 100, "{compared}");
}
