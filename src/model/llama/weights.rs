//! The files of a model, and a hash over all their bytes, which identifies the model of a saved state.
//!
//! Reading a large file takes minutes, so the hash is computed once after the load and cached in a folder. The cache
//! key consists of the file's attributes: path, device, inode, length, and the times of its last changes.

use chrono::{DateTime, Utc};
use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Number of bytes to read at once.
const CHUNK: usize = 1 << 20;
/// Age in seconds below which a file may change without a change of its timestamps.
const SETTLED_S: i64 = 3;

/// A model file with its attributes at load time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightFile {
    path: PathBuf,
    attributes: FileAttributes,
}

/// Attributes of a file that change with its content.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FileAttributes {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileAttributes {
    fn from_metadata(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    fn is_settled(&self, now: DateTime<Utc>) -> bool {
        now.timestamp() - self.modified.0.max(self.changed.0) > SETTLED_S
    }
}

impl WeightFile {
    /// Records the current attributes of the file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn new(path: &Path) -> io::Result<Self> {
        let path = path.canonicalize()?;
        let attributes = FileAttributes::from_metadata(&fs::metadata(&path)?);
        Ok(Self { path, attributes })
    }

    /// Returns the path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file's length.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.attributes.bytes
    }

    /// Returns the hash of the file, from `cache` or by reading the file. Reading sets this thread to a low priority.
    /// `progress` receives the size of each chunk in bytes and cancels by returning false. The hash of a file that
    /// changed shortly before `now` is not cached.
    ///
    /// # Errors
    /// The file cannot be read, has changed since it was loaded, or the hash was cancelled.
    pub fn hash(
        &self,
        cache: Option<&Path>,
        now: DateTime<Utc>,
        mut progress: impl FnMut(u64) -> bool,
    ) -> io::Result<u128> {
        let entry = cache.map(|folder| folder.join(format!("{:032x}", xxh3_128(self.key().as_bytes()))));
        let mut file = File::open(&self.path)?;
        self.check(&file)?;
        if let Some(known) = entry.as_deref().and_then(|entry| self.read_cached(entry)) {
            return Ok(known);
        }
        // Uses only idle CPU time. On other systems this call would change the priority of the whole process.
        if cfg!(target_os = "linux") {
            let _ = rustix::process::setpriority_process(None, 19);
        }
        let mut hash = Xxh3::new();
        let mut chunk = vec![0; CHUNK];
        loop {
            let read = file.read(&mut chunk)?;
            if read == 0 {
                break;
            }
            hash.update(&chunk[..read]);
            if !progress(read as u64) {
                return Err(io::Error::other("the model is no longer loaded"));
            }
        }
        self.check(&file)?;
        let digest = hash.digest128();
        if let Some(entry) = entry.filter(|_| self.attributes.is_settled(now))
            && let Err(error) = self.write_cached(&entry, digest)
        {
            tracing::warn!(%error, file = %entry.display(), "cannot cache the hash of the model; it will be computed again");
        }
        Ok(digest)
    }

    /// Returns true if `cache` has a note of [`WeightFile::note_check`] on this file, with the same attributes, by `checker`.
    #[must_use]
    pub fn is_checked(&self, cache: &Path, checker: &Self) -> bool {
        let key = self.check_key(checker);
        fs::read_to_string(check_entry(cache, &key)).is_ok_and(|noted| noted == key)
    }

    /// Notes in `cache` that the program `checker` has checked the file. A file that changed shortly before `now` is not
    /// noted.
    ///
    /// # Errors
    /// The note cannot be written.
    pub fn note_check(&self, cache: &Path, checker: &Self, now: DateTime<Utc>) -> io::Result<()> {
        if !self.attributes.is_settled(now) {
            return Ok(());
        }
        let key = self.check_key(checker);
        write_private(&check_entry(cache, &key), &key)
    }

    fn check_key(&self, checker: &Self) -> String {
        format!("{}\n{}\n", self.key(), checker.key())
    }

    fn check(&self, file: &File) -> io::Result<()> {
        if FileAttributes::from_metadata(&file.metadata()?) == self.attributes {
            return Ok(());
        }
        Err(io::Error::other(format!("{} has changed since it was loaded; load the model again", self.path.display())))
    }

    fn key(&self) -> String {
        let FileAttributes { device, inode, bytes, modified, changed } = &self.attributes;
        format!("{} {device} {inode} {bytes} {modified:?} {changed:?}", self.path.display())
    }

    fn read_cached(&self, entry: &Path) -> Option<u128> {
        let text = fs::read_to_string(entry).ok()?;
        let (digest, key) = text.split_once(' ')?;
        (key == self.key()).then(|| u128::from_str_radix(digest, 16).ok()).flatten()
    }

    fn write_cached(&self, entry: &Path, digest: u128) -> io::Result<()> {
        write_private(entry, &format!("{digest:032x} {}", self.key()))
    }
}

