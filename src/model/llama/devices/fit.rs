//! Estimate of the number of layers that fit on GPUs, computed from the model file before it is loaded.

use super::super::ffi::model_info::type_layout;
use super::super::{CacheType, ContextRequirements, GgufHeader, ModelOptions, SplitMode};
use std::path::{Path, PathBuf};

/// Memory of each GPU that is left free for its driver and other programs, in bytes.
const RESERVED_BYTES: u64 = 512 << 20;
/// Maximum number of files of a model.
const MAX_FILES: u64 = 1000;

/// A GPU for the layers of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gpu {
    /// Free memory in bytes.
    pub free: u64,
    /// Share of the layers, as a proportion.
    pub share: f32,
}

/// GPU memory that a model needs, in bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct GpuRequirements {
    /// The layers in order, each with its part of the KV cache if the cache is placed with the layers.
    layers: Vec<u64>,
    /// The output; llama.cpp counts it as one more layer.
    output: u64,
    /// The compute graph, on every GPU.
    graph: u64,
}

impl GpuRequirements {
    /// Computes the requirements of a model from its header, the headers of its other files, and the options.
    pub fn new(header: &GgufHeader, others: &[GgufHeader], options: &ModelOptions) -> Self {
        let requirements = &options.context;
        let parameter = |key| header.parameter(key);
        let count = parameter("block_count").unwrap_or(0).min(4096) as usize;
        let heads = parameter("attention.head_count").unwrap_or(1).max(1);
        let embedding = parameter("embedding_length").unwrap_or(0);
        let context = context_length(header, requirements);
        let cache = if options.tuning.cache_on_host { 0 } else { layer_cache_bytes(header, requirements) };
        let ubatch = u64::from(requirements.ubatch_size);
        let scores = if requirements.stores_scores { heads.saturating_mul(context) } else { 0 };
        let hidden = embedding.saturating_mul(4);
        let forward = parameter("feed_forward_length").unwrap_or(hidden).saturating_mul(3);
        let values = [context, hidden, forward].into_iter().fold(scores, u64::saturating_add);
        let mut needs = Self {
            layers: vec![cache; count],
            output: header
                .arrays
                .get("tokenizer.ggml.tokens")
                .map_or(0, |array| array.count)
                .saturating_mul(4 * ubatch),
            graph: values.saturating_mul(4 * ubatch),
        };
        needs.layers[count_cached_layers(header, count as u64) as usize..].fill(0);
        let files = || std::iter::once(header).chain(others);
        let has_output = files().flat_map(|file| &file.tensors).any(|tensor| tensor.name == "output.weight");
        for tensor in files().flat_map(|file| &file.tensors) {
            let layer = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            let place = match layer {
                Some(layer) if layer < count => &mut needs.layers[layer],
                // The embedding stays on the CPU, unless it is also the output.
                None if !tensor.name.starts_with("token_embd") || !has_output => &mut needs.output,
                _ => continue,
            };
            *place = place.saturating_add(tensor.size_bytes);
        }
        needs
    }
}

/// Reads the headers of a split model's other files. Skips unreadable files.
pub fn read_other_headers(path: &Path, header: &GgufHeader) -> Vec<GgufHeader> {
    other_split_files(path, header).iter().filter_map(|path| GgufHeader::read(path).ok()).collect()
}

/// Returns the paths of a split model's other files.
pub fn other_split_files(path: &Path, header: &GgufHeader) -> Vec<PathBuf> {
    let files = header.integer("split.count").unwrap_or(1).min(MAX_FILES);
    let stem = path.to_str().and_then(|path| path.strip_suffix(&format!("-00001-of-{files:05}.gguf")));
    let Some(stem) = stem else { return Vec::new() };
    (2..=files).map(|file| format!("{stem}-{file:05}-of-{files:05}.gguf").into()).collect()
}

/// Returns the number of layers that have a KV cache. The layers after them use the cache of an earlier layer.
fn count_cached_layers(header: &GgufHeader, layers: u64) -> u64 {
    // llama.cpp does not read this number from the file.
    const GEMMA_3N: u64 = 20;
    if header.text("general.architecture").is_some_and(|name| name == "gemma3n") {
        return layers.min(GEMMA_3N);
    }
    layers.saturating_sub(header.parameter("attention.shared_kv_layers").unwrap_or(0))
}

/// Returns a lower bound for the KV cache in bytes; `None` for models that do not store keys and values of all heads in
/// all layers.
pub fn cache_bytes(header: &GgufHeader, requirements: &ContextRequirements) -> Option<u64> {
    let parameter = |key| header.parameter(key);
    parameter("attention.head_count").filter(|&heads| heads > 0)?;
    parameter("embedding_length")?;
    // Latent attention stores less than the keys and values of all heads, and in hybrid models only some layers have a
    // KV cache.
    let is_plain = ["attention.kv_lora_rank", "ssm.state_size", "full_attention_interval", "wkv.head_size"]
        .into_iter()
        .all(|key| parameter(key).is_none());
    // Some layers may have no key heads if each has its own number.
    let per_layer = format!("{}.attention.head_count_kv", header.text("general.architecture")?);
    if !is_plain || header.arrays.contains_key(&per_layer) {
        return None;
    }
    let layers = count_cached_layers(header, parameter("block_count")?);
    Some(layer_cache_bytes(header, requirements).saturating_mul(layers))
}

