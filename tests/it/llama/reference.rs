//! Reference answers, computed by llama.cpp without Thunder's engine.

use crate::harness;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::token::LlamaToken;
use std::num::NonZeroU32;
use std::path::Path;

/// Returns the most probable continuation of these tokens, and the log-probabilities of all tokens after the first.
pub fn greedy(prompt: &[i32], count: usize) -> (Vec<i32>, Vec<f64>) {
    run(prompt, count, None, &[])
}

/// Returns the most probable continuation with a LoRA adapter at a scale, and without the `banned` tokens.
pub fn greedy_with(prompt: &[i32], count: usize, adapter: Option<(&Path, f32)>, banned: &[i32]) -> Vec<i32> {
    run(prompt, count, adapter, banned).0
}

fn run(prompt: &[i32], count: usize, adapter: Option<(&Path, f32)>, banned: &[i32]) -> (Vec<i32>, Vec<f64>) {
    let backend = thunder::model::llama::backend().unwrap();
    let mut model = LlamaModel::load_from_file(backend, harness::model(), &LlamaModelParams::default()).unwrap();
    let params = LlamaContextParams::default()
        .with_n_ctx(NonZeroU32::new(1024))
        .with_n_threads(1)
        .with_n_threads_batch(1)
        .with_flash_attention_policy(llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_DISABLED);
    let mut adapter = adapter.map(|(path, scale)| (model.lora_adapter_init(path).unwrap(), scale));
    let mut context = model.new_context(backend, params).unwrap();
    if let Some((adapter, scale)) = &mut adapter {
        context.lora_adapter_set(adapter, *scale).unwrap();
    }
    let mut batch = LlamaBatch::new(1024, 1);
    for (position, &token) in prompt.iter().enumerate() {
        batch.add(LlamaToken::new(token), position as i32, &[0], true).unwrap();
    }
    context.decode(&mut batch).unwrap();
    let mut logprobs: Vec<f64> =
        (1..prompt.len()).map(|at| logprob(context.get_logits_ith(at as i32 - 1), prompt[at])).collect();
    let mut answer = Vec::new();
    let mut last = prompt.len() as i32 - 1;
    while answer.len() < count {
        let logits = context.get_logits_ith(last);
        let allowed = (0..logits.len()).filter(|&at| !banned.contains(&(at as i32)));
        let best = allowed.reduce(|best, at| if logits[at] > logits[best] { at } else { best }).unwrap();
        logprobs.push(logprob(logits, best as i32));
        answer.push(best as i32);
        batch.clear();
        batch.add(LlamaToken::new(best as i32), (prompt.len() + answer.len() - 1) as i32, &[0], true).unwrap();
        context.decode(&mut batch).unwrap();
        last = 0;
    }
    (answer, logprobs)
}

fn logprob(logits: &[f32], token: i32) -> f64 {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    f64::from(logits[token as usize] - max) - sum.ln()
}
