//! Files that hold what could not be stored yet.
//!
//! A record is its length, its XXH3 checksum and its body. Records are appended and synced a batch at a time; whoever
//! reads a file stops at the first record that is not whole, which is where a crash cut it off. Each Thunder has one file,
//! locked as long as it lives; the files of dead ones are drained by the next.

use super::Error;
use super::writer::Record;
use crate::events::{Action, AttentionStep, Event, Item, ModCall, ModLog, RunEnd, RunId, RunStart};
use crate::trace::document::Numbering;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

/// Length and checksum.
const HEADER: usize = 12;
/// A longer record is not one.
const LONGEST: usize = 1 << 30;

const STARTED: u8 = 1;
const ITEMS: u8 = 2;
const ATTENTION: u8 = 3;
const ENDED: u8 = 4;

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
        let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let file = file.map_err(disk("cannot create", &path))?;
        file.lock().map_err(disk("cannot lock", &path))?;
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
        written.map_err(disk("cannot write", &self.path))?;
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

/// The next body; `None` where none is whole.
fn read_body(file: &mut impl Read, left: u64) -> io::Result<Option<Vec<u8>>> {
    let mut header = [0; HEADER];
    if left < HEADER as u64 {
        return Ok(None);
    }
    file.read_exact(&mut header)?;
    let (length, checksum) = header.split_at(4);
    let length = u32::from_le_bytes(length.try_into().unwrap_or_default()) as usize;
    let checksum = u64::from_le_bytes(checksum.try_into().unwrap_or_default());
    if length > LONGEST || length as u64 > left - HEADER as u64 {
        return Ok(None);
    }
    let mut body = vec![0; length];
    file.read_exact(&mut body)?;
    Ok((xxh3_64(&body) == checksum).then_some(body))
}

#[derive(Serialize)]
struct ItemsOut<'a> {
    run_id: RunId,
    calls: u32,
    logs: u32,
    actions: u32,
    items: Vec<ItemOut<'a>>,
}

