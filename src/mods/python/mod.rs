//! Python mods: each runs in a separate worker process, never inside the server.
//!
//! [`PythonMods::load_all`] imports a source once, in a separate process, to find the functions with `@mod`, and
//! returns a [`ModFactory`] for each. A worker starts with the first run that names the mod. It serves the runs with
//! the mod, one call at a time, and ends after an idle period or when the mod is removed. Module-level state lasts as
//! long as the worker. Each mod of a file has its own worker, and mods share no state.
//!
//! # A call
//! `instance` writes the sequence and the logits into memory shared with the worker and submits the call to the mod's
//! supervisor, a thread (`handle`, `supervisor`). The decode thread continues. The frame is sent to the worker
//! immediately if it is idle, otherwise after the earlier calls. The supervisor answers queries of the worker (only the
//! server can tokenize) and delivers the reply through [`ReplySender`](super::ReplySender).
//!
//! # Deadlines and crashes
//! A call must end within [`WorkerLimits::call`] after the worker receives it, an import within
//! [`WorkerLimits::import`]. A worker that exceeds its deadline is made to dump its stack, which becomes the
//! exception's traceback, and is then killed with its process group. Only its current call fails with an exception. The
//! call is never retried, since the mod may have executed half of it. Calls of other runs wait in the supervisor and go
//! to the next worker, which imports the mod again, so module-level state is lost. Output printed by the failed call is
//! kept. If an import fails after a restart, or several workers fail without a successful call in between, calls fail
//! immediately for a delay that doubles from 0.5 s to 30 s. The engine disables a mod for a run if its calls keep
//! failing.
//!
//! # Several workers
//! `@mod(workers=N)`, or [`WorkerLimits::workers`] if the mod does not specify it, lets up to N workers serve a mod.
//! Another worker starts when all existing ones have runs. A run stays with its worker, so the state that a mod keeps
//! for a request is available in its next call. Module-level state is separate in each worker. A worker ends after
//! [`WorkerLimits::idle`] without a run.
//!
//! # Protocol
//! Descriptor 0 of a new worker is a Unix socket, 1 the shared memory, 2 a pipe for stray output. Frames are `u32`
//! header length, `u32` body length, header as JSON, body; little-endian. `message` has the types.
//!
//! | server | worker | |
//! |---|---|---|
//! | `load` (source) | `loaded` or `failed` | once |
//! | `run` | | before the first call of a run on this worker |
//! | `call` | `reply` | one event; regions of the shared memory as (byte offset, count) |
//! | `finished` | `reply` | the run has ended |
//! | `score` (answer) | `scored` or `failed` | an answer of an experiment, for a scorer |
//! | `answer` | `query` | during a call: `encode`, or `vocabulary` once per model |
//! | | `log` | at any time; belongs to the call in progress, otherwise to the next one |
//!
//! The shared memory is an anonymous file. The worker maps it; the server reads and writes it only with system calls,
//! so a worker that truncates it causes an exception for its mod and no harm to the server. Each mod instance has one
//! region for its tokens, of which only the changed end is written, and one for its logits: `float32`, one per token of
//! the vocabulary. The reply has `keep` (only the temperature), `memory` (all logits were replaced) or `set`/`add`
//! (sparse edits in the body: `i32` tokens, then as many `f32` values). It can also set the number of last tokens that
//! the stream holds back from now on (`holdback`), and the position from which on they are discarded if the run ends
//! (`discard_from`).
//!
//! # Isolation of a worker
//! A worker has an environment without the server's variables, none of the server's descriptors, a private working
//! directory, its own process group, limits on memory, file size, descriptors, output and on CPU time
//! between calls, no core files, and it dies with the server (Linux). This contains mistakes, but not hostile code: the
//! worker runs as the server's user, can read that user's files and use the network. Uploaded source is not trusted and
//! runs in a `sandbox`. Files belong to the user and run in a sandbox only with [`SandboxPolicy::All`].

