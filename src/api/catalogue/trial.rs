//! A trial of a file in a process of its own, before this one takes it: over some damages llama.cpp ends the process.

use super::Catalogue;
use crate::model::ModelError;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::timeout;

/// A trial that takes longer says nothing.
const PATIENCE: Duration = Duration::from_mins(1);
/// How much of what the trial said is told.
const TOLD: usize = 400;

impl Catalogue {
    /// Has every file tried by this program from now on: `program probe FILE` must not die of a signal.
    pub fn try_with(&self, program: std::path::PathBuf) {
        // Only start-up calls this; the first program stays.
        let _ = self.0.trial.set(program);
    }

    /// Tries a file. What llama.cpp refuses in order is left to the load, which has the same reason to give.
    pub(super) async fn attempt(&self, path: &Path) -> Result<(), ModelError> {
        let Some(program) = self.0.trial.get() else { return Ok(()) };
        let mut command = Command::new(program);
        command.arg("probe").arg(path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.env_remove("RUST_BACKTRACE").env("GGML_NO_BACKTRACE", "1").kill_on_drop(true);
        let output = match timeout(PATIENCE, command.output()).await {
            Ok(Ok(output)) => output,
            Ok(Err(error)) => {
                tracing::warn!(%error, "the file cannot be tried in a process of its own");
                return Ok(());
            }
            Err(_) => return Ok(()),
        };
        // A signal leaves no code.
        if output.status.code().is_some() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let assertion = said.lines().find(|line| line.contains("GGML_ASSERT") || line.contains("what():"));
        let told: String = assertion.unwrap_or("it gives no reason").trim().chars().take(TOLD).collect();
        let told = told.rsplit_once("llama.cpp/").map_or(told.as_str(), |(_, place)| place);
        Err(ModelError::Load {
            path: path.display().to_string(),
            reason: format!("the file is damaged, it would end the process: {told}"),
        })
    }
}