#[derive(Serialize)]
enum ItemOut<'a> {
    E(&'a Event),
    C(&'a ModCall),
    L(&'a ModLog),
    A(&'a Action),
}

#[derive(Deserialize)]
struct ItemsIn {
    run_id: RunId,
    calls: u32,
    logs: u32,
    actions: u32,
    items: Vec<ItemIn>,
}

#[derive(Deserialize)]
enum ItemIn {
    E(Event),
    C(ModCall),
    L(ModLog),
    A(Action),
}

fn encode(record: &Record, out: &mut Vec<u8>) {
    match record {
        Record::Started(start, server_id) => push(out, STARTED, |body| json(body, &(&**start, server_id))),
        Record::Ended(run_id, end) => push(out, ENDED, |body| json(body, &(run_id, &**end))),
        Record::Items(run_id, numbering, items) => {
            let plain = items.iter().filter_map(|item| {
                Some(match item {
                    Item::Event(event) => ItemOut::E(event),
                    Item::ModCall(call) => ItemOut::C(call),
                    Item::ModLog(log) => ItemOut::L(log),
                    Item::Action(action) => ItemOut::A(action),
                    Item::Attention(_) => return None,
                })
            });
            let plain = ItemsOut {
                run_id: *run_id,
                calls: numbering.mod_calls,
                logs: numbering.mod_logs,
                actions: numbering.actions,
                items: plain.collect(),
            };
            if !plain.items.is_empty() {
                push(out, ITEMS, |body| json(body, &plain));
            }
            for item in items.iter() {
                if let Item::Attention(step) = item {
                    push(out, ATTENTION, |body| attention(body, *run_id, step));
                }
            }
        }
    }
}

fn push(out: &mut Vec<u8>, kind: u8, write: impl FnOnce(&mut Vec<u8>)) {
    let begin = out.len();
    out.extend_from_slice(&[0; HEADER]);
    out.push(kind);
    write(out);
    let body = begin + HEADER;
    let (length, checksum) = ((out.len() - body) as u32, xxh3_64(&out[body..]));
    out[begin..begin + 4].copy_from_slice(&length.to_le_bytes());
    out[begin + 4..body].copy_from_slice(&checksum.to_le_bytes());
}

fn json(out: &mut Vec<u8>, value: &impl Serialize) {
    let begin = out.len();
    if let Err(error) = serde_json::to_writer(&mut *out, value) {
        // these types hold nothing that JSON cannot
        tracing::error!(%error, "a record cannot be written to the spool file");
        out.truncate(begin);
    }
}

fn attention(out: &mut Vec<u8>, run_id: RunId, step: &AttentionStep) {
    out.extend_from_slice(run_id.0.as_bytes());
    for number in [
        step.sequence_order.cast_unsigned(),
        step.row_len,
        step.heads.into(),
        step.layer_ids.len() as u32,
        step.t0.len() as u32,
    ] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    for layer in step.layer_ids.iter() {
        out.extend_from_slice(&layer.to_le_bytes());
    }
    out.extend_from_slice(&step.t0);
    out.extend_from_slice(&step.t1);
}

fn decode(body: &[u8]) -> Option<Record> {
    let (kind, body) = body.split_first()?;
    Some(match *kind {
        STARTED => {
            let (start, server_id): (RunStart, Uuid) = serde_json::from_slice(body).ok()?;
            Record::Started(Arc::new(start), server_id)
        }
        ITEMS => {
            let read: ItemsIn = serde_json::from_slice(body).ok()?;
            let numbering = Numbering { mod_calls: read.calls, mod_logs: read.logs, actions: read.actions };
            let items = read.items.into_iter().map(|item| match item {
                ItemIn::E(event) => Item::Event(event),
                ItemIn::C(call) => Item::ModCall(call),
                ItemIn::L(log) => Item::ModLog(log),
                ItemIn::A(action) => Item::Action(action),
            });
            Record::Items(read.run_id, numbering, Arc::new(items.collect()))
        }
        ATTENTION => {
            let (run_id, step) = decode_attention(body)?;
            Record::Items(run_id, Numbering::default(), Arc::new(vec![Item::Attention(step)]))
        }
        ENDED => {
            let (run_id, end): (RunId, RunEnd) = serde_json::from_slice(body).ok()?;
            Record::Ended(run_id, Arc::new(end))
        }
        _ => return None,
    })
}

fn decode_attention(body: &[u8]) -> Option<(RunId, AttentionStep)> {
    let (run_id, mut rest) = body.split_first_chunk::<16>()?;
    let mut number = || {
        let (bytes, after) = rest.split_first_chunk::<4>()?;
        rest = after;
        Some(u32::from_le_bytes(*bytes))
    };
    let (sequence_order, row_len, heads, layers, t0) = (number()?, number()?, number()?, number()?, number()?);
    let (layer_ids, tiers) = rest.split_at_checked((layers as usize).checked_mul(2)?)?;
    let (t0, t1) = tiers.split_at_checked(t0 as usize)?;
    let step = AttentionStep {
        sequence_order: sequence_order.cast_signed(),
        row_len,
        heads: heads.try_into().ok()?,
        layer_ids: layer_ids.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect(),
        t0: t0.to_vec(),
        t1: t1.to_vec(),
    };
    Some((RunId(Uuid::from_bytes(*run_id)), step))
}

fn disk(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Disk { action, path: path.clone(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{EventType, Finish, FinishReason, Measured, RunStatus, Surface, TokenMeasure, Usage};
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn records() -> Vec<Record> {
        let run_id = RunId::now();
        let now = chrono::Utc::now();
        let start = RunStart {
            run_id,
            request_id: "req\u{0}\"ä".into(),
            created_at: now,
            surface: Surface::Openai,
            model: "m".into(),
            user_label: None,
            max_tokens: Some(3),
            temperature: Some(0.7),
            seed: Some(u32::MAX),
            mods: vec!["a".into()],
            prompt_preview: "hi".into(),
        };
        let mut event = Event::new(EventType::Sampled, 1, 0, Some(now));
        event.measured = Some(Box::new(Measured {
            tokens: vec![TokenMeasure {
                token: 1,
                text: "x".into(),
                logprob: Some(-0.1),
                rank: Some(1),
                entropy: None,
            }],
            ..Measured::default()
        }));
        event.top_tokens = Some(serde_json::value::RawValue::from_string("{\"b\":1, \"a\":1.0}".into()).unwrap());
        let step = AttentionStep {
            sequence_order: 1,
            row_len: 4,
            layer_ids: vec![0, 3].into(),
            heads: 2,
            t0: vec![1, 2, 3],
            t1: vec![4],
        };
        let finish = Finish {
            reason: FinishReason::Stop,
            message: None,
            stop_string: None,
            text: "x".into(),
            tool_calls: None,
            fault: None,
            usage: Usage::default(),
            first_token_us: None,
            prompt_us: 1,
            generation_us: 2,
            truncated: false,
            evicted_tokens: 0,
            evicted: Vec::new(),
        };
        let numbering = Numbering { mod_calls: 1, mod_logs: 2, actions: 3 };
        vec![
            Record::Started(Arc::new(start), Uuid::nil()),
            Record::Items(run_id, numbering, Arc::new(vec![Item::Event(event)])),
            Record::Items(run_id, Numbering::default(), Arc::new(vec![Item::Attention(step)])),
            Record::Ended(run_id, Arc::new(RunEnd { completed_at: now, status: RunStatus::Done, finish })),
        ]
    }

    fn spool() -> (tempdir::Folder, Spool) {
        let folder = tempdir::Folder::new();
        let spool = Spool::create(&folder.0, Uuid::now_v7()).unwrap();
        (folder, spool)
    }

    mod tempdir {
        pub struct Folder(pub std::path::PathBuf);

        impl Folder {
            pub fn new() -> Self {
                Self(std::env::temp_dir().join(format!("thunder-spool-{}", uuid::Uuid::now_v7())))
            }
        }

        impl Drop for Folder {
            fn drop(&mut self) {
                let _ = std::fs::remove_dir_all(&self.0);
            }
        }
    }

    #[test]
    fn records_come_back_in_order_and_the_file_is_empty_again() {
        let (_folder, mut spool) = spool();
        let records = records();
        spool.append(&records[..2]).unwrap();
        spool.append(&records[2..]).unwrap();
        let (first, at) = spool.next(2).unwrap();
        spool.drained(at).unwrap();
        let (second, at) = spool.next(100).unwrap();
        let back: Vec<Record> = first.into_iter().chain(second).collect();
        assert_eq!(format!("{back:?}"), format!("{records:?}"));
        assert!(!spool.is_drained());
        spool.drained(at).unwrap();
        assert!(spool.is_drained());
        assert_eq!(spool.file.metadata().unwrap().len(), 0);
    }

    #[test]
    fn a_record_that_a_crash_cut_off_ends_the_file() {
        let (folder, mut spool) = spool();
        spool.append(&records()).unwrap();
        let length = spool.file.metadata().unwrap().len();
        spool.file.set_len(length - 3).unwrap();
        assert!(Spool::orphans(&folder.0).is_empty(), "a living Thunder's file is its own");
        drop(spool);
        let mut orphans = Spool::orphans(&folder.0);
        let (records, at) = orphans[0].next(100).unwrap();
        assert_eq!(records.len(), 3);
        orphans[0].drained(at).unwrap();
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