mod background_cpu;
mod call_log;
mod exit_status;
mod frame;
mod handle;
mod instance;
mod interpreter;
mod job;
mod limits;
mod message;
mod process;
mod query;
pub mod sandbox;
mod scorer;
mod shared_memory;
mod stray_output;
mod supervisor;
#[cfg(test)]
mod tests;
mod wire_action;
mod worker_dir;
mod worker_spec;

use super::name::check_mod_name;
use super::{ModDescription, ModException, ModFactory, ModOrigin};
use instance::PythonMod;
pub use limits::WorkerLimits;
use message::HandlerInfo;
pub use message::ScoredCell;
use sandbox::{SandboxLauncher, SandboxPolicy};
pub use scorer::PythonScorer;
use serde_json::Value;
use shared_memory::SharedMemory;
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
pub use worker_dir::{remove_worker_dirs, unpack_sdk};
use worker_spec::{StartFailure, WorkerSpec};

/// Template of a new mod.
pub const TEMPLATE: &str = include_str!("template.py");
/// Placeholder of the mod's name in the template.
pub const TEMPLATE_NAME: &str = "mod_name";

/// Reason why a mod could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file or directory cannot be read.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        /// Path of the file or directory.
        path: String,
        /// Error of the system.
        source: std::io::Error,
    },
    /// No usable Python interpreter was found.
    #[error(
        "Python mods need Python 3.9 or newer, but '{tried}' cannot be used: {reason}; install python3 or set THUNDER_PYTHON"
    )]
    NoPython {
        /// Interpreter that was tried.
        tried: String,
        /// Reason why the interpreter cannot be used.
        reason: String,
    },
    /// The source must run in a sandbox, but none is available.
    #[error(
        "{file}: the mod must run in a sandbox, but none is available: {reason}; --mod-sandbox off runs mods with the rights of the server"
    )]
    NoSandbox {
        /// Name of the file.
        file: String,
        /// Missing feature.
        reason: String,
    },
    /// The import failed, or the source contains no mod.
    #[error("{file}: {message}")]
    Failed {
        /// Name of the file.
        file: String,
        /// Message, one line.
        message: String,
        /// Python traceback, if there is one.
        traceback: Option<String>,
        /// True if the same source may load later, e.g. after an import that exceeded its deadline.
        is_transient: bool,
    },
}

impl LoadError {
    /// Returns the Python traceback, if the mod's code failed and the traceback contains more than the message.
    #[must_use]
    pub fn traceback(&self) -> Option<&str> {
        match self {
            Self::Failed { message, traceback, .. } => traceback.as_deref().filter(|text| text.trim_end() != message),
            _ => None,
        }
    }

    /// Returns true if the same source may load later: the import exceeded its deadline, the worker could not be started,
    /// or shared memory could not be created.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Failed { is_transient: true, .. })
    }

    /// Returns the line of the mod's source that caused the error, from 1: the last line of this file in the traceback.
    #[must_use]
    pub fn line(&self) -> Option<u32> {
        let Self::Failed { file, traceback: Some(traceback), .. } = self else { return None };
        line_in(file, traceback)
    }
}

/// Returns the last line of a file in a traceback, from 1.
#[must_use]
pub fn line_in(file: &str, traceback: &str) -> Option<u32> {
    let prefix = format!("File \"{file}\", line ");
    let rest = traceback.rsplit_once(&prefix)?.1;
    let digits = rest.find(|c: char| !c.is_ascii_digit()).map_or(rest, |end| &rest[..end]);
    digits.parse().ok()
}

/// Returns the last of these files that a traceback names, with its line, from 1.
#[must_use]
pub fn last_location<'f>(files: impl IntoIterator<Item = &'f str>, traceback: &str) -> Option<(&'f str, u32)> {
    let position = |file: &str| traceback.rfind(&format!("File \"{file}\", line "));
    let (_, file) = files.into_iter().filter_map(|file| Some((position(file)?, file))).max()?;
    Some((file, line_in(file, traceback)?))
}

