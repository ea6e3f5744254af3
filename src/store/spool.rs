//! Spool files: records on disk that the database could not store yet.
//!
//! A record is its length, its XXH3 checksum and its body. Records are appended and synced in batches. A reader stops at
//! the first incomplete record, where a crash interrupted the writer. Each Thunder process has one file and locks it;
//! the next process on the folder drains the files of processes that have ended.

mod record;
mod status;

pub use status::SpoolStatus;

use super::Error;
use super::writer::Record;
use crate::events::RunId;
use record::{HEADER, decode, encode, read_body};
use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::{self, Seek, SeekFrom, Write};
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
    /// Offset of the next batch to read.
    read: u64,
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
        Ok(Self { file, path, read: 0, end, open_runs: BTreeSet::new() })
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
                Some(Self { file, path, read: 0, end, open_runs: BTreeSet::new() })
            })
            .collect()
    }

    /// Returns the server that the file belongs to.
    pub fn server_id(&self) -> Option<Uuid> {
        self.path.file_stem()?.to_str()?.parse().ok()
    }

    /// Returns true if all records were read.
    pub fn is_drained(&self) -> bool {
        self.read >= self.end
    }

    /// Returns the size of the records that were not read yet.
    pub fn unread_bytes(&self) -> u64 {
        self.end.saturating_sub(self.read)
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
    /// [`Spool::mark_drained`].
    pub fn next(&mut self, items: usize) -> Result<(Vec<Record>, u64), Error> {
        let mut records: Vec<Record> = Vec::new();
        let (mut at, mut count, mut ends) = (self.read, 0, 0);
        self.file.seek(SeekFrom::Start(at)).map_err(disk("cannot read", &self.path))?;
        while at < self.end && count < items && ends < MAX_ENDS {
            let Some(body) = read_body(&mut self.file, self.end - at).map_err(disk("cannot read", &self.path))? else {
                tracing::warn!(path = %self.path.display(), at, end = self.end, "the spool file ends in the middle of a record");
                self.truncate_damaged(at)?;
                break;
            };
            at += (HEADER + body.len()) as u64;
            match decode(&body) {
                Some(record) => {
                    count += record.weight();
                    match &record {
                        Record::Started(..) => {}
                        Record::Items(run_id, ..) => drop(self.open_runs.insert(*run_id)),
                        Record::Ended(run_id, _) => {
                            ends += 1;
                            self.open_runs.remove(run_id);
                        }
                    }
                    records.push(record);
                }
                None => {
                    tracing::error!(path = %self.path.display(), at, "cannot decode a record of the spool file");
                }
            }
        }
        Ok((records, at))
    }

    /// Returns the runs of which all items in the file were read, but no end; `None` if records follow after the offset `at`.
    pub fn open_runs(&self, at: u64) -> Option<&BTreeSet<RunId>> {
        (at >= self.end).then_some(&self.open_runs)
    }

    /// Marks all records before the offset `at` as stored, and empties the file when none is left.
    pub fn mark_drained(&mut self, at: u64) -> Result<(), Error> {
        self.read = at;
        if self.is_drained() {
            self.file.set_len(0).map_err(disk("cannot empty", &self.path))?;
            (self.read, self.end) = (0, 0);
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

    /// Truncates a damaged file at the offset `at` and keeps a copy of the whole file for inspection.
    fn truncate_damaged(&mut self, at: u64) -> Result<(), Error> {
        let copy = self.path.with_extension("damaged");
        fs::copy(&self.path, &copy).map_err(disk("cannot write", &copy))?;
        self.file.set_len(at).map_err(disk("cannot truncate", &self.path))?;
        self.end = at;
        Ok(())
    }
}

fn disk(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Disk { action, path: path.clone(), source }
}

#[cfg(test)]
mod tests {
    use super::record::{decode, encode, read_body};
    use super::{MAX_ENDS, Spool};
    use crate::events::{
        AttentionStep, Event, EventType, Finish, FinishReason, Measurements, RunEnd, RunId, RunStart, RunStatus,
        Surface, TokenMeasurement, TraceItem, Usage, system,
    };
    use crate::store::writer::Record;
    use crate::trace::document::Numbering;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::sync::Arc;

    fn records() -> Vec<Record> {
        let run_id = RunId::now();
        let now = system::now();
        let start = RunStart {
            run_id,
            request_id: "req\u{0}\"ä".into(),
            created_at: now,
            surface: Surface::Openai,
            model: "m".into(),
            owner: None,
            user_label: None,
            metadata: crate::events::RunMetadata::default(),
            max_tokens: Some(3),
            temperature: Some(0.7),
            seed: Some(u32::MAX),
            mods: vec!["a".into()],
            prompt_preview: "hi".into(),
            parent: None,
            images: Vec::new(),
        };
        let mut event = Event::new(EventType::Sampled, 1, 0, Some(now));
        event.measured = Some(Box::new(Measurements {
            tokens: vec![TokenMeasurement {
                token: 1,
                text: "x".into(),
                logprob: Some(-0.1),
                rank: Some(1),
                entropy: None,
            }],
            ..Measurements::default()
        }));
        event.top_tokens = Some(serde_json::value::RawValue::from_string("{\"b\":1, \"a\":1.0}".into()).unwrap());
        let step = AttentionStep {
            sequence_order: 1,
            row_len: 4,
            layer_ids: vec![0, 3].into(),
            heads: 2,
            t0: vec![1, 2, 3],
            t1: vec![4],
            head_rows: Vec::new(),
        };
        let with_heads = AttentionStep { sequence_order: 2, head_rows: vec![5, 6, 7], ..step.clone() };
        let finish = Finish {
            reason: FinishReason::Stop,
            message: None,
            stop_string: None,
            text: "x".into(),
            tool_calls: None,
            fault: None,
            cause: None,
            usage: Usage::default(),
            first_token_us: None,
            prompt_decoded: 2,
            prompt_us: 1,
            generation_us: 2,
            truncated: false,
            evicted_tokens: 0,
            drafts: crate::events::DraftUsage::default(),
            evicted: Vec::new(),
        };
        let numbering = Numbering { mod_calls: 1, mod_logs: 2, actions: 3 };
        vec![
            Record::Started(Arc::new(start), uuid::Uuid::nil()),
            Record::Items(run_id, numbering, Arc::new(vec![TraceItem::Event(event)])),
            Record::Items(run_id, Numbering::default(), Arc::new(vec![TraceItem::Attention(step)])),
            Record::Items(run_id, Numbering::default(), Arc::new(vec![TraceItem::Attention(with_heads)])),
            Record::Ended(run_id, Arc::new(RunEnd { completed_at: now, status: RunStatus::Done, finish })),
        ]
    }

    fn spool() -> (tempdir::Folder, Spool) {
        let folder = tempdir::Folder::new();
        let spool = Spool::create(&folder.0, system::new_id()).unwrap();
        (folder, spool)
    }

    mod tempdir {
        use crate::events::system;

        pub struct Folder(pub std::path::PathBuf);

        impl Folder {
            pub fn new() -> Self {
                Self(std::env::temp_dir().join(format!("thunder-spool-{}", system::new_id())))
            }
        }

        impl Drop for Folder {
            fn drop(&mut self) {
                let _ = std::fs::remove_dir_all(&self.0);
            }
        }
    }

    #[test]
    fn drained_records_keep_their_order_and_empty_the_file() {
        let (_folder, mut spool) = spool();
        let records = records();
        spool.append(&records[..2]).unwrap();
        spool.append(&records[2..]).unwrap();
        let (first, at) = spool.next(2).unwrap();
        spool.mark_drained(at).unwrap();
        let (second, at) = spool.next(100).unwrap();
        let decoded: Vec<Record> = first.into_iter().chain(second).collect();
        assert_eq!(format!("{decoded:?}"), format!("{records:?}"));
        assert!(!spool.is_drained());
        spool.mark_drained(at).unwrap();
        assert!(spool.is_drained());
        assert_eq!(spool.file.metadata().unwrap().len(), 0);
    }

    #[test]
    fn batch_has_a_limited_number_of_ends() {
        let (_folder, mut spool) = spool();
        for _ in 0..=MAX_ENDS {
            spool.append(&records()).unwrap();
        }
        let open = records();
        spool.append(&open[..2]).unwrap();
        let per_run = open.len();
        for (count, is_last) in [(MAX_ENDS * per_run, false), (per_run + 2, true)] {
            let (read, at) = spool.next(10_000).unwrap();
            assert_eq!(read.len(), count);
            let open_runs = spool.open_runs(at).map(|runs| runs.iter().copied().collect::<Vec<_>>());
            assert_eq!(open_runs, is_last.then(|| vec![open[0].run_id()]));
            spool.mark_drained(at).unwrap();
        }
        assert!(spool.is_drained() && spool.open_runs.is_empty());
    }

    #[test]
    fn incomplete_record_ends_the_file() {
        let (folder, mut spool) = spool();
        spool.append(&records()).unwrap();
        let length = spool.file.metadata().unwrap().len();
        spool.file.set_len(length - 3).unwrap();
        assert!(Spool::orphans(&folder.0).is_empty(), "a locked file is not an orphan");
        drop(spool);
        let mut orphans = Spool::orphans(&folder.0);
        let (read, at) = orphans[0].next(100).unwrap();
        assert_eq!(read.len(), records().len() - 1);
        orphans[0].mark_drained(at).unwrap();
        assert!(orphans[0].is_drained());
    }

    proptest! {
        #[test]
        fn damaged_bodies_never_panic(kind in 0u8..6, body in vec(any::<u8>(), 0..100)) {
            let mut bytes = vec![kind];
            bytes.extend(body);
            let _ = decode(&bytes);
        }

        #[test]
        fn damaged_files_never_panic(at in any::<prop::sample::Index>(), with in any::<u8>()) {
            let mut bytes = Vec::new();
            for record in &records() {
                encode(record, &mut bytes);
            }
            let at = at.index(bytes.len());
            bytes[at] = with;
            let mut input = bytes.as_slice();
            loop {
                let left = input.len() as u64;
                let Ok(Some(body)) = read_body(&mut input, left) else { break };
                let _ = decode(&body);
            }
        }
    }
}