fn check_entry(cache: &Path, key: &str) -> PathBuf {
    cache.join(format!("{:032x}", xxh3_128(key.as_bytes())))
}

/// Writes a file that only this account can read. Readers see either the old or the new text.
fn write_private(path: &Path, text: &str) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path.parent().unwrap_or(path))?;
    let partial = path.with_extension(std::process::id().to_string());
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
    file.write_all(text.as_bytes())?;
    fs::rename(partial, path)
}

#[cfg(test)]
mod tests {
    use super::WeightFile;
    use crate::events::system;
    use chrono::TimeDelta;
    use std::fs;

    #[test]
    fn check_is_noted_for_the_attributes_of_file_and_program() {
        let folder = std::env::temp_dir().join(format!("thunder-checks-{}", system::new_id()));
        fs::create_dir_all(&folder).unwrap();
        let (path, program, cache) = (folder.join("model"), folder.join("program"), folder.join("cache"));
        fs::write(&path, "one").unwrap();
        fs::write(&program, "first").unwrap();
        let (file, checker) = (WeightFile::new(&path).unwrap(), WeightFile::new(&program).unwrap());
        file.note_check(&cache, &checker, system::now()).unwrap();
        assert!(!file.is_checked(&cache, &checker), "the file has changed a moment ago");
        file.note_check(&cache, &checker, system::now() + TimeDelta::seconds(5)).unwrap();
        assert!(file.is_checked(&cache, &checker));
        fs::write(&program, "second").unwrap();
        assert!(!file.is_checked(&cache, &WeightFile::new(&program).unwrap()), "another program");
        fs::write(&path, "three").unwrap();
        assert!(!WeightFile::new(&path).unwrap().is_checked(&cache, &checker), "another file");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn hash_covers_every_byte_and_is_cached_until_the_file_changes() {
        let folder = std::env::temp_dir().join(format!("thunder-weights-{}", system::new_id()));
        fs::create_dir_all(&folder).unwrap();
        let (path, cache) = (folder.join("model"), folder.join("cache"));
        let mut bytes = vec![7u8; 3 << 20];
        fs::write(&path, &bytes).unwrap();
        let hash_at = |file: &WeightFile, now| {
            let mut read = 0;
            let digest = file.hash(Some(&cache), now, |more| {
                read += more;
                true
            });
            (digest, read)
        };
        let hash = |file: &WeightFile| hash_at(file, system::now());
        let file = WeightFile::new(&path).unwrap();
        let (first, read) = hash(&file);
        assert_eq!((read, file.bytes()), (3 << 20, 3 << 20));
        // The file has changed a moment ago, so the hash is not cached.
        assert_eq!(hash(&file).1, 3 << 20);
        bytes[(3 << 20) * 83 / 100] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert!(hash(&file).0.unwrap_err().to_string().contains("has changed"));
        let (second, _) = hash(&WeightFile::new(&path).unwrap());
        assert_ne!(first.unwrap(), second.unwrap());
        assert!(WeightFile::new(&path).unwrap().hash(None, system::now(), |_| false).is_err(), "the hash is cancelled");
        let (file, later) = (WeightFile::new(&path).unwrap(), system::now() + TimeDelta::seconds(5));
        assert_eq!((hash_at(&file, later).1, hash(&file).1), (3 << 20, 0));
        fs::remove_dir_all(folder).unwrap();
    }
}
