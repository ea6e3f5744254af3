//! Choice of a model's files, as llama-server chooses them.

use crate::model::{SplitName, split_name};
use anyhow::bail;
use std::fmt;
use std::path::Path;

/// Quantizations that are preferred if none is requested.
const PREFERRED: [&str; 2] = ["Q4_K_M", "Q8_0"];

/// Words in the names of files that accompany a model, such as image encoders.
const COMPANIONS: [&str; 6] = ["mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-"];

/// A file with a path in a repository.
pub trait HasPath {
    /// Returns the path, with forward slashes.
    fn path(&self) -> &str;
}

/// A selection of a model in a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileSelector {
    /// A preferred quantization, else the first model.
    Any,
    /// A quantization, e.g. `Q8_0`.
    Quantization(String),
    /// A path.
    File(String),
}

impl FileSelector {
    /// Splits `user/model[:QUANT]` into the repository and the requested file.
    pub fn in_repository(name: &str, file: Option<&str>) -> anyhow::Result<(String, Self)> {
        let (repository, quantization) = match name.split_once(':') {
            Some((repository, quantization)) => (repository, Some(quantization)),
            None => (name, None),
        };
        if !is_repository(repository) || quantization == Some("") {
            bail!("--hf-repo must be USER/MODEL or USER/MODEL:QUANT, got \"{name}\"");
        }
        let wanted = match (file, quantization) {
            (Some(file), _) => Self::File(file.to_owned()),
            (None, Some(quantization)) => Self::Quantization(quantization.to_owned()),
            (None, None) => Self::Any,
        };
        Ok((repository.to_owned(), wanted))
    }

    /// Returns the requested file, with all parts of a split model in order; `None` if there is none.
    ///
    /// # Errors
    /// Parts are missing.
    pub fn choose<'a, F: HasPath>(&self, files: &'a [F]) -> Option<anyhow::Result<Vec<&'a F>>> {
        let models = || files.iter().filter(|file| is_model(file.path()));
        let with_quantization = |quantization: &str| {
            let quantization = quantization.to_ascii_lowercase();
            models().find(|file| {
                let path = file.path().to_ascii_lowercase();
                let mut matches = path.match_indices(&quantization);
                matches.any(|(at, found)| path[at + found.len()..].starts_with(['-', '.']))
            })
        };
        let first = match self {
            Self::File(path) => files.iter().find(|file| file.path() == path),
            Self::Quantization(quantization) => with_quantization(quantization),
            Self::Any => {
                PREFERRED.iter().find_map(|quantization| with_quantization(quantization)).or_else(|| models().next())
            }
        }?;
        Some(parts(first, files))
    }
}

impl fmt::Display for FileSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => Ok(()),
            Self::Quantization(quantization) => write!(f, " with the quantization {quantization}"),
            Self::File(path) => write!(f, " named {path}"),
        }
    }
}

/// Returns the models among the files, for an error.
pub fn list_models<F: HasPath>(files: &[F]) -> String {
    const MAX_LISTED: usize = 12;
    let models: Vec<&str> = files.iter().map(HasPath::path).filter(|path| is_model(path)).collect();
    match models.len() {
        0 => "no GGUF model".to_owned(),
        count if count <= MAX_LISTED => models.join(", "),
        count => format!("{} and {} more", models[..MAX_LISTED].join(", "), count - MAX_LISTED),
    }
}

/// Returns the quantization in a file's name, e.g. `Q4_K_M` of `model-Q4_K_M-00001-of-00002.gguf`.
pub fn quantization(path: &str) -> Option<String> {
    let stem = path.strip_suffix(".gguf")?;
    let stem = split_name(path).map_or(stem, |split| split.prefix);
    let word = stem.rsplit(['-', '.']).next().filter(|word| word.len() < stem.len())?;
    let is_word = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    is_word.then(|| word.to_ascii_uppercase())
}

fn parts<'a, F: HasPath>(first: &'a F, files: &'a [F]) -> anyhow::Result<Vec<&'a F>> {
    let Some(SplitName { prefix, count, .. }) = split_name(first.path()) else { return Ok(vec![first]) };
    let part = |index| {
        let is_part = |file: &&F| split_name(file.path()) == Some(SplitName { prefix, index, count });
        files.iter().find(is_part)
    };
    let found: Vec<&F> = (1..=count).map_while(part).collect();
    if found.is_empty() || found.len() < count as usize {
        bail!("{} is a part of a split model, and part {} of {count} is missing", first.path(), found.len() + 1);
    }
    Ok(found)
}

