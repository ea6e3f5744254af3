use super::Message;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

/// Bytes that may wait for a client that does not read.
const UNSENT_BYTES: usize = 1 << 20;

/// What a message costs besides its bytes.
const MESSAGE_BYTES: usize = 128;

/// The connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the connection is closed")]
pub(in crate::api) struct Gone;

/// The way to a client, for any number of runs; cheap to clone.
#[derive(Debug, Clone)]
pub(in crate::api) struct Outgoing {
    room: Arc<Semaphore>,
    queue: mpsc::UnboundedSender<Unsent>,
    at_work: watch::Sender<usize>,
}

/// A message on its way, and its place in the queue.
pub(super) struct Unsent {
    pub(super) message: Message,
    _place: OwnedSemaphorePermit,
}

/// The other end of [`Outgoing`].
pub(super) struct Queue {
    room: Arc<Semaphore>,
    pub(super) unsent: mpsc::UnboundedReceiver<Unsent>,
}

/// Says that the connection has something to do, as long as it lives: it is not idle, and a server that stops waits for it.
pub(in crate::api) struct AtWork(watch::Sender<usize>);

/// A queue that holds about a MiB, or one message that is larger.
pub(super) fn queue() -> (Outgoing, Queue) {
    let (queue, unsent) = mpsc::unbounded_channel();
    let room = Arc::new(Semaphore::new(UNSENT_BYTES));
    let outgoing = Outgoing { room: Arc::clone(&room), queue, at_work: watch::Sender::new(0) };
    (outgoing, Queue { room, unsent })
}

impl Outgoing {
    /// Queues a message, as soon as there is room for it.
    ///
    /// # Errors
    /// The connection is closed.
    pub(in crate::api) async fn send(&self, message: impl Into<Message>) -> Result<(), Gone> {
        let message = message.into();
        let cost = (message.len() + MESSAGE_BYTES).min(UNSENT_BYTES) as u32;
        let place = Arc::clone(&self.room).acquire_many_owned(cost).await.map_err(|_| Gone)?;
        self.queue.send(Unsent { message, _place: place }).map_err(|_| Gone)
    }

    /// Returns when the connection is closed.
    pub(in crate::api) async fn closed(&self) {
        self.queue.closed().await;
    }

    /// Says that there is something to do for this connection, until the result is dropped.
    pub(in crate::api) fn at_work(&self) -> AtWork {
        self.at_work.send_modify(|count| *count += 1);
        AtWork(self.at_work.clone())
    }

    /// How much there is to do.
    pub(super) fn work(&self) -> watch::Receiver<usize> {
        self.at_work.subscribe()
    }
}

impl Queue {
    /// Takes no more messages; those that are there can still be taken out.
    pub(super) fn close(&mut self) {
        self.room.close();
        self.unsent.close();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.close();
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_queue_makes_the_sender_wait() {
        let (outgoing, mut queue) = queue();
        let half = "x".repeat(UNSENT_BYTES / 2);
        outgoing.send(half.clone()).await.unwrap();
        let mut second = Box::pin(outgoing.send(half));
        assert!(futures::poll!(&mut second).is_pending());
        drop(queue.unsent.recv().await);
        second.await.unwrap();
    }

    #[tokio::test]
    async fn a_message_larger_than_the_queue_goes_alone() {
        let (outgoing, mut queue) = queue();
        outgoing.send("x".repeat(3 * UNSENT_BYTES)).await.unwrap();
        assert!(futures::poll!(Box::pin(outgoing.send(String::from("y")))).is_pending());
        queue.close();
        assert_eq!(outgoing.send(String::from("z")).await, Err(Gone));
        assert!(queue.unsent.recv().await.is_some());
    }
}
