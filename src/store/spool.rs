//! Spool files: records on disk that the database could not store yet.
//!
//! A record is its length, its XXH3 checksum and its body. Records are appended and synced in batches. A reader stops at
//! the first incomplete record, where a crash interrupted the writer. Each Thunder process has one file and locks it;
//! the next process on the folder drains the files of processes that have ended.

mod codec;
mod status;

pub use status::SpoolStatus;

use super::Error;
use super::record::Record;
use crate::events::RunId;
use codec::{HEADER, decode, encode, read_body};
use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Maximum ends of runs in a batch, because all items of a run are read when its end is stored.
const MAX_ENDS: usize = 32;

/// A locked spool file.
#[derive(Debug)]
pub struct Spool {
    file: File,
    path: PathBuf,
    /// Offset before which all records are stored.
    drained_to: u64,
    /// Offset at which the next record is appended.
    end: u64,
    /// Runs of which items were read, but no end.
    open_runs: BTreeSet<RunId>,
}

impl Spool {
    /// Creates the file of this process.
    pub fn create(folder: &Path, server_id: Uuid) -> Result<Self, Error> {
        // Spooled records contain prompts and answers, so only the owner may read them. Earlier releases created the folder
        // with wider permissions.
        fs::create_dir_all(folder)
            .and_then(|()| fs::set_permissions(folder, Permissions::from_mode(0o700)))
            .map_err(disk("cannot create", folder))?;
        let path = folder.join(format!("{server_id}.spool"));
        let file = loop {
            let file = File::options().create(true).truncate(false).read(true).write(true).mode(0o600).open(&path);
            let file = file.map_err(disk("cannot create", &path))?;
            file.lock().map_err(disk("cannot lock", &path))?;
            // Before the lock was taken, another process may have treated the file as an orphan and removed it.
            if path.exists() {
                break file;
            }
        };
        let end = file.metadata().map_err(disk("cannot read", &path))?.len();
        Ok(Self { file, path, drained_to: 0, end, open_runs: BTreeSet::new() })
    }

    /// Checks that a file can be created, and removes it with the folders that did not exist.
    pub fn check(folder: &Path) -> Result<(), Error> {
        let missing: Vec<&Path> = folder.ancestors().take_while(|folder| !folder.exists()).collect();
        let checked = Self::create(folder, Uuid::nil()).map(Self::remove);
        // A folder that another process uses in the meantime is not empty and stays.
        missing.into_iter().for_each(|folder| drop(fs::remove_dir(folder)));
        checked
    }

