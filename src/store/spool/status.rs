//! Status of all spool files, for operators.

use super::codec::{HEADER, decode, read_body};
use super::{Spool, disk};
use crate::events::{TraceItem, system};
use crate::store::Error;
use crate::store::record::Record;
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::Path;

/// The records in the spool files of a folder.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SpoolStatus {
    /// Number of files with records.
    pub files: u64,
    /// Number of records, including those that a server is storing at the moment.
    pub records: u64,
    /// Size of the records in bytes.
    pub bytes: u64,
    /// Age of the oldest record in seconds; `None` if there are none.
    pub lag_s: Option<u64>,
    /// Size in bytes of the records that are damaged, that this version cannot decode, or that the database rejected.
    pub refused_bytes: u64,
}

impl Spool {
    /// Returns the status of the files in a folder, which servers may be using.
    pub fn status(folder: &Path) -> Result<SpoolStatus, Error> {
        let mut status = SpoolStatus::default();
        let entries = match fs::read_dir(folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(status),
            entries => entries.map_err(disk("cannot read", folder))?,
        };
        let mut oldest: Option<DateTime<Utc>> = None;
        for path in entries.flatten().map(|entry| entry.path()) {
            let length = fs::metadata(&path).map_or(0, |file| file.len());
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("refused" | "damaged") => status.refused_bytes += length,
                Some("spool") if length > 0 => {
                    // A server may remove a drained file meanwhile.
                    let Ok(file) = File::open(&path) else { continue };
                    let read = read(file, length).map_err(disk("cannot read", &path))?;
                    let Some((records, first)) = read else { continue };
                    status.files += 1;
                    status.records += records;
                    status.bytes += length;
                    oldest = oldest.into_iter().chain(first).min();
                }
                _ => {}
            }
        }
        status.lag_s = oldest.map(|time| (system::now() - time).num_seconds().max(0).unsigned_abs());
        Ok(status)
    }
}

/// Returns the number of records and the time of the first one that has a time. Returns `None` if the file has become
/// shorter than `length`, because a server has drained it meanwhile.
pub(super) fn read(file: File, length: u64) -> io::Result<Option<(u64, Option<DateTime<Utc>>)>> {
    match read_records(file, length) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(None),
        result => result.map(Some),
    }
}

fn read_records(file: File, length: u64) -> io::Result<(u64, Option<DateTime<Utc>>)> {
    let mut file = BufReader::new(file);
    let (mut at, mut records, mut first) = (0, 0, None);
    while first.is_none()
        && let Some(body) = read_body(&mut file, length - at)?
    {
        at += (HEADER + body.len()) as u64;
        records += 1;
        first = decode(&body).as_ref().and_then(time);
    }
    // For the other records, the headers are enough.
    let mut header = [0; HEADER];
    while length.saturating_sub(at) >= HEADER as u64 {
        file.read_exact(&mut header)?;
        let [a, b, c, d, ..] = header;
        let body = u32::from_le_bytes([a, b, c, d]);
        at += HEADER as u64 + u64::from(body);
        if at > length {
            break;
        }
        file.seek_relative(body.into())?;
        records += 1;
    }
    Ok((records, first))
}

fn time(record: &Record) -> Option<DateTime<Utc>> {
    match record {
        Record::Started { start, .. } => Some(start.created_at),
        Record::Ended { end, .. } => Some(end.completed_at),
        Record::Items { items, .. } => items.iter().find_map(|item| match item {
            TraceItem::Event(event) => event.created_at,
            _ => None,
        }),
    }
}
