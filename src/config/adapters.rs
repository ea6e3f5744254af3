//! LoRA adapters of the command line, numbered in command-line order across both flags.

use super::ConfigError;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use std::path::PathBuf;

/// LoRA adapters.
#[derive(Debug, Clone)]
pub struct AdapterFlags {
    /// The files, in order.
    pub files: Vec<ScaledFile>,
    /// True if adapters have scale 0 until a request sets another one.
    pub init_without_apply: bool,
}

/// A file and its scale.
#[derive(Debug, Clone, PartialEq)]
pub struct ScaledFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Scale; 1 is the strength used in training.
    pub scale: f32,
}

#[derive(Args)]
struct AdapterArguments {
    /// LoRA adapter (GGUF) for --model; repeat or separate with commas. Requests refer to it by its number, from 0
    #[arg(long, env = "THUNDER_LORA", value_name = "PATH", value_delimiter = ',')]
    lora: Vec<PathBuf>,
    /// LoRA adapter with its scale, e.g. `style.gguf:0.5`; numbered together with --lora, in order
    #[arg(long, env = "THUNDER_LORA_SCALED", value_name = "PATH:SCALE", value_delimiter = ',')]
    lora_scaled: Vec<ScaledFile>,
    /// Scale 0 for all LoRA adapters until POST /lora-adapters or a request sets another one
    #[arg(long, env = "THUNDER_LORA_INIT_WITHOUT_APPLY", value_parser = clap::builder::FalseyValueParser::new())]
    lora_init_without_apply: bool,
}

impl AdapterFlags {
    /// Returns the files with their scales.
    pub(super) fn config(self) -> Result<Vec<(PathBuf, f32)>, ConfigError> {
        let starts_disabled = self.init_without_apply;
        let checked = self.files.into_iter().map(|ScaledFile { path, scale }| {
            if !path.is_file() {
                return Err(ConfigError::NoAdapter { path: path.display().to_string() });
            }
            Ok((path, if starts_disabled { 0.0 } else { scale }))
        });
        checked.collect()
    }
}

impl Args for AdapterFlags {
    fn augment_args(command: Command) -> Command {
        AdapterArguments::augment_args(command)
    }
    fn augment_args_for_update(command: Command) -> Command {
        AdapterArguments::augment_args_for_update(command)
    }
}

impl FromArgMatches for AdapterFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let parsed = AdapterArguments::from_arg_matches(matches)?;
        let positions = |id: &str| matches.indices_of(id).into_iter().flatten().chain(std::iter::repeat(usize::MAX));
        let plain = parsed.lora.into_iter().map(|path| ScaledFile { path, scale: 1.0 });
        let mut files: Vec<(usize, ScaledFile)> = positions("lora").zip(plain).collect();
        files.extend(positions("lora_scaled").zip(parsed.lora_scaled));
        files.sort_by_key(|&(position, _)| position);
        let files = files.into_iter().map(|(_, file)| file).collect();
        Ok(Self { files, init_without_apply: parsed.lora_init_without_apply })
    }
    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl std::str::FromStr for ScaledFile {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = text.rsplit_once(':').and_then(|(path, scale)| {
            let scale = scale.parse::<f32>().ok().filter(|scale| scale.is_finite())?;
            Some(Self { path: path.into(), scale })
        });
        parsed.ok_or_else(|| format!("'{text}' is not a path and a scale; expected PATH:SCALE, e.g. style.gguf:0.5"))
    }
}

#[cfg(test)]
mod tests {
    use super::AdapterFlags;
    use clap::{Command, FromArgMatches};

    #[test]
    fn adapters_are_numbered_in_command_line_order() {
        let command = <AdapterFlags as clap::Args>::augment_args(Command::new("x"));
        let words = ["x", "--lora-scaled", "a:0.5,b:2", "--lora", "c,d", "--lora-scaled", "e:0", "--lora=f"];
        let flags = AdapterFlags::from_arg_matches(&command.try_get_matches_from(words).unwrap()).unwrap();
        let files: Vec<_> = flags.files.iter().map(|file| (file.path.to_str().unwrap(), file.scale)).collect();
        assert_eq!(files, [("a", 0.5), ("b", 2.0), ("c", 1.0), ("d", 1.0), ("e", 0.0), ("f", 1.0)]);
    }
}