    /// Returns the files of processes that have ended, oldest first.
    pub fn orphans(folder: &Path) -> Vec<Self> {
        let mut paths: Vec<PathBuf> = fs::read_dir(folder)
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|extension| extension == "spool"))
            .collect();
        paths.sort();
        paths
            .into_iter()
            .filter_map(|path| {
                let file = File::options().read(true).write(true).open(&path).ok()?;
                file.try_lock().ok()?;
                let end = file.metadata().ok()?.len();
                Some(Self { file, path, drained_to: 0, end, open_runs: BTreeSet::new() })
            })
            .collect()
    }

    /// Returns the server that the file belongs to.
    pub fn server_id(&self) -> Option<Uuid> {
        self.path.file_stem()?.to_str()?.parse().ok()
    }

    /// Returns true if all records are stored.
    pub fn is_drained(&self) -> bool {
        self.drained_to >= self.end
    }

    /// Returns the size of the records that are not stored yet.
    pub fn undrained_bytes(&self) -> u64 {
        self.end.saturating_sub(self.drained_to)
    }

    /// Appends records and syncs them to disk.
    pub fn append(&mut self, records: &[Record]) -> Result<(), Error> {
        if records.is_empty() {
            return Ok(());
        }
        let mut bytes = Vec::new();
        for record in records {
            encode(record, &mut bytes);
        }
        let written = self
            .file
            .seek(SeekFrom::Start(self.end))
            .and_then(|_| self.file.write_all(&bytes))
            .and_then(|()| self.file.sync_data());
        if let Err(source) = written {
            // Removes the incomplete record, which also frees space if the disk is full.
            let _ = self.file.set_len(self.end);
            return Err(disk("cannot write", &self.path)(source));
        }
        self.end += bytes.len() as u64;
        Ok(())
    }

    /// Returns the next records, about `items` items and up to [`MAX_ENDS`] ends in total, and the offset after them for
    /// [`Spool::mark_drained`]. A record that this version cannot decode is copied to the file of rejected records when
    /// all records before it are stored.
    pub fn next(&mut self, items: usize) -> Result<(Vec<Record>, u64), Error> {
        let mut records: Vec<Record> = Vec::new();
        let (mut at, mut count, mut ends) = (self.drained_to, 0, 0);
        self.file.seek(SeekFrom::Start(at)).map_err(disk("cannot read", &self.path))?;
        while at < self.end && count < items && ends < MAX_ENDS {
            let Some(body) = read_body(&mut self.file, self.end - at).map_err(disk("cannot read", &self.path))? else {
                tracing::warn!(path = %self.path.display(), at, end = self.end, "the spool file ends in the middle of a record");
                self.truncate_damaged(at)?;
                break;
            };
            let length = (HEADER + body.len()) as u64;
            let Some(record) = decode(&body) else {
                if !records.is_empty() {
                    break;
                }
                self.skip_undecodable(at, length)?;
                at += length;
                continue;
            };
            at += length;
            count += record.weight();
            match &record {
                Record::Started { .. } => {}
                Record::Items { run_id, .. } => drop(self.open_runs.insert(*run_id)),
                Record::Ended { run_id, .. } => {
                    ends += 1;
                    self.open_runs.remove(run_id);
                }
            }
            records.push(record);
        }
        Ok((records, at))
    }

    /// Returns the runs of which all items in the file were read, but no end; `None` if records follow after the offset `at`.
    pub fn open_runs(&self, at: u64) -> Option<&BTreeSet<RunId>> {
        (at >= self.end).then_some(&self.open_runs)
    }

    /// Marks all records before the offset `at` as stored, and empties the file when none is left.
    pub fn mark_drained(&mut self, at: u64) -> Result<(), Error> {
        self.drained_to = at;
        if self.is_drained() {
            self.file.set_len(0).map_err(disk("cannot empty", &self.path))?;
            (self.drained_to, self.end) = (0, 0);
            self.open_runs.clear();
        }
        Ok(())
    }

    /// Deletes the file, which must be drained.
    pub fn remove(self) {
        let _ = fs::remove_file(&self.path);
    }

    /// Moves records that the database permanently rejects to a separate file, so they do not block the others. Returns
    /// its path.
    pub fn reject(&self, records: &[Record]) -> Result<PathBuf, Error> {
        let path = self.path.with_extension("refused");
        let mut bytes = Vec::new();
        for record in records {
            encode(record, &mut bytes);
        }
        let file = File::options().create(true).append(true).mode(0o600).open(&path);
        file.and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_data()))
            .map_err(disk("cannot write", &path))?;
        Ok(path)
    }

    /// Copies the record at the offset `at` to the file of rejected records, if the disk has space for it, and marks it as
    /// stored.
    fn skip_undecodable(&mut self, at: u64, length: u64) -> Result<(), Error> {
        let path = self.path.with_extension("refused");
        match append_part(&self.file, at, length, &path) {
            Ok(()) => tracing::error!(
                path = %path.display(),
                "this version of Thunder cannot decode a record of the spool file; it is kept in a file"
            ),
            // An error would keep the server from starting, and the other records from leaving the full disk.
            Err(error) => tracing::error!(
                path = %path.display(), %error,
                "this version of Thunder cannot decode a record of the spool file, nor keep it in a file; it is lost"
            ),
        }
        self.drained_to = at + length;
        self.file.seek(SeekFrom::Start(self.drained_to)).map_err(disk("cannot read", &self.path))?;
        Ok(())
    }

    /// Truncates a damaged file at the offset `at`. Keeps a copy of the rest for inspection, if the disk has space for it.
    fn truncate_damaged(&mut self, at: u64) -> Result<(), Error> {
        let path = self.path.with_extension("damaged");
        if let Err(error) = append_part(&self.file, at, u64::MAX, &path) {
            tracing::warn!(path = %path.display(), %error, "cannot copy the damaged part of the spool file");
        }
        self.file.set_len(at).map_err(disk("cannot truncate", &self.path))?;
        self.end = at;
        Ok(())
    }
}

/// Appends up to `length` bytes from the offset `at` to a file, or nothing.
fn append_part(mut from: &File, at: u64, length: u64, path: &Path) -> io::Result<()> {
    let mut copy = File::options().create(true).append(true).mode(0o600).open(path)?;
    let len = copy.metadata()?.len();
    from.seek(SeekFrom::Start(at))?;
    // An incomplete copy would only take space.
    io::copy(&mut from.take(length), &mut copy).and_then(|_| copy.sync_data()).inspect_err(|_| drop(copy.set_len(len)))
}

fn disk(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Disk { action, path: path.clone(), source }
}

#[cfg(test)]
mod tests;