/// Source file of a mod.
pub(crate) struct Source {
    /// Name in tracebacks.
    file: String,
    /// Name in Python's `sys.modules`.
    module: String,
    text: String,
}

impl Source {
    fn new(file: String, text: String) -> Self {
        let stem = Path::new(&file).file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
        let identifier: String = stem.chars().map(|c| if c.is_alphanumeric() { c } else { '_' }).collect();
        // The prefix keeps a file json.py from shadowing Python's json.
        Self { file, module: format!("mod_{identifier}"), text }
    }
}

/// Maximum bytes of a file with mods.
const MAX_BYTES: u64 = 16 << 20;

/// Reads the text of a file with mods. Pipes and devices, which might never end, are rejected.
///
/// # Errors
/// The file cannot be read, is not a regular file, is too large, or is not UTF-8.
pub fn read_source(path: &Path) -> io::Result<String> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut text = String::new();
    File::open(path)?.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(io::Error::other(format!("it is larger than {} MiB", MAX_BYTES >> 20)));
    }
    Ok(text)
}

/// Removes the mods that a module of a package imports from its other modules, unless it defines none.
fn remove_imported(handlers: &mut Vec<HandlerInfo>) {
    if handlers.iter().any(|handler| !handler.is_imported) {
        handlers.retain(|handler| !handler.is_imported);
    }
}

/// Loader of mods written in Python.
#[derive(Debug, Clone, Default)]
pub struct PythonMods {
    /// Resource limits of each worker.
    pub limits: WorkerLimits,
    /// Python interpreter; `None` for the one that `THUNDER_PYTHON` names, or `python3` on the PATH.
    pub python: Option<PathBuf>,
    /// Origin of the code.
    pub origin: ModOrigin,
    /// Policy that decides which mods run in a sandbox.
    pub policy: SandboxPolicy,
    /// Launcher of sandboxes; `None` if sandboxes are unavailable.
    pub launcher: Option<SandboxLauncher>,
}

impl PythonMods {
    /// Loads all mods of a text: one per function with `@mod`. `file` is its name in tracebacks.
    ///
    /// # Errors
    /// [`LoadError`]; a text without any mod is an error.
    pub fn load_all(&self, file: String, text: String) -> Result<Vec<Arc<dyn ModFactory>>, LoadError> {
        let source = Arc::new(Source::new(file, text));
        let (spec, mut handlers) = self.discover(&source, None)?;
        remove_imported(&mut handlers);
        let mut names = HashSet::new();
        for HandlerInfo { name, .. } in &handlers {
            let problem = match check_mod_name(name) {
                Err(rule) => format!("the name of the mod {rule}; rename it"),
                Ok(()) if !names.insert(name) => format!("two mods have the name '{name}'; rename one"),
                Ok(()) => continue,
            };
            let message = format!("{problem} with @mod(name=\"…\")");
            return Err(LoadError::Failed { file: source.file.clone(), message, traceback: None, is_transient: false });
        }
        Ok(handlers.into_iter().map(|handler| self.make(handler, &spec)).collect())
    }

