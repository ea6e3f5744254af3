//! Checks a model file in a separate process before it is loaded, because llama.cpp aborts the process on some corrupt
//! files.

use super::ModelRegistry;
use crate::model::llama::{PROBE_STEP_PREFIX, WeightFile};
use crate::model::{ModelError, split_name};
use nix::sys::signal::Signal;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::timeout;

/// Time limit of a check, above the processor time that the process may use: a check that exceeds it waits for the disk,
/// and counts as passed.
const PROBE_TIMEOUT: Duration = Duration::from_mins(3);
/// Maximum length of the check's output in errors.
const MAX_REASON_CHARS: usize = 400;

/// Signals that a person, a service manager or the system without memory sends, and that say nothing about the file.
const OUTSIDE_SIGNALS: [Signal; 4] = [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

impl ModelRegistry {
    /// Sets the program that checks files: `program probe FILE` loads a file. If a signal kills the program, the file
    /// would also crash the server.
    pub fn set_probe_program(&self, program: std::path::PathBuf) {
        // Only start-up calls this; the first program is kept.
        let _ = self.0.probe_program.set(program);
    }

    /// Loads a file, with a projector if there is one, in a separate process, unless the same program has loaded the unchanged
    /// files before. Only a crash is an error here; errors that llama.cpp returns are reported by the load itself.
    pub(super) async fn probe_file(&self, path: &Path, projector: Option<&Path>) -> Result<(), ModelError> {
        let Some(program) = self.0.probe_program.get() else { return Ok(()) };
        let cache = self.0.config.data.dir.join("cache").join("probes");
        // The attributes from before the check, so that a change during the check is noticed. The files of a split model are
        // checked every time, because the path names only the first.
        let is_split = path.to_str().and_then(split_name).is_some();
        let paths = std::iter::once(path).chain(projector);
        let files: Option<Vec<WeightFile>> =
            if is_split { None } else { paths.map(|path| WeightFile::new(path).ok()).collect() };
        let files = files.zip(WeightFile::new(program).ok());
        if files.as_ref().is_some_and(|(files, checker)| files.iter().all(|file| file.is_checked(&cache, checker))) {
            return Ok(());
        }
        let mut command = Command::new(program);
        command.arg("probe").arg(path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        if let Some(projector) = projector {
            command.arg("--mmproj").arg(projector);
        }
        command.env_remove("RUST_BACKTRACE").env("GGML_NO_BACKTRACE", "1").kill_on_drop(true);
        let output = match timeout(PROBE_TIMEOUT, command.output()).await {
            Ok(Ok(output)) => output,
            Ok(Err(error)) => {
                tracing::warn!(%error, "checking the model file in a separate process failed");
                return Ok(());
            }
            Err(_) => {
                let (file, limit_s) = (path.display(), PROBE_TIMEOUT.as_secs());
                tracing::warn!(%file, limit_s, "the check of the model file takes too long; loading it without the check");
                return Ok(());
            }
        };
        // Only a process that a signal killed has a signal.
        let Some(signal) = output.status.signal() else {
            if let Some((files, checker)) = files.filter(|_| output.status.success()) {
                for file in files {
                    if let Err(error) = file.note_check(&cache, &checker, (self.0.clock)()) {
                        tracing::debug!(%error, "cannot note the check of the model file; the next load checks it again");
                    }
                }
            }
            return Ok(());
        };
        let signal = Signal::try_from(signal).unwrap_or(Signal::SIGABRT);
        if OUTSIDE_SIGNALS.contains(&signal) {
            let file = path.display();
            tracing::warn!(%file, %signal, "the check of the model file was killed; loading it without the check");
            return Ok(());
        }
        let reason = crash_reason(&String::from_utf8_lossy(&output.stderr), signal);
        let named = projector.map_or_else(String::new, |projector| format!(" (with {})", projector.display()));
        Err(ModelError::Load { path: format!("{}{named}", path.display()), reason })
    }
}

/// Returns the reason of a crash from the output of the check: the last step, the signal, and the message, which is the first
/// line after the step with a known form, or else the last line.
fn crash_reason(stderr: &str, signal: Signal) -> String {
    let (step, lines) = match stderr.rsplit_once(PROBE_STEP_PREFIX) {
        Some((_, rest)) => rest.split_once('\n').unwrap_or((rest, "")),
        None => ("starting the check", stderr),
    };
    if signal == Signal::SIGXCPU {
        return format!("the file may be corrupt and would block the server: {step} does not end ({signal})");
    }
    let is_message = |line: &&str| {
        ["GGML_ASSERT", "what():", "fatal runtime error"].iter().any(|form| line.contains(form)) || is_abort(line)
    };
    let last = || lines.lines().rfind(|line| !line.trim().is_empty());
    let message = lines.lines().find(is_message).or_else(last).unwrap_or("no message");
    let message: String = message.trim().chars().take(MAX_REASON_CHARS).collect();
    let message = message.rsplit_once("llama.cpp/").map_or(message.as_str(), |(_, place)| place);
    format!("the file is corrupt and would crash the server: {message} ({signal} while {step})")
}

/// Returns true for a line of `GGML_ABORT`: `…/llama.cpp/ggml/src/ggml.c:123: message`.
fn is_abort(line: &str) -> bool {
    let place = line.split_once("llama.cpp/").and_then(|(_, place)| place.split_once(": "));
    place.and_then(|(place, _)| place.rsplit_once(':')).is_some_and(|(_, number)| number.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::{Signal, crash_reason};

    #[test]
    fn reason_has_message_signal_and_step() {
        let crash = "the file is corrupt and would crash the server: ";
        for (lines, message) in [
            ("", "no message"),
            (
                "/x/llama.cpp/ggml/src/ops.cpp:7: GGML_ASSERT(eps >= 0.0f) failed\n#1 frame\n",
                "ggml/src/ops.cpp:7: GGML_ASSERT(eps >= 0.0f) failed",
            ),
            (
                "/x/llama.cpp/src/binary-ops.cpp:117: unsupported types: f32\n#1\n",
                "src/binary-ops.cpp:117: unsupported types: f32",
            ),
            (
                "a\nfatal runtime error: Rust cannot catch foreign exceptions, aborting\n",
                "fatal runtime error: Rust cannot catch foreign exceptions, aborting",
            ),
            ("first\nlast\n\n", "last"),
        ] {
            let stderr = format!("thunder probe: loading\nolder\nthunder probe: decoding a text\n{lines}");
            let reason = crash_reason(&stderr, Signal::SIGFPE);
            assert_eq!(reason, format!("{crash}{message} (SIGFPE while decoding a text)"));
        }
        let blocked = crash_reason("thunder probe: decoding a text\n", Signal::SIGXCPU);
        assert_eq!(
            blocked,
            "the file may be corrupt and would block the server: decoding a text does not end (SIGXCPU)"
        );
        assert_eq!(crash_reason("", Signal::SIGSEGV), format!("{crash}no message (SIGSEGV while starting the check)"));
    }
}
