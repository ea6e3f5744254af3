//! Tests of the spool file.

use super::codec::{decode, encode, push, read_body};
use super::{MAX_ENDS, Spool};
use crate::events::{
    AttentionStep, Event, EventType, Finish, FinishReason, Measurements, RunEnd, RunId, RunStart, RunStatus, Surface,
    TokenMeasurement, TraceItem, Usage, system,
};
use crate::store::record::Record;
use crate::trace::document::Numbering;
use proptest::collection::vec;
use proptest::prelude::*;
use std::io::Write;
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
        mod_failures: Vec::new(),
    };
    let first_numbers = Numbering { mod_calls: 1, mod_logs: 2, actions: 3 };
    let items = |first_numbers, item| Record::Items { run_id, first_numbers, items: Arc::new(vec![item]) };
    vec![
        Record::Started { start: Arc::new(start), server_id: uuid::Uuid::nil() },
        items(first_numbers, TraceItem::Event(event)),
        items(Numbering::default(), TraceItem::Attention(step)),
        items(Numbering::default(), TraceItem::Attention(with_heads)),
        Record::Ended { run_id, end: Arc::new(RunEnd { completed_at: now, status: RunStatus::Done, finish }) },
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
    let damaged = orphans[0].path.with_extension("damaged");
    assert_eq!(damaged.metadata().unwrap().len(), length - 3 - at, "the copy contains only the damaged part");
    orphans[0].mark_drained(at).unwrap();
    assert!(orphans[0].is_drained());
}

#[test]
fn record_that_cannot_be_decoded_is_copied_once() {
    let (_folder, mut spool) = spool();
    let records = records();
    let mut unknown = Vec::new();
    push(&mut unknown, 99, |body| body.extend_from_slice(b"of a later version"));
    spool.append(&records[..1]).unwrap();
    spool.file.write_all(&unknown).unwrap();
    spool.end += unknown.len() as u64;
    spool.append(&records[1..]).unwrap();
    let refused = spool.path.with_extension("refused");

    let (first, at) = spool.next(100).unwrap();
    assert_eq!(first.len(), 1);
    assert!(!refused.exists(), "the records before it are not stored yet");
    spool.mark_drained(at).unwrap();
    for _ in 0..2 {
        assert_eq!(spool.next(100).unwrap().0.len(), records.len() - 1);
        assert_eq!(std::fs::read(&refused).unwrap(), unknown);
    }
    let (_, at) = spool.next(100).unwrap();
    spool.mark_drained(at).unwrap();
    assert!(spool.is_drained());
}

#[test]
fn status_skips_a_file_that_is_drained_meanwhile() {
    let (_folder, mut spool) = spool();
    spool.append(&records()).unwrap();
    let read = |length| super::status::read(std::fs::File::open(&spool.path).unwrap(), length).unwrap();
    assert_eq!(read(spool.end).map(|(count, _)| count), Some(records().len() as u64));
    spool.file.set_len(0).unwrap();
    assert_eq!(read(spool.end), None);
}

#[test]
fn damaged_file_is_truncated_if_it_cannot_be_copied() {
    let (_folder, mut spool) = spool();
    spool.append(&records()).unwrap();
    spool.end -= 3;
    spool.file.set_len(spool.end).unwrap();
    std::fs::create_dir(spool.path.with_extension("damaged")).unwrap();
    let (read, at) = spool.next(100).unwrap();
    assert_eq!(read.len(), records().len() - 1);
    assert_eq!((spool.end, spool.file.metadata().unwrap().len()), (at, at));
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
