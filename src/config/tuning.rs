//! How the model is computed, where a person knows better than llama.cpp: rotary positions, what the file says, threads,
//! memory. The spellings are llama-server's.

use super::flags::OnOff;
use clap::{Args, ValueEnum};

/// Most processors that a mask can name.
const MOST_CPUS: usize = 512;
/// Most bytes of a key, and of a text, that llama.cpp takes.
const MOST_BYTES: usize = 127;

/// How the model is computed.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Tuning")]
pub struct TuningFlags {
    /// How positions beyond those that the model was trained with are scaled; without it as the model says
    #[arg(long, env = "THUNDER_ROPE_SCALING", value_name = "none|linear|yarn")]
    pub rope_scaling: Option<RopeScalingFlag>,
    /// How many times the context that the model was trained with is to be reached
    #[arg(long, env = "THUNDER_ROPE_SCALE", value_name = "X", value_parser = positive, conflicts_with = "rope_freq_scale")]
    pub rope_scale: Option<f32>,
    /// Base of the rotary positions; without it as the model says
    #[arg(long, env = "THUNDER_ROPE_FREQ_BASE", value_name = "X", value_parser = positive)]
    pub rope_freq_base: Option<f32>,
    /// The same as --rope-scale, as its reciprocal
    #[arg(long, env = "THUNDER_ROPE_FREQ_SCALE", value_name = "X", value_parser = positive)]
    pub rope_freq_scale: Option<f32>,
    /// Context that the model had before it was extended with YaRN
    #[arg(long, env = "THUNDER_YARN_ORIG_CTX", value_name = "TOKENS")]
    pub yarn_orig_ctx: Option<u32>,
    /// How much of YaRN's extrapolation is mixed in, 0 for interpolation only
    #[arg(long, env = "THUNDER_YARN_EXT_FACTOR", value_name = "X", value_parser = finite, allow_negative_numbers = true)]
    pub yarn_ext_factor: Option<f32>,
    /// By how much YaRN scales the magnitude of attention
    #[arg(long, env = "THUNDER_YARN_ATTN_FACTOR", value_name = "X", value_parser = finite, allow_negative_numbers = true)]
    pub yarn_attn_factor: Option<f32>,
    /// YaRN's high correction dimension
    #[arg(long, env = "THUNDER_YARN_BETA_SLOW", value_name = "X", value_parser = finite, allow_negative_numbers = true)]
    pub yarn_beta_slow: Option<f32>,
    /// YaRN's low correction dimension
    #[arg(long, env = "THUNDER_YARN_BETA_FAST", value_name = "X", value_parser = finite, allow_negative_numbers = true)]
    pub yarn_beta_fast: Option<f32>,
    /// Take something else than what the model's file says, e.g. `tokenizer.ggml.add_bos_token=bool:false`, again or after a
    /// comma for more
    #[arg(long, env = "THUNDER_OVERRIDE_KV", value_name = "KEY=TYPE:VALUE", value_delimiter = ',')]
    pub override_kv: Vec<MetadataOverride>,
    /// Look for invalid numbers in the weights while they are loaded
    #[arg(long, env = "THUNDER_CHECK_TENSORS", value_parser = clap::builder::FalseyValueParser::new())]
    pub check_tensors: bool,
    /// How the weights are read: auto maps them, none as with --no-mmap, mlock and mmap+mlock keep them from being swapped out
    #[arg(long, env = "THUNDER_LOAD_MODE", value_name = "MODE")]
    pub load_mode: Option<LoadMode>,
    /// Whether the KV cache of layers that are on GPUs is there, too [also: --no-kv-offload, -nkvo]
    #[arg(long, env = "THUNDER_KV_OFFLOAD", value_name = "on|off", default_value = "on", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    pub kv_offload: OnOff,
    /// Whether GPUs help with prompts through layers that are not theirs [also: --no-op-offload]
    #[arg(long, env = "THUNDER_OP_OFFLOAD", value_name = "on|off", default_value = "on", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    pub op_offload: OnOff,
    /// Whether weights are laid out anew for the processor that computes them [also: --no-repack]
    #[arg(long, env = "THUNDER_REPACK", value_name = "on|off", default_value = "on", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    pub repack: OnOff,
    /// Let the processor's own layouts be used where GPUs would want plain memory
    #[arg(long, env = "THUNDER_NO_HOST", value_parser = clap::builder::FalseyValueParser::new())]
    pub no_host: bool,
    /// How threads and memory go on machines of several nodes
    #[arg(long, env = "THUNDER_NUMA", value_name = "distribute|isolate|numactl")]
    pub numa: Option<NumaFlag>,
    /// How long threads look for work before they sleep: 0 not at all, 100 longest
    #[arg(long, env = "THUNDER_POLL", value_name = "0..100", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub poll: u32,
    /// Priority of the threads that decode, -1 low to 3 real-time; above 0 it needs the right
    #[arg(long, env = "THUNDER_PRIO", value_name = "-1..3", default_value_t = 0, value_parser = clap::value_parser!(i32).range(-1..=3),
          allow_negative_numbers = true)]
    pub prio: i32,
    /// CpuSet that decode, as the bits of a hexadecimal number
    #[arg(long, env = "THUNDER_CPU_MASK", value_name = "HEX")]
    pub cpu_mask: Option<CpuSet>,
    /// CpuSet that decode, from the first to the last, together with those of --cpu-mask
    #[arg(long, env = "THUNDER_CPU_RANGE", value_name = "FIRST-LAST", value_parser = range)]
    pub cpu_range: Option<CpuSet>,
    /// Whether each thread has a processor of its own of those
    #[arg(long, env = "THUNDER_CPU_STRICT", value_name = "on|off", default_value = "off")]
    pub cpu_strict: OnOff,
}

