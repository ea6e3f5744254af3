//! Sources of mods that another program of the same user has written to the server's data directory.
//!
//! `thunder run` and `thunder chat` send their runs to the server that owns the database. The source of a mod file is
//! not part of such a request, since permission to send runs does not imply permission to send code. Instead, the
//! program writes the source to the data directory, which only its owner can write, as the upload that registers the mod.
//! The name of the file is the hash of this version. The server loads the source when it receives a run that names the
//! hash.

use super::ModUpload;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Folder within the data directory.
const FOLDER: &str = "mod-sources";
/// Maximum size of a source file in bytes, as JSON.
const MAX_BYTES: u64 = 64 << 20;

/// Stores a source and returns the hash of its version.
///
/// # Errors
/// The data directory cannot be written.
pub fn store(data_dir: &Path, upload: &ModUpload) -> io::Result<String> {
    let folder = data_dir.join(FOLDER);
    DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
    let hash = upload.hash();
    let partial_file = folder.join(format!("{hash}.{}", std::process::id()));
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&partial_file)?;
    file.write_all(&serde_json::to_vec(upload)?)?;
    fs::rename(partial_file, folder.join(&hash))?;
    Ok(hash)
}

/// Returns the source of the version with that hash, if it is stored.
#[must_use]
pub fn load(data_dir: &Path, hash: &str) -> Option<ModUpload> {
    let path = source_path(data_dir, hash)?;
    if !fs::symlink_metadata(&path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    let upload: ModUpload = serde_json::from_slice(&bytes).ok()?;
    (upload.hash() == hash).then_some(upload)
}

/// Removes a source. Returns true if it was stored.
#[must_use]
pub fn remove(data_dir: &Path, hash: &str) -> bool {
    source_path(data_dir, hash).is_some_and(|path| fs::remove_file(path).is_ok())
}

fn source_path(data_dir: &Path, hash: &str) -> Option<PathBuf> {
    // The hash comes from a client and may be any text.
    let is_hash = hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hash.then(|| data_dir.join(FOLDER).join(hash))
}

#[cfg(test)]
mod tests {
    use super::{ModUpload, load, remove, source_path, store};
    use crate::events::system;
    use serde_json::json;
    use std::fs;

    #[test]
    fn load_returns_only_sources_with_matching_hash() {
        let data_dir = std::env::temp_dir().join(format!("thunder-test-{}", system::new_id()));
        let upload = |source: &str| -> ModUpload { serde_json::from_value(json!({ "source": source })).unwrap() };
        let hash = store(&data_dir, &upload("@mod")).unwrap();
        assert_eq!(load(&data_dir, &hash), Some(upload("@mod")));
        let other = upload("other").hash();
        fs::copy(source_path(&data_dir, &hash).unwrap(), source_path(&data_dir, &other).unwrap()).unwrap();
        assert_eq!(load(&data_dir, &other), None, "its content has another hash");
        fs::write(data_dir.join("x"), "{\"source\": \"y\"}").unwrap();
        assert!(load(&data_dir, "../x").is_none() && !remove(&data_dir, "../x"));
        assert!(remove(&data_dir, &hash) && !remove(&data_dir, &hash));
        assert_eq!(load(&data_dir, &hash), None);
        fs::remove_dir_all(data_dir).unwrap();
    }
}
