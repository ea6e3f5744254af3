//! How a model is computed, where a person knows better than llama.cpp.

use super::ffi;
use super::ffi::threads::{ThreadOptions, ThreadPool};
use llama_cpp_2::context::params::{LlamaContextParams, RopeScalingType};

/// How a model is computed; the default is llama.cpp's choice, and what the model's file says.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tuning {
    /// Rotary positions.
    pub rope: RopeOptions,
    /// Something else than what the file says, by key.
    pub overrides: Vec<(String, MetadataValue)>,
    /// Look for invalid numbers in the weights while they are loaded.
    pub check_tensors: bool,
    /// Keep the KV cache of layers that are on GPUs in the machine's memory.
    pub cache_on_host: bool,
    /// Let GPUs compute their own layers only.
    pub no_op_offload: bool,
    /// Leave weights as the file has them.
    pub no_repack: bool,
    /// Let the processor's own layouts be used where GPUs would want plain memory.
    pub no_host: bool,
    /// Machines of several nodes; holds for the process from the first model that says it.
    pub numa: Option<Numa>,
    /// ThreadOptions that decode.
    pub threads: ThreadOptions,
}

/// Rotary positions; `None` is what the file says.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RopeOptions {
    /// How positions beyond those of the training are scaled.
    pub scaling: Option<RopeScaling>,
    /// Base of the frequencies.
    pub base: Option<f32>,
    /// What the frequencies are multiplied by.
    pub scale: Option<f32>,
    /// Context before the extension by YaRN, in tokens.
    pub yarn_original_context: Option<u32>,
    /// How much of YaRN's extrapolation is mixed in.
    pub yarn_extrapolation: Option<f32>,
    /// By how much YaRN scales the magnitude of attention.
    pub yarn_attention: Option<f32>,
    /// YaRN's low correction dimension.
    pub yarn_beta_fast: Option<f32>,
    /// YaRN's high correction dimension.
    pub yarn_beta_slow: Option<f32>,
}

/// How positions beyond those of the training are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All alike.
    Linear,
    /// By frequency.
    Yarn,
}

/// A value of a model's file.
#[derive(Debug, Clone, PartialEq)]
pub enum MetadataValue {
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// Yes or no.
    Bool(bool),
    /// A text of at most 127 bytes.
    Text(String),
}

/// How threads and memory go on machines of several nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numa {
    /// Evenly over all.
    Distribute,
    /// On the one where the program began.
    Isolate,
    /// As numactl says.
    Numactl,
}

impl Tuning {
    /// The parameters of a context with what is to be otherwise.
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

    /// ThreadOptions that stay between graphs, where they are of use.
    pub(super) fn pool(&self, threads: i32) -> Option<ThreadPool> {
        // One thread needs a pool only to be somewhere.
        (threads > 1 || self.threads.are_placed()).then(|| ThreadPool::start(threads, &self.threads)).flatten()
    }

    /// Tells llama.cpp how the machine is; once for the process, before the first model.
    pub(super) fn prepare(&self) {
        if let Some(numa) = self.numa {
            ffi::threads::prepare_nodes(numa);
        }
    }

    /// What of it changes what the model computes, as a text; empty for nothing.
    pub(super) fn difference(&self) -> String {
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
    fn what_is_said_goes_to_llama_cpp_and_the_rest_stays() {
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
    fn only_what_changes_the_numbers_makes_a_difference() {
        assert_eq!(Tuning { check_tensors: true, cache_on_host: true, ..Tuning::default() }.difference(), "");
        let rope = RopeOptions { base: Some(5e5), ..RopeOptions::default() };
        assert_ne!(Tuning { rope, ..Tuning::default() }.difference(), "");
        let overrides = vec![("a".to_owned(), MetadataValue::Bool(true))];
        assert_ne!(Tuning { overrides, ..Tuning::default() }.difference(), "");
    }
}
