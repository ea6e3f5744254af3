//! Models without attention: their runs work, and requests for attention are rejected.

use super::client::client_tokens;
use super::gguf::Writer;
use super::variant::{EPS, LAYERS, WIDTH, write_vocabulary};
use super::{attention_request, tokens};
use crate::engine::test_engine_of;
use std::path::PathBuf;
use std::sync::Arc;
use thunder::engine::{ReportOptions, SubmitError, UnsupportedAttention};
use thunder::model::Model;
use thunder::model::llama::ModelOptions;

/// Writes a Mamba model with fixed, irregular weights.
pub fn mamba() -> PathBuf {
    const KERNEL: usize = 4;
    const STATE: usize = 16;
    const RANK: usize = 2;
    const INNER: usize = 2 * WIDTH;
    let mut w = Writer::default();
    w.string("general.architecture", "mamba");
    w.string("general.name", "recurrent");
    for (name, value) in [
        ("context_length", 1024),
        ("embedding_length", WIDTH),
        ("block_count", LAYERS),
        ("feed_forward_length", 0),
        ("attention.head_count", 0),
        ("ssm.conv_kernel", KERNEL),
        ("ssm.inner_size", INNER),
        ("ssm.state_size", STATE),
        ("ssm.time_step_rank", RANK),
    ] {
        w.number(&format!("mamba.{name}"), value as u32);
    }
    w.float("mamba.attention.layer_norm_rms_epsilon", EPS);
    let vocabulary = write_vocabulary(&mut w);
    let mut tensors: Vec<(String, Vec<usize>)> =
        vec![("token_embd.weight".into(), vec![WIDTH, vocabulary]), ("output_norm.weight".into(), vec![WIDTH])];
    for layer in 0..LAYERS {
        for (name, dimensions) in [
            ("attn_norm.weight", vec![WIDTH]),
            ("ssm_in.weight", vec![WIDTH, 2 * INNER]),
            ("ssm_conv1d.weight", vec![KERNEL, INNER]),
            ("ssm_conv1d.bias", vec![INNER]),
            ("ssm_x.weight", vec![INNER, RANK + 2 * STATE]),
            ("ssm_dt.weight", vec![RANK, INNER]),
            ("ssm_dt.bias", vec![INNER]),
            ("ssm_a", vec![STATE, INNER]),
            ("ssm_d", vec![INNER]),
            ("ssm_out.weight", vec![INNER, WIDTH]),
        ] {
            tensors.push((format!("blk.{layer}.{name}"), dimensions));
        }
    }
    let value = |name: &str, index: usize| match name {
        name if name.ends_with("norm.weight") => 1.0,
        name if name.ends_with("ssm_a") => -1.0 - (index % 5) as f32,
        _ => ((index * 7919 % 101) as f32 - 50.0) / 200.0,
    };
    let values: Vec<Vec<f32>> = tensors
        .iter()
        .map(|(name, dimensions)| (0..dimensions.iter().product::<usize>()).map(|index| value(name, index)).collect())
        .collect();
    let tensors: Vec<_> = tensors
        .iter()
        .zip(&values)
        .map(|((name, dimensions), values)| (name.as_str(), dimensions.clone(), values.as_slice()))
        .collect();
    let path = crate::harness::folder().join("recurrent.gguf");
    std::fs::write(&path, w.with_tensors(&tensors)).unwrap();
    path
}

#[tokio::test]
async fn model_without_attention_runs_but_rejects_requests_for_rows() {
    let model = Arc::new(Model::load(&mamba(), &ModelOptions::default(), |_| true).unwrap());
    let mut test_engine = test_engine_of(model, 1, true, |_| {}).await;
    // The run is recorded without attention.
    let result = test_engine.run(attention_request(tokens(1, 40), 6)).await;
    assert_eq!(result.generated().len(), 6);
    let mut request = attention_request(tokens(1, 40), 6);
    request.report = ReportOptions { per_token: true, attention_rows: true, ..ReportOptions::default() };
    let error = test_engine.engine.submit(request).await.map(|_| ()).unwrap_err();
    assert!(
        matches!(error, SubmitError::AttentionUnsupported { reason: UnsupportedAttention::Recurrent, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("do not attend to tokens"), "{error}");
    let mut plain = attention_request(tokens(1, 40), 6);
    plain.attention = false;
    assert_eq!(test_engine.run(plain).await.generated(), result.generated());
}

#[tokio::test]
async fn attention_support_of_a_model_is_known_at_start() {
    for kind in super::Kind::ALL {
        let test_engine = super::test_engine(&super::Variant::new(kind), 1, super::FLASH).await;
        let support = test_engine.engine.attention().unwrap().clone();
        let expected = (kind.layers(), super::HEADS as u16, kind.has_sinks());
        assert_eq!((support.layer_ids, support.heads, support.sinks), expected, "{kind:?}");
        let result = client_tokens(&test_engine, attention_request(tokens(2, 30), 3)).await;
        assert!(result.iter().all(|(_, row)| row.is_some()), "{kind:?}");
    }
}
