//! Registration of the mods in a folder of Python files, and of their changes.

use super::{ImportRetry, ModOrigin, ModProblem, ModRegistry, ModSource, RegisteredVersion, WithSource, version_of};
use crate::events::system;
use crate::mods::ModFactory;
use crate::mods::python::{LoadError, PythonMods, read_source};
use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Time without changes after which the folder is read again, because editors write a file in several steps.
const DEBOUNCE_DELAY: Duration = Duration::from_millis(150);
/// Maximum delay before the folder is read again.
const MAX_DEBOUNCE_DELAY: Duration = Duration::from_secs(2);

/// Minimum delay before a folder that could not be read is read again without a change.
const REREAD_DELAY: Duration = Duration::from_secs(30);

/// Maximum files imported in parallel.
const MAX_PARALLEL_IMPORTS: usize = 8;

/// A folder of mods: the functions with `@mod` in its `.py` files.
pub struct ModFolder {
    path: PathBuf,
    python: PythonMods,
    files: BTreeMap<PathBuf, FolderFile>,
    /// True if the folder could not be read last time.
    is_unreadable: bool,
}

/// The state of a file at its last read.
#[derive(Default)]
struct FolderFile {
    /// Text of the file; `None` if it could not be read.
    text: Option<String>,
    /// Names of the mods registered from the file.
    names: Vec<String>,
    /// True if the name of one of its mods was taken. The mod of that name may be removed later, so the file is imported
    /// again on every change of the folder.
    has_rejected: bool,
    /// Next import of the unchanged file; `None` unless the last one failed for a reason that may pass.
    retry: Option<ImportRetry>,
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
        Self {
            path,
            python: PythonMods { origin: ModOrigin::File, ..python },
            files: BTreeMap::new(),
            is_unreadable: false,
        }
    }

    /// Registers new and changed mods, and removes those whose files were removed. A file that cannot be loaded keeps
    /// the mods of its last valid text, and the reason is logged and listed in [`ModRegistry::problems`]. An import whose
    /// failure [may pass](LoadError::is_transient) is due again after a delay. Takes as long as the imports of the changed
    /// files.
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
        let is_current = |path: &PathBuf, text: &String| {
            let is_due = |known: &FolderFile| known.retry.as_ref().is_some_and(ImportRetry::is_due);
            let is_done = |known: &FolderFile| !known.has_rejected && !is_due(known);
            self.files.get(path).is_some_and(|known| known.text.as_ref() == Some(text) && is_done(known))
        };
        let mut changed: Vec<(PathBuf, io::Result<String>)> = Vec::new();
        for path in paths {
            let text = read_source(&path);
            if !text.as_ref().is_ok_and(|text| is_current(&path, text)) {
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
        let known = self.files.entry(path.to_owned()).or_default();
        let is_retry = known.retry.is_some() && known.text.as_ref() == text;
        known.text = text.cloned();
        let earlier_retry = known.retry.take();
        let found = match found {
            Ok(found) => found,
            Err(error) => {
                let kept = if known.names.is_empty() { "" } else { "; the previous version remains registered" };
                if error.is_transient() {
                    known.retry = Some(ImportRetry::after(earlier_retry.as_ref(), source.hash()));
                }
                if is_retry {
                    tracing::warn!("{error}{kept}");
                } else {
                    let traceback = error.traceback().map(|text| format!("\n{}", text.trim_end())).unwrap_or_default();
                    tracing::error!("{error}{kept}{traceback}");
                }
                let traceback = error.traceback().map(str::to_owned);
                registry.set_problem(&file, Some(problem(&file, error.to_string(), traceback)));
                return;
            }
        };
        let mut rejected = None;
        let mut names = Vec::new();
        for factory in found {
            let factory = WithSource::wrap(factory, source.clone(), source.hash(), None);
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
            let mut next = self.resync(&registry);
            loop {
                let change = match next {
                    Some(next) => changes.recv_timeout(next.saturating_duration_since(Instant::now())),
                    None => changes.recv().map_err(RecvTimeoutError::from),
                };
                match change {
                    Ok(()) => {
                        let latest = Instant::now() + MAX_DEBOUNCE_DELAY;
                        while changes.recv_timeout(DEBOUNCE_DELAY).is_ok() && Instant::now() < latest {}
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
                next = self.resync(&registry);
            }
        })?;
        Ok(FolderWatch { _watcher: watcher })
    }

    /// Reads the folder again. Returns the time at which an import is due without a change.
    fn resync(&mut self, registry: &ModRegistry) -> Option<Instant> {
        let synced = self.sync(registry);
        let due = self.files.values().filter_map(|known| known.retry.as_ref()).map(|retry| retry.at).min();
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

#[cfg(test)]
mod tests {
    use super::{ModFolder, REREAD_DELAY, Registration, file_name};
    use crate::events::system;
    use crate::mods::ModRegistry;
    use crate::mods::python::{LoadError, PythonMods};
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::Instant;

    fn new_folder() -> PathBuf {
        let path = std::env::temp_dir().join(format!("thunder-test-{}", system::new_id()));
        std::fs::create_dir(&path).unwrap();
        path
    }

    /// Returns the source of a file with mods of these names.
    fn mods(names: &[&str]) -> String {
        let functions = names.iter().map(|name| format!("\n\n@mod\ndef {name}(event, actions):\n    pass\n"));
        format!("from thunder_mods import mod\n{}", functions.collect::<String>())
    }

    #[test]
    fn rejected_mod_does_not_restart_other_mods_of_its_file() {
        let path = new_folder();
        std::fs::write(path.join("one.py"), mods(&["taken"])).unwrap();
        std::fs::write(path.join("two.py"), mods(&["kept", "taken"])).unwrap();
        let registry = ModRegistry::default();
        let mut folder = ModFolder::new(path.clone(), PythonMods::default());
        folder.sync(&registry).unwrap();
        let kept = registry.get("kept").unwrap();
        assert!(registry.problems()[0].message.contains("the name 'taken' is already used by the file one.py"));
        std::fs::write(path.join("three.py"), mods(&["third"])).unwrap();
        folder.sync(&registry).unwrap();
        assert!(Arc::ptr_eq(&kept, &registry.get("kept").unwrap()) && registry.get("third").is_some());
        std::fs::remove_file(path.join("one.py")).unwrap();
        folder.sync(&registry).unwrap();
        let by = registry.info("taken", None).unwrap().current.registered_by;
        assert_eq!((by.as_deref(), registry.problems()), (Some("two.py"), Vec::new()));
        assert!(Arc::ptr_eq(&kept, &registry.get("kept").unwrap()));
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn file_is_imported_again_after_a_transient_failure() {
        let path = new_folder();
        let file = path.join("calm.py");
        let text = mods(&["calm"]);
        std::fs::write(&file, &text).unwrap();
        let registry = ModRegistry::default();
        let mut folder = ModFolder::new(path.clone(), PythonMods::default());
        let failure = LoadError::Failed {
            file: file_name(&file),
            message: "the import failed: deadline of 1 ms exceeded".to_owned(),
            traceback: None,
            is_transient: true,
        };
        folder.register_file(&file, Some(&text), Err(failure), &registry, &mut Registration::default());
        folder.sync(&registry).unwrap();
        assert_eq!((registry.get("calm").is_some(), registry.problems().len()), (false, 1), "not due yet");
        let due = Instant::now();
        folder.files.get_mut(&file).unwrap().retry.as_mut().unwrap().at = due;
        let moved = path.with_extension("moved");
        std::fs::rename(&path, &moved).unwrap();
        assert!(folder.resync(&registry).unwrap() >= due + REREAD_DELAY, "the folder is missing");
        std::fs::rename(&moved, &path).unwrap();
        assert_eq!(folder.resync(&registry), None);
        assert!(registry.get("calm").is_some() && registry.problems().is_empty());
        assert!(folder.files[&file].retry.is_none());
        std::fs::remove_dir_all(path).unwrap();
    }
}
