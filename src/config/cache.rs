//! The KV cache: data types, reuse across requests, and the policy for a full context.

use super::flag_values::OnOff;
use super::{ConfigError, Size};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};

/// Maximum default of `--cache-ram`, in MiB.
const MAX_DEFAULT_CACHE_RAM_MIB: usize = 8192;

/// Data type of keys or values, by llama-server's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheTypeFlag(&'static str);

impl CacheTypeFlag {
    /// All types.
    pub const ALL: [Self; 9] = [
        Self("f32"),
        Self("f16"),
        Self("bf16"),
        Self("q8_0"),
        Self("q4_0"),
        Self("q4_1"),
        Self("iq4_nl"),
        Self("q5_0"),
        Self("q5_1"),
    ];

    /// Returns the name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.0
    }

    fn is_quantized(self) -> bool {
        !matches!(self.0, "f32" | "f16" | "bf16")
    }
}

impl Default for CacheTypeFlag {
    fn default() -> Self {
        Self("f16")
    }
}

impl std::fmt::Display for CacheTypeFlag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::str::FromStr for CacheTypeFlag {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|kind| kind.0 == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::as_str).join(", ");
            format!("'{text}' is not a KV cache type; expected one of {names}")
        })
    }
}

/// The KV cache.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "KV cache")]
pub struct CacheFlags {
    /// Data type of keys: `f32`, `f16`, `bf16`, `q8_0`, `q4_0`, `q4_1`, `iq4_nl`, `q5_0` or `q5_1` [also: -ctk]
    #[arg(long, env = "THUNDER_CACHE_TYPE_K", value_name = "TYPE", default_value = "f16")]
    pub cache_type_k: CacheTypeFlag,
    /// Data type of values; quantized types exclude `--attention on` [also: -ctv]
    #[arg(long, env = "THUNDER_CACHE_TYPE_V", value_name = "TYPE", default_value = "f16")]
    pub cache_type_v: CacheTypeFlag,
    /// Minimum share of a prompt, 0 to 1, that must be in a slot's KV cache for the slot to be preferred; 0 ignores slot
    /// contents [also: -sps]
    #[arg(long, env = "THUNDER_SLOT_PROMPT_SIMILARITY", value_name = "SHARE", default_value_t = 0.1)]
    pub slot_prompt_similarity: f32,
    /// Memory in MiB for the snapshots of evicted slots; 0 for none, -1 for unlimited; default: 8192, but not more than
    /// a quarter of the machine's memory [also: -cram]
    #[arg(long, env = "THUNDER_CACHE_RAM", value_name = "MIB", allow_negative_numbers = true)]
    pub cache_ram: Option<i64>,
    /// Memory for the stored sessions of all models, e.g. 4G
    #[arg(long, env = "THUNDER_SESSION_MEMORY", value_name = "SIZE", default_value = "4G")]
    pub session_memory: Size,
    /// Policy for a full context: end the answer (stop), drop the oldest tokens (shift) or drop whole messages (evict);
    /// requests can override it; default: stop
    #[arg(long, env = "THUNDER_CONTEXT_POLICY", value_name = "POLICY", value_enum)]
    pub context_policy: Option<ContextPolicy>,
    /// Same as `--context-policy shift` [also: --no-context-shift]
    #[arg(long, env = "THUNDER_CONTEXT_SHIFT", value_name = "on|off", default_missing_value = "on", num_args = 0..=1,
          require_equals = true, conflicts_with = "context_policy")]
    pub context_shift: Option<OnOff>,
    /// Reuse of prompt tokens that are in a slot's KV cache; requests can override it; default: on [also: --no-cache-prompt]
    #[arg(long, env = "THUNDER_CACHE_PROMPT", value_name = "on|off", default_missing_value = "on", num_args = 0..=1,
          require_equals = true)]
    pub cache_prompt: Option<OnOff>,
    /// Minimum tokens of a cached piece that is moved to a new position in a prompt, 0 for never; a moved piece keeps the
    /// values that it had in its original context
    #[arg(long, env = "THUNDER_CACHE_REUSE", value_name = "TOKENS", default_value_t = 0)]
    pub cache_reuse: u32,
    /// Full --ctx-size for each slot instead of an equal share; allocates memory for all slots [also: -kvu]
    #[arg(long, env = "THUNDER_KV_UNIFIED", value_name = "on|off", default_missing_value = "on", num_args = 0..=1, require_equals = true)]
    pub kv_unified: Option<OnOff>,
}

/// Behavior when the context is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ContextPolicy {
    /// Ends the answer.
    Stop,
    /// Drops the oldest tokens.
    Shift,
    /// Drops whole messages, oldest first.
    Evict,
}

/// Validated settings of the KV cache.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheConfig {
    /// Data type of keys.
    pub type_k: CacheTypeFlag,
    /// Data type of values.
    pub type_v: CacheTypeFlag,
    /// Minimum share of a prompt that must be in a slot's KV cache for the slot to be preferred; 0 ignores slot contents.
    pub slot_prompt_similarity: f32,
    /// Maximum bytes of snapshots of evicted slots.
    pub cache_ram_bytes: usize,
    /// Maximum bytes of stored sessions.
    pub max_session_bytes: usize,
}

impl CacheFlags {
    /// Validates the flags. `stores_scores` is true if flash attention is off because attention is captured.
    pub(super) fn config(&self, stores_scores: bool) -> Result<CacheConfig, ConfigError> {
        if stores_scores && self.cache_type_v.is_quantized() {
            return Err(ConfigError::QuantizedValues { cache_type: self.cache_type_v });
        }
        if !(0.0..=1.0).contains(&self.slot_prompt_similarity) {
            return Err(ConfigError::Similarity { value: self.slot_prompt_similarity });
        }
        Ok(CacheConfig {
            type_k: self.cache_type_k,
            type_v: self.cache_type_v,
            slot_prompt_similarity: self.slot_prompt_similarity,
            cache_ram_bytes: match self.cache_ram {
                Some(mib) => usize::try_from(mib).map_or(usize::MAX, |mib| mib.saturating_mul(1 << 20)),
                None => default_cache_ram_bytes(super::defaults::memory_bytes()),
            },
            max_session_bytes: self.session_memory.0,
        })
    }

    /// Returns the request defaults that the flags set.
    pub(super) fn defaults(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        let policy = match (self.context_policy, self.context_shift) {
            (Some(policy), _) => Some(policy),
            (None, Some(OnOff::On)) => Some(ContextPolicy::Shift),
            (None, _) => None,
        };
        if let Some(name) = policy.and_then(|policy| policy.to_possible_value()) {
            fields.insert("context_policy".into(), json!(name.get_name()));
        }
        if self.cache_reuse > 0 {
            fields.insert("n_cache_reuse".into(), json!(self.cache_reuse));
        }
        if let Some(switch) = self.cache_prompt {
            fields.insert("cache_prompt".into(), json!(switch == OnOff::On));
        }
        fields
    }
}

fn default_cache_ram_bytes(memory: Option<usize>) -> usize {
    let max = MAX_DEFAULT_CACHE_RAM_MIB << 20;
    memory.map_or(max / 4, |memory| max.min(memory / 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_use_up_to_a_quarter_of_the_memory() {
        assert_eq!(default_cache_ram_bytes(Some(8 << 30)), 2 << 30);
        assert_eq!(default_cache_ram_bytes(Some(512 << 30)), 8 << 30);
        assert_eq!(default_cache_ram_bytes(None), 2 << 30);
    }
}
