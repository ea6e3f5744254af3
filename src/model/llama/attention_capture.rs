//! The choice between flash attention and stored probabilities for contexts that capture attention.

use super::cache_type::CacheType;

/// Capture of attention.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AttentionCapture {
    /// No capture; llama.cpp decides on flash attention.
    Off,
    /// Capture from stored probabilities, without flash attention.
    On,
    /// Capture with flash attention: rows are computed from its inputs, for requested tokens only.
    Flash,
    /// [`AttentionCapture::On`] for caches of 32-bit floats, else [`AttentionCapture::Flash`].
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
            Self::Flash => "flash",
            Self::Auto => "auto",
        }
    }

    /// Returns true if attention can be captured.
    #[must_use]
    pub fn is_enabled(self) -> bool {
        self != Self::Off
    }

    /// Returns the effective setting for these cache types.
    pub(super) fn resolve(self, keys: CacheType, values: CacheType) -> Self {
        // Flash attention converts a cache of 32-bit floats to 16 bits at every step, which costs more than it saves and
        // rounds the scores.
        let is_wide = keys == CacheType::F32 || values == CacheType::F32;
        match self {
            Self::Auto if values.is_quantized() => Self::Flash,
            Self::Auto if is_wide => Self::On,
            Self::Auto => Self::Flash,
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_stores_probabilities_for_32_bit_caches() {
        let auto = |keys, values| AttentionCapture::Auto.resolve(keys, values);
        assert_eq!(auto(CacheType::F16, CacheType::F16), AttentionCapture::Flash);
        assert_eq!(auto(CacheType::F32, CacheType::F16), AttentionCapture::On);
        assert_eq!(auto(CacheType::F16, CacheType::F32), AttentionCapture::On);
        // Quantized values need flash attention.
        assert_eq!(auto(CacheType::F32, CacheType::Q8_0), AttentionCapture::Flash);
        for other in [AttentionCapture::Off, AttentionCapture::On, AttentionCapture::Flash] {
            assert_eq!(other.resolve(CacheType::F32, CacheType::F32), other);
        }
    }
}
