//! Encoding of captured attention for storage, in order, on a separate thread with a short queue. Senders never wait.

use crate::engine::options::{AttentionEncodeFn, HeadEncodeFn};
use crate::events::{AttentionStep, RunId, StoredHeads, TraceItem};
use crate::model::llama::AttentionRow;
use crate::recording::Signal;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use tokio::sync::mpsc;

/// Maximum queued rows; a run whose rows do not fit is left out of the batch.
const MAX_QUEUED_ROWS: usize = 64;

/// Maximum bytes of queued rows; a single row may be larger.
const MAX_QUEUED_BYTES: usize = 128 << 20;

/// Tolerance for rounding in rows whose probabilities sum to more than 1. Sums below 1 are valid: they come from layers
/// with attention sinks.
const SUM_TOLERANCE: f32 = 0.02;

enum EncodeJob {
    Row(RunId, i32, Arc<AttentionRow>, StoredHeads),
    Forward(Signal),
}

/// Functions that encode a row for storage.
#[derive(Debug, Clone, Copy)]
pub struct Encoders {
    /// Rows reduced over heads, see [`AttentionEncodeFn`].
    pub tiers: AttentionEncodeFn,
    /// Rows of single heads.
    pub heads: HeadEncodeFn,
}

/// Handle of the encoder thread. Dropping it ends the thread once the queue is empty.
pub struct AttentionEncoderThread {
    jobs: Sender<EncodeJob>,
    thread: JoinHandle<()>,
    waiting: Arc<AtomicUsize>,
    waiting_bytes: Arc<AtomicUsize>,
}

impl AttentionEncoderThread {
    /// Starts the thread, which sends encoded rows to `recorder`.
    pub fn start(encoders: Encoders, recorder: mpsc::Sender<Signal>) -> std::io::Result<Self> {
        let (jobs, queue) = channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let waiting_bytes = Arc::new(AtomicUsize::new(0));
        let (counter, bytes) = (Arc::clone(&waiting), Arc::clone(&waiting_bytes));
        let thread = std::thread::Builder::new()
            .name("thunder-attention".into())
            .spawn(move || encode_rows(&queue, encoders, &recorder, &counter, &bytes))?;
        Ok(Self { jobs, thread, waiting, waiting_bytes })
    }

    /// Waits until the recorder has received everything in the queue.
    pub fn finish(self) {
        drop(self.jobs);
        if self.thread.join().is_err() {
            tracing::error!("attention encoder thread panicked");
        }
    }

    /// Returns true if `rows` more rows fit into the queue.
    pub fn has_room(&self, rows: usize) -> bool {
        let waiting = self.waiting.load(Ordering::Acquire);
        waiting + rows <= MAX_QUEUED_ROWS && self.waiting_bytes.load(Ordering::Acquire) < MAX_QUEUED_BYTES
    }

    /// Queues the attention of the step whose `ForwardPass` event has this number. The caller has checked
    /// [`AttentionEncoderThread::has_room`].
    pub fn send_row(&self, run: RunId, sequence_order: i32, captured: Arc<AttentionRow>, stored: StoredHeads) {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        self.waiting_bytes.fetch_add(size_of_val(captured.values.as_slice()), Ordering::AcqRel);
        // The channel is closed only after the recorder has stopped, and then nothing is recorded.
        let _ = self.jobs.send(EncodeJob::Row(run, sequence_order, captured, stored));
    }

    /// Forwards a signal to the recorder after all queued rows.
    pub fn forward(&self, signal: Signal) {
        let _ = self.jobs.send(EncodeJob::Forward(signal));
    }
}

fn encode_rows(
    queue: &Receiver<EncodeJob>,
    encoders: Encoders,
    recorder: &mpsc::Sender<Signal>,
    waiting: &AtomicUsize,
    waiting_bytes: &AtomicUsize,
) {
    for job in queue {
        let signal = match job {
            EncodeJob::Forward(signal) => Some(signal),
            EncodeJob::Row(run, sequence_order, captured, stored) => {
                // A panic on one row must not end the thread, which also forwards the ends of runs.
                let step = catch_unwind(AssertUnwindSafe(|| encode_row(encoders, sequence_order, &captured, &stored)));
                let step = step.unwrap_or_else(|_| {
                    tracing::error!(run.id = %run, sequence_order, "attention row not recorded: the encoder panicked");
                    None
                });
                waiting.fetch_sub(1, Ordering::AcqRel);
                waiting_bytes.fetch_sub(size_of_val(captured.values.as_slice()), Ordering::AcqRel);
                step.map(|step| Signal::Items(run, Arc::new(vec![TraceItem::Attention(step)])))
            }
        };
        if let Some(signal) = signal
            && recorder.blocking_send(signal).is_err()
        {
            return;
        }
    }
}

fn encode_row(
    encoders: Encoders,
    sequence_order: i32,
    captured: &AttentionRow,
    stored: &StoredHeads,
) -> Option<AttentionStep> {
    let AttentionRow { row_len, layer_ids, heads, values, .. } = captured;
    let (row_len, heads, layers) = (*row_len as usize, *heads as usize, layer_ids.len());
    if layers == 0 || heads == 0 || values.len() != layers * heads * row_len {
        tracing::warn!(layers, heads, row_len, "attention row not recorded: layers differ in size");
        return None;
    }
    let max_sum = values.chunks_exact(row_len).map(|row| row.iter().sum::<f32>()).fold(0f32, f32::max);
    if max_sum > 1.0 + SUM_TOLERANCE {
        tracing::error!(sum = max_sum, sequence_order, "attention row not recorded: its sum exceeds 1");
        return None;
    }
    let (t0, t1) = (encoders.tiers)(values, layers, heads, row_len)?;
    let head_rows = match stored {
        StoredHeads::None => Vec::new(),
        selected => (encoders.heads)(values, layer_ids, heads as u16, selected),
    };
    Some(AttentionStep {
        sequence_order,
        row_len: row_len as u32,
        layer_ids: layer_ids.as_slice().into(),
        heads: heads as u16,
        t0,
        t1,
        head_rows,
    })
}
