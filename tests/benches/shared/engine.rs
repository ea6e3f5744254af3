use std::path::Path;
use std::sync::Arc;
use thunder::engine::{DraftModel, Engine, EngineOptions, MAX_UNREAD_TIME, SpeculationOptions};
use thunder::events::system;
use thunder::model::Model;
use thunder::model::llama::{AttentionCapture, CacheType, ModelOptions};
use thunder::recording::RecorderHandle;

/// Returns the measured engine: `parallel` slots of `ctx_size` tokens each, no host cache. A draft model is used if the
/// drafter is one.
pub async fn engine(
    model: &Path,
    (parallel, ctx_size): (u32, u32),
    threads: i32,
    attention: AttentionCapture,
    (speculation, draft_model): (SpeculationOptions, Option<&Path>),
    recorder: impl Into<RecorderHandle>,
) -> Engine {
    let load = |path: &Path| Arc::new(Model::load(path, &ModelOptions::default(), |_| true).expect("the model loads"));
    let options = EngineOptions {
        ctx_size,
        parallel,
        threads,
        threads_batch: threads,
        batch_size: 2048,
        ubatch_size: 512,
        attention,
        cache_type_k: CacheType::F16,
        cache_type_v: CacheType::F16,
        slot_prompt_similarity: 0.1,
        cache_ram_bytes: 0,
        speculation,
        draft_model: draft_model.map(|path| DraftModel::new(load(path))),
        max_unread_time: MAX_UNREAD_TIME,
        hash_cache: None,
        max_tokens: None,
        encode_heads: thunder::trace::attention::encode_heads,
        encode_attention: |values, layers, heads, row_len| {
            thunder::trace::attention::encode(values, layers, heads, row_len).ok()
        },
        clock: system::now,
    };
    Engine::start(load(model), options, recorder).await.expect("the engine starts")
}
