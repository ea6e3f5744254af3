//! Compute settings that override llama.cpp's defaults: rotary position embeddings (RoPE), model metadata, threads,
//! memory. The flags have llama-server's names.

use super::flag_values::OnOff;
use clap::{Args, ValueEnum};

/// Maximum number of CPUs in a mask.
const MAX_CPUS: usize = 512;
/// llama.cpp's maximum length of a metadata key or text value, in bytes.
const MAX_METADATA_BYTES: usize = 127;

/// Compute settings.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Tuning")]
pub struct TuningFlags {
    /// Scaling of positions beyond the training context; default: the model's
    #[arg(long, env = "THUNDER_ROPE_SCALING", value_name = "none|linear|yarn")]
    pub rope_scaling: Option<RopeScalingFlag>,
    /// Factor by which the training context is extended; default: the model's
    #[arg(long, env = "THUNDER_ROPE_SCALE", value_name = "X", value_parser = positive, conflicts_with = "rope_freq_scale")]
    pub rope_scale: Option<f32>,
    /// Base frequency of the rotary position embeddings (RoPE); default: the model's
    #[arg(long, env = "THUNDER_ROPE_FREQ_BASE", value_name = "X", value_parser = positive)]
    pub rope_freq_base: Option<f32>,
    /// Reciprocal of --rope-scale; default: the model's
    #[arg(long, env = "THUNDER_ROPE_FREQ_SCALE", value_name = "X", value_parser = positive)]
    pub rope_freq_scale: Option<f32>,
    /// Training context of the model before it was extended with YaRN; default: the model's
    #[arg(long, env = "THUNDER_YARN_ORIG_CTX", value_name = "TOKENS")]
    pub yarn_orig_ctx: Option<u32>,
    /// YaRN's extrapolation mix factor; 0 for interpolation only; default: the model's
    #[arg(long, env = "THUNDER_YARN_EXT_FACTOR", value_name = "X", value_parser = finite, allow_negative_numbers = true)]
    pub yarn_ext_factor: Option<f32>,
    /// YaRN's scale of the attention magnitude; default: the model's
    #[arg(long, env = "THUNDER_YARN_ATTN_FACTOR", value_name = "X", value_parser = finite, allow_negative_numbers = true)]
    pub yarn_attn_factor: Option<f32>,
    /// YaRN's high correction dimension; default: the model's
    #[arg(long, env = "THUNDER_YARN_BETA_SLOW", value_name = "X", value_parser = finite, allow_negative_numbers = true)]
    pub yarn_beta_slow: Option<f32>,
    /// YaRN's low correction dimension; default: the model's
    #[arg(long, env = "THUNDER_YARN_BETA_FAST", value_name = "X", value_parser = finite, allow_negative_numbers = true)]
    pub yarn_beta_fast: Option<f32>,
    /// Override of a value in the model's metadata, e.g. `tokenizer.ggml.add_bos_token=bool:false`; repeat or separate
    /// with commas
    #[arg(long, env = "THUNDER_OVERRIDE_KV", value_name = "KEY=TYPE:VALUE", value_delimiter = ',')]
    pub override_kv: Vec<MetadataOverride>,
    /// Check of the weights for invalid numbers while loading
    #[arg(long, env = "THUNDER_CHECK_TENSORS", value_parser = clap::builder::FalseyValueParser::new())]
    pub check_tensors: bool,
    /// Loading of the weights: auto maps the file, none reads it into memory, mlock and mmap+mlock also lock them in
    /// memory
    #[arg(long, env = "THUNDER_LOAD_MODE", value_name = "MODE")]
    pub load_mode: Option<LoadMode>,
    /// KV cache of GPU layers on the GPU [also: --no-kv-offload, -nkvo]
    #[arg(long, env = "THUNDER_KV_OFFLOAD", value_name = "on|off", default_value = "on", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    pub kv_offload: OnOff,
    /// Prompt processing of CPU layers on GPUs [also: --no-op-offload]
    #[arg(long, env = "THUNDER_OP_OFFLOAD", value_name = "on|off", default_value = "on", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    pub op_offload: OnOff,
    /// Repacking of weights for the CPU or GPU that computes them [also: --no-repack]
    #[arg(long, env = "THUNDER_REPACK", value_name = "on|off", default_value = "on", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    pub repack: OnOff,
    /// No host buffers of GPUs, so that weights on the CPU can have CPU-specific layouts
    #[arg(long, env = "THUNDER_NO_HOST", value_parser = clap::builder::FalseyValueParser::new())]
    pub no_host: bool,
    /// Placement of threads and memory on NUMA machines
    #[arg(long, env = "THUNDER_NUMA", value_name = "distribute|isolate|numactl")]
    pub numa: Option<NumaFlag>,
    /// Polling level of waiting threads before they sleep, from 0 (no polling) to 100
    #[arg(long, env = "THUNDER_POLL", value_name = "0..100", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub poll: u32,
    /// Priority of the decoding threads, from -1 (low) to 3 (real-time); above 0 it needs privileges
    #[arg(long, env = "THUNDER_PRIO", value_name = "-1..3", default_value_t = 0, value_parser = clap::value_parser!(i32).range(-1..=3),
          allow_negative_numbers = true)]
    pub prio: i32,
    /// CPUs for decoding, as a hexadecimal bit mask
    #[arg(long, env = "THUNDER_CPU_MASK", value_name = "HEX")]
    pub cpu_mask: Option<CpuSet>,
    /// CPUs for decoding, as a range that is added to --cpu-mask
    #[arg(long, env = "THUNDER_CPU_RANGE", value_name = "FIRST-LAST", value_parser = range)]
    pub cpu_range: Option<CpuSet>,
    /// Pinning of each thread to one of these CPUs
    #[arg(long, env = "THUNDER_CPU_STRICT", value_name = "on|off", default_value = "off")]
    pub cpu_strict: OnOff,
}

