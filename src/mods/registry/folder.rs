//! Registration of the mods in a folder of Python files, and of their changes.

use super::{ModOrigin, ModProblem, ModRegistry, ModSource, RegisteredVersion, WithSource, version_of};
use crate::events::system;
use crate::mods::ModFactory;
use crate::mods::python::{LoadError, PythonMods, read_source};
use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Time without changes after which the folder is read again, because editors write a file in several steps.
const DEBOUNCE_DELAY: Duration = Duration::from_millis(150);
/// Maximum delay before the folder is read again.
const MAX_DEBOUNCE_DELAY: Duration = Duration::from_secs(2);

/// Maximum files imported in parallel.
const MAX_PARALLEL_IMPORTS: usize = 8;

/// A folder of mods: the functions with `@mod` in its `.py` files.
pub struct ModFolder {
    path: PathBuf,
    python: PythonMods,
    files: BTreeMap<PathBuf, FolderFile>,
}

/// The state of a file at its last read.
struct FolderFile {
    /// Text of the file; `None` if it could not be read.
    text: Option<String>,
    /// Names of the mods registered from the file.
    names: Vec<String>,
}

/// Effects of the registration of files on other files.
#[derive(Default)]
struct Registration {
    /// Files with a mod whose name was taken.
    rejected: Vec<PathBuf>,
    /// True if a file no longer has one of its mods, so that another file may use the name.
    has_removed: bool,
}

impl ModFolder {
    /// Creates a folder that has not been read yet.
    #[must_use]
    pub fn new(path: PathBuf, python: PythonMods) -> Self {
        Self { path, python: PythonMods { origin: ModOrigin::File, ..python }, files: BTreeMap::new() }
    }

