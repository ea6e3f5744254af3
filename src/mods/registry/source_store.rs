//! Sources of mods that another program of the same user has run, for the server that gets its runs.
//!
//! `thunder run` and `thunder chat` hand runs to the server that has the database. The source of a file does not travel with
//! them: who sends runs need not be one who may send code. It is laid into the server's data directory instead, where only
//! its owner can write, under its hash; the server takes it from there when the run comes that names it.

use super::ModSource;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The folder within the data directory.
const FOLDER: &str = "handed-mods";
/// Most bytes of a source with what JSON needs for it.
const MOST_BYTES: u64 = 64 << 20;

/// Lays a source down, and returns its hash.
///
/// # Errors
/// The data directory cannot be written.
pub fn store(data_dir: &Path, source: &ModSource) -> io::Result<String> {
    let folder = data_dir.join(FOLDER);
    DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
    let hash = source.hash();
    let unfinished = folder.join(format!("{hash}.{}", std::process::id()));
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
    file.write_all(&serde_json::to_vec(source)?)?;
    fs::rename(unfinished, folder.join(&hash))?;
    Ok(hash)
}

/// The source of that hash, if it lies there.
#[must_use]
pub fn load(data_dir: &Path, hash: &str) -> Option<ModSource> {
    let path = path_of(data_dir, hash)?;
    if !fs::symlink_metadata(&path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    let source: ModSource = serde_json::from_slice(&bytes).ok()?;
    (source.hash() == hash).then_some(source)
}

/// Takes a source away, and says whether it store there.
#[must_use]
pub fn remove(data_dir: &Path, hash: &str) -> bool {
    path_of(data_dir, hash).is_some_and(|path| fs::remove_file(path).is_ok())
}

fn path_of(data_dir: &Path, hash: &str) -> Option<PathBuf> {
    // A run that somebody made up names anything.
    let is_hash = hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hash.then(|| data_dir.join(FOLDER).join(hash))
}

#[cfg(test)]
mod tests {
    use super::{ModSource, load, path_of, remove, store};
    use std::fs;

    #[test]
    fn only_a_source_that_has_the_hash_is_found() {
        let data_dir = std::env::temp_dir().join(format!("thunder-test-{}", uuid::Uuid::now_v7()));
        let source = ModSource::Text("@mod".into());
        let hash = store(&data_dir, &source).unwrap();
        assert_eq!(load(&data_dir, &hash), Some(source));
        let other = ModSource::Text("other".into()).hash();
        fs::copy(path_of(&data_dir, &hash).unwrap(), path_of(&data_dir, &other).unwrap()).unwrap();
        assert_eq!(load(&data_dir, &other), None, "it has another hash");
        fs::write(data_dir.join("x"), "\"y\"").unwrap();
        assert!(load(&data_dir, "../x").is_none() && !remove(&data_dir, "../x"));
        assert!(remove(&data_dir, &hash) && !remove(&data_dir, &hash));
        assert_eq!(load(&data_dir, &hash), None);
        fs::remove_dir_all(data_dir).unwrap();
    }
}
