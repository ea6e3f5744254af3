//! Registration of the mods in a folder of Python files and packages, and of their changes.

#[cfg(test)]
mod tests;
mod watch;

use super::local_source::package_folders;
use super::upload::{MAX_FILES, is_identifier};
use super::{ImportRetry, LocalSource, ModOrigin, ModProblem, ModRegistry, ModSource, RegisteredVersion, version_of};
use crate::events::system;
use crate::mods::ModFactory;
use crate::mods::python::{LoadError, PythonMods};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
pub use watch::FolderWatch;

/// Minimum delay before a folder that could not be read is read again without a change.
const REREAD_DELAY: Duration = Duration::from_secs(30);

/// Maximum sources imported in parallel.
const MAX_PARALLEL_IMPORTS: usize = 8;

/// A folder of mods: the functions with `@mod` in its `.py` files and packages. Each of these is a source.
pub struct ModFolder {
    path: PathBuf,
    python: PythonMods,
    sources: BTreeMap<PathBuf, KnownSource>,
    /// True if the folder could not be read last time.
    is_unreadable: bool,
}

/// The state of a source at its last read.
#[derive(Default)]
struct KnownSource {
    /// Text or files; `None` if they could not be read.
    source: Option<ModSource>,
    /// Names of the mods registered from the source.
    names: Vec<String>,
    /// True if the name of one of its mods was taken. The mod of that name may be removed later, so the source is
    /// imported again on every change of the folder.
    has_rejected: bool,
    /// Next import of the unchanged source; `None` unless the last one failed for a reason that may pass.
    retry: Option<ImportRetry>,
}

/// Effects of the registration of sources on other sources.
#[derive(Default)]
struct Registration {
    /// Sources with a mod whose name was taken.
    rejected: Vec<PathBuf>,
    /// True if a source no longer has one of its mods, so that another source may use the name.
    has_removed: bool,
}

impl ModFolder {
    /// Creates a folder that has not been read yet.
    #[must_use]
    pub fn new(path: PathBuf, python: PythonMods) -> Self {
        Self {
            path,
            python: PythonMods { origin: ModOrigin::File, ..python },
            sources: BTreeMap::new(),
            is_unreadable: false,
        }
    }