impl Default for TuningFlags {
    fn default() -> Self {
        Self {
            rope_scaling: None,
            rope_scale: None,
            rope_freq_base: None,
            rope_freq_scale: None,
            yarn_orig_ctx: None,
            yarn_ext_factor: None,
            yarn_attn_factor: None,
            yarn_beta_slow: None,
            yarn_beta_fast: None,
            override_kv: Vec::new(),
            check_tensors: false,
            load_mode: None,
            kv_offload: OnOff::On,
            op_offload: OnOff::On,
            repack: OnOff::On,
            no_host: false,
            numa: None,
            poll: 1,
            prio: 0,
            cpu_mask: None,
            cpu_range: None,
            cpu_strict: OnOff::Off,
        }
    }
}

impl TuningFlags {
    /// By what the frequencies of rotary positions are multiplied.
    #[must_use]
    pub fn frequency_scale(&self) -> Option<f32> {
        self.rope_freq_scale.or_else(|| self.rope_scale.map(f32::recip))
    }

    /// Numbers of the processors that decode, in order; empty for any.
    #[must_use]
    pub fn processors(&self) -> Vec<usize> {
        let both = self.cpu_mask.iter().chain(&self.cpu_range);
        let mut all: Vec<usize> = both.flat_map(|set| set.0.iter().copied()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// How positions beyond those of the training are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RopeScalingFlag {
    /// Not at all.
    None,
    /// All alike.
    Linear,
    /// By frequency.
    Yarn,
}

/// How the weights are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoadMode {
    /// Mapped.
    #[value(alias = "mmap")]
    Auto,
    /// Into memory.
    #[value(alias = "dio")]
    None,
    /// Into memory that is not swapped out.
    Mlock,
    /// Mapped, and not swapped out.
    #[value(name = "mmap+mlock")]
    MmapMlock,
}

/// How threads and memory go on machines of several nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NumaFlag {
    /// Evenly over all.
    Distribute,
    /// On the one where the program began.
    Isolate,
    /// As numactl says.
    Numactl,
}

/// Numbers of processors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuSet(Vec<usize>);

impl std::str::FromStr for CpuSet {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or(text);
        let wrong = || format!("'{text}' is not a hexadecimal number of at most {} digits, such as ff", MOST_CPUS / 4);
        if digits.is_empty() || digits.len() > MOST_CPUS / 4 {
            return Err(wrong());
        }
        let mut found = Vec::new();
        for (place, digit) in digits.chars().rev().enumerate() {
            let bits = digit.to_digit(16).ok_or_else(wrong)?;
            found.extend((0..4).filter(|bit| bits >> bit & 1 == 1).map(|bit| place * 4 + bit));
        }
        if found.is_empty() {
            return Err(format!("'{text}' names no processor"));
        }
        Ok(Self(found))
    }
}

fn range(text: &str) -> Result<CpuSet, String> {
    let wrong = || format!("'{text}' is not a range of processors such as 0-3, with numbers below {MOST_CPUS}");
    let (first, last) = text.split_once('-').ok_or_else(wrong)?;
    let number = |text: &str, otherwise: usize| match text {
        "" => Ok(otherwise),
        text => text.parse::<usize>().map_err(|_| wrong()),
    };
    let (first, last) = (number(first, 0)?, number(last, MOST_CPUS - 1)?);
    if first > last || last >= MOST_CPUS {
        return Err(wrong());
    }
    Ok(CpuSet((first..=last).collect()))
}

