//! Search for a Python interpreter that is new enough.

use super::LoadError;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const MIN_VERSION: (u32, u32) = (3, 9);
const VERSION_SCRIPT: &str = "import sys; print(*sys.version_info[:2], sys.executable, sep='\\n')";

/// Returns the interpreter for workers: `configured`; if that is `None`, the one that `THUNDER_PYTHON` names, or
/// `python3` on the PATH.
///
/// # Errors
/// [`LoadError::NoPython`] with the candidate that was tried.
pub fn find(configured: Option<&Path>) -> Result<PathBuf, LoadError> {
    static DEFAULT: OnceLock<PathBuf> = OnceLock::new();
    match (configured, DEFAULT.get()) {
        (Some(configured), _) => resolve(configured),
        (None, Some(known)) => Ok(known.clone()),
        (None, None) => {
            let candidate = std::env::var_os("THUNDER_PYTHON").unwrap_or_else(|| "python3".into());
            let found = resolve(Path::new(&candidate))?;
            Ok(DEFAULT.get_or_init(|| found).clone())
        }
    }
}

/// Returns the path of the actual interpreter. `candidate` may be a shim that depends on environment variables, which
/// workers do not have.
fn resolve(candidate: &Path) -> Result<PathBuf, LoadError> {
    let failed = |reason: String| LoadError::NoPython { tried: candidate.display().to_string(), reason };
    let output = Command::new(candidate)
        .args(["-I", "-c", VERSION_SCRIPT])
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let mut lines = text.lines();
    let mut number = || lines.next().and_then(|line| line.parse::<u32>().ok());
    match (number(), number(), lines.next()) {
        (Some(major), Some(minor), Some(_)) if (major, minor) < MIN_VERSION => {
            Err(failed(format!("it is Python {major}.{minor}")))
        }
        (Some(_), Some(_), Some(path)) if !path.is_empty() => Ok(PathBuf::from(path)),
        _ => Err(failed(format!("its output is not Python's: {text:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::find;
    use std::path::Path;

    #[test]
    fn missing_python_error_names_candidate_and_remedy() {
        for candidate in ["/nowhere/python3", "/bin/echo"] {
            let message = find(Some(Path::new(candidate))).unwrap_err().to_string();
            assert!(message.contains(candidate) && message.contains("THUNDER_PYTHON"), "{message}");
        }
    }
}