/// Returns the bytes of one layer's KV cache. All heads have keys if the header has no single number of key heads.
fn layer_cache_bytes(header: &GgufHeader, requirements: &ContextRequirements) -> u64 {
    let parameter = |key| header.parameter(key);
    let heads = parameter("attention.head_count").unwrap_or(1).max(1);
    let key_heads = parameter("attention.head_count_kv").unwrap_or(heads);
    let bytes_per_token = |length, cache_type: CacheType| {
        let width = parameter(length).unwrap_or(parameter("embedding_length").unwrap_or(0) / heads);
        let (block, bytes) = type_layout(cache_type.to_llama().into()).unwrap_or((1, 1));
        width.saturating_mul(key_heads).div_ceil(block).saturating_mul(bytes)
    };
    bytes_per_token("attention.key_length", requirements.keys)
        .saturating_add(bytes_per_token("attention.value_length", requirements.values))
        .saturating_mul(context_length(header, requirements))
        .saturating_mul(requirements.sequences.into())
}

/// Returns the maximum number of tokens of a sequence.
fn context_length(header: &GgufHeader, requirements: &ContextRequirements) -> u64 {
    let trained = header.parameter("context_length").filter(|_| requirements.limit_to_training_context);
    trained.unwrap_or(u64::MAX).min(requirements.context_per_sequence.into())
}

/// Returns the number of layers, counted from the last, that fit on these GPUs; all plus one if the whole model fits.
pub fn fitting_layers(needs: &GpuRequirements, gpus: &[Gpu], split: SplitMode) -> usize {
    (1..=needs.layers.len() + 1).rev().find(|&count| fits(needs, gpus, split, count)).unwrap_or(0)
}

/// Returns true if the last `count` layers, with the output counted as one, fit if they are distributed the way
/// llama.cpp does it.
fn fits(needs: &GpuRequirements, gpus: &[Gpu], split: SplitMode, count: usize) -> bool {
    let sum: f32 = gpus.iter().map(|gpu| gpu.share).sum();
    if sum <= 0.0 {
        return false;
    }
    let mut taken = vec![0_u64; gpus.len()];
    let layers = needs.layers.iter().chain([&needs.output]).skip(needs.layers.len() + 1 - count);
    for (index, &bytes) in layers.enumerate() {
        if split == SplitMode::Row {
            for (taken, gpu) in taken.iter_mut().zip(gpus) {
                *taken = taken.saturating_add((bytes as f64 * f64::from(gpu.share / sum)) as u64);
            }
            continue;
        }
        let mut upto = 0.0;
        let at = gpus.iter().position(|gpu| {
            upto += gpu.share;
            upto / sum > index as f32 / count as f32
        });
        let taken = &mut taken[at.unwrap_or(gpus.len() - 1)];
        *taken = taken.saturating_add(bytes);
    }
    let overhead = needs.graph.saturating_add(RESERVED_BYTES);
    // A GPU without a share receives nothing.
    taken.iter().zip(gpus).all(|(&taken, gpu)| taken.saturating_add(overhead) <= gpu.free || gpu.share == 0.0)
}

#[cfg(test)]
mod tests {
    use super::super::super::gguf::{GgufArray, GgufScalar, GgufTensor};
    use super::*;

    fn gpus(free: &[u64]) -> Vec<Gpu> {
        free.iter().map(|&free| Gpu { free, share: free as f32 }).collect()
    }

    #[test]
    fn layers_fill_the_free_memory() {
        let needs = GpuRequirements { layers: vec![10; 4], output: 5, graph: 1 };
        let fitting = |free: &[u64]| fitting_layers(&needs, &gpus(free), SplitMode::Layer);
        for (free, layers) in
            [(0, 0), (RESERVED_BYTES, 0), (RESERVED_BYTES + 6, 1), (RESERVED_BYTES + 26, 3), (RESERVED_BYTES + 46, 5)]
        {
            assert_eq!(fitting(&[free]), layers, "{free}");
        }
        assert_eq!(fitting(&[]), 0);
        // Layers are not split: the first GPU gets three of the five, and the second the rest.
        assert_eq!(
            (
                fitting(&[RESERVED_BYTES + 31, RESERVED_BYTES + 16]),
                fitting(&[RESERVED_BYTES + 30, RESERVED_BYTES + 16])
            ),
            (5, 4)
        );
        assert_eq!(fitting_layers(&needs, &gpus(&[RESERVED_BYTES + 24, RESERVED_BYTES + 24]), SplitMode::Row), 5);
    }

