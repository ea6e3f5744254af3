//! Description of how a process ended.

use nix::sys::signal::Signal;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Describes how a process ended.
pub fn describe_exit(status: Option<ExitStatus>) -> String {
    match status.map(|status| (status.code(), status.signal())) {
        Some((Some(code), _)) => format!("the worker ended with exit code {code}"),
        Some((None, Some(signal))) => {
            let name = Signal::try_from(signal).map_or("unknown", Signal::as_str);
            format!("the worker was ended by signal {signal} ({name})")
        }
        _ => "the worker ended".into(),
    }
}
