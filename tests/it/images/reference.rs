//! Probabilities compared with those of llama.cpp.

use super::{DEMO, PROJECTOR, assert_close, bmp, image_request, logprobs, server};
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::mtmd::{MtmdBitmap, MtmdContext, MtmdContextParams, MtmdInputText};
use llama_cpp_2::token::LlamaToken;
use serde_json::json;
use std::num::NonZeroU32;

/// Returns the log-probabilities of the most probable tokens at each step of an answer, computed with llama.cpp's own
/// evaluation of images.
pub fn reference(
    (model, projector): (&str, &str),
    prompt: &str,
    image: &[u8],
    answer: &[(String, f64)],
) -> Vec<(String, f64)> {
    let backend = thunder::model::llama::backend().unwrap();
    let model = LlamaModel::load_from_file(backend, model, &LlamaModelParams::default()).unwrap();
    let params = LlamaContextParams::default()
        .with_n_ctx(NonZeroU32::new(1024))
        .with_n_threads(1)
        .with_n_threads_batch(1)
        .with_type_k(llama_cpp_2::context::params::KvCacheType::F32)
        .with_type_v(llama_cpp_2::context::params::KvCacheType::F32)
        .with_flash_attention_policy(llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_DISABLED);
    let mut context = model.new_context(backend, params).unwrap();
    let params = MtmdContextParams { use_gpu: false, n_threads: 1, ..MtmdContextParams::default() };
    let mut projector = MtmdContext::init_from_file(projector, &model, &params).unwrap();
    let bitmap = MtmdBitmap::from_buffer(&projector, image, false).unwrap();
    let text = MtmdInputText { text: prompt.to_owned(), add_special: true, parse_special: true };
    let chunks = projector.tokenize(text, &[&bitmap]).unwrap();
    let past = chunks.eval_chunks(&mut projector, &mut context, 0, 0, 512, true).unwrap();
    let mut batch = LlamaBatch::new(1, 1);
    let mut logits = context.get_logits().to_vec();
    let mut found = Vec::new();
    // Each step has four entries. The first is the chosen token, because the answer is greedy.
    for (position, step) in (past..).zip(answer.chunks(4)) {
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        for &token in &order[..step.len()] {
            let piece = model.vocab().token_to_piece(LlamaToken::new(token as i32), true, None);
            let logprob = f64::from(logits[token] - max) - sum.ln();
            found.push((String::from_utf8_lossy(&piece).into_owned(), logprob));
        }
        batch.clear();
        batch.add(LlamaToken::new(order[0] as i32), position, &[0], true).unwrap();
        context.decode(&mut batch).unwrap();
        logits = context.get_logits_ith(0).to_vec();
    }
    found
}

#[tokio::test]
async fn log_probabilities_equal_those_of_llama_cpp() {
    let server = server().await;
    let body = image_request(&bmp(5), &json!({"ignore_eos": false}));
    let prompt = server.answer("/apply-template", &body).await["prompt"].as_str().unwrap().to_owned();
    let found = logprobs(&server.answer("/v1/chat/completions", &body).await);
    let expected = tokio::task::spawn_blocking({
        let found = found.clone();
        move || reference((DEMO, PROJECTOR), &prompt, &bmp(5), &found)
    });
    assert_close(&found, &expected.await.unwrap(), 1e-3);
    let other =
        logprobs(&server.answer("/v1/chat/completions", &image_request(&bmp(6), &json!({"ignore_eos": false}))).await);
    assert!(found.iter().zip(&other).any(|(one, other)| one.0 != other.0 || (one.1 - other.1).abs() > 0.01));
}
