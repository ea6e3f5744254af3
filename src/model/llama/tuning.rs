//! Compute settings that override llama.cpp's defaults.

use super::ffi;
use super::ffi::threads::{ThreadOptions, ThreadPool};
use super::numa::Numa;
use llama_cpp_2::context::params::{LlamaContextParams, RopeScalingType};

/// Compute settings; the default is llama.cpp's choice and the model's metadata.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tuning {
    /// Rotary positions.
    pub rope: RopeOptions,
    /// Overrides of metadata, by key.
    pub overrides: Vec<(String, MetadataValue)>,
    /// True to check the weights for invalid numbers while loading.
    pub check_tensors: bool,
    /// True to keep the KV cache of GPU layers in host memory.
    pub cache_on_host: bool,
    /// True to compute on a GPU only the layers placed there.
    pub no_op_offload: bool,
    /// True to keep weights in the layout of the file.
    pub no_repack: bool,
    /// True to leave the host buffers of GPUs unused, so that weights on the CPU can have CPU-specific layouts.
    pub no_host: bool,
    /// NUMA placement; set for the process by the first model that has one.
    pub numa: Option<Numa>,
    /// Settings of the decoding threads.
    pub threads: ThreadOptions,
}

/// Rotary positions; `None` for the model's value.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RopeOptions {
    /// Scaling of positions beyond the training context.
    pub scaling: Option<RopeScaling>,
    /// Base frequency.
    pub base: Option<f32>,
    /// Factor of the frequencies.
    pub scale: Option<f32>,
    /// Training context before the extension by YaRN, in tokens.
    pub yarn_original_context: Option<u32>,
    /// Mix of YaRN's extrapolation.
    pub yarn_extrapolation: Option<f32>,
    /// YaRN's attention scaling factor.
    pub yarn_attention: Option<f32>,
    /// YaRN's low correction dimension.
    pub yarn_beta_fast: Option<f32>,
    /// YaRN's high correction dimension.
    pub yarn_beta_slow: Option<f32>,
}

/// Scaling of positions beyond the training context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// The same factor for all frequencies.
    Linear,
    /// A factor that depends on the frequency.
    Yarn,
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum MetadataValue {
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// A text of up to 127 bytes.
    Text(String),
}

impl Tuning {
    /// Returns the context parameters with these settings applied.
    pub(super) fn apply(&self, params: LlamaContextParams) -> LlamaContextParams {
        let rope = &self.rope;
        let set = |params, value: Option<f32>, with: fn(LlamaContextParams, f32) -> LlamaContextParams| match value {
            Some(value) => with(params, value),
            None => params,
        };
        let mut params = params.with_offload_kqv(!self.cache_on_host).with_op_offload(!self.no_op_offload);
        if let Some(scaling) = rope.scaling {
            params = params.with_rope_scaling_type(match scaling {
                RopeScaling::None => RopeScalingType::None,
                RopeScaling::Linear => RopeScalingType::Linear,
                RopeScaling::Yarn => RopeScalingType::Yarn,
            });
        }
        if let Some(tokens) = rope.yarn_original_context {
            params = params.with_yarn_orig_ctx(tokens);
        }
        params = set(params, rope.base, LlamaContextParams::with_rope_freq_base);
        params = set(params, rope.scale, LlamaContextParams::with_rope_freq_scale);
        params = set(params, rope.yarn_extrapolation, LlamaContextParams::with_yarn_ext_factor);
        params = set(params, rope.yarn_attention, LlamaContextParams::with_yarn_attn_factor);
        params = set(params, rope.yarn_beta_fast, LlamaContextParams::with_yarn_beta_fast);
        set(params, rope.yarn_beta_slow, LlamaContextParams::with_yarn_beta_slow)
    }

    /// Starts a thread pool that persists between graphs, if it is useful.
    pub(super) fn pool(&self, threads: i32) -> Option<ThreadPool> {
        // A single thread needs a pool only for its own settings, e.g. pinning.
        (threads > 1 || self.threads.is_customized()).then(|| ThreadPool::start(threads, &self.threads)).flatten()
    }

    /// Configures NUMA in llama.cpp. Only the first call of a process has an effect.
    pub(super) fn init_numa(&self) {
        if let Some(numa) = self.numa {
            ffi::threads::init_numa(numa);
        }
    }

    /// Returns the settings that change the model's results, as a text; empty for none.
    pub(super) fn result_settings(&self) -> String {
        let rope = (self.rope != RopeOptions::default()).then(|| format!("{:?}", self.rope));
        let overrides = self.overrides.iter().map(|(key, value)| format!(";{key}={value:?}"));
        rope.into_iter().chain(overrides).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{MetadataValue, RopeOptions, RopeScaling, Tuning};
    use llama_cpp_2::context::params::{LlamaContextParams, RopeScalingType};

    #[test]
    fn settings_are_passed_to_llama_cpp_and_others_kept() {
        let plain = LlamaContextParams::default();
        let tuned = Tuning::default().apply(plain.clone());
        assert_eq!(tuned.rope_freq_base(), plain.rope_freq_base());
        assert_eq!(tuned.offload_kqv(), plain.offload_kqv());
        let rope = RopeOptions {
            scaling: Some(RopeScaling::Yarn),
            base: Some(5e5),
            scale: Some(0.25),
            yarn_original_context: Some(4096),
            ..RopeOptions::default()
        };
        let tuned = Tuning { rope, cache_on_host: true, ..Tuning::default() }.apply(plain);
        assert_eq!(tuned.rope_scaling_type(), RopeScalingType::Yarn);
        assert_eq!((tuned.rope_freq_base(), tuned.rope_freq_scale(), tuned.yarn_orig_ctx()), (5e5, 0.25, 4096));
        assert!(!tuned.offload_kqv());
    }

    #[test]
    fn result_settings_list_only_settings_that_change_results() {
        assert_eq!(Tuning { check_tensors: true, cache_on_host: true, ..Tuning::default() }.result_settings(), "");
        let rope = RopeOptions { base: Some(5e5), ..RopeOptions::default() };
        assert_ne!(Tuning { rope, ..Tuning::default() }.result_settings(), "");
        let overrides = vec![("a".to_owned(), MetadataValue::Bool(true))];
        assert_ne!(Tuning { overrides, ..Tuning::default() }.result_settings(), "");
    }
}
