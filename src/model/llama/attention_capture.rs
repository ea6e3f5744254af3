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
    /// Capture with flash attention: rows are computed from its inputs, and only for tokens that want them. On GPUs and
    /// with caches of 32-bit floats the same as [`AttentionCapture::On`].
    #[default]
    Auto,
}

impl AttentionCapture {
    /// Returns the name of the setting.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Auto => "auto",
        }
    }

    /// Returns true if attention can be captured.
    #[must_use]
    pub fn is_enabled(self) -> bool {
        self != Self::Off
    }

    /// Returns the setting that takes effect for this placement and these types of keys and values.
    pub(super) fn resolve(self, placement: &Placement, keys: CacheType, values: CacheType) -> Self {
        // Keys in GPU memory would have to be copied for every row. Flash attention converts a cache of 32-bit floats to
        // 16 bits at every step, which costs more than it saves and rounds the scores.
        let stores = !placement.devices.is_empty() || keys == CacheType::F32 || values == CacheType::F32;
        match self {
            Self::Auto if stores && !values.is_quantised() => Self::On,
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_stores_probabilities_on_gpus_and_for_32_bit_caches() {
        let (cpu, gpu) = (Placement::default(), Placement { devices: vec!["CUDA0".into()], ..Placement::default() });
        let auto = |placement, keys, values| AttentionCapture::Auto.resolve(placement, keys, values);
        assert_eq!(auto(&cpu, CacheType::F16, CacheType::F16), AttentionCapture::Auto);
        assert_eq!(auto(&cpu, CacheType::F32, CacheType::F16), AttentionCapture::On);
        assert_eq!(auto(&gpu, CacheType::F16, CacheType::F16), AttentionCapture::On);
        // Quantised values need flash attention.
        assert_eq!(auto(&cpu, CacheType::F32, CacheType::Q8_0), AttentionCapture::Auto);
        assert_eq!(AttentionCapture::Off.resolve(&gpu, CacheType::F32, CacheType::F32), AttentionCapture::Off);
    }
}
