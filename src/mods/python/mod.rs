//! Mods in Python: one worker process per mod, never inside the server.
//!
//! [`PythonMods::from_file`] imports a file once, in a process of its own, to learn which functions carry `@mod`, and
//! returns one [`ModFactory`] for each. A worker starts with the first run that names the mod and serves all runs that
//! do, one call at a time; it ends when the mod is removed. Module-level state lives as long as the worker. Several
//! mods of one file have a worker each and share nothing.
//!
//! # A call
//! `session` writes the sequence and the logits into memory shared with the worker and hands the call to the mod's
//! keeper, a thread (`desk`, `keeper`); the decode thread goes on. The frame goes to the worker at once where it is
//! free, else when the calls before it are answered. The keeper answers what the worker asks (tokenizing needs the
//! server), and delivers the reply through [`ReplySender`](super::ReplySender).
//!
//! # Deadlines and crashes
//! A call has [`WorkerLimits::call`], counted from the moment the worker gets it; an import has [`WorkerLimits::import`]. A worker
//! that overruns is asked where it is (that is the exception's traceback), then killed with its process group. That
//! one call is an exception and is never tried again, since the mod may have done half of it. Other runs' calls wait
//! at the keeper and go to the next worker, which imports the mod anew: its module-level state is gone. What a call
//! printed before it was lost is kept. When an import fails after a restart, or workers are lost one after another
//! with no call that went well between, calls fail at once for a pause that doubles from 0.5 s to 30 s. The engine
//! switches a mod off for its run when calls go on failing.
//!
//! # Several workers
//! `@mod(workers=N)`, or [`WorkerLimits::workers`] where the mod does not say, lets up to N workers serve a mod; another one
//! starts when all that there are have runs. A run stays with its worker, so that what a mod keeps for a request is
//! there in its next call; module-level state is each worker's own. A worker ends when no run has needed it for
//! [`WorkerLimits::idle`].
//!
//! # Protocol, version 1
//! Descriptor 0 of a new worker is a Unix socket, 1 the shared memory, 2 a pipe for stray output. Frames are
//! `u32` header length, `u32` body length, header as JSON, body; little-endian. `message` holds the types.
//!
//! | server | worker | |
//! |---|---|---|
//! | `load` (source) | `loaded` or `failed` | once |
//! | `run` | | before the first call of a run on this worker |
//! | `call` | `reply` | one event; places in shared memory as (byte offset, count) |
//! | `finished` | `reply` | the run is over |
//! | `answer` | `ask` | while the worker works: `encode`, or `vocabulary` once per model |
//! | | `log` | at any time; belongs to the call in progress, else to the next one |
//!
//! The shared memory is an anonymous file. The worker maps it; the server writes and reads it with system calls only,
//! so that a worker that truncates it gets an exception and does no harm. A session has a slot for its tokens, of
//! which only the changed end is written, and one for its logits, `float32`, one per token of the vocabulary. The
//! reply says `keep` (only the temperature), `memory` (all logits were replaced) or `set`/`add` (sparse edits in the
//! body: `i32` tokens, then as many `f32` values). It can also say how many of the last tokens the stream is to hold
//! back from now on (`holdback`).
//!
//! # What a worker is kept from, and what not
//! It has an environment without the server's variables, none of the server's descriptors, a directory of its own as
//! working directory, a process group of its own, bounds on memory, file size, descriptors, output and on computing
//! between calls, no core files, and it dies with the server (Linux). That keeps mistakes from doing harm. It does not
//! keep hostile code: it runs as the server's user and can read that user's files and use the network. Uploaded source
//! is somebody else's and runs in a `sandbox` besides; a file is the user's own, and does where [`SandboxPolicy::All`] says so.

mod desk;
mod frame;
mod interpreter;
mod keeper;
mod limits;
mod logs;
mod memory;
mod message;
mod process;
mod recipe;
pub mod sandbox;
mod session;
#[cfg(test)]
mod tests;

use super::{ModDescription, ModFactory, ModOrigin};
pub use limits::WorkerLimits;
use memory::SharedMemory;
use message::Handler;
pub use process::unpack_sdk;
use recipe::Recipe;
use sandbox::{SandboxLauncher, SandboxPolicy};
use serde_json::Value;
use session::PythonMod;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a new mod begins as.
pub const TEMPLATE: &str = include_str!("template.py");
/// What stands in it for the mod's name.
pub const TEMPLATE_NAME: &str = "mod_name";