    #[test]
    fn given_shares_are_respected() {
        let needs = GpuRequirements { layers: vec![10; 4], output: 5, graph: 0 };
        let mut two = gpus(&[RESERVED_BYTES + 100, RESERVED_BYTES + 10]);
        (two[0].share, two[1].share) = (1.0, 1.0);
        assert_eq!(fitting_layers(&needs, &two, SplitMode::Layer), 3);
        (two[0].share, two[1].share) = (1.0, 0.0);
        assert_eq!(fitting_layers(&needs, &two, SplitMode::Layer), 5);
        two[1].free = 0;
        assert_eq!(fitting_layers(&needs, &two, SplitMode::Layer), 5);
    }

    #[test]
    fn requirements_follow_from_the_header() {
        let tensor = |name: &str, size_bytes| GgufTensor { name: name.into(), size_bytes, ..GgufTensor::default() };
        let numbers = [
            ("block_count", 2),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
            ("embedding_length", 128),
            ("feed_forward_length", 256),
            ("context_length", 1000),
        ];
        let tokens = GgufArray { count: 50, ..GgufArray::default() };
        let arrays = [("tokenizer.ggml.tokens".to_owned(), tokens)].into_iter().collect();
        let metadata = numbers.map(|(key, value)| (format!("llama.{key}"), GgufScalar::Integer(value)));
        let mut header = GgufHeader {
            metadata: metadata.into_iter().collect(),
            arrays,
            tensors: vec![tensor("token_embd.weight", 700), tensor("blk.0.attn_q.weight", 11)],
        };
        header.metadata.insert("general.architecture".into(), GgufScalar::Text("llama".into()));
        let second = GgufHeader { tensors: vec![tensor("blk.1.attn_q.weight", 13)], ..GgufHeader::default() };
        let third = GgufHeader { tensors: vec![tensor("output.weight", 900)], ..GgufHeader::default() };
        let with = |context: ContextRequirements| ModelOptions { context, ..ModelOptions::default() };
        let context = ContextRequirements {
            context_per_sequence: 8192,
            sequences: 4,
            ubatch_size: 10,
            ..ContextRequirements::default()
        };

        // Two heads of 32 keys and as many values, in 16 bits, for 1000 tokens of 4 sequences.
        let cache = 2 * 2 * 32 * 2 * 1000 * 4;
        let (logits, fixed) = (50 * 4 * 10, 1000 + 4 * 128 + 3 * 256);
        let expected = GpuRequirements {
            layers: vec![cache + 11, cache + 13],
            output: logits + 700,
            graph: (4 * 1000 + fixed) * 4 * 10,
        };
        assert_eq!(GpuRequirements::new(&header, std::slice::from_ref(&second), &with(context)), expected);
        // If the model has a separate output, the embedding stays on the CPU.
        assert_eq!(GpuRequirements::new(&header, &[second, third], &with(context)).output, logits + 900);
        let mut other = with(ContextRequirements {
            limit_to_training_context: false,
            stores_scores: false,
            keys: CacheType::Q8_0,
            values: CacheType::F32,
            ..context
        });
        let needs = GpuRequirements::new(&header, &[], &other);
        assert_eq!(needs.layers[1], (2 * 34 + 2 * 32 * 4) * 8192 * 4);
        assert_eq!(needs.graph, (8192 + 4 * 128 + 3 * 256) * 4 * 10);
        other.tuning.cache_on_host = true;
        assert_eq!(GpuRequirements::new(&header, &[], &other).layers, [11, 0]);
        other.tuning.cache_on_host = false;
        let requirements = other.context;
        let all = cache_bytes(&header, &requirements).unwrap();
        header.metadata.insert("llama.attention.shared_kv_layers".into(), GgufScalar::Integer(1));
        assert_eq!(GpuRequirements::new(&header, &[], &other).layers, [needs.layers[1] + 11, 0]);
        assert_eq!(cache_bytes(&header, &requirements), Some(all / 2));
        for (key, length) in [("attention.key_length", 64), ("attention.value_length", 32)] {
            header.metadata.insert(format!("llama.{key}"), GgufScalar::Integer(length));
        }
        assert_eq!(cache_bytes(&header, &requirements), Some((2 * 2 * 34 + 2 * 32 * 4) * 8192 * 4));
        let per_layer = "llama.attention.head_count_kv";
        header.metadata.remove(per_layer);
        assert_eq!(cache_bytes(&header, &requirements), Some((4 * 2 * 34 + 4 * 32 * 4) * 8192 * 4));
        header.arrays.insert(per_layer.into(), GgufArray { count: 2, ..GgufArray::default() });
        assert_eq!(cache_bytes(&header, &requirements), None);

        // A header with excessive sizes fits nowhere.
        for key in ["embedding_length", "feed_forward_length", "attention.key_length"] {
            header.metadata.insert(format!("llama.{key}"), GgufScalar::Integer(u64::MAX.into()));
        }
        assert_eq!(
            fitting_layers(&GpuRequirements::new(&header, &[], &other), &gpus(&[u64::MAX - 1]), SplitMode::Layer),
            0
        );
    }
}