    /// Registers new and changed mods, and removes those whose sources were removed. A source that cannot be loaded keeps
    /// the mods of its last valid state, and the reason is logged and listed in [`ModRegistry::problems`]. An import whose
    /// failure [may pass](LoadError::is_transient) is due again after a delay. Takes as long as the imports of the changed
    /// sources.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn sync(&mut self, registry: &ModRegistry) -> Result<(), LoadError> {
        let mut paths = source_paths(&self.path)?;
        let mut changed: Vec<(PathBuf, LocalSource)> = Vec::new();
        paths.retain(|path| {
            match LocalSource::read(path) {
                // A package of tests or helpers.
                Ok(source) if !source.has_mods() => return false,
                Ok(source) if self.is_current(path, source.source()) => {}
                Ok(source) => changed.push((path.clone(), source)),
                Err(error) => self.register_source(path, None, Err(error), registry, &mut Registration::default()),
            }
            true
        });
        let removed: Vec<PathBuf> = self.sources.keys().filter(|path| !paths.contains(path)).cloned().collect();
        for path in removed {
            let file = label(&path);
            for name in self.sources.remove(&path).map(|known| known.names).unwrap_or_default() {
                registry.remove(&name);
                tracing::info!(mod.name = name, mod.file = file, "mod removed with its file");
            }
            registry.set_problem(&file, None);
        }
        let first = self.register_sources(&changed, registry);
        if first.has_removed {
            // A mod may have moved to a source that was registered before its previous one.
            changed.retain(|(path, _)| first.rejected.contains(path));
            self.register_sources(&changed, registry);
        }
        Ok(())
    }

    /// Returns true if a source did not change and no import of it is due.
    fn is_current(&self, path: &Path, source: &ModSource) -> bool {
        let is_due = |known: &KnownSource| known.retry.as_ref().is_some_and(ImportRetry::is_due);
        let is_done = |known: &KnownSource| !known.has_rejected && !is_due(known);
        self.sources.get(path).is_some_and(|known| known.source.as_ref() == Some(source) && is_done(known))
    }

    /// Imports and registers sources.
    fn register_sources(&mut self, sources: &[(PathBuf, LocalSource)], registry: &ModRegistry) -> Registration {
        let mut registration = Registration::default();
        // Imported in parallel, so that one import that hangs does not block all others.
        for batch in sources.chunks(MAX_PARALLEL_IMPORTS) {
            for ((path, source), found) in batch.iter().zip(self.import(batch)) {
                self.register_source(path, Some(source.source()), found, registry, &mut registration);
            }
        }
        registration
    }

    /// Imports sources in parallel.
    fn import(&self, sources: &[(PathBuf, LocalSource)]) -> Vec<Result<Vec<Arc<dyn ModFactory>>, LoadError>> {
        let python = &self.python;
        std::thread::scope(|scope| {
            let imports: Vec<_> =
                sources.iter().map(|(_, source)| scope.spawn(move || source.load_all(python))).collect();
            let found = imports.into_iter().map(std::thread::ScopedJoinHandle::join);
            found.map(|found| found.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }

    fn register_source(
        &mut self,
        path: &Path,
        source: Option<&ModSource>,
        found: Result<Vec<Arc<dyn ModFactory>>, LoadError>,
        registry: &ModRegistry,
        registration: &mut Registration,
    ) {
        let file = label(path);
        let known = self.sources.entry(path.to_owned()).or_default();
        let is_retry = known.retry.is_some() && known.source.as_ref() == source;
        known.source = source.cloned();
        let earlier_retry = known.retry.take();
        let found = match found {
            Ok(found) => found,
            Err(error) => {
                let message = error.to_string();
                let is_known = |known: &ModProblem| known.file == file && known.message == message;
                if source.is_none() && registry.problems().iter().any(is_known) {
                    return;
                }
                let kept = if known.names.is_empty() { "" } else { "; the previous version remains registered" };
                if let Some(source) = source.filter(|_| error.is_transient()) {
                    known.retry = Some(ImportRetry::after(earlier_retry.as_ref(), source.hash()));
                }
                if is_retry {
                    tracing::warn!("{error}{kept}");
                } else {
                    let traceback = error.traceback().map(|text| format!("\n{}", text.trim_end())).unwrap_or_default();
                    tracing::error!("{error}{kept}{traceback}");
                }
                let traceback = error.traceback().map(str::to_owned);
                registry.set_problem(&file, Some(problem(&file, message, traceback)));
                return;
            }
        };
        let mut rejected = None;
        let mut names = Vec::new();
        for factory in found {
            let version = RegisteredVersion {
                hash: version_of(&*factory),
                origin: ModOrigin::File,
                registered_at: Some(system::now()),
                registered_by: Some(file.clone()),
            };
            let (name, hash) = (factory.describe().name, version.hash.clone());
            // A mod that did not change keeps its workers, with their state.
            if known.names.contains(&name) && registry.get(&name).is_some_and(|current| version_of(&*current) == hash) {
                names.push(name);
                continue;
            }
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
        known.has_rejected = rejected.is_some();
        if known.has_rejected {
            registration.rejected.push(path.to_owned());
        }
        registry.set_problem(&file, rejected);
    }

    /// Returns the folders of the packages, and the folders that become packages when they get an `__init__.py`.
    fn package_folders(&self) -> BTreeSet<PathBuf> {
        let mut folders = BTreeSet::new();
        for entry in std::fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let path = entry.path();
            if !path.is_dir() || label(&path).starts_with(['_', '.']) {
                continue;
            }
            if is_package(&path) {
                // A package with more folders is rejected.
                folders
                    .extend(package_folders(&path).ok().filter(|found| found.len() <= MAX_FILES).into_iter().flatten());
            }
            folders.insert(path);
        }
        folders
    }

    /// Reads the folder again. Returns the time at which an import is due without a change.
    fn resync(&mut self, registry: &ModRegistry) -> Option<Instant> {
        let synced = self.sync(registry);
        let due = self.sources.values().filter_map(|known| known.retry.as_ref()).map(|retry| retry.at).min();
        let was_unreadable = std::mem::replace(&mut self.is_unreadable, synced.is_err());
        match synced {
            Ok(()) => due,
            Err(error) => {
                if !was_unreadable {
                    tracing::error!("{error}; the mods of the folder are unchanged");
                }
                // The imports that were due remain due.
                due.map(|due| due.max(Instant::now() + REREAD_DELAY))
            }
        }
    }
}

/// Returns the Python files and packages of a folder in order, without those that start with `_` or `.`, and without
/// `test_NAME.py` if the file or package `NAME` exists.
fn source_paths(folder: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let unreadable = |source| LoadError::Unreadable { path: folder.display().to_string(), source };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let name = label(&path);
        let is_python = path.extension().is_some_and(|kind| kind == "py");
        let is_test = name.strip_prefix("test_").is_some_and(|tested| {
            let tested = folder.join(tested);
            tested.is_file() || is_package(&tested.with_extension(""))
        });
        if (is_python || is_package(&path)) && !name.starts_with(['_', '.']) && !is_test {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn is_package(path: &Path) -> bool {
    path.file_name().and_then(OsStr::to_str).is_some_and(is_identifier) && path.join("__init__.py").is_file()
}

/// Returns the name of a source for messages: `calm.py`, or `calm/` for a package.
fn label(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if path.extension().is_some_and(|kind| kind == "py") { name.into_owned() } else { format!("{name}/") }
}

fn problem(file: &str, message: String, traceback: Option<String>) -> ModProblem {
    ModProblem { file: file.to_owned(), message, traceback, at: system::now() }
}