/// Why a mod could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file or directory cannot be read.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        /// The path.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// There is no Python.
    #[error(
        "mods in Python need Python 3.9 or newer, and '{tried}' cannot be used: {reason}; install python3 or name one in THUNDER_PYTHON"
    )]
    NoPython {
        /// What was tried.
        tried: String,
        /// Why it is no good.
        reason: String,
    },
    /// The source must run in a sandbox, and there is none.
    #[error(
        "{file}: it must run in a sandbox, and there is none: {reason}; --mod-sandbox off runs it with the rights of the server"
    )]
    NoSandbox {
        /// The file's name.
        file: String,
        /// What is missing.
        reason: String,
    },
    /// The import raised, or there is nothing to run in it.
    #[error("{file}: {message}")]
    Failed {
        /// The file's name.
        file: String,
        /// One line.
        message: String,
        /// Python's traceback, where there is one.
        traceback: Option<String>,
    },
    /// Two mods of a directory have the same name.
    #[error("{second}: a mod '{name}' is in {first} already; rename one with @mod(name=\"…\")")]
    Duplicate {
        /// The name.
        name: String,
        /// The file that has it.
        first: String,
        /// The file that has it too.
        second: String,
    },
}

impl LoadError {
    /// Python's traceback, where the mod's code is at fault and it says more than the message.
    #[must_use]
    pub fn traceback(&self) -> Option<&str> {
        match self {
            Self::Failed { message, traceback, .. } => traceback.as_deref().filter(|text| text.trim_end() != message),
            _ => None,
        }
    }
}

impl LoadError {
    /// The line of the mod's text that is at fault, from 1: the last one of it that the traceback names.
    #[must_use]
    pub fn line(&self) -> Option<u32> {
        let Self::Failed { file, traceback: Some(traceback), .. } = self else { return None };
        let place = format!("File \"{file}\", line ");
        let rest = traceback.rsplit_once(&place)?.1;
        let digits = rest.find(|c: char| !c.is_ascii_digit()).map_or(rest, |end| &rest[..end]);
        digits.parse().ok()
    }
}

/// What a directory of mods holds.
#[derive(Default)]
pub struct ModDirectory {
    /// The mods, by file name and then in the order of the file.
    pub mods: Vec<Arc<dyn ModFactory>>,
    /// The files that could not be loaded, and why.
    pub failed: Vec<LoadError>,
}

/// A mod's source.
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
        // A prefix, so that a file json.py does not stand in the way of Python's own json.
        Self { file, module: format!("mod_{identifier}"), text }
    }

    /// The first 12 hexadecimal digits of the SHA-256 of the text.
    fn version(&self) -> String {
        let digest = Sha256::digest(self.text.as_bytes());
        let first = digest.iter().take(6).fold(0_u64, |number, &byte| number << 8 | u64::from(byte));
        format!("{first:012x}")
    }
}

/// Most bytes of a file with mods.
const MOST_BYTES: u64 = 16 << 20;

/// The text of a file with mods. A pipe or a device, which might never end, is none.
///
/// # Errors
/// It cannot be read, or is not a file, or too large, or no UTF-8.
pub fn read_source(path: &Path) -> io::Result<String> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut text = String::new();
    File::open(path)?.take(MOST_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MOST_BYTES {
        return Err(io::Error::other(format!("it has more than {} MiB", MOST_BYTES >> 20)));
    }
    Ok(text)
}

/// Loads mods written in Python.
#[derive(Debug, Clone, Default)]
pub struct PythonMods {
    /// What each of them may use.
    pub limits: WorkerLimits,
    /// The interpreter; `None` takes `THUNDER_PYTHON`, else `python3` on the PATH.
    pub python: Option<PathBuf>,
    /// Whose code they are.
    pub origin: ModOrigin,
    /// Which of them run in a sandbox.
    pub policy: SandboxPolicy,
    /// What makes the sandbox; without it there is none.
    pub launcher: Option<SandboxLauncher>,
}

