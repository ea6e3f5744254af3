//! Progress of long steps such as loading: one changing line on a terminal, separate lines elsewhere.

use crate::server::{App, ServerState};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Minimum time between two lines about the same step.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// A progress report to standard error and to the server's health response.
pub struct Progress {
    bar: Option<ProgressBar>,
    app: Option<App>,
    shown: Mutex<Shown>,
}

struct Shown {
    line: String,
    last: Instant,
}

impl Progress {
    /// Creates a report to standard error and, if given, to `app`.
    pub fn new(app: Option<App>) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style =
                ProgressStyle::with_template("{spinner} {msg}").unwrap_or_else(|_| ProgressStyle::default_spinner());
            let bar = ProgressBar::new_spinner().with_style(style);
            bar.enable_steady_tick(std::time::Duration::from_millis(120));
            bar
        });
        Self { bar, app, shown: Mutex::new(Shown { line: String::new(), last: Instant::now() }) }
    }

    /// Begins a step.
    pub fn begin(&self, step: &str) {
        self.show(step, step);
    }

    /// Reports the fraction `done` of a step, from 0 to 1.
    pub fn advance(&self, step: &str, done: f32) {
        let exact = format!("{step} ({:.0}%)", done * 100.0);
        // Logs need only occasional lines.
        let is_due = self.lock().last.elapsed() > LINE_INTERVAL;
        let coarse = if is_due { exact.clone() } else { String::new() };
        self.show(&exact, &coarse);
    }

    /// Ends the report.
    pub fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show(&self, exact: &str, coarse: &str) {
        if let Some(app) = &self.app {
            app.set_state(ServerState::Loading(exact.to_owned()));
        }
        if let Some(bar) = &self.bar {
            bar.set_message(exact.to_owned());
            return;
        }
        let mut shown = self.lock();
        if !coarse.is_empty() && shown.line != coarse {
            eprintln!("thunder: {coarse}");
            *shown = Shown { line: coarse.to_owned(), last: Instant::now() };
        }
    }
}