    /// Registers new and changed mods, and removes those whose files were removed. A file that cannot be loaded keeps
    /// the mods of its last valid text, and the reason is logged and listed in [`ModRegistry::problems`]. Takes as long
    /// as the imports of the changed files.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn sync(&mut self, registry: &ModRegistry) -> Result<(), LoadError> {
        let paths = files(&self.path)?;
        let removed: Vec<PathBuf> = self.files.keys().filter(|path| !paths.contains(path)).cloned().collect();
        for path in removed {
            let file = file_name(&path);
            for name in self.files.remove(&path).map(|known| known.names).unwrap_or_default() {
                registry.remove(&name);
                tracing::info!(mod.name = name, mod.file = file, "mod removed with its file");
            }
            registry.set_problem(&file, None);
        }
        let known = |path: &PathBuf| self.files.get(path).and_then(|known| known.text.as_ref());
        let mut changed: Vec<(PathBuf, io::Result<String>)> = Vec::new();
        for path in paths {
            let text = read_source(&path);
            if !text.as_ref().is_ok_and(|text| known(&path) == Some(text)) {
                changed.push((path, text));
            }
        }
        let first = self.register_files(&changed, registry);
        if first.has_removed {
            // A mod may have moved to a file that was registered before its previous file.
            changed.retain(|(path, _)| first.rejected.contains(path));
            self.register_files(&changed, registry);
        }
        Ok(())
    }

    /// Imports and registers files.
    fn register_files(&mut self, files: &[(PathBuf, io::Result<String>)], registry: &ModRegistry) -> Registration {
        let mut registration = Registration::default();
        // Imported in parallel, so that one import that hangs does not block all others.
        for batch in files.chunks(MAX_PARALLEL_IMPORTS) {
            for ((path, text), found) in batch.iter().zip(self.import(batch)) {
                self.register_file(path, text.as_ref().ok(), found, registry, &mut registration);
            }
        }
        registration
    }

    /// Imports files in parallel.
    fn import(&self, files: &[(PathBuf, io::Result<String>)]) -> Vec<Result<Vec<Arc<dyn ModFactory>>, LoadError>> {
        let import = |path: &Path, text: &io::Result<String>| match text {
            Ok(text) => self.python.load_all(file_name(path), text.clone()),
            Err(error) => {
                let source = io::Error::new(error.kind(), error.to_string());
                Err(LoadError::Unreadable { path: path.display().to_string(), source })
            }
        };
        std::thread::scope(|scope| {
            let imports: Vec<_> = files.iter().map(|(path, text)| scope.spawn(move || import(path, text))).collect();
            let found = imports.into_iter().map(std::thread::ScopedJoinHandle::join);
            found.map(|found| found.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }

    fn register_file(
        &mut self,
        path: &Path,
        text: Option<&String>,
        found: Result<Vec<Arc<dyn ModFactory>>, LoadError>,
        registry: &ModRegistry,
        registration: &mut Registration,
    ) {
        let file = file_name(path);
        let source = ModSource::Text(text.cloned().unwrap_or_default());
        let known = self.files.entry(path.to_owned()).or_insert(FolderFile { text: None, names: Vec::new() });
        known.text = text.cloned();
        let found = match found {
            Ok(found) => found,
            Err(error) => {
                let kept = if known.names.is_empty() { "" } else { "; the previous version remains registered" };
                let traceback = error.traceback().map(|text| format!("\n{}", text.trim_end())).unwrap_or_default();
                tracing::error!("{error}{kept}{traceback}");
                let traceback = error.traceback().map(str::to_owned);
                registry.set_problem(&file, Some(problem(&file, error.to_string(), traceback)));
                return;
            }
        };
        let mut rejected = None;
        let mut names = Vec::new();
        for factory in found {
            let factory = WithSource::wrap(factory, source.clone());
            let version = RegisteredVersion {
                hash: version_of(&*factory),
                origin: ModOrigin::File,
                registered_at: Some(system::now()),
                registered_by: Some(file.clone()),
            };
            let (name, hash) = (factory.describe().name, version.hash.clone());
            match registry.register(factory, version) {
                Ok(replaced) => {
                    let message = if replaced { "mod updated" } else { "mod registered" };
                    tracing::info!(mod.name = name, mod.file = file, mod.version = &hash[..12.min(hash.len())], "{message}");
                    names.push(name);
                }
                Err(taken) => {
                    let message = format!("{}: {taken}; rename one with @mod(name=\"…\")", path.display());
                    tracing::error!("{message}");
                    rejected = Some(problem(&file, message, None));
                }
            }
        }
        for name in known.names.iter().filter(|name| !names.contains(name)) {
            registration.has_removed |= registry.remove(name);
        }
        known.names = names;
        if rejected.is_some() {
            registration.rejected.push(path.to_owned());
            // The other mod of this name may be removed later, so the file is retried on every change.
            known.text = None;
        }
        registry.set_problem(&file, rejected);
    }

    /// Updates the registry on every change, until the watch is dropped.
    ///
    /// # Errors
    /// The system cannot watch the folder.
    pub fn watch(mut self, registry: Arc<ModRegistry>) -> notify::Result<FolderWatch> {
        let (changed, changes) = mpsc::channel();
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Read accesses are not changes; reading the folder causes them.
            let is_change = event.map_or(
                true,
                |event| !matches!(event.kind, EventKind::Access(kind) if kind != AccessKind::Close(AccessMode::Write)),
            );
            if is_change {
                // The thread below outlives this sender.
                let _ = changed.send(());
            }
        })?;
        watcher.watch(&self.path, RecursiveMode::NonRecursive)?;
        std::thread::Builder::new().name("mods folder".into()).spawn(move || {
            // Files may have changed between the first read and the start of the watch.
            self.resync(&registry);
            while changes.recv().is_ok() {
                let latest = Instant::now() + MAX_DEBOUNCE_DELAY;
                while changes.recv_timeout(DEBOUNCE_DELAY).is_ok() && Instant::now() < latest {}
                self.resync(&registry);
            }
        })?;
        Ok(FolderWatch { _watcher: watcher })
    }

    fn resync(&mut self, registry: &ModRegistry) {
        if let Err(error) = self.sync(registry) {
            tracing::error!("{error}; the mods of the folder are unchanged");
        }
    }
}

/// Watch of a folder; dropping it ends the watch.
pub struct FolderWatch {
    _watcher: RecommendedWatcher,
}

/// Returns the Python files of a folder in order, without files that start with `_` or `.`, and without `test_NAME` if
/// the file `NAME` exists.
fn files(folder: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let unreadable = |source| LoadError::Unreadable { path: folder.display().to_string(), source };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let name = file_name(&path);
        let is_test = name.strip_prefix("test_").is_some_and(|tested| folder.join(tested).is_file());
        if path.extension().is_some_and(|kind| kind == "py") && !name.starts_with(['_', '.']) && !is_test {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn problem(file: &str, message: String, traceback: Option<String>) -> ModProblem {
    ModProblem { file: file.to_owned(), message, traceback, at: system::now() }
}