/// Something else than what the model's file says.
#[derive(Debug, Clone, PartialEq)]
pub struct MetadataOverride {
    /// Its key.
    pub key: String,
    /// What holds instead.
    pub value: OverrideValue,
}

/// A value of a model's file.
#[derive(Debug, Clone, PartialEq)]
pub enum OverrideValue {
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// Yes or no.
    Bool(bool),
    /// A text.
    Text(String),
}

impl std::str::FromStr for MetadataOverride {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || {
            format!(
                "'{text}' is not KEY=TYPE:VALUE with one of the types int, float, bool and str, e.g. \
                 tokenizer.ggml.add_bos_token=bool:false"
            )
        };
        let (key, typed) = text.split_once('=').ok_or_else(wrong)?;
        let (kind, value) = typed.split_once(':').ok_or_else(wrong)?;
        let fits = |text: &str| !text.contains('\0') && text.len() <= MOST_BYTES;
        if key.is_empty() || !fits(key) || !fits(value) {
            return Err(format!("'{text}': key and value may have {MOST_BYTES} bytes each, and a key at least one"));
        }
        let value = match kind {
            "int" => OverrideValue::Int(value.parse().map_err(|_| wrong())?),
            "float" => OverrideValue::Float(value.parse().map_err(|_| wrong())?),
            "bool" => OverrideValue::Bool(value.parse().map_err(|_| wrong())?),
            "str" => OverrideValue::Text(value.to_owned()),
            _ => return Err(wrong()),
        };
        Ok(Self { key: key.to_owned(), value })
    }
}

fn finite(text: &str) -> Result<f32, String> {
    let number = text.parse::<f32>().ok().filter(|number| number.is_finite());
    number.ok_or_else(|| format!("'{text}' is not a number"))
}

fn positive(text: &str) -> Result<f32, String> {
    finite(text).ok().filter(|&number| number > 0.0).ok_or_else(|| format!("'{text}' is not a number above 0"))
}

#[cfg(test)]
mod tests {
    use super::{CpuSet, MetadataOverride, OverrideValue, TuningFlags, range};

    #[test]
    fn processors_are_read_from_bits_and_from_a_range() {
        let mask = |text: &str| text.parse::<CpuSet>().map(|set| set.0);
        assert_eq!(mask("0x11"), Ok(vec![0, 4]));
        assert_eq!(mask("F00"), Ok(vec![8, 9, 10, 11]));
        for wrong in ["", "0", "0x", "fg", &"f".repeat(129)] {
            assert!(mask(wrong).is_err(), "{wrong}");
        }
        assert_eq!(range("2-4").map(|set| set.0), Ok(vec![2, 3, 4]));
        assert_eq!(range("510-").map(|set| set.0), Ok(vec![510, 511]));
        for wrong in ["3", "4-2", "0-512", "a-b"] {
            assert!(range(wrong).is_err(), "{wrong}");
        }
        let flags =
            TuningFlags { cpu_mask: Some(CpuSet(vec![1, 3])), cpu_range: range("2-3").ok(), ..Default::default() };
        assert_eq!(flags.processors(), [1, 2, 3]);
    }

    #[test]
    fn what_a_file_says_can_be_overridden_with_its_type() {
        let read = |text: &str| text.parse::<MetadataOverride>().map(|read| read.value);
        assert_eq!(read("a.b=int:-5"), Ok(OverrideValue::Int(-5)));
        assert_eq!(read("a.b=float:0.5"), Ok(OverrideValue::Float(0.5)));
        assert_eq!(read("a.b=bool:false"), Ok(OverrideValue::Bool(false)));
        assert_eq!(read("a.b=str:x=y:z"), Ok(OverrideValue::Text("x=y:z".into())));
        for wrong in ["a", "a=int", "a=int:x", "a=bool:1", "a=list:1", "=int:1", &format!("a=str:{}", "x".repeat(128))]
        {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_scale_is_the_reciprocal_of_the_frequencies() {
        assert_eq!(TuningFlags { rope_scale: Some(4.0), ..Default::default() }.frequency_scale(), Some(0.25));
        assert_eq!(TuningFlags { rope_freq_scale: Some(0.5), ..Default::default() }.frequency_scale(), Some(0.5));
    }
}
