//! Files that hold what could not be stored yet.
//!
//! A record is its length, its XXH3 checksum and its body. Records are appended and synced a batch at a time; whoever
//! reads a file stops at the first record that is not whole, which is where a crash cut it off. Each Thunder has one file,
//! locked as long as it lives; the files of dead ones are drained by the next.

mod record;

use super::Error;
use super::writer::Record;
use record::{HEADER, decode, encode, read_body};
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// A spool file, locked.
#[derive(Debug)]
pub struct Spool {
    file: File,
    path: PathBuf,
    /// Where the next batch is read.
    read: u64,
    /// Where the next record is appended.
    end: u64,
}

impl Spool {
    /// Makes the file of this Thunder.
    pub fn create(folder: &Path, server_id: Uuid) -> Result<Self, Error> {
        fs::create_dir_all(folder).map_err(disk("cannot create", folder))?;
        let path = folder.join(format!("{server_id}.spool"));
        let file = loop {
            let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
            let file = file.map_err(disk("cannot create", &path))?;
            file.lock().map_err(disk("cannot lock", &path))?;
            // Another Thunder may have taken it for a dead one's before it was locked, and removed it.
            if path.exists() {
                break file;
            }
        };
        let end = file.metadata().map_err(disk("cannot read", &path))?.len();
        Ok(Self { file, path, read: 0, end })
    }

    /// The files of Thunders that are dead, oldest first.
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
                Some(Self { file, path, read: 0, end })
            })
            .collect()
    }

    /// Whether everything was read.
    pub fn is_drained(&self) -> bool {
        self.read >= self.end
    }

    /// Appends records; they are on the disk when this returns.
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
            // What is there of them is no record, and a full disk has better uses for it.
            let _ = self.file.set_len(self.end);
            return Err(disk("cannot write", &self.path)(source));
        }
        self.end += bytes.len() as u64;
        Ok(())
    }

    /// The next records, some `items` of items, and the place after them, which [`Spool::drained`] takes.
    pub fn next(&mut self, items: usize) -> Result<(Vec<Record>, u64), Error> {
        let mut records: Vec<Record> = Vec::new();
        let (mut at, mut count) = (self.read, 0);
        self.file.seek(SeekFrom::Start(at)).map_err(disk("cannot read", &self.path))?;
        while at < self.end && count < items {
            let Some(body) = read_body(&mut self.file, self.end - at).map_err(disk("cannot read", &self.path))? else {
                tracing::warn!(path = %self.path.display(), at, end = self.end, "the spool file ends in the middle of a record");
                self.set_aside(at)?;
                break;
            };
            at += (HEADER + body.len()) as u64;
            match decode(&body) {
                Some(record) => {
                    count += record.len();
                    records.push(record);
                }
                None => {
                    tracing::error!(path = %self.path.display(), at, "a record of the spool file is not one of this version");
                }
            }
        }
        Ok((records, at))
    }

    /// Everything before `at` is stored. An empty file starts from the beginning again.
    pub fn drained(&mut self, at: u64) -> Result<(), Error> {
        self.read = at;
        if self.is_drained() {
            self.file.set_len(0).map_err(disk("cannot empty", &self.path))?;
            (self.read, self.end) = (0, 0);
        }
        Ok(())
    }

    /// Deletes a file that is drained.
    pub fn remove(self) {
        let _ = fs::remove_file(&self.path);
    }

    /// Keeps records that the database refuses for good, so that the others can go on.
    pub fn refuse(&self, records: &[Record]) -> Result<PathBuf, Error> {
        let path = self.path.with_extension("refused");
        let mut bytes = Vec::new();
        for record in records {
            encode(record, &mut bytes);
        }
        let file = File::options().create(true).append(true).open(&path);
        file.and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_data()))
            .map_err(disk("cannot write", &path))?;
        Ok(path)
    }

    /// The rest of the file is damaged: a copy stays for whoever wants to look, and the file ends before it.
    fn set_aside(&mut self, at: u64) -> Result<(), Error> {
        let aside = self.path.with_extension("damaged");
        fs::copy(&self.path, &aside).map_err(disk("cannot write", &aside))?;
        self.file.set_len(at).map_err(disk("cannot cut", &self.path))?;
        self.end = at;
        Ok(())
    }
}

fn disk(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Disk { action, path: path.clone(), source }
}

#[cfg(test)]
mod tests;
