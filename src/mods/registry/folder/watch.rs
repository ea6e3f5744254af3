//! Watch of a folder of mods and of the packages in it.

use super::{ModFolder, is_package};
use crate::mods::ModRegistry;
use notify::event::{AccessKind, AccessMode, EventKind, ModifyKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Time without changes after which the folder is read again, because editors write a file in several steps.
const DEBOUNCE_DELAY: Duration = Duration::from_millis(150);
/// Maximum delay before the folder is read again.
const MAX_DEBOUNCE_DELAY: Duration = Duration::from_secs(2);

/// Watch of a folder; dropping it ends the watch.
pub struct FolderWatch {
    _watcher: Arc<Mutex<RecommendedWatcher>>,
}

impl ModFolder {
    /// Updates the registry on every change, until the watch is dropped.
    ///
    /// # Errors
    /// The system cannot watch the folder.
    pub fn watch(mut self, registry: Arc<ModRegistry>) -> notify::Result<FolderWatch> {
        let (changed, changes) = mpsc::channel();
        // The paths of events are absolute.
        let root = std::path::absolute(&self.path).map_err(notify::Error::io)?;
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            if event.map_or(true, |event| is_change(&root, &event)) {
                // The thread below outlives this sender.
                let _ = changed.send(());
            }
        })?;
        watcher.watch(&self.path, RecursiveMode::NonRecursive)?;
        let watcher = Arc::new(Mutex::new(watcher));
        let weak = Arc::downgrade(&watcher);
        std::thread::Builder::new().name("mods folder".into()).spawn(move || {
            let mut watched = BTreeSet::new();
            loop {
                // First the watches, then the read: no watch reports what changed before it began.
                while self.watch_packages(&weak, &mut watched) {}
                let change = match self.resync(&registry) {
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
            }
        })?;
        Ok(FolderWatch { _watcher: watcher })
    }

    /// Watches the folders of packages, and no longer those that were removed. Returns true if there are new ones.
    fn watch_packages(&self, watcher: &Weak<Mutex<RecommendedWatcher>>, watched: &mut BTreeSet<PathBuf>) -> bool {
        let Some(watcher) = watcher.upgrade() else { return false };
        let mut watcher = watcher.lock().unwrap_or_else(PoisonError::into_inner);
        let current = self.package_folders();
        for removed in watched.difference(&current) {
            // The system has ended the watch of a folder that no longer exists.
            let _ = watcher.unwatch(removed);
        }
        let mut has_new = false;
        for folder in &current {
            // Also the known ones: the watch of a folder that was replaced has ended.
            let result = watcher.watch(folder, RecursiveMode::NonRecursive);
            if !watched.contains(folder) {
                has_new = true;
                if let Err(error) = result {
                    tracing::warn!("changes in {} are not noticed: {error}", folder.display());
                }
            }
        }
        *watched = current;
        has_new
    }
}

/// Returns true if an event can be about a source: not a read, which the read of the folder itself causes, and not about
/// other files, for example a log file in the folder.
fn is_change(root: &Path, event: &notify::Event) -> bool {
    let is_write = match event.kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) | EventKind::Modify(ModifyKind::Data(_)) => true,
        EventKind::Access(_) => return false,
        _ => false,
    };
    let is_of_source = |path: &PathBuf| {
        match path.extension() {
            Some(kind) if kind != "py" => return false,
            // A folder is not written; the path may be that of a folder.
            None if is_write => return false,
            _ => {}
        }
        let mut parts = path.strip_prefix(root).into_iter().flatten();
        let folder = parts.next().map(|name| root.join(name));
        let is_in_subfolder = parts.next().is_some();
        !is_in_subfolder
            || path.file_name() == Some(OsStr::new("__init__.py"))
            || folder.is_some_and(|it| is_package(&it))
    };
    event.paths.is_empty() || event.paths.iter().any(is_of_source)
}

#[cfg(test)]
mod tests {
    use super::is_change;
    use crate::events::system;
    use notify::Event;
    use notify::event::{AccessKind, AccessMode, CreateKind, DataChange, EventKind, ModifyKind};

    #[test]
    fn only_events_of_sources_are_changes() {
        let root = std::env::temp_dir().join(format!("thunder-test-{}", system::new_id()));
        std::fs::create_dir_all(root.join("pack")).unwrap();
        std::fs::write(root.join("pack/__init__.py"), "").unwrap();
        let write = EventKind::Modify(ModifyKind::Data(DataChange::Any));
        let close = EventKind::Access(AccessKind::Close(AccessMode::Write));
        let read = EventKind::Access(AccessKind::Open(AccessMode::Any));
        let create = EventKind::Create(CreateKind::Any);
        for (kind, path, expected) in [
            (write, "calm.py", true),
            (close, "pack/deep/calm.py", true),
            (create, "new", true),
            (create, "pack/deep", true),
            (create, "logs/__init__.py", true),
            (read, "calm.py", false),
            (write, "thunder.log", false),
            (write, "log", false),
            (close, "pack/notes.txt", false),
            (create, "logs/thunder.log", false),
            (create, "logs/lock", false),
            (write, "logs/script.py", false),
        ] {
            let event = Event::new(kind).add_path(root.join(path));
            assert_eq!(is_change(&root, &event), expected, "{kind:?} {path}");
        }
        assert!(is_change(&root, &Event::new(EventKind::Other)), "events were lost");
        std::fs::remove_dir_all(root).unwrap();
    }
}
