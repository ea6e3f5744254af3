//! The signals that end a command. The command then closes its resources, such as the embedded database.

use std::io::IsTerminal as _;
use std::process::ExitCode;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The error of a command that a signal has ended, with the exit code for the signal.
#[derive(Debug, thiserror::Error)]
#[error("a signal ended the command")]
pub struct Interrupted(pub ExitCode);

/// The signals that end a command: SIGINT, SIGTERM, and SIGHUP, which a closed terminal sends.
pub struct EndSignals {
    /// `None` if the command handles Ctrl-C.
    interrupt: Option<Signal>,
    terminate: Signal,
    /// `None` if the program was started with SIGHUP ignored, e.g. by nohup, or reloads on SIGHUP.
    hangup: Option<Signal>,
}

impl EndSignals {
    /// Handles the signals from now on.
    pub fn new() -> std::io::Result<Self> {
        let hangup = if is_ignored(SignalKind::hangup()) { None } else { Some(signal(SignalKind::hangup())?) };
        let interrupt = Some(signal(SignalKind::interrupt())?);
        Ok(Self { interrupt, terminate: signal(SignalKind::terminate())?, hangup })
    }

    /// Returns the SIGHUP handler if the program runs as a service, that is, with neither standard input nor standard
    /// error on a terminal: a service reloads on SIGHUP. Otherwise returns `None`, and SIGHUP ends the program.
    pub fn take_reload_signal(&mut self) -> Option<Signal> {
        let on_terminal = std::io::stdin().is_terminal() || std::io::stderr().is_terminal();
        if on_terminal { None } else { self.hangup.take() }
    }

    /// Leaves SIGINT to the command.
    pub fn without_interrupt(self) -> Self {
        Self { interrupt: None, ..self }
    }

    /// Waits for the next signal and returns its exit code.
    pub async fn next(&mut self) -> ExitCode {
        let kind = tokio::select! {
            () = next(self.interrupt.as_mut()) => SignalKind::interrupt(),
            () = next(Some(&mut self.terminate)) => SignalKind::terminate(),
            () = next(self.hangup.as_mut()) => SignalKind::hangup(),
        };
        ExitCode::from(128 + u8::try_from(kind.as_raw_value()).unwrap_or(0))
    }

    /// Runs a future until it completes or a signal cancels it.
    ///
    /// # Errors
    /// A signal came first.
    pub async fn run_until_signal<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Interrupted> {
        tokio::select! {
            done = work => Ok(done),
            code = self.next() => Err(Interrupted(code)),
        }
    }
}

/// Waits for a signal, or forever if `None`.
pub async fn next(signal: Option<&mut Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

/// Returns true if the program was started with the signal ignored, e.g. by nohup.
fn is_ignored(kind: SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (kind.as_raw_value() - 1) & 1 == 1)
}
