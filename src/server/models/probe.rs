//! Checks a model file in a separate process before it is loaded, because llama.cpp aborts the process on some corrupt
//! files.

use super::ModelRegistry;
use crate::model::llama::WeightFile;
use crate::model::{ModelError, split_name};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::timeout;

/// Time limit of a check. A check that exceeds it counts as passed.
const PROBE_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum length of the check's output in errors.
const MAX_REASON_CHARS: usize = 400;

impl ModelRegistry {
    /// Sets the program that checks files: `program probe FILE` loads a file. If a signal kills the program, the file
    /// would also crash the server.
    pub fn set_probe_program(&self, program: std::path::PathBuf) {
        // Only start-up calls this; the first program is kept.
        let _ = self.0.probe_program.set(program);
    }

    /// Loads a file in a separate process, unless the same program has loaded the unchanged file before. Only a crash is
    /// an error here; errors that llama.cpp returns are reported by the load itself.
    pub(super) async fn probe_file(&self, path: &Path) -> Result<(), ModelError> {
        let Some(program) = self.0.probe_program.get() else { return Ok(()) };
        let cache = self.0.config.data.dir.join("cache").join("probes");
        // The attributes from before the check, so that a change during the check is noticed. The files of a split model are
        // checked every time, because the path names only the first.
        let is_split = path.to_str().and_then(split_name).is_some();
        let files = if is_split { None } else { WeightFile::new(path).ok().zip(WeightFile::new(program).ok()) };
        if files.as_ref().is_some_and(|(file, checker)| file.is_checked(&cache, checker)) {
            return Ok(());
        }
        let mut command = Command::new(program);
        command.arg("probe").arg(path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.env_remove("RUST_BACKTRACE").env("GGML_NO_BACKTRACE", "1").kill_on_drop(true);
        let output = match timeout(PROBE_TIMEOUT, command.output()).await {
            Ok(Ok(output)) => output,
            Ok(Err(error)) => {
                tracing::warn!(%error, "checking the model file in a separate process failed");
                return Ok(());
            }
            Err(_) => return Ok(()),
        };
        // A process killed by a signal has no exit code.
        if output.status.code().is_some() {
            if let Some((file, checker)) = files.filter(|_| output.status.success())
                && let Err(error) = file.note_check(&cache, &checker, (self.0.clock)())
            {
                tracing::debug!(%error, "cannot note the check of the model file; the next load checks it again");
            }
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        let assertion = stderr.lines().find(|line| line.contains("GGML_ASSERT") || line.contains("what():"));
        let reason: String = assertion.unwrap_or("no reason given").trim().chars().take(MAX_REASON_CHARS).collect();
        let reason = reason.rsplit_once("llama.cpp/").map_or(reason.as_str(), |(_, place)| place);
        Err(ModelError::Load {
            path: path.display().to_string(),
            reason: format!("the file is corrupt and would crash the server: {reason}"),
        })
    }
}
