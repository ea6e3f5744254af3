//! Loads a file in a separate process first, because llama.cpp aborts the process on some damaged files.

use super::Catalogue;
use crate::model::ModelError;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::timeout;

/// Time limit of a trial; a slower trial has no result.
const PATIENCE: Duration = Duration::from_mins(1);
/// Maximum length of the trial's output in errors.
const MAX_REASON_CHARS: usize = 400;

impl Catalogue {
    /// Sets the program that tries every file: `program probe FILE` must not die from a signal.
    pub fn try_with(&self, program: std::path::PathBuf) {
        // Only start-up calls this; the first program is kept.
        let _ = self.0.trial.set(program);
    }

    /// Tries a file. A regular refusal by llama.cpp is reported by the load itself.
    pub(super) async fn attempt(&self, path: &Path) -> Result<(), ModelError> {
        let Some(program) = self.0.trial.get() else { return Ok(()) };
        let mut command = Command::new(program);
        command.arg("probe").arg(path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.env_remove("RUST_BACKTRACE").env("GGML_NO_BACKTRACE", "1").kill_on_drop(true);
        let output = match timeout(PATIENCE, command.output()).await {
            Ok(Ok(output)) => output,
            Ok(Err(error)) => {
                tracing::warn!(%error, "trying the file in a separate process failed");
                return Ok(());
            }
            Err(_) => return Ok(()),
        };
        // A process killed by a signal has no exit code.
        if output.status.code().is_some() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let assertion = said.lines().find(|line| line.contains("GGML_ASSERT") || line.contains("what():"));
        let told: String = assertion.unwrap_or("no reason given").trim().chars().take(MAX_REASON_CHARS).collect();
        let told = told.rsplit_once("llama.cpp/").map_or(told.as_str(), |(_, place)| place);
        Err(ModelError::Load {
            path: path.display().to_string(),
            reason: format!("the file is damaged and would crash the server: {told}"),
        })
    }
}
