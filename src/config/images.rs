//! The image encoder of the command line.

use super::ConfigError;
use super::flag_values::OnOff;
use clap::Args;
use std::path::PathBuf;

/// The image encoder.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Images")]
pub struct ImageFlags {
    /// Projector (GGUF) that lets --model see images; default: text only [also: -mm]
    #[arg(long, env = "THUNDER_MMPROJ", value_name = "PATH")]
    mmproj: Option<PathBuf>,
    /// Encoding of images on the GPU, if the model uses one [also: --no-mmproj-offload]
    #[arg(long, env = "THUNDER_MMPROJ_OFFLOAD", value_name = "on|off", default_value = "on", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    mmproj_offload: OnOff,
    /// Minimum tokens of an image, for projectors whose images have different numbers of tokens; default: the projector's
    #[arg(long, env = "THUNDER_IMAGE_MIN_TOKENS", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    image_min_tokens: Option<u32>,
    /// Maximum tokens of an image, for projectors whose images have different numbers of tokens; default: the projector's
    #[arg(long, env = "THUNDER_IMAGE_MAX_TOKENS", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    image_max_tokens: Option<u32>,
}

/// The image encoder of the default model.
#[derive(Debug, Clone)]
pub struct ImageConfig {
    /// Path of the projector.
    pub projector: PathBuf,
    /// True if a GPU is used.
    pub gpu: bool,
    /// Minimum tokens of an image; `None` for the projector's.
    pub min_tokens: Option<u32>,
    /// Maximum tokens of an image; `None` for the projector's.
    pub max_tokens: Option<u32>,
}

impl ImageFlags {
    pub(super) fn config(self) -> Result<Option<ImageConfig>, ConfigError> {
        let (min_tokens, max_tokens) = (self.image_min_tokens, self.image_max_tokens);
        if let (Some(min), Some(max)) = (min_tokens, max_tokens)
            && min > max
        {
            return Err(ConfigError::ImageTokens { min, max });
        }
        let Some(projector) = self.mmproj else { return Ok(None) };
        if !projector.is_file() {
            return Err(ConfigError::NoProjector { path: projector.display().to_string() });
        }
        Ok(Some(ImageConfig { projector, gpu: self.mmproj_offload == OnOff::On, min_tokens, max_tokens }))
    }
}
