use llama_cpp_2::context::params::KvCacheType;
use std::fmt;

/// How the KV cache keeps keys or values.
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
    /// 4 bits on a curve, and a scale for 32 values.
    Iq4Nl,
    /// 5 bits and a scale for 32 values.
    Q5_0,
    /// 5 bits, a scale and a minimum for 32 values.
    Q5_1,
}

impl CacheType {
    /// All of them.
    pub const ALL: [Self; 9] =
        [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Q4_0, Self::Q4_1, Self::Iq4Nl, Self::Q5_0, Self::Q5_1];

    /// The name as llama-server's flags have it.
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

    /// Whether several values share a scale. Quantised values need flash attention.
    #[must_use]
    pub const fn is_quantised(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    pub(super) const fn of_llama(self) -> KvCacheType {
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

    /// The name of ggml's number for a type; the number itself for one that no cache has.
    pub(super) fn name_of(ggml_type: i32) -> String {
        let known = Self::ALL.into_iter().find(|kind| {
            let raw: llama_cpp_sys_2::ggml_type = kind.of_llama().into();
            i32::try_from(raw) == Ok(ggml_type)
        });
        known.map_or_else(|| format!("ggml type {ggml_type}"), |kind| kind.as_str().to_owned())
    }
}

impl fmt::Display for CacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
