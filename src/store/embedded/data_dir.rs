//! The data directory and its lock.

use super::{disk, open_private};
use crate::store::EmbeddedError;
use std::fs::{DirBuilder, File, TryLockError};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Name of the lock file of a data directory.
const LOCK_FILE: &str = "thunder.lock";

/// Returns true if the data directory has a database. One that cannot be read exists: its start reports the reason.
pub fn exists(data_dir: &Path) -> bool {
    !matches!(data_dir.join("postgres/data/PG_VERSION").try_exists(), Ok(false))
}

/// Checks that no other process uses the data directory.
pub fn check_unused(data_dir: &Path) -> Result<(), EmbeddedError> {
    // A directory in use has the file, and the check must not create it.
    if data_dir.join(LOCK_FILE).exists() { lock(data_dir).map(drop) } else { Ok(()) }
}

/// Creates the data directory if it does not exist and returns its absolute path.
pub fn make_data_dir(data_dir: &Path) -> Result<PathBuf, EmbeddedError> {
    // If Thunder runs as root, PostgreSQL runs as another account, which must be able to enter its folder below this
    // one.
    let mode = if nix::unistd::geteuid().is_root() { 0o755 } else { 0o700 };
    DirBuilder::new().recursive(true).mode(mode).create(data_dir).map_err(disk("cannot create", data_dir))?;
    data_dir.canonicalize().map_err(disk("cannot find", data_dir))
}

/// The lock of a data directory.
pub struct DataDirLock(File);

impl Drop for DataDirLock {
    /// Unlocks, because closing is not enough: a process that is just being started still has the file open.
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

/// Locks the data directory, and writes the id of this process into the lock file.
pub fn lock(data_dir: &Path) -> Result<DataDirLock, EmbeddedError> {
    let path = data_dir.join(LOCK_FILE);
    let file = open_private(File::options().create(true).truncate(false).read(true).write(true), &path);
    let mut file = file.map_err(disk("cannot open", &path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut owner = String::new();
            let _ = file.read_to_string(&mut owner);
            return Err(EmbeddedError::InUse { data_dir: data_dir.to_owned(), owner: owner.trim().parse().ok() });
        }
        Err(TryLockError::Error(error)) => return Err(disk("cannot lock", &path)(error)),
    }
    let _ = file.set_len(0).and_then(|()| file.write_all(format!("{}\n", std::process::id()).as_bytes()));
    Ok(DataDirLock(file))
}
