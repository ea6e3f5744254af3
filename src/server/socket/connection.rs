//! Serves a connection. Reading, writing and the handler run concurrently in one task.

use super::activity::LastActivity;
use super::assembler::Assembler;
use super::outgoing::{Queue, QueuedMessage, queue};
use super::unauthenticated::{LimitedStream, MAX_MESSAGE_BYTES};
use super::{Close, Incoming, Message, Outgoing, Socket, authentication};
use crate::config::SocketConfig;
use crate::server::peers::ForwardHeaders;
use crate::server::{ApiError, App, Caller};
use futures::SinkExt;
use std::future::poll_fn;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio::time::{sleep, timeout};
use yawc::streaming::Streaming;
use yawc::{Frame, OpCode, Result as SocketResult, WebSocketError};

/// Maximum messages queued for the handler.
const MAX_UNREAD_MESSAGES: usize = 16;

/// Maximum messages written before a flush.
const MAX_BATCH_MESSAGES: usize = 64;

/// Maximum wait for the client's close frame.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Additional time for protocols to send their last message when the server stops.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Minimum time before an unresponsive client is disconnected; three ping intervals if those are longer.
const MIN_SILENCE_TIMEOUT: Duration = Duration::from_mins(1);

/// Shared by reading and writing.
struct Connection {
    /// Locked for one poll at a time.
    stream: Mutex<Streaming<LimitedStream>>,
    /// True after reading failed. Unless the connection is closed, the library has then queued a close frame with the
    /// cause.
    is_failed: AtomicBool,
}

