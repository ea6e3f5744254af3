//! The choice between flash attention and stored probabilities for contexts that capture attention.

use super::cache_type::CacheType;
use super::devices::Placement;

/// Capture of attention.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AttentionCapture {
    /// No capture; llama.cpp decides on flash attention.
    Off,
    /// Capture from stored probabilities, without flash attention.
    On,
    /// Capture with flash attention: rows are computed from its inputs, for requested tokens only.
    Flash,
    /// [`AttentionCapture::Flash`] if it usually makes runs without attention faster, else [`AttentionCapture::On`].
    #[default]
    Auto,
}

/// Number of values in a vector of llama.cpp's flash attention on processors with 16-bit float arithmetic
/// (AVX512-FP16).
const WIDE_VECTOR: u32 = 128;

impl AttentionCapture {
    /// Returns the name of the setting.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Flash => "flash",
            Self::Auto => "auto",
        }
    }

    /// Returns true if attention can be captured.
    #[must_use]
    pub fn is_enabled(self) -> bool {
        self != Self::Off
    }

    /// Returns the effective setting for this placement, these cache types, and `width` values per head.
    pub(super) fn resolve(self, placement: &Placement, keys: CacheType, values: CacheType, width: u32) -> Self {
        // Flash attention converts a cache of 32-bit floats to 16 bits at every step, which costs more than it saves and
        // rounds the scores.
        let is_wide = keys == CacheType::F32 || values == CacheType::F32;
        let uses_cpu = placement.devices.is_empty() || placement.gpu_layers < placement.layers;
        match self {
            Self::Auto if values.is_quantized() => Self::Flash,
            Self::Auto if is_wide || uses_cpu && is_scalar(values, width, has_wide_vectors()) => Self::On,
            Self::Auto => Self::Flash,
            other => other,
        }
    }
}

/// Returns true if llama.cpp's flash attention adds up some values of such heads one by one, because they do not fill a
/// vector. With heads of 64 values and 4000 tokens of context, generation is then 2.7 times slower than without flash
/// attention.
fn is_scalar(values: CacheType, width: u32, wide_vectors: bool) -> bool {
    wide_vectors && values == CacheType::F16 && !width.is_multiple_of(WIDE_VECTOR)
}

fn has_wide_vectors() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512fp16");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_stores_probabilities_for_32_bit_caches() {
        let (cpu, gpu) = (Placement::default(), Placement { devices: vec!["CUDA0".into()], ..Placement::default() });
        let auto = |placement, keys, values| AttentionCapture::Auto.resolve(placement, keys, values, 128);
        assert_eq!(auto(&cpu, CacheType::F16, CacheType::F16), AttentionCapture::Flash);
        assert_eq!(auto(&cpu, CacheType::F32, CacheType::F16), AttentionCapture::On);
        assert_eq!(auto(&gpu, CacheType::F16, CacheType::F16), AttentionCapture::Flash);
        assert_eq!(auto(&gpu, CacheType::F32, CacheType::F16), AttentionCapture::On);
        // Quantized values need flash attention.
        assert_eq!(auto(&cpu, CacheType::F32, CacheType::Q8_0), AttentionCapture::Flash);
        for other in [AttentionCapture::Off, AttentionCapture::On, AttentionCapture::Flash] {
            assert_eq!(other.resolve(&gpu, CacheType::F32, CacheType::F32, 64), other);
        }
    }

    #[test]
    fn heads_that_fill_no_vector_are_scalar() {
        assert!(is_scalar(CacheType::F16, 64, true) && is_scalar(CacheType::F16, 192, true));
        assert!(!is_scalar(CacheType::F16, 128, true) && !is_scalar(CacheType::F16, 64, false));
        assert!(!is_scalar(CacheType::Bf16, 64, true));
    }
}
