//! The control vectors of the command line.

use super::{ConfigError, ScaledFile};
use clap::Args;
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// The control vectors.
#[derive(Debug, Clone, Default, Args)]
pub struct ControlFlags {
    /// Control vector (GGUF) that is added to what comes out of the layers of --model, again or after a comma for more
    #[arg(long, env = "THUNDER_CONTROL_VECTOR", value_name = "PATH", value_delimiter = ',')]
    control_vector: Vec<PathBuf>,
    /// The same with how strongly it holds, e.g. `happy.gguf:0.5`, or `happy.gguf:-1` for the opposite
    #[arg(long, env = "THUNDER_CONTROL_VECTOR_SCALED", value_name = "PATH:SCALE", value_delimiter = ',')]
    control_vector_scaled: Vec<ScaledFile>,
    /// First and last layer that control vectors are added to, counted from 0 [in the environment with a comma between them]
    #[arg(
        long,
        env = "THUNDER_CONTROL_VECTOR_LAYER_RANGE",
        value_names = ["FIRST", "LAST"],
        num_args = 2,
        value_delimiter = ','
    )]
    control_vector_layer_range: Vec<u32>,
}

/// Which control vectors hold, and where.
#[derive(Debug, Clone, Default)]
pub struct ControlConfig {
    /// The files, each with how strongly it holds.
    pub files: Vec<(PathBuf, f32)>,
    /// The layers that they are added to; `None` for all.
    pub layers: Option<RangeInclusive<u32>>,
}

impl ControlFlags {
    pub(super) fn config(self) -> Result<ControlConfig, ConfigError> {
        let plain = self.control_vector.into_iter().map(|path| (path, 1.0));
        let scaled = self.control_vector_scaled.into_iter().map(|ScaledFile { path, scale }| (path, scale));
        let files: Vec<_> = plain.chain(scaled).collect();
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
