//! Reference answers, computed by llama.cpp without Thunder's engine.

use super::prompt::{Files, Prompt, path};
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::mtmd::{MtmdBitmap, MtmdContext, MtmdContextParams, MtmdInputText};
use llama_cpp_2::token::LlamaToken;
use std::num::NonZeroU32;
use thunder::events::TokenId;

/// Returns the greedy answer, without tokens that end it, that llama.cpp generates with its own evaluation of images.
pub(super) fn reference((model, projector): Files, prompt: &Prompt, count: usize) -> Vec<TokenId> {
    let backend = thunder::model::llama::backend().unwrap();
    let model = LlamaModel::load_from_file(backend, path(model), &LlamaModelParams::default()).unwrap();
    let params =
        LlamaContextParams::default().with_n_ctx(NonZeroU32::new(1024)).with_n_threads(1).with_n_threads_batch(1);
    let mut context = model.new_context(backend, params).unwrap();
    let params = MtmdContextParams { use_gpu: false, n_threads: 1, ..MtmdContextParams::default() };
    let mut projector = MtmdContext::init_from_file(path(projector).to_str().unwrap(), &model, &params).unwrap();
    let bitmaps: Vec<MtmdBitmap> =
        prompt.files.iter().map(|file| MtmdBitmap::from_buffer(&projector, file, false).unwrap()).collect();
    let text = MtmdInputText { text: prompt.text.clone(), add_special: false, parse_special: true };
    let chunks = projector.tokenize(text, &bitmaps.iter().collect::<Vec<_>>()).unwrap();
    assert_eq!(chunks.total_tokens(), prompt.tokens.len());
    let past = chunks.eval_chunks(&mut projector, &mut context, 0, 0, 512, true).unwrap();
    let mut batch = LlamaBatch::new(1, 1);
    let mut logits = context.get_logits().to_vec();
    let mut answer = Vec::new();
    for position in (past..).take(count) {
        let candidates = (0..logits.len()).filter(|&id| !model.vocab().is_eog(LlamaToken::new(id as TokenId)));
        let token = candidates.max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as TokenId;
        answer.push(token);
        batch.clear();
        batch.add(LlamaToken::new(token), position, &[0], true).unwrap();
        context.decode(&mut batch).unwrap();
        logits = context.get_logits_ith(0).to_vec();
    }
    answer
}
