//! Encoding of spool records: length, checksum and body.

use crate::events::{ActionRecord, AttentionStep, Event, ModCall, ModLog, RunEnd, RunId, RunStart, TraceItem};
use crate::store::record::Record;
use crate::trace::document::Numbering;
use serde::{Deserialize, Serialize};
use std::io::{self, Read};
use std::sync::Arc;
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a record's length and checksum.
pub(super) const HEADER: usize = 12;
/// Maximum length of a body. A larger length in a header means that the file is damaged.
const MAX_BODY_BYTES: usize = 1 << 30;

const STARTED: u8 = 1;
const ITEMS: u8 = 2;
const ATTENTION: u8 = 3;
const ENDED: u8 = 4;
const ATTENTION_WITH_HEADS: u8 = 5;

/// Reads the next body. Returns `None` if the rest of the file, `left` bytes, does not begin with a complete record.
pub(super) fn read_body(file: &mut impl Read, left: u64) -> io::Result<Option<Vec<u8>>> {
    let mut header = [0; HEADER];
    if left < HEADER as u64 {
        return Ok(None);
    }
    file.read_exact(&mut header)?;
    let (length, checksum) = header.split_at(4);
    let length = u32::from_le_bytes(length.try_into().unwrap_or_default()) as usize;
    let checksum = u64::from_le_bytes(checksum.try_into().unwrap_or_default());
    if length > MAX_BODY_BYTES || length as u64 > left - HEADER as u64 {
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
    #[serde(rename = "E")]
    Event(&'a Event),
    #[serde(rename = "C")]
    Call(&'a ModCall),
    #[serde(rename = "L")]
    Log(&'a ModLog),
    #[serde(rename = "A")]
    Action(&'a ActionRecord),
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
    #[serde(rename = "E")]
    Event(Event),
    #[serde(rename = "C")]
    Call(ModCall),
    #[serde(rename = "L")]
    Log(ModLog),
    #[serde(rename = "A")]
    Action(ActionRecord),
}

/// Appends an encoded record to `out`.
pub(super) fn encode(record: &Record, out: &mut Vec<u8>) {
    match record {
        Record::Started { start, server_id } => push(out, STARTED, |body| json(body, &(&**start, server_id))),
        Record::Ended { run_id, end } => push(out, ENDED, |body| json(body, &(run_id, &**end))),
        Record::Items { run_id, first_numbers, items } => {
            let plain = items.iter().filter_map(|item| {
                Some(match item {
                    TraceItem::Event(event) => ItemOut::Event(event),
                    TraceItem::ModCall(call) => ItemOut::Call(call),
                    TraceItem::ModLog(log) => ItemOut::Log(log),
                    TraceItem::Action(action) => ItemOut::Action(action),
                    TraceItem::Attention(_) => return None,
                })
            });
            let plain = ItemsOut {
                run_id: *run_id,
                calls: first_numbers.mod_calls,
                logs: first_numbers.mod_logs,
                actions: first_numbers.actions,
                items: plain.collect(),
            };
            if !plain.items.is_empty() {
                push(out, ITEMS, |body| json(body, &plain));
            }
            for item in items.iter() {
                if let TraceItem::Attention(step) = item {
                    // Attention without per-head rows keeps the format of earlier versions.
                    let kind = if step.head_rows.is_empty() { ATTENTION } else { ATTENTION_WITH_HEADS };
                    push(out, kind, |body| attention(body, *run_id, step));
                }
            }
        }
    }
}

/// Appends a record of a kind whose body `write` appends.
pub(super) fn push(out: &mut Vec<u8>, kind: u8, write: impl FnOnce(&mut Vec<u8>)) {
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
        // Unreachable: JSON can represent these types.
        tracing::error!(%error, "cannot encode a record for the spool file");
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
    if !step.head_rows.is_empty() {
        out.extend_from_slice(&(step.head_rows.len() as u32).to_le_bytes());
        out.extend_from_slice(&step.head_rows);
    }
    out.extend_from_slice(&step.t1);
}

/// Decodes a body. Returns `None` if it is not a record of this version.
pub(super) fn decode(body: &[u8]) -> Option<Record> {
    let (kind, body) = body.split_first()?;
    Some(match *kind {
        STARTED => {
            let (start, server_id): (RunStart, Uuid) = serde_json::from_slice(body).ok()?;
            Record::Started { start: Arc::new(start), server_id }
        }
        ITEMS => {
            let read: ItemsIn = serde_json::from_slice(body).ok()?;
            let first_numbers = Numbering { mod_calls: read.calls, mod_logs: read.logs, actions: read.actions };
            let items = read.items.into_iter().map(|item| match item {
                ItemIn::Event(event) => TraceItem::Event(event),
                ItemIn::Call(call) => TraceItem::ModCall(call),
                ItemIn::Log(log) => TraceItem::ModLog(log),
                ItemIn::Action(action) => TraceItem::Action(action),
            });
            Record::Items { run_id: read.run_id, first_numbers, items: Arc::new(items.collect()) }
        }
        ATTENTION | ATTENTION_WITH_HEADS => {
            let (run_id, step) = decode_attention(body, *kind == ATTENTION_WITH_HEADS)?;
            Record::Items {
                run_id,
                first_numbers: Numbering::default(),
                items: Arc::new(vec![TraceItem::Attention(step)]),
            }
        }
        ENDED => {
            let (run_id, end): (RunId, RunEnd) = serde_json::from_slice(body).ok()?;
            Record::Ended { run_id, end: Arc::new(end) }
        }
        _ => return None,
    })
}

fn decode_attention(body: &[u8], with_heads: bool) -> Option<(RunId, AttentionStep)> {
    let (run_id, mut rest) = body.split_first_chunk::<16>()?;
    let mut number = || {
        let (bytes, after) = rest.split_first_chunk::<4>()?;
        rest = after;
        Some(u32::from_le_bytes(*bytes))
    };
    let (sequence_order, row_len, heads, layers, t0) = (number()?, number()?, number()?, number()?, number()?);
    let (layer_ids, tiers) = rest.split_at_checked((layers as usize).checked_mul(2)?)?;
    let (t0, tiers) = tiers.split_at_checked(t0 as usize)?;
    let (head_rows, t1) = if with_heads {
        let (length, rest) = tiers.split_first_chunk::<4>()?;
        rest.split_at_checked(u32::from_le_bytes(*length) as usize)?
    } else {
        tiers.split_at(0)
    };
    let step = AttentionStep {
        sequence_order: sequence_order.cast_signed(),
        row_len,
        heads: heads.try_into().ok()?,
        layer_ids: layer_ids.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect(),
        t0: t0.to_vec(),
        t1: t1.to_vec(),
        head_rows: head_rows.to_vec(),
    };
    Some((RunId(Uuid::from_bytes(*run_id)), step))
}