impl TuningFlags {
    /// Returns the factor of the rotary frequencies.
    #[must_use]
    pub fn frequency_scale(&self) -> Option<f32> {
        self.rope_freq_scale.or_else(|| self.rope_scale.map(f32::recip))
    }

    /// Returns the numbers of the CPUs for decoding, in order; empty for any.
    #[must_use]
    pub fn processors(&self) -> Vec<usize> {
        let both = self.cpu_mask.iter().chain(&self.cpu_range);
        let mut all: Vec<usize> = both.flat_map(|set| set.0.iter().copied()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// Scaling of positions beyond the training context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RopeScalingFlag {
    /// No scaling.
    None,
    /// The same factor for all frequencies.
    Linear,
    /// A factor that depends on the frequency.
    Yarn,
}

/// Loading of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoadMode {
    /// Mapped file.
    #[value(alias = "mmap")]
    Auto,
    /// Read into memory.
    #[value(alias = "dio")]
    None,
    /// Read into locked memory.
    Mlock,
    /// Mapped file, locked in memory.
    #[value(name = "mmap+mlock")]
    MmapMlock,
}

/// Placement of threads and memory on NUMA machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NumaFlag {
    /// Evenly over all nodes.
    Distribute,
    /// On the node where the program started.
    Isolate,
    /// The placement of numactl.
    Numactl,
}

/// A set of CPU numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuSet(Vec<usize>);

impl std::str::FromStr for CpuSet {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or(text);
        let invalid = || format!("'{text}' is not a hexadecimal mask of 1 to {} digits, e.g. ff", MAX_CPUS / 4);
        if digits.is_empty() || digits.len() > MAX_CPUS / 4 {
            return Err(invalid());
        }
        let mut cpus = Vec::new();
        for (digit_index, digit) in digits.chars().rev().enumerate() {
            let bits = digit.to_digit(16).ok_or_else(invalid)?;
            cpus.extend((0..4).filter(|bit| bits >> bit & 1 == 1).map(|bit| digit_index * 4 + bit));
        }
        if cpus.is_empty() {
            return Err(format!("'{text}' selects no CPU"));
        }
        Ok(Self(cpus))
    }
}

fn range(text: &str) -> Result<CpuSet, String> {
    let invalid = || format!("'{text}' is not a range of CPUs below {MAX_CPUS}, e.g. 0-3");
    let (first, last) = text.split_once('-').ok_or_else(invalid)?;
    let number = |text: &str, otherwise: usize| match text {
        "" => Ok(otherwise),
        text => text.parse::<usize>().map_err(|_| invalid()),
    };
    let (first, last) = (number(first, 0)?, number(last, MAX_CPUS - 1)?);
    if first > last || last >= MAX_CPUS {
        return Err(invalid());
    }
    Ok(CpuSet((first..=last).collect()))
}

