//! The private directory of a worker.

use super::sandbox::is_worker_uid;
use crate::events::system;
use nix::fcntl::OFlag;
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, SystemTime};

/// Python SDK, unpacked for every worker.
#[derive(rust_embed::RustEmbed)]
#[folder = "src/mods/python/sdk"]
struct Sdk;

/// Prefix of the name of a worker's directory.
const WORKER_DIR_PREFIX: &str = "thunder-mod-";

/// Existing directories of this process.
static OWN_DIRS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Directory of a worker, with the SDK.
pub struct WorkerDir {
    path: PathBuf,
    /// Locked while the server runs.
    _lock: File,
}

impl WorkerDir {
    /// Creates the directory and unpacks the SDK into it.
    pub fn create() -> io::Result<Self> {
        static SWEPT: Once = Once::new();
        SWEPT.call_once(|| remove_stale_dirs(&std::env::temp_dir()));
        let path = std::env::temp_dir().join(format!("{WORKER_DIR_PREFIX}{}", system::new_id().simple()));
        DirBuilder::new().mode(0o700).create(&path)?;
        OWN_DIRS.lock().unwrap_or_else(PoisonError::into_inner).insert(path.clone());
        let lock = File::create(path.join("lock"))?;
        lock.lock()?;
        let dir = Self { path, _lock: lock };
        fs::create_dir(dir.path.join("work"))?;
        unpack_sdk(&dir.path.join("sdk"))?;
        Ok(dir)
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Writes the SDK into a folder, from which Python can import it.
///
/// # Errors
/// A file could not be written.
pub fn unpack_sdk(folder: &Path) -> io::Result<()> {
    for name in Sdk::iter().filter(|name| is_source(name)) {
        let file = folder.join(&*name);
        if let Some(parent) = file.parent() {
            fs::create_dir_all(parent)?;
        }
        if let Some(content) = Sdk::get(&name) {
            fs::write(file, content.data)?;
        }
    }
    Ok(())
}

/// Returns true if a file of the SDK's folder belongs to the SDK, and not to its packaging.
fn is_source(name: &str) -> bool {
    let path = Path::new(name);
    path.extension().is_some_and(|kind| kind == "py") && !path.starts_with("build") && !path.starts_with("dist")
}

/// Removes the directories of all workers of this process. The exit of the process kills the workers, and does not wait
/// for the threads that own them.
pub fn remove_worker_dirs() {
    for path in std::mem::take(&mut *OWN_DIRS.lock().unwrap_or_else(PoisonError::into_inner)) {
        // Fails if the owner of the directory removes it at the same time, or if the worker writes into it.
        let _ = (0..3).any(|_| fs::remove_dir_all(&path).is_ok() || !path.exists());
    }
}

/// Removes the directories of servers that were killed together with their workers.
fn remove_stale_dirs(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(WORKER_DIR_PREFIX) {
            continue;
        }
        // Not that of the target if another user has put a link here.
        let Ok(metadata) = entry.metadata() else { continue };
        if !metadata.is_dir() || !is_worker_uid(metadata.uid()) {
            continue;
        }
        let age = metadata.modified().ok().and_then(|at| SystemTime::from(system::now()).duration_since(at).ok());
        let is_old = age.is_some_and(|age| age > Duration::from_mins(1));
        // The owner may have put a pipe here, whose opening would wait, or a link to a device.
        let flags = (OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW).bits();
        let lock = File::options().read(true).custom_flags(flags).open(entry.path().join("lock"));
        let is_unused = match lock {
            Ok(lock) => lock.try_lock().is_ok(),
            // Created a moment ago, unless the directory is old: then its removal was interrupted.
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        if is_old && is_unused {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for WorkerDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
        OWN_DIRS.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::{WORKER_DIR_PREFIX, remove_stale_dirs};
    use crate::events::system;
    use std::fs::{self, File};
    use std::time::{Duration, SystemTime};

    #[test]
    fn only_stale_worker_dirs_are_removed() {
        let folder = std::env::temp_dir().join(format!("thunder-test-{}", system::new_id()));
        let make = |name: &str, with_lock: bool, age: u64| {
            let path = folder.join(name);
            fs::create_dir_all(&path).unwrap();
            let lock = with_lock.then(|| File::create(path.join("lock")).unwrap());
            File::open(&path)
                .unwrap()
                .set_modified(SystemTime::from(system::now()) - Duration::from_secs(age))
                .unwrap();
            (path, lock)
        };
        let (left, _) = make(&format!("{WORKER_DIR_PREFIX}left"), true, 100);
        let (young, _) = make(&format!("{WORKER_DIR_PREFIX}young"), true, 1);
        let (unlocked, _) = make(&format!("{WORKER_DIR_PREFIX}without"), false, 100);
        let (alive, lock) = make(&format!("{WORKER_DIR_PREFIX}alive"), true, 100);
        let (other, _) = make("other", true, 100);
        let (target, _) = make("target", false, 100);
        let (of_worker, _) = make(&format!("{WORKER_DIR_PREFIX}worker"), true, 100);
        let (of_other, _) = make(&format!("{WORKER_DIR_PREFIX}user"), true, 100);
        let is_root = nix::unistd::geteuid().is_root();
        if is_root {
            std::os::unix::fs::chown(&of_worker, Some(1_000_000_007), None).unwrap();
            std::os::unix::fs::chown(&of_other, Some(1234), None).unwrap();
        }
        let link = folder.join(format!("{WORKER_DIR_PREFIX}link"));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        lock.as_ref().unwrap().lock().unwrap();
        remove_stale_dirs(&folder);
        assert_eq!(
            [left, young, unlocked, alive, other, target].map(|path| path.exists()),
            [false, true, false, true, true, true]
        );
        assert_eq!((of_worker.exists(), of_other.exists()), (false, is_root));
        assert!(link.exists());
        fs::remove_dir_all(folder).unwrap();
    }
}