impl PythonMods {
    /// All mods of a file, with default limits: one per function with `@mod`.
    ///
    /// # Errors
    /// [`LoadError`]; a file without any mod is one.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Vec<Arc<dyn ModFactory>>, LoadError> {
        Self::default().file(path)
    }

    /// The mod that a text holds, with default limits, under `name`. `entrypoint` is the function; it can be left
    /// out where only one carries `@mod`.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn from_source(name: &str, source: &str, entrypoint: Option<&str>) -> Result<Arc<dyn ModFactory>, LoadError> {
        Self::default().source(name, source, entrypoint)
    }

    /// All mods of all `.py` files of a directory, with default limits. One that cannot be loaded does not keep the
    /// others away.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn load_dir(dir: impl AsRef<Path>) -> Result<ModDirectory, LoadError> {
        Self::default().dir(dir)
    }

    /// As [`PythonMods::from_file`], with these limits.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn file(&self, path: impl AsRef<Path>) -> Result<Vec<Arc<dyn ModFactory>>, LoadError> {
        let path = path.as_ref();
        let text =
            read_source(path).map_err(|source| LoadError::Unreadable { path: path.display().to_string(), source })?;
        let file =
            path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned());
        self.text(file, text)
    }

    /// All mods of a text; `file` is its name in tracebacks.
    ///
    /// # Errors
    /// [`LoadError`]; a text without any mod is one.
    pub fn text(&self, file: String, text: String) -> Result<Vec<Arc<dyn ModFactory>>, LoadError> {
        let source = Arc::new(Source::new(file, text));
        let (recipe, handlers) = self.discover(&source, None)?;
        Ok(handlers.into_iter().map(|handler| self.make(handler, &recipe)).collect())
    }

    /// As [`PythonMods::from_source`], with these limits.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn source(&self, name: &str, source: &str, entrypoint: Option<&str>) -> Result<Arc<dyn ModFactory>, LoadError> {
        let source = Arc::new(Source::new(format!("{name}.py"), source.to_owned()));
        let (recipe, mut handlers) = self.discover(&source, entrypoint)?;
        if handlers.iter().any(|handler| handler.name == name) {
            handlers.retain(|handler| handler.name == name);
        }
        match (handlers.pop(), handlers.as_slice()) {
            (Some(mut only), []) => {
                name.clone_into(&mut only.name);
                Ok(self.make(only, &recipe))
            }
            (last, others) => {
                let names: Vec<&str> = others.iter().chain(&last).map(|handler| handler.entrypoint.as_str()).collect();
                let message = format!("which of its mods is meant? name one as the entrypoint: {}", names.join(", "));
                Err(LoadError::Failed { file: source.file.clone(), message, traceback: None })
            }
        }
    }

    /// As [`PythonMods::load_dir`], with these limits.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn dir(&self, dir: impl AsRef<Path>) -> Result<ModDirectory, LoadError> {
        let dir = dir.as_ref();
        let unreadable = |source| LoadError::Unreadable { path: dir.display().to_string(), source };
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            // __init__.py and the like are not mods.
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.extension().is_some_and(|kind| kind == "py") && !name.starts_with(['_', '.']) {
                paths.push(path);
            }
        }
        paths.sort();
        let mut directory = ModDirectory::default();
        let mut names: BTreeMap<String, String> = BTreeMap::new();
        for path in paths {
            let file = path.display().to_string();
            match self.file(&path) {
                Err(error) => directory.failed.push(error),
                Ok(mods) => {
                    for found in mods {
                        let name = found.describe().name;
                        if let Some(first) = names.get(&name) {
                            let (first, second) = (first.clone(), file.clone());
                            directory.failed.push(LoadError::Duplicate { name, first, second });
                        } else {
                            names.insert(name, file.clone());
                            directory.mods.push(found);
                        }
                    }
                }
            }
        }
        Ok(directory)
    }

    /// The interpreter that workers run on.
    ///
    /// # Errors
    /// [`LoadError::NoPython`]
    pub fn interpreter(&self) -> Result<PathBuf, LoadError> {
        interpreter::find(self.python.as_deref())
    }

    /// Imports the source once, in a worker that is then ended.
    fn discover(&self, source: &Arc<Source>, entrypoint: Option<&str>) -> Result<(Recipe, Vec<Handler>), LoadError> {
        let failed = |message, traceback| LoadError::Failed { file: source.file.clone(), message, traceback };
        let recipe = Recipe {
            sandbox: self.sandbox(&source.file)?,
            python: interpreter::find(self.python.as_deref())?,
            limits: self.limits.clone(),
            source: Arc::clone(source),
            entrypoint: entrypoint.map(str::to_owned),
        };
        let memory = SharedMemory::create().map_err(|error| failed(format!("no shared memory: {error}"), None))?;
        let (worker, handlers) =
            recipe.start(&memory).map_err(|exception| failed(exception.message, exception.traceback))?;
        worker.kill();
        Ok((recipe, handlers))
    }

    /// The sandbox that these mods run in, if they do.
    fn sandbox(&self, file: &str) -> Result<Option<SandboxLauncher>, LoadError> {
        let wanted = match self.policy {
            SandboxPolicy::Off => false,
            SandboxPolicy::Uploaded => !self.origin.is_trusted(),
            SandboxPolicy::All => true,
        };
        if !wanted {
            return Ok(None);
        }
        let refused = |reason: &str| LoadError::NoSandbox { file: file.to_owned(), reason: reason.to_owned() };
        let launcher = self.launcher.as_ref().ok_or_else(|| refused("this program cannot start one"))?;
        launcher.support().map_err(refused)?;
        Ok(Some(launcher.clone()))
    }

    fn make(&self, handler: Handler, recipe: &Recipe) -> Arc<dyn ModFactory> {
        let description = ModDescription {
            name: handler.name.clone(),
            description: handler.description.clone(),
            language: "python".into(),
            version: recipe.source.version(),
            config: handler.config.clone().map_or(Value::Null, Value::Object),
            schema: handler.schema.clone().unwrap_or_default(),
            origin: self.origin,
            ..ModDescription::default()
        };
        let recipe = Recipe { entrypoint: Some(handler.entrypoint.clone()), ..recipe.clone() };
        Arc::new(PythonMod::new(description, handler, recipe))
    }
}
