use llama_cpp_2::context::params::KvCacheType;
use std::fmt;

/// Data type of keys or values in the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheType {
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    #[default]
    F16,
    /// 16-bit floats with the range of 32-bit ones.
    Bf16,
    /// 8 bits and a scale for 32 values.
    Q8_0,
    /// 4 bits and a scale for 32 values.
    Q4_0,
    /// 4 bits, a scale and a minimum for 32 values.
    Q4_1,
    /// 4 bits on a non-linear scale, and a scale for 32 values.
    Iq4Nl,
    /// 5 bits and a scale for 32 values.
    Q5_0,
    /// 5 bits, a scale and a minimum for 32 values.
    Q5_1,
}

impl CacheType {
    /// All types.
    pub const ALL: [Self; 9] =
        [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Q4_0, Self::Q4_1, Self::Iq4Nl, Self::Q5_0, Self::Q5_1];

    /// Returns llama-server's name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Iq4Nl => "iq4_nl",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
        }
    }

    /// Returns true if several values share a scale. Quantized values need flash attention.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    pub(super) const fn to_llama(self) -> KvCacheType {
        match self {
            Self::F32 => KvCacheType::F32,
            Self::F16 => KvCacheType::F16,
            Self::Bf16 => KvCacheType::BF16,
            Self::Q8_0 => KvCacheType::Q8_0,
            Self::Q4_0 => KvCacheType::Q4_0,
            Self::Q4_1 => KvCacheType::Q4_1,
            Self::Iq4Nl => KvCacheType::IQ4_NL,
            Self::Q5_0 => KvCacheType::Q5_0,
            Self::Q5_1 => KvCacheType::Q5_1,
        }
    }

    /// Returns the type with ggml's number; `None` if no cache uses it.
    pub(super) fn from_ggml(ggml_type: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| {
            let raw: llama_cpp_sys_2::ggml_type = kind.to_llama().into();
            i32::try_from(raw) == Ok(ggml_type)
        })
    }

    /// Returns the name for ggml's type number; the number itself if no cache uses it.
    pub(super) fn name_of(ggml_type: i32) -> String {
        Self::from_ggml(ggml_type).map_or_else(|| format!("ggml type {ggml_type}"), |kind| kind.as_str().to_owned())
    }

    /// Returns true if all values are finite and small enough to keep results finite.
    pub(super) fn has_valid_numbers(self, bytes: &[u8]) -> bool {
        /// Exponent of 2^30; the largest number of `F16` is 2^16.
        const MAX_EXPONENT_BITS: u32 = 127 + 30;
        let f16 = |bytes: &[u8]| bytes.as_chunks::<2>().0.iter().all(|&b| u16::from_le_bytes(b) & 0x7c00 != 0x7c00);
        // Size of a block in bytes, and of the scales and minima at its start.
        let (block, scales) = match self {
            Self::F32 => {
                return bytes
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .all(|&b| (u32::from_le_bytes(b) >> 23) & 0xff < MAX_EXPONENT_BITS);
            }
            Self::Bf16 => {
                return bytes
                    .as_chunks::<2>()
                    .0
                    .iter()
                    .all(|&b| (u32::from(u16::from_le_bytes(b)) >> 7) & 0xff < MAX_EXPONENT_BITS);
            }
            Self::F16 => return f16(bytes),
            Self::Q8_0 => (34, 2),
            Self::Q4_0 | Self::Iq4Nl => (18, 2),
            Self::Q4_1 => (20, 4),
            Self::Q5_0 => (22, 2),
            Self::Q5_1 => (24, 4),
        };
        bytes.chunks_exact(block).all(|block| f16(&block[..scales]))
    }
}

impl fmt::Display for CacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::CacheType;

    #[test]
    fn invalid_numbers_are_detected() {
        let nan = 0x7e00_u16.to_le_bytes();
        for (kind, block, scales) in [
            (CacheType::F16, 2, 1),
            (CacheType::Q8_0, 34, 1),
            (CacheType::Q4_0, 18, 1),
            (CacheType::Iq4Nl, 18, 1),
            (CacheType::Q4_1, 20, 2),
            (CacheType::Q5_0, 22, 1),
            (CacheType::Q5_1, 24, 2),
        ] {
            let (size, of_block) = crate::model::llama::ffi::model_info::type_layout(kind.to_llama().into()).unwrap();
            assert_eq!((of_block, size == 32), (block, kind.is_quantized()), "{kind}");
            let valid = vec![0x55; 4 * block as usize];
            assert!(kind.has_valid_numbers(&valid), "{kind}");
            for scale in 0..scales {
                let mut bytes = valid.clone();
                bytes[2 * block as usize + 2 * scale..][..2].copy_from_slice(&nan);
                assert!(!kind.has_valid_numbers(&bytes), "{kind}");
            }
        }
        let f32s = |value: f32| CacheType::F32.has_valid_numbers(&[1.0f32.to_le_bytes(), value.to_le_bytes()].concat());
        assert!(f32s(-1e6) && !f32s(f32::NAN) && !f32s(f32::NEG_INFINITY) && !f32s(1e38));
        let bf16 = |value: f32| CacheType::Bf16.has_valid_numbers(&value.to_le_bytes()[2..]);
        assert!(bf16(-1e6) && !bf16(f32::NAN) && !bf16(-1e30));
    }
}
