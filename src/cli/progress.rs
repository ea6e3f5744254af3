//! What a person sees while things are loaded: a bar on a terminal, plain lines elsewhere.

use crate::api::{App, State};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};

/// Says what is going on, on standard error and to whoever asks the server for its health.
pub struct Progress {
    bar: Option<ProgressBar>,
    app: Option<App>,
    shown: Mutex<String>,
}

impl Progress {
    /// Reports to standard error, and to `app` where there is one.
    pub fn new(app: Option<App>) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style =
                ProgressStyle::with_template("{spinner} {msg}").unwrap_or_else(|_| ProgressStyle::default_spinner());
            let bar = ProgressBar::new_spinner().with_style(style);
            bar.enable_steady_tick(std::time::Duration::from_millis(120));
            bar
        });
        Self { bar, app, shown: Mutex::default() }
    }

    /// Something new begins.
    pub fn begin(&self, doing: &str) {
        self.tell(doing, doing);
    }

    /// `doing` has come to `done`, 0 … 1.
    pub fn advance(&self, doing: &str, done: f32) {
        // Lines are for logs, which need no thousand of them.
        let quarter = (done * 4.0) as u32 * 25;
        self.tell(&format!("{doing} ({:.0} %)", done * 100.0), &format!("{doing} ({quarter} %)"));
    }

    /// Nothing more will be said.
    pub fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn tell(&self, exact: &str, coarse: &str) {
        if let Some(app) = &self.app {
            app.set_state(State::Loading(exact.to_owned()));
        }
        if let Some(bar) = &self.bar {
            bar.set_message(exact.to_owned());
            return;
        }
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        if *shown != coarse {
            eprintln!("thunder: {coarse}");
            coarse.clone_into(&mut shown);
        }
    }
}
