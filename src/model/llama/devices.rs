//! What llama.cpp computes on, and how many layers go there.

use super::ffi::loading::Loading;
use super::{GpuLayers, Header, ModelOptions, SplitMode};
use llama_cpp_2::{LlamaBackendDeviceType, list_llama_ggml_backend_devices};

/// Memory of each GPU that stays free for graphs and for others, in bytes.
const SPARE: u64 = 512 << 20;

/// Something that llama.cpp computes on.
#[derive(Debug, Clone)]
pub struct Device {
    /// llama.cpp's name, e.g. `CUDA0`.
    pub name: String,
    /// What a person knows it by.
    pub description: String,
    /// Whether it is a GPU, integrated or not.
    pub gpu: bool,
    /// Bytes of its memory; 0 when it does not tell.
    pub memory_bytes: u64,
    /// Bytes that are free.
    pub free_bytes: u64,
}

/// Every device, GPUs and others.
#[must_use]
pub fn devices() -> Vec<Device> {
    list_llama_ggml_backend_devices()
        .into_iter()
        .map(|device| Device {
            name: device.name,
            description: device.description.trim().to_owned(),
            gpu: matches!(device.device_type, LlamaBackendDeviceType::Gpu | LlamaBackendDeviceType::IntegratedGpu),
            memory_bytes: device.memory_total as u64,
            free_bytes: device.memory_free as u64,
        })
        .collect()
}

/// The options in llama.cpp's terms.
pub(super) fn loading(options: &ModelOptions, header: &Header) -> Loading {
    let gpu_layers = match options.gpu_layers {
        GpuLayers::All => -1,
        GpuLayers::Count(count) => i32::try_from(count).unwrap_or(i32::MAX),
        GpuLayers::Auto => {
            let free: Vec<u64> = devices().iter().filter(|device| device.gpu).map(|device| device.free_bytes).collect();
            let layers = that_fit(&Needs::of(header, options.room_for), &free);
            tracing::debug!(layers, ?free, "layers that fit on GPUs");
            i32::try_from(layers).unwrap_or(i32::MAX)
        }
    };
    Loading {
        gpu_layers,
        split_mode: Some(match options.split_mode {
            SplitMode::None => llama_cpp_sys_2::LLAMA_SPLIT_MODE_NONE,
            SplitMode::Layer => llama_cpp_sys_2::LLAMA_SPLIT_MODE_LAYER,
            SplitMode::Row => llama_cpp_sys_2::LLAMA_SPLIT_MODE_ROW,
        }),
        tensor_split: options.tensor_split.clone(),
        main_gpu: options.main_gpu,
        mmap: !options.no_mmap,
        mlock: options.mlock,
        check_tensors: options.tuning.check_tensors,
        no_repack: options.tuning.no_repack,
        no_host: options.tuning.no_host,
        overrides: options.tuning.overrides.clone(),
        no_alloc: false,
    }
}

/// What a model takes of a GPU, in bytes.
#[derive(Debug, Default)]
struct Needs {
    /// Each layer with its part of the KV cache, in order.
    layers: Vec<u64>,
    /// What is behind the last layer; llama.cpp counts it as one more.
    output: u64,
}

impl Needs {
    fn of(header: &Header, room_for: Option<u32>) -> Self {
        let parameter = |key| header.parameter(key);
        let count = parameter("block_count").unwrap_or(0).min(4096) as usize;
        let heads = parameter("attention.head_count").unwrap_or(1).max(1);
        let key_heads = parameter("attention.head_count_kv").unwrap_or(heads);
        let width = parameter("embedding_length").unwrap_or(0) / heads;
        let head = |key| parameter(key).unwrap_or(width);
        let per_token = key_heads.saturating_mul(head("attention.key_length") + head("attention.value_length")) * 2;
        let tokens = room_for.map_or_else(|| parameter("context_length").unwrap_or(4096), u64::from);
        let mut needs = Self { layers: vec![per_token.saturating_mul(tokens); count], output: 0 };
        for tensor in &header.tensors {
            let layer = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            match layer {
                Some(layer) if layer < count => needs.layers[layer] += tensor.size_bytes,
                // The embedding stays on the CPU, unless it is the output, too.
                None if !tensor.name.starts_with("token_embd") || !has_output(header) => {
                    needs.output += tensor.size_bytes;
                }
                _ => {}
            }
        }
        needs
    }
}

fn has_output(header: &Header) -> bool {
    header.tensors.iter().any(|tensor| tensor.name == "output.weight")
}

/// How many layers, counted from the last, fit into so much free memory; all and one more when the whole model fits.
fn that_fit(needs: &Needs, free: &[u64]) -> usize {
    let mut left: u64 = free.iter().map(|bytes| bytes.saturating_sub(SPARE)).sum();
    let mut layers = 0;
    // llama.cpp puts the output on the GPU first, then layers from the last on.
    for bytes in std::iter::once(needs.output).chain(needs.layers.iter().rev().copied()) {
        let Some(rest) = left.checked_sub(bytes) else { break };
        left = rest;
        layers += 1;
    }
    if free.is_empty() { 0 } else { layers }
}

#[cfg(test)]
mod tests {
    use super::{Needs, SPARE, that_fit};

    #[test]
    fn layers_go_where_there_is_room() {
        let needs = Needs { layers: vec![10; 4], output: 5 };
        for (free, layers) in
            [(vec![], 0), (vec![SPARE], 0), (vec![SPARE + 14], 1), (vec![SPARE + 25], 3), (vec![SPARE + 1000], 5)]
        {
            assert_eq!(that_fit(&needs, &free), layers, "{free:?}");
        }
        assert_eq!(that_fit(&needs, &[SPARE + 20, SPARE + 25]), 5);
    }
}