    /// Loads one mod of a text and names it `name`. `entrypoint` is its function; it is optional if only one function
    /// has `@mod`.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn load_one(
        &self,
        name: &str,
        source: &str,
        entrypoint: Option<&str>,
    ) -> Result<Arc<dyn ModFactory>, LoadError> {
        let source = Arc::new(Source::new(format!("{name}.py"), source.to_owned()));
        let (spec, mut handlers) = self.discover(&source, entrypoint)?;
        if handlers.iter().any(|handler| handler.name == name) {
            handlers.retain(|handler| handler.name == name);
        } else {
            remove_imported(&mut handlers);
        }
        match (handlers.pop(), handlers.as_slice()) {
            (Some(mut only), []) => {
                name.clone_into(&mut only.name);
                Ok(self.make(only, &spec))
            }
            (last, others) => {
                let names: Vec<&str> = others.iter().chain(&last).map(|handler| handler.name.as_str()).collect();
                let message = format!(
                    "the source has several mods, and none is named '{name}'; use the name of one: {}",
                    names.join(", ")
                );
                Err(LoadError::Failed { file: source.file.clone(), message, traceback: None, is_transient: false })
            }
        }
    }

    /// Loads a scorer of experiments from its source, which defines `score(text)` or `score(text, cell)`.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn load_scorer(&self, text: &str) -> Result<PythonScorer, LoadError> {
        let spec = self.scorer_spec(text)?;
        let file = spec.source.file.clone();
        PythonScorer::start(spec).map_err(|exception| LoadError::Failed {
            file,
            message: exception.message,
            traceback: exception.traceback,
            is_transient: false,
        })
    }

    /// Returns the specification of the worker of a scorer.
    fn scorer_spec(&self, text: &str) -> Result<WorkerSpec, LoadError> {
        let source = Arc::new(Source::new("score.py".to_owned(), text.to_owned()));
        Ok(WorkerSpec { is_scorer: true, ..self.spec(&source, None)? })
    }

    /// Returns the interpreter that workers use.
    ///
    /// # Errors
    /// [`LoadError::NoPython`]
    pub fn interpreter(&self) -> Result<PathBuf, LoadError> {
        interpreter::find(self.python.as_deref())
    }

    /// Imports the source once, in a worker that ends afterwards.
    fn discover(
        &self,
        source: &Arc<Source>,
        entrypoint: Option<&str>,
    ) -> Result<(WorkerSpec, Vec<HandlerInfo>), LoadError> {
        let failed = |StartFailure { exception: ModException { message, traceback }, is_transient }| {
            LoadError::Failed { file: source.file.clone(), message, traceback, is_transient }
        };
        let spec = self.spec(source, entrypoint)?;
        let memory = SharedMemory::create().map_err(|error| {
            let exception = ModException::new(format!("shared memory cannot be created: {error}"));
            failed(StartFailure { exception, is_transient: true })
        })?;
        let (worker, handlers) = spec.start(&memory).map_err(failed)?;
        worker.kill();
        Ok((spec, handlers))
    }

    /// Returns the specification of workers for a source.
    fn spec(&self, source: &Arc<Source>, entrypoint: Option<&str>) -> Result<WorkerSpec, LoadError> {
        Ok(WorkerSpec {
            sandbox: self.sandbox(&source.file)?,
            python: interpreter::find(self.python.as_deref())?,
            limits: self.limits.clone(),
            source: Arc::clone(source),
            entrypoint: entrypoint.map(str::to_owned),
            is_scorer: false,
        })
    }

    /// Returns the launcher of the sandbox, if these mods need one.
    fn sandbox(&self, file: &str) -> Result<Option<SandboxLauncher>, LoadError> {
        let needs_sandbox = match self.policy {
            SandboxPolicy::Off => false,
            SandboxPolicy::Uploaded => !self.origin.is_trusted(),
            SandboxPolicy::All => true,
        };
        if !needs_sandbox {
            return Ok(None);
        }
        let refused = |reason: &str| LoadError::NoSandbox { file: file.to_owned(), reason: reason.to_owned() };
        let launcher = self.launcher.as_ref().ok_or_else(|| refused("this program cannot start one"))?;
        launcher.support().map_err(refused)?;
        Ok(Some(launcher.clone()))
    }

    fn make(&self, handler: HandlerInfo, spec: &WorkerSpec) -> Arc<dyn ModFactory> {
        let description = ModDescription {
            name: handler.name.clone(),
            description: handler.description.clone(),
            language: "python".into(),
            config: handler.config.clone().map_or(Value::Null, Value::Object),
            schema: handler.schema.clone().unwrap_or_default(),
            origin: self.origin,
            ..ModDescription::default()
        };
        let spec = WorkerSpec { entrypoint: Some(handler.entrypoint.clone()), ..spec.clone() };
        Arc::new(PythonMod::new(description, handler, spec))
    }
}
