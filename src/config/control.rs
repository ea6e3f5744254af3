//! Flags of control vectors.

use super::{ConfigError, ScaledFile};
use clap::Args;
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Control vectors.
#[derive(Debug, Clone, Args)]
pub struct ControlFlags {
    /// Control vector (GGUF) that is added to the layer outputs of --model; repeat or separate with commas. Requests refer
    /// to it by the file's name without extension
    #[arg(long, env = "THUNDER_CONTROL_VECTOR", value_name = "PATH", value_delimiter = ',')]
    control_vector: Vec<PathBuf>,
    /// Control vector with its scale, e.g. `happy.gguf:0.5`, or `happy.gguf:-1` for the opposite
    #[arg(long, env = "THUNDER_CONTROL_VECTOR_SCALED", value_name = "PATH:SCALE", value_delimiter = ',')]
    control_vector_scaled: Vec<ScaledFile>,
    /// Scale 0 for all control vectors in requests without `steering`
    #[arg(
        long,
        env = "THUNDER_CONTROL_VECTOR_INIT_WITHOUT_APPLY",
        value_parser = clap::builder::FalseyValueParser::new()
    )]
    control_vector_init_without_apply: bool,
    /// First and last layer that control vectors are added to, counted from 0; default: all layers [in the environment:
    /// FIRST,LAST]
    #[arg(
        long,
        env = "THUNDER_CONTROL_VECTOR_LAYER_RANGE",
        value_names = ["FIRST", "LAST"],
        num_args = 2,
        value_delimiter = ','
    )]
    control_vector_layer_range: Vec<u32>,
}

/// Control vectors with their scales and layers.
#[derive(Debug, Clone, Default)]
pub struct ControlConfig {
    /// The files, each with its default scale.
    pub files: Vec<(PathBuf, f32)>,
    /// Layers that the vectors are added to; `None` for all.
    pub layers: Option<RangeInclusive<u32>>,
}

impl ControlFlags {
    pub(super) fn config(self) -> Result<ControlConfig, ConfigError> {
        let plain = self.control_vector.into_iter().map(|path| (path, 1.0));
        let scaled = self.control_vector_scaled.into_iter().map(|ScaledFile { path, scale }| (path, scale));
        let starts_disabled = self.control_vector_init_without_apply;
        let default_scale = |(path, scale)| (path, if starts_disabled { 0.0 } else { scale });
        let files: Vec<_> = plain.chain(scaled).map(default_scale).collect();
        if let Some((path, _)) = files.iter().find(|(path, _)| !path.is_file()) {
            return Err(ConfigError::NoControlVector { path: path.display().to_string() });
        }
        let layers = match self.control_vector_layer_range[..] {
            [first, last] if first <= last => Some(first..=last),
            [first, last] => return Err(ConfigError::LayerRange { first, last }),
            _ => None,
        };
        Ok(ControlConfig { files, layers })
    }
}