/// Returns true if a file is in the GGUF format by its name.
pub fn is_gguf(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "gguf")
}

/// Returns true for a model file; of a split model, only for the first part.
pub fn is_model(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let is_companion = COMPANIONS.iter().any(|word| name.contains(word));
    is_gguf(name) && !is_companion && split_name(path).is_none_or(|split| split.index == 1)
}

/// Returns true for `user/model`: words of letters, digits and `_`, joined by single `.` or `-`.
pub fn is_repository(name: &str) -> bool {
    let is_word = |part: &str| {
        let words = part.split(['.', '-']);
        words.into_iter().all(|word| !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'))
    };
    name.len() <= 256 && name.split_once('/').is_some_and(|(user, model)| is_word(user) && is_word(model))
}

#[cfg(test)]
mod tests {
    use super::{FileSelector, HasPath, is_repository, quantization};

    impl HasPath for &str {
        fn path(&self) -> &str {
            self
        }
    }

    fn chosen(name: &str, files: &[&'static str]) -> Option<Result<Vec<&'static str>, String>> {
        let (_, wanted) = FileSelector::in_repository(name, None).unwrap();
        let chosen = wanted.choose(files)?;
        Some(chosen.map(|files| files.into_iter().copied().collect()).map_err(|error| error.to_string()))
    }

    #[test]
    fn quantization_is_chosen_as_in_llama_server() {
        let files =
            ["mmproj-Q4_K_M.gguf", "a-F16.gguf", "a-Q8_0.gguf", "a-q4_k_m.gguf", "b/Q5_K_M-x.gguf", "README.md"];
        assert_eq!(chosen("u/m", &files), Some(Ok(vec!["a-q4_k_m.gguf"])));
        assert_eq!(chosen("u/m", &files[..3]), Some(Ok(vec!["a-Q8_0.gguf"])));
        assert_eq!(chosen("u/m", &files[..2]), Some(Ok(vec!["a-F16.gguf"])));
        assert_eq!(chosen("u/m:q5_k_m", &files), Some(Ok(vec!["b/Q5_K_M-x.gguf"])));
        assert_eq!(chosen("u/m:Q4", &files), None);
        assert_eq!(chosen("u/m", &files[5..]), None);
    }

    #[test]
    fn split_model_has_all_parts_in_order() {
        let files = ["m-Q8_0-00002-of-00003.gguf", "m-Q8_0-00001-of-00003.gguf", "m-Q8_0-00003-of-00003.gguf"];
        assert_eq!(chosen("u/m", &files), Some(Ok(vec![files[1], files[0], files[2]])));
        let missing = chosen("u/m", &files[..2]).unwrap().unwrap_err();
        assert!(missing.contains("part 3 of 3 is missing"), "{missing}");
        let none = FileSelector::File("m-00001-of-00000.gguf".to_owned());
        assert!(none.choose(&["m-00001-of-00000.gguf"]).unwrap().is_err());
    }

    #[test]
    fn quantization_is_the_last_word_of_the_name() {
        for (path, expected) in [
            ("gemma-3-it-Q4_K_M.gguf", Some("Q4_K_M")),
            ("x/a.f16-00001-of-00002.gguf", Some("F16")),
            ("model.gguf", None),
            ("model.bin", None),
        ] {
            assert_eq!(quantization(path).as_deref(), expected, "{path}");
        }
    }

    #[test]
    fn repository_name_holds_no_path() {
        assert!(is_repository("ggml-org/gemma-3.1-it_GGUF"));
        for wrong in ["gemma", "a/b/c", "../x", "a/..", "a//b", "/a", "a/", "a/-b", "a/b-", "a/b c", ""] {
            assert!(!is_repository(wrong), "{wrong}");
            assert!(FileSelector::in_repository(wrong, None).is_err(), "{wrong}");
        }
        assert!(FileSelector::in_repository("a/b:", None).is_err());
    }
}
