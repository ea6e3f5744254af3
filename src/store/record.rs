//! The records of live runs, which are written to the database or to a spool file.

use crate::events::{RunEnd, RunId, RunStart, TraceItem};
use crate::trace::document::Numbering;
use std::sync::Arc;
use uuid::Uuid;

/// A record of a live run, in order of occurrence.
#[derive(Debug, Clone)]
pub enum Record {
    /// A run began.
    Started {
        start: Arc<RunStart>,
        /// The server that generates the run.
        server_id: Uuid,
    },
    /// Items of a run.
    Items {
        run_id: RunId,
        /// The indexes of the first item of each kind.
        first_numbers: Numbering,
        items: Arc<Vec<TraceItem>>,
    },
    /// A run ended.
    Ended { run_id: RunId, end: Arc<RunEnd> },
}

impl Record {
    /// Returns the run of the record.
    pub fn run_id(&self) -> RunId {
        match self {
            Self::Started { start, .. } => start.run_id,
            Self::Items { run_id, .. } | Self::Ended { run_id, .. } => *run_id,
        }
    }

    /// Returns the bytes of image files and of attention.
    pub fn blob_bytes(&self) -> usize {
        match self {
            Self::Started { start, .. } => start.images.iter().map(|file| file.data.len()).sum(),
            Self::Items { items, .. } => items.iter().map(attention_bytes).sum(),
            Self::Ended { .. } => 0,
        }
    }

    /// Returns the weight in items. Attention and images are weighted by their bytes, because one of them can be as large as a
    /// thousand events.
    pub fn weight(&self) -> usize {
        const BYTES: usize = 4096;
        match self {
            Self::Started { .. } => 1 + self.blob_bytes() / BYTES,
            Self::Items { items, .. } => items.iter().map(|item| 1 + attention_bytes(item) / BYTES).sum(),
            Self::Ended { .. } => 1,
        }
    }
}

/// Returns the bytes of the attention of an item; 0 for other items.
pub fn attention_bytes(item: &TraceItem) -> usize {
    match item {
        TraceItem::Attention(step) => step.t0.len() + step.t1.len() + step.head_rows.len(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::Record;
    use crate::events::{AttentionStep, RunId, TraceItem};
    use crate::trace::document::Numbering;
    use std::sync::Arc;

    #[test]
    fn weight_includes_rows_of_all_heads() {
        let step = AttentionStep {
            sequence_order: 1,
            row_len: 1000,
            layer_ids: vec![0].into(),
            heads: 2,
            t0: vec![1; 96],
            t1: vec![2; 4000],
            head_rows: vec![3; 3 << 20],
        };
        let without_heads = AttentionStep { head_rows: Vec::new(), ..step.clone() };
        let record = |steps: [AttentionStep; 2]| {
            let items: Vec<TraceItem> = steps.into_iter().map(TraceItem::Attention).collect();
            Record::Items { run_id: RunId::now(), first_numbers: Numbering::default(), items: Arc::new(items) }
        };
        let small = record([without_heads.clone(), without_heads.clone()]);
        assert_eq!((small.weight(), small.blob_bytes()), (4, 2 * 4096));
        let large = record([step, without_heads]);
        assert_eq!((large.weight(), large.blob_bytes()), (4 + 3 * 256, 2 * 4096 + (3 << 20)));
    }
}
