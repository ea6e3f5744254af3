//! The KV cache: how it is kept, what of it is reused, and what happens when it is full.

use super::flags::OnOff;
use super::{ConfigError, Size};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};

/// Default of `--cache-ram`, in MiB.
const CACHE_RAM: i64 = 8192;

/// How keys or values are kept, as llama-server names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheTypeFlag(&'static str);

impl CacheTypeFlag {
    /// All of them.
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

    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.0
    }

    fn is_quantised(self) -> bool {
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
            format!("'{text}' is no type of the KV cache; the types are {names}")
        })
    }
}

/// The KV cache.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "KV cache")]
pub struct CacheFlags {
    /// How keys are kept: `f32`, `f16`, `bf16`, `q8_0`, `q4_0`, `q4_1`, `iq4_nl`, `q5_0` or `q5_1` [also: -ctk]
    #[arg(long, env = "THUNDER_CACHE_TYPE_K", value_name = "TYPE", default_value = "f16")]
    pub cache_type_k: CacheTypeFlag,
    /// How values are kept; a quantised type needs --attention off [also: -ctv]
    #[arg(long, env = "THUNDER_CACHE_TYPE_V", value_name = "TYPE", default_value = "f16")]
    pub cache_type_v: CacheTypeFlag,
    /// Share of a prompt that a slot must already hold to be chosen for it; 0 chooses without looking [also: -sps]
    #[arg(long, env = "THUNDER_SLOT_PROMPT_SIMILARITY", value_name = "SHARE", default_value_t = 0.1)]
    pub slot_prompt_similarity: f32,
    /// MiB of memory for states of slots that would be thrown away, 0 for none, -1 for no limit; without it 8192, but at most
    /// a quarter of the machine's [also: -cram]
    #[arg(long, env = "THUNDER_CACHE_RAM", value_name = "MIB", allow_negative_numbers = true)]
    pub cache_ram: Option<i64>,
    /// Memory for the sessions of all models, which clients keep on the server, e.g. 4G
    #[arg(long, env = "THUNDER_SESSION_MEMORY", value_name = "SIZE", default_value = "4G")]
    pub session_memory: Size,
    /// When the context is full: end the answer, shift tokens out whatever they are, or evict whole messages of the
    /// conversation; requests can say otherwise
    #[arg(long, env = "THUNDER_CONTEXT_POLICY", value_name = "POLICY", value_enum)]
    pub context_policy: Option<ContextPolicy>,
    /// As --context-policy shift [also: --no-context-shift]
    #[arg(long, env = "THUNDER_CONTEXT_SHIFT", value_name = "on|off", default_missing_value = "on", num_args = 0..=1,
          require_equals = true, conflicts_with = "context_policy")]
    pub context_shift: Option<OnOff>,
    /// Whether prompts begin behind the state that a slot holds, unless a request says otherwise [also: --no-cache-prompt]
    #[arg(long, env = "THUNDER_CACHE_PROMPT", value_name = "on|off", default_missing_value = "on", num_args = 0..=1,
          require_equals = true)]
    pub cache_prompt: Option<OnOff>,
    /// Least tokens of a piece of a slot's state that is moved up to where the prompt has it, 0 for never; such a piece keeps what
    /// it knew of the tokens before it
    #[arg(long, env = "THUNDER_CACHE_REUSE", value_name = "TOKENS", default_value_t = 0)]
    pub cache_reuse: u32,
    /// Give each slot the whole of --ctx-size instead of an equal share; takes memory for all of them [also: -kvu]
    #[arg(long, env = "THUNDER_KV_UNIFIED", value_name = "on|off", default_missing_value = "on", num_args = 0..=1, require_equals = true)]
    pub kv_unified: Option<OnOff>,
    /// The caches have no holes.
    #[arg(long, alias = "defrag", hide = true, value_name = "N", num_args = 0..=1, allow_negative_numbers = true)]
    pub defrag_thold: Option<f32>,
    /// Window layers always have their full cache.
    #[arg(long, hide = true)]
    pub swa_full: bool,
}

/// What happens when the context is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ContextPolicy {
    /// The answer ends.
    Stop,
    /// Tokens go, whatever they are.
    Shift,
    /// Whole messages go, oldest first.
    Evict,
}

/// The KV cache.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheConfig {
    /// How keys are kept.
    pub type_k: CacheTypeFlag,
    /// How values are kept.
    pub type_v: CacheTypeFlag,
    /// Share of a prompt that a slot must hold to be chosen for it; 0 chooses without looking.
    pub slot_prompt_similarity: f32,
    /// Most bytes of states that no slot has room for.
    pub idle_bytes: usize,
    /// Most bytes of sessions.
    pub session_bytes: usize,
}

impl CacheFlags {
    /// Checks the flags; `attention` is whether it can be captured.
    pub(super) fn config(&self, attention: bool) -> Result<CacheConfig, ConfigError> {
        if attention && self.cache_type_v.is_quantised() {
            return Err(ConfigError::QuantisedValues { cache_type: self.cache_type_v });
        }
        if !(0.0..=1.0).contains(&self.slot_prompt_similarity) {
            return Err(ConfigError::Similarity { value: self.slot_prompt_similarity });
        }
        Ok(CacheConfig {
            type_k: self.cache_type_k,
            type_v: self.cache_type_v,
            slot_prompt_similarity: self.slot_prompt_similarity,
            idle_bytes: match self.cache_ram {
                Some(mib) => usize::try_from(mib).map_or(usize::MAX, |mib| mib.saturating_mul(1 << 20)),
                None => default_idle_bytes(super::defaults::memory_bytes()),
            },
            session_bytes: self.session_memory.0,
        })
    }

    /// What the flags say of requests that do not say otherwise.
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

fn default_idle_bytes(memory: Option<usize>) -> usize {
    let most = (CACHE_RAM as usize) << 20;
    memory.map_or(most / 4, |memory| most.min(memory / 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_states_take_no_more_than_a_quarter_of_the_memory() {
        assert_eq!(default_idle_bytes(Some(8 << 30)), 2 << 30);
        assert_eq!(default_idle_bytes(Some(512 << 30)), 8 << 30);
        assert_eq!(default_idle_bytes(None), 2 << 30);
    }
}
