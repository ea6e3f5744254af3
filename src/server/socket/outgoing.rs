use super::Message;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

/// Maximum bytes queued for a client that does not read.
const MAX_QUEUED_BYTES: usize = 1 << 20;

/// Overhead of a queued message in bytes.
const MESSAGE_OVERHEAD: usize = 128;

/// The connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the connection is closed")]
pub(crate) struct ConnectionClosed;

/// Queue of messages to a client, shared by its runs; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    free_bytes: Arc<Semaphore>,
    queue: mpsc::UnboundedSender<QueuedMessage>,
    active: watch::Sender<usize>,
}

/// A queued message with its permit.
pub(super) struct QueuedMessage {
    pub(super) message: Message,
    _permit: OwnedSemaphorePermit,
}

/// The receiving end of [`Outgoing`].
pub(super) struct Queue {
    free_bytes: Arc<Semaphore>,
    pub(super) unsent: mpsc::UnboundedReceiver<QueuedMessage>,
}

/// Guard that marks the connection as active until dropped. An active connection is not closed as idle, and a stopping
/// server waits for it.
pub(crate) struct ActivityGuard(watch::Sender<usize>);

/// Creates a queue for about 1 MiB, or one larger message.
pub(super) fn queue() -> (Outgoing, Queue) {
    let (queue, unsent) = mpsc::unbounded_channel();
    let free_bytes = Arc::new(Semaphore::new(MAX_QUEUED_BYTES));
    let outgoing = Outgoing { free_bytes: Arc::clone(&free_bytes), queue, active: watch::Sender::new(0) };
    (outgoing, Queue { free_bytes, unsent })
}

impl Outgoing {
    /// Queues a message when there is room for it.
    ///
    /// # Errors
    /// The connection is closed.
    pub(crate) async fn send(&self, message: impl Into<Message>) -> Result<(), ConnectionClosed> {
        let message = message.into();
        let cost = (message.len() + MESSAGE_OVERHEAD).min(MAX_QUEUED_BYTES) as u32;
        let permit = Arc::clone(&self.free_bytes).acquire_many_owned(cost).await.map_err(|_| ConnectionClosed)?;
        self.queue.send(QueuedMessage { message, _permit: permit }).map_err(|_| ConnectionClosed)
    }

    /// Marks the connection as active until the result is dropped.
    pub(crate) fn mark_active(&self) -> ActivityGuard {
        self.active.send_modify(|count| *count += 1);
        ActivityGuard(self.active.clone())
    }

    /// Returns the number of activities.
    pub(super) fn activity_count(&self) -> watch::Receiver<usize> {
        self.active.subscribe()
    }
}

impl Queue {
    /// Rejects new messages; queued ones can still be received.
    pub(super) fn close(&mut self) {
        self.free_bytes.close();
        self.unsent.close();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.close();
    }
}

impl Drop for ActivityGuard {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn full_queue_blocks_the_sender() {
        let (outgoing, mut queue) = queue();
        let half = "x".repeat(MAX_QUEUED_BYTES / 2);
        outgoing.send(half.clone()).await.unwrap();
        let mut second = Box::pin(outgoing.send(half));
        assert!(futures::poll!(&mut second).is_pending());
        drop(queue.unsent.recv().await);
        second.await.unwrap();
    }

    #[tokio::test]
    async fn message_larger_than_the_queue_is_sent_alone() {
        let (outgoing, mut queue) = queue();
        outgoing.send("x".repeat(3 * MAX_QUEUED_BYTES)).await.unwrap();
        assert!(futures::poll!(Box::pin(outgoing.send(String::from("y")))).is_pending());
        queue.close();
        assert_eq!(outgoing.send(String::from("z")).await, Err(ConnectionClosed));
        assert!(queue.unsent.recv().await.is_some());
    }
}
