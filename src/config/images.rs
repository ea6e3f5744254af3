//! Flags of the image encoder, and of images in requests and recordings.

use super::flag_values::OnOff;
use super::{ConfigError, Size};
use clap::Args;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The image encoder.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Images")]
pub struct ImageFlags {
    /// Projector (GGUF) that lets --model see images; default: text only [also: -mm]
    #[arg(long, env = "THUNDER_MMPROJ", value_name = "PATH")]
    mmproj: Option<PathBuf>,
    /// Encoding of images on the GPU, if the model uses one [also: --no-mmproj-offload]
    #[arg(long, env = "THUNDER_MMPROJ_OFFLOAD", value_name = "on|off", default_value = "on", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    mmproj_offload: OnOff,
    /// Minimum tokens of an image, for projectors whose images have different numbers of tokens; default: the
    /// projector's
    #[arg(long, env = "THUNDER_IMAGE_MIN_TOKENS", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    image_min_tokens: Option<u32>,
    /// Maximum tokens of an image, for projectors whose images have different numbers of tokens; default: the
    /// projector's
    #[arg(long, env = "THUNDER_IMAGE_MAX_TOKENS", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    image_max_tokens: Option<u32>,
    /// Storage of image files with the recorded runs, for their replay and for later forks; off: only hash,
    /// size and dimensions
    #[arg(long, env = "THUNDER_RECORD_IMAGES", value_name = "on|off", default_value = "off", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    record_images: OnOff,
    /// Maximum size of the stored images of a run, e.g. 32M; further images are recorded without their files
    #[arg(long, env = "THUNDER_RECORD_IMAGES_SIZE", value_name = "SIZE", default_value = "32M")]
    record_images_size: Size,
    /// Fetching of images that clients send as http: and https: URLs; private addresses are rejected
    #[arg(long, env = "THUNDER_ALLOW_IMAGE_URLS", value_name = "on|off", default_value = "off", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    allow_image_urls: OnOff,
    /// Hosts with private addresses from which --allow-image-urls also fetches, e.g. images.local:8080
    #[arg(long, env = "THUNDER_IMAGE_URL_HOSTS", value_name = "HOST[:PORT],…", value_delimiter = ',')]
    image_url_hosts: Vec<UrlHost>,
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
    /// Maximum bytes of the stored images of a run; 0 stores none.
    pub record_bytes: usize,
    /// Fetching of images by URL; `None` if it is off.
    pub urls: Option<ImageUrlConfig>,
}

/// Fetching of images by URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageUrlConfig {
    /// Hosts that may have private addresses.
    pub private_hosts: Vec<UrlHost>,
}

/// The host of a URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UrlHost {
    /// Name or address, as in a URL.
    pub host: String,
    /// Port; `None` for all ports.
    pub port: Option<u16>,
}

impl fmt::Display for UrlHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.host),
            None => f.write_str(&self.host),
        }
    }
}

impl FromStr for UrlHost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid =
            || format!("'{text}' is not a host; expected HOST or HOST:PORT, e.g. images.local:8080 or [::1]:8080");
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => (host, Some(port.parse().map_err(|_| invalid())?)),
            _ => (text, None),
        };
        let is_bracketed = host.starts_with('[') && host.ends_with(']');
        let is_name = !host.is_empty() && !host.contains(|c: char| c.is_whitespace() || "/:@[]".contains(c));
        if is_bracketed || is_name { Ok(Self { host: host.to_ascii_lowercase(), port }) } else { Err(invalid()) }
    }
}

impl ImageFlags {
    /// Returns the warning about a flag that has no effect without a projector.
    pub(super) fn ineffective_flag_note(&self) -> Option<String> {
        let given = [
            ("--allow-image-urls", self.allow_image_urls == OnOff::On),
            ("--record-images", self.record_images == OnOff::On),
            ("--image-min-tokens", self.image_min_tokens.is_some()),
            ("--image-max-tokens", self.image_max_tokens.is_some()),
        ];
        let (flag, _) = given.into_iter().find(|(_, is_given)| *is_given && self.mmproj.is_none())?;
        Some(format!("{flag} has no effect without --mmproj: the model reads no images"))
    }

    pub(super) fn config(self) -> Result<Option<ImageConfig>, ConfigError> {
        let (min_tokens, max_tokens) = (self.image_min_tokens, self.image_max_tokens);
        if let (Some(min), Some(max)) = (min_tokens, max_tokens)
            && min > max
        {
            return Err(ConfigError::ImageTokens { min, max });
        }
        let allow_urls = self.allow_image_urls == OnOff::On;
        if !allow_urls && let Some(host) = self.image_url_hosts.first() {
            return Err(ConfigError::ImageUrlHosts { host: host.to_string() });
        }
        let Some(projector) = self.mmproj else { return Ok(None) };
        if !projector.is_file() {
            return Err(ConfigError::NoProjector { path: projector.display().to_string() });
        }
        let urls = ImageUrlConfig { private_hosts: self.image_url_hosts };
        Ok(Some(ImageConfig {
            projector,
            gpu: self.mmproj_offload == OnOff::On,
            min_tokens,
            max_tokens,
            record_bytes: if self.record_images == OnOff::On { self.record_images_size.0 } else { 0 },
            urls: allow_urls.then_some(urls),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::{ImageFlags, UrlHost};
    use crate::config::ConfigError;
    use crate::config::flag_values::OnOff;
    use crate::config::flags::default_flags;

    #[test]
    fn private_hosts_need_image_urls() {
        let flags = |allow_image_urls| ImageFlags {
            allow_image_urls,
            image_url_hosts: vec!["images.local:8080".parse().unwrap()],
            ..default_flags()
        };
        let error = flags(OnOff::Off).config().unwrap_err();
        assert!(matches!(&error, ConfigError::ImageUrlHosts { host } if host == "images.local:8080"), "{error}");
        let note = "--allow-image-urls has no effect without --mmproj: the model reads no images";
        assert_eq!(flags(OnOff::On).ineffective_flag_note().as_deref(), Some(note));
        assert_eq!(flags(OnOff::Off).ineffective_flag_note(), None);
        assert!(flags(OnOff::On).config().unwrap().is_none());
    }

    #[test]
    fn hosts_are_parsed_with_and_without_a_port() {
        let host = |host: &str, port| Ok(UrlHost { host: host.into(), port });
        assert_eq!("Images.local".parse(), host("images.local", None));
        assert_eq!("127.0.0.1:8080".parse(), host("127.0.0.1", Some(8080)));
        assert_eq!("[::1]:8080".parse(), host("[::1]", Some(8080)));
        assert_eq!("[::1]".parse(), host("[::1]", None));
        for invalid in ["", ":80", "a:b", "http://a", "a/b", "::1", "a b"] {
            assert!(invalid.parse::<UrlHost>().is_err(), "{invalid}");
        }
    }
}