impl Connection {
    fn new(stream: Streaming<LimitedStream>) -> Self {
        Self { stream: Mutex::new(stream), is_failed: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, Streaming<LimitedStream>> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_failed(&self) -> bool {
        self.is_failed.load(Ordering::Relaxed)
    }

    async fn read(&self) -> SocketResult<Frame> {
        let read = poll_fn(|cx| self.lock().poll_next_frame(cx)).await;
        let frame = read.inspect_err(|_| self.is_failed.store(true, Ordering::Relaxed))?;
        if frame.opcode() == OpCode::Ping {
            // Writes the pong first: the queue of pongs has no limit, and the client may never read them.
            self.wait_writable().await?;
        }
        Ok(frame)
    }

    /// Writes the queued pongs and waits until another frame can be sent.
    async fn wait_writable(&self) -> SocketResult<()> {
        poll_fn(|cx| self.lock().poll_ready_unpin(cx)).await
    }

    /// Writes a frame to the buffer.
    async fn feed(&self, frame: Frame) -> SocketResult<()> {
        // Waiting would first write the close frame that the library queues when reading fails.
        if !self.is_failed() {
            self.wait_writable().await?;
        }
        self.lock().start_send_unpin(frame)
    }

    async fn send(&self, frame: Frame) -> SocketResult<()> {
        self.feed(frame).await?;
        self.flush().await
    }

    async fn flush(&self) -> SocketResult<()> {
        poll_fn(|cx| self.lock().poll_flush_unpin(cx)).await
    }
}

/// The client of a connection.
pub(super) struct Client {
    /// The caller; `None` if its first message must contain the key.
    pub(super) caller: Option<Caller>,
    /// Address of the client.
    pub(super) address: Option<SocketAddr>,
    /// Headers for another server that its messages are forwarded to.
    pub(super) headers: ForwardHeaders,
    /// Set to true when the key was accepted or none is required.
    pub(super) authenticated: watch::Sender<bool>,
    /// Permit of a connection that waits for its key.
    pub(super) permit: Option<OwnedSemaphorePermit>,
    /// Times of its last activity.
    pub(super) activity: Arc<LastActivity>,
}

/// Serves a connection until one side closes it.
pub(super) async fn serve<H, F>(
    connection: Streaming<LimitedStream>,
    app: &App,
    client: Client,
    error: fn(&ApiError) -> String,
    handler: H,
) where
    H: FnOnce(Socket) -> F,
    F: Future<Output = Close>,
{
    let config = app.config().server.sockets;
    let connection = Connection::new(connection);
    let activity = Arc::clone(&client.activity);
    let (messages, unread) = mpsc::channel(MAX_UNREAD_MESSAGES);
    let (outgoing, mut queue) = queue();
    let authenticated = client.authenticated.subscribe();
    let mut reading = pin!(read(&connection, messages, authenticated, config.max_message_bytes, &activity));
    let close = {
        let handling = handle(app, client, outgoing.clone(), unread, error, handler);
        let mut handling = pin!(handling);
        let mut writing = pin!(write(&connection, &mut queue, config, &activity));
        tokio::select! {
            close = &mut handling => close,
            close = &mut reading => match close {
                Some(close) => close,
                None => return,
            },
            () = &mut writing => return,
            () = unresponsive(config, &activity) => return,
            () = idle(config, &activity, &outgoing) => Close::away("the connection was idle"),
            () = stopped(app, &outgoing) => Close::away("the server is stopping"),
        }
    };
    queue.close();
    let closing = async {
        if close_connection(&connection, &mut queue, close, error).await.is_ok() && !connection.is_failed() {
            // Frames sent before the client's close frame are ignored.
            while connection.read().await.is_ok() {}
        }
    };
    if timeout(CLOSE_TIMEOUT, closing).await.is_err() {
        tracing::debug!("WebSocket close frame not answered");
    }
}

/// Authenticates the client and runs the protocol's handler.
async fn handle<H, F>(
    app: &App,
    client: Client,
    outgoing: Outgoing,
    unread: mpsc::Receiver<Message>,
    error: fn(&ApiError) -> String,
    handler: H,
) -> Close
where
    H: FnOnce(Socket) -> F,
    F: Future<Output = Close>,
{
    let mut incoming = Incoming { first: None, messages: unread };
    let Client { caller, address, mut headers, authenticated, permit, .. } = client;
    let caller = match caller {
        Some(caller) => caller,
        None => match authentication::authenticate(app, &mut incoming, &mut headers).await {
            Ok(caller) => {
                authenticated.send_replace(true);
                drop(permit);
                caller
            }
            Err(rejected) => {
                // Sending fails only if the client has disconnected.
                let _ = outgoing.send(error(&rejected)).await;
                return authentication::rejection();
            }
        },
    };
    handler(Socket { caller, address, headers, incoming, outgoing }).await
}

/// Forwards messages until the client closes the connection. Returns a close frame if the client violated the protocol.
async fn read(
    connection: &Connection,
    messages: mpsc::Sender<Message>,
    mut authenticated: watch::Receiver<bool>,
    limit: usize,
    activity: &LastActivity,
) -> Option<Close> {
    let mut is_limited = !*authenticated.borrow();
    let mut assembler = Assembler::new(if is_limited { limit.min(MAX_MESSAGE_BYTES) } else { limit });
    loop {
        let frame = match connection.read().await {
            Ok(frame) => frame,
            Err(WebSocketError::IoError(error)) if error.kind() == ErrorKind::QuotaExceeded => {
                return Some(Close::policy("the first message must contain an API key and have at most 16384 bytes"));
            }
            // The header of a frame has a length far above the limit.
            Err(WebSocketError::FrameTooLarge) => return Some(assembler.too_large()),
            Err(error) => {
                tracing::debug!(%error, "WebSocket closed");
                // One more read sends the close frame of the library.
                let _ = timeout(CLOSE_TIMEOUT, connection.read()).await;
                return None;
            }
        };
        activity.record_frame();
        match assembler.add_frame(frame) {
            Ok(None) => {}
            Ok(Some(message)) => {
                activity.record_message();
                // Sending fails if the handler has ended; the connection is then being closed.
                let _ = messages.send(message).await;
                if is_limited {
                    // Reading pauses while the key is checked. An error means that the handler rejected the key.
                    if authenticated.wait_for(|&accepted| accepted).await.is_err() {
                        std::future::pending::<()>().await;
                    }
                    is_limited = false;
                    assembler = Assembler::new(limit);
                }
                activity.record_frame();
            }
            Err(close) => return Some(close),
        }
    }
}

/// Writes queued messages and pings until writing fails.
async fn write(connection: &Connection, queue: &mut Queue, config: SocketConfig, activity: &LastActivity) {
    loop {
        let ping = async {
            match config.ping {
                Some(period) => sleep(period).await,
                None => std::future::pending().await,
            }
        };
        let written = tokio::select! {
            biased;
            unsent = queue.unsent.recv() => match unsent {
                Some(unsent) => write_batch(connection, queue, unsent, activity).await,
                None => return,
            },
            () = ping => connection.send(Frame::ping("")).await,
        };
        if let Err(error) = written {
            tracing::debug!(%error, "writing to the WebSocket failed");
            return;
        }
    }
}

/// Writes a message and the ones queued after it.
async fn write_batch(
    connection: &Connection,
    queue: &mut Queue,
    first: QueuedMessage,
    activity: &LastActivity,
) -> SocketResult<()> {
    connection.feed(frame(first.message)).await?;
    for _ in 1..MAX_BATCH_MESSAGES {
        let Ok(next) = queue.unsent.try_recv() else { break };
        connection.feed(frame(next.message)).await?;
    }
    connection.flush().await?;
    activity.record_message();
    // A client that accepts messages is alive, even if a ping is still in the system's buffer.
    activity.record_frame();
    Ok(())
}

fn frame(message: Message) -> Frame {
    match message {
        Message::Text(text) => Frame::text(text),
        Message::Binary(bytes) => Frame::binary(bytes),
    }
}

/// Sends the queued messages and the close frame.
async fn close_connection(
    connection: &Connection,
    queue: &mut Queue,
    close: Close,
    error: fn(&ApiError) -> String,
) -> SocketResult<()> {
    while let Some(unsent) = queue.unsent.recv().await {
        connection.feed(frame(unsent.message)).await?;
    }
    if close.is_too_large() {
        let too_large = ApiError::new(crate::server::ErrorKind::TooLarge, close.reason.clone());
        connection.feed(Frame::text(error(&too_large))).await?;
    }
    connection.send(Frame::close(close.code, close.reason)).await
}

/// Waits until the client has been unresponsive for too long.
async fn unresponsive(config: SocketConfig, activity: &LastActivity) {
    match config.ping {
        Some(ping) => activity.wait_unresponsive((ping * 3).max(MIN_SILENCE_TIMEOUT)).await,
        None => std::future::pending().await,
    }
}

/// Waits until the connection has been idle for too long.
async fn idle(config: SocketConfig, activity: &LastActivity, outgoing: &Outgoing) {
    let Some(limit) = config.idle else { return std::future::pending().await };
    let mut activities = outgoing.activity_count();
    loop {
        // The sender is part of `outgoing`, so waiting cannot fail.
        let _ = activities.wait_for(|&count| count == 0).await;
        tokio::select! {
            () = activity.wait_idle(limit) => return,
            _ = activities.wait_for(|&count| count > 0) => {}
        }
    }
}

/// Waits until the server stops and all activity has ended or its grace period is over.
async fn stopped(app: &App, outgoing: &Outgoing) {
    app.wait_until_stopping().await;
    let mut activities = outgoing.activity_count();
    tokio::select! {
        _ = activities.wait_for(|&count| count == 0) => {}
        // Interrupted runs still send their last message.
        () = async { app.wait_until_stopped().await; sleep(STOP_GRACE).await } => {}
    }
}
