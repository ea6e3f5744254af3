use super::Spool;
use super::record::{decode, encode, read_body};
use crate::events::{
    AttentionStep, Event, EventType, Finish, FinishReason, Item, Measured, RunEnd, RunId, RunStart, RunStatus, Surface,
    TokenMeasure, Usage,
};
use crate::store::writer::Record;
use crate::trace::document::Numbering;
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::Arc;
use uuid::Uuid;

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
        tokens: vec![TokenMeasure { token: 1, text: "x".into(), logprob: Some(-0.1), rank: Some(1), entropy: None }],
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
