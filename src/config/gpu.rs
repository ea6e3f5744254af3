//! Placement of models on GPUs.

use super::ConfigError;
use clap::{Args, ValueEnum};

/// GPUs to use, and the parts of the model placed on them.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "GPUs")]
pub struct GpuFlags {
    /// Number of layers on GPUs, auto for as many as fit, or all; needs a GPU build [also: -ngl]
    #[arg(
        long,
        env = "THUNDER_GPU_LAYERS",
        value_name = "auto|all|N",
        alias = "n-gpu-layers",
        default_value = "auto",
        allow_negative_numbers = true
    )]
    pub gpu_layers: GpuLayersFlag,
    /// GPUs to use by their names from --list-devices, or none for CPU only; default: all [also: -dev]
    #[arg(long, env = "THUNDER_DEVICE", value_name = "NAME,NAME,…", value_delimiter = ',')]
    pub device: Vec<String>,
    /// Split of a model over several GPUs: none, by layer, or by row of each weight [also: -sm]
    #[arg(long, env = "THUNDER_SPLIT_MODE", value_name = "none|layer|row", default_value = "layer")]
    pub split_mode: SplitModeFlag,
    /// Share of each GPU as proportions, e.g. 3,1; default: by free memory [also: -ts]
    #[arg(long, env = "THUNDER_TENSOR_SPLIT", value_name = "P,P,…")]
    pub tensor_split: Option<TensorSplit>,
    /// Index of the GPU to use when the model is not split, from 0 [also: -mg]
    #[arg(long, env = "THUNDER_MAIN_GPU", value_name = "N", default_value_t = 0)]
    pub main_gpu: u16,
    /// Buffer for tensors whose names match a regular expression, e.g. `\.ffn_up=CPU`; repeat or separate with commas;
    /// takes precedence over --cpu-moe, --n-cpu-moe and --n-cpu-ffn [also: -ot]
    #[arg(long, env = "THUNDER_OVERRIDE_TENSOR", value_name = "PATTERN=BUFFER", value_delimiter = ',')]
    pub override_tensor: Vec<TensorOverride>,
    /// All expert weights on the CPU [also: -cmoe]
    #[arg(long, env = "THUNDER_CPU_MOE", value_parser = clap::builder::FalseyValueParser::new())]
    pub cpu_moe: bool,
    /// Number of layers, from the first, whose expert weights stay on the CPU [also: -ncmoe]
    #[arg(long, env = "THUNDER_N_CPU_MOE", value_name = "N", default_value_t = 0)]
    pub n_cpu_moe: u32,
    /// Number of layers, from the first, whose feed-forward weights stay on the CPU, in models without experts [also:
    /// -ncffn]
    #[arg(long, env = "THUNDER_N_CPU_FFN", value_name = "N", default_value_t = 0)]
    pub n_cpu_ffn: u32,
}

/// Buffer for the tensors whose names match a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorOverride {
    /// Regular expression for the tensor names.
    pub pattern: String,
    /// llama.cpp's name of the buffer.
    pub buffer: String,
}

impl std::str::FromStr for TensorOverride {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('=').map(|(pattern, buffer)| (pattern, buffer.trim())) {
            Some((pattern, buffer)) if !pattern.is_empty() && !buffer.is_empty() => {
                Ok(Self { pattern: pattern.to_owned(), buffer: buffer.to_owned() })
            }
            _ => Err(format!("'{text}' is not a tensor override; expected PATTERN=BUFFER, e.g. \\.ffn_up=CPU")),
        }
    }
}

/// Number of layers to place on GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GpuLayersFlag {
    /// All that fit.
    #[default]
    Auto,
    /// All.
    All,
    /// This number of layers.
    Count(u32),
}

impl std::str::FromStr for GpuLayersFlag {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            // llama-server's older value for all.
            "all" | "-1" => Ok(Self::All),
            count => count
                .parse()
                .map(Self::Count)
                .map_err(|_| format!("'{text}' is neither a number of layers nor auto or all")),
        }
    }
}

/// Share of each GPU as proportions; empty for shares by free memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TensorSplit(Vec<f32>);

impl std::str::FromStr for TensorSplit {
    type Err = &'static str;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // llama-server accepts both separators.
        let shares = text.split([',', '/']).map(|share| share.trim().parse().ok());
        match shares.collect::<Option<Vec<f32>>>() {
            _ if text.trim().is_empty() => Ok(Self::default()),
            Some(shares) if shares.iter().all(|share| share.is_finite() && *share >= 0.0) => Ok(Self(shares)),
            _ => Err("expected a proportion for each GPU, e.g. 3,1"),
        }
    }
}

/// Split of a model over several GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum SplitModeFlag {
    /// No split.
    None,
    /// By layer.
    #[default]
    Layer,
    /// By row of each weight.
    Row,
}

/// GPUs to use, and the parts of a model placed on them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuConfig {
    /// Layers on GPUs.
    pub layers: GpuLayersFlag,
    /// Names of the GPUs, in order; empty for CPU only, `None` for all.
    pub devices: Option<Vec<String>>,
    /// Split of a model over several GPUs.
    pub split_mode: SplitModeFlag,
    /// Share of each GPU; empty for shares by free memory.
    pub tensor_split: Vec<f32>,
    /// Index of the GPU to use when a model is not split, from 0.
    pub main_gpu: usize,
    /// Buffers for tensors by name.
    pub tensors: Vec<TensorOverride>,
    /// True if the expert weights of all layers stay on the CPU.
    pub cpu_moe: bool,
    /// Number of layers, from the first, whose expert weights stay on the CPU.
    pub n_cpu_moe: u32,
    /// Number of layers, from the first, whose feed-forward weights stay on the CPU, in models without experts.
    pub n_cpu_ffn: u32,
}

impl GpuFlags {
    /// Validates the flags.
    pub(super) fn config(self) -> Result<GpuConfig, ConfigError> {
        let names: Vec<&str> = self.device.iter().map(|name| name.trim()).filter(|name| !name.is_empty()).collect();
        let devices = match names[..] {
            [] => None,
            ["none"] => Some(Vec::new()),
            _ if names.contains(&"none") => return Err(ConfigError::DeviceNone),
            _ => Some(names.into_iter().map(str::to_owned).collect()),
        };
        Ok(GpuConfig {
            layers: self.gpu_layers,
            devices,
            split_mode: self.split_mode,
            tensor_split: self.tensor_split.unwrap_or_default().0,
            main_gpu: self.main_gpu.into(),
            tensors: self.override_tensor,
            cpu_moe: self.cpu_moe,
            n_cpu_moe: self.n_cpu_moe,
            n_cpu_ffn: self.n_cpu_ffn,
        })
    }
}

impl GpuConfig {
    /// Returns the flags that need a GPU, as written on a command line.
    #[must_use]
    pub fn gpu_flags(&self) -> Vec<String> {
        let mut flags = Vec::new();
        match self.layers {
            GpuLayersFlag::All => flags.push("--gpu-layers all".to_owned()),
            GpuLayersFlag::Count(count @ 1..) => flags.push(format!("--gpu-layers {count}")),
            GpuLayersFlag::Auto | GpuLayersFlag::Count(0) => {}
        }
        if self.split_mode == SplitModeFlag::Row {
            flags.push("--split-mode row".to_owned());
        }
        if !self.tensor_split.is_empty() {
            let shares: Vec<String> = self.tensor_split.iter().map(ToString::to_string).collect();
            flags.push(format!("--tensor-split {}", shares.join(",")));
        }
        if self.main_gpu > 0 {
            flags.push(format!("--main-gpu {}", self.main_gpu));
        }
        flags
    }
}