/// An override of a value in the model's metadata.
#[derive(Debug, Clone, PartialEq)]
pub struct MetadataOverride {
    /// The metadata key.
    pub key: String,
    /// The value to use.
    pub value: OverrideValue,
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum OverrideValue {
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// A text.
    Text(String),
}

impl std::str::FromStr for MetadataOverride {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || {
            format!(
                "'{text}' is not KEY=TYPE:VALUE with the type int, float, bool or str, e.g. \
                 tokenizer.ggml.add_bos_token=bool:false"
            )
        };
        let (key, typed) = text.split_once('=').ok_or_else(invalid)?;
        let (kind, value) = typed.split_once(':').ok_or_else(invalid)?;
        let fits = |text: &str| !text.contains('\0') && text.len() <= MAX_METADATA_BYTES;
        if key.is_empty() || !fits(key) || !fits(value) {
            return Err(format!(
                "'{text}': key and value must have up to {MAX_METADATA_BYTES} bytes, and the key at least one"
            ));
        }
        let value = match kind {
            "int" => OverrideValue::Int(value.parse().map_err(|_| invalid())?),
            "float" => OverrideValue::Float(value.parse().map_err(|_| invalid())?),
            "bool" => OverrideValue::Bool(value.parse().map_err(|_| invalid())?),
            "str" => OverrideValue::Text(value.to_owned()),
            _ => return Err(invalid()),
        };
        Ok(Self { key: key.to_owned(), value })
    }
}

fn finite(text: &str) -> Result<f32, String> {
    let number = text.parse::<f32>().ok().filter(|number| number.is_finite());
    number.ok_or_else(|| format!("expected a finite number, got '{text}'"))
}

fn positive(text: &str) -> Result<f32, String> {
    finite(text).ok().filter(|&number| number > 0.0).ok_or_else(|| format!("'{text}' is not a number above 0"))
}

#[cfg(test)]
mod tests {
    use super::{CpuSet, MetadataOverride, OverrideValue, TuningFlags, range};
    use crate::config::flags::default_flags;

    #[test]
    fn cpu_sets_parse_from_masks_and_ranges() {
        let mask = |text: &str| text.parse::<CpuSet>().map(|set| set.0);
        assert_eq!(mask("0x11"), Ok(vec![0, 4]));
        assert_eq!(mask("F00"), Ok(vec![8, 9, 10, 11]));
        for invalid in ["", "0", "0x", "fg", &"f".repeat(129)] {
            assert!(mask(invalid).is_err(), "{invalid}");
        }
        assert_eq!(range("2-4").map(|set| set.0), Ok(vec![2, 3, 4]));
        assert_eq!(range("510-").map(|set| set.0), Ok(vec![510, 511]));
        for invalid in ["3", "4-2", "0-512", "a-b"] {
            assert!(range(invalid).is_err(), "{invalid}");
        }
        let flags = TuningFlags { cpu_mask: Some(CpuSet(vec![1, 3])), cpu_range: range("2-3").ok(), ..default_flags() };
        assert_eq!(flags.processors(), [1, 2, 3]);
    }

    #[test]
    fn metadata_overrides_parse_with_their_type() {
        let read = |text: &str| text.parse::<MetadataOverride>().map(|read| read.value);
        assert_eq!(read("a.b=int:-5"), Ok(OverrideValue::Int(-5)));
        assert_eq!(read("a.b=float:0.5"), Ok(OverrideValue::Float(0.5)));
        assert_eq!(read("a.b=bool:false"), Ok(OverrideValue::Bool(false)));
        assert_eq!(read("a.b=str:x=y:z"), Ok(OverrideValue::Text("x=y:z".into())));
        for invalid in
            ["a", "a=int", "a=int:x", "a=bool:1", "a=list:1", "=int:1", &format!("a=str:{}", "x".repeat(128))]
        {
            assert!(read(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn rope_scale_is_the_reciprocal_of_the_frequency_scale() {
        assert_eq!(TuningFlags { rope_scale: Some(4.0), ..default_flags() }.frequency_scale(), Some(0.25));
        assert_eq!(TuningFlags { rope_freq_scale: Some(0.5), ..default_flags() }.frequency_scale(), Some(0.5));
    }
}
