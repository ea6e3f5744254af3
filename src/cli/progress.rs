//! Progress of long steps such as loading: one changing line on a terminal, separate lines elsewhere.

use super::logging;
use crate::server::{App, ServerState};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Minimum time between two lines about the same step.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// A progress report to standard error and to the server's health response. Shows the steps of all tasks at once.
pub struct Progress {
    bar: Option<ProgressBar>,
    app: Option<App>,
    shown: Mutex<Shown>,
}

struct Shown {
    /// The current step of each active task, in the order of their start.
    steps: Vec<(u64, String)>,
    /// Number of tasks so far.
    tasks: u64,
    line: String,
    last: Instant,
}

impl Progress {
    /// Creates a report to standard error and, if given, to `app`.
    pub fn new(app: Option<App>) -> Arc<Self> {
        let has_bar = std::io::stderr().is_terminal() && !logging::is_json_on_stderr();
        let bar = has_bar.then(|| {
            let style =
                ProgressStyle::with_template("{spinner} {msg}").unwrap_or_else(|_| ProgressStyle::default_spinner());
            let bar = ProgressBar::new_spinner().with_style(style);
            bar.enable_steady_tick(std::time::Duration::from_millis(120));
            bar
        });
        let shown = Shown { steps: Vec::new(), tasks: 0, line: String::new(), last: Instant::now() };
        Arc::new(Self { bar, app, shown: Mutex::new(shown) })
    }

    /// Returns the report of a task, which may run at the same time as others.
    pub fn task(self: &Arc<Self>) -> TaskProgress {
        let mut shown = self.lock();
        shown.tasks += 1;
        TaskProgress { progress: Arc::clone(self), task: shown.tasks }
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

    /// Shows the step of a task, or removes the task. `line` is printed where there is no terminal, unless it is empty.
    fn show(&self, task: u64, step: Option<&str>, line: &str) {
        let mut shown = self.lock();
        let steps = shown.set(task, step);
        if let Some(app) = self.app.as_ref().filter(|_| !steps.is_empty()) {
            app.set_state(ServerState::Loading(steps.clone()));
        }
        match &self.bar {
            Some(bar) if !steps.is_empty() => bar.set_message(steps),
            None if !line.is_empty() && shown.line != line => {
                logging::report(line);
                (shown.line, shown.last) = (line.to_owned(), Instant::now());
            }
            _ => {}
        }
    }
}

impl Shown {
    /// Sets the step of a task, or removes it. Returns the steps of all tasks.
    fn set(&mut self, task: u64, step: Option<&str>) -> String {
        let known = self.steps.iter().position(|(known, _)| *known == task);
        match (known, step) {
            (Some(index), Some(step)) => step.clone_into(&mut self.steps[index].1),
            (Some(index), None) => drop(self.steps.remove(index)),
            (None, Some(step)) => self.steps.push((task, step.to_owned())),
            (None, None) => {}
        }
        self.steps.iter().map(|(_, step)| step.as_str()).collect::<Vec<_>>().join(", ")
    }
}

/// The progress report of one task. Dropping it ends the task's step.
pub struct TaskProgress {
    progress: Arc<Progress>,
    task: u64,
}

impl TaskProgress {
    /// Begins a step.
    pub fn begin(&self, step: &str) {
        self.progress.show(self.task, Some(step), step);
    }

    /// Reports the fraction `done` of a step, from 0 to 1.
    pub fn advance(&self, step: &str, done: f32) {
        let exact = format!("{step} ({:.0}%)", done * 100.0);
        // Logs need only occasional lines.
        let is_due = self.progress.lock().last.elapsed() > LINE_INTERVAL;
        self.progress.show(self.task, Some(&exact), if is_due { &exact } else { "" });
    }
}

impl Drop for TaskProgress {
    fn drop(&mut self) {
        self.progress.show(self.task, None, "");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_all_tasks_are_shown_until_they_end() {
        let mut shown = Shown { steps: Vec::new(), tasks: 0, line: String::new(), last: Instant::now() };
        assert_eq!(shown.set(1, Some("opening the database")), "opening the database");
        assert_eq!(shown.set(2, Some("loading the model")), "opening the database, loading the model");
        assert_eq!(shown.set(1, Some("starting the database")), "starting the database, loading the model");
        assert_eq!(shown.set(1, None), "loading the model");
        assert_eq!(shown.set(2, None), "");
    }
}
