//! The life of a connection: reading, writing and the handler side by side, in one task.

use super::outgoing::{Queue, Unsent, queue};
use super::reading::Assembly;
use super::unauthenticated::{LimitedStream, MAX_MESSAGE_BYTES};
use super::{Close, Incoming, Message, Outgoing, Socket, admission};
use crate::api::peers::ForwardHeaders;
use crate::api::{ApiError, App, Caller};
use crate::config::SocketConfig;
use futures::SinkExt;
use std::future::poll_fn;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use yawc::streaming::Streaming;
use yawc::{Frame, Result as SocketResult, WebSocketError};

/// Messages that may wait for the handler.
const UNREAD: usize = 16;

/// Messages that are written before they are flushed.
const BATCH: usize = 64;

/// How long the other side may take to answer our close frame.
const FAREWELL: Duration = Duration::from_secs(5);

/// How long protocols may take to tell of the end when the server does not wait any longer.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// A client that shows no life gets at least so long, and at least three pings.
const LEAST_PATIENCE: Duration = Duration::from_mins(1);

/// Reading and writing share it; it is locked for one poll at a time.
struct Connection(Mutex<Streaming<LimitedStream>>);

impl Connection {
    fn lock(&self) -> MutexGuard<'_, Streaming<LimitedStream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn read(&self) -> SocketResult<Frame> {
        poll_fn(|cx| self.lock().poll_next_frame(cx)).await
    }

    async fn feed(&self, frame: Frame) -> SocketResult<()> {
        poll_fn(|cx| self.lock().poll_ready_unpin(cx)).await?;
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

/// When a connection last showed life.
struct Pulse {
    since: Instant,
    alive_ms: AtomicU64,
    message_ms: AtomicU64,
}

impl Pulse {
    fn new() -> Self {
        Self { since: Instant::now(), alive_ms: AtomicU64::new(0), message_ms: AtomicU64::new(0) }
    }

    fn beat(&self) {
        self.alive_ms.store(self.since.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn message(&self) {
        self.message_ms.store(self.since.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Returns when `what` lies that long back.
    async fn still(&self, what: &AtomicU64, limit: Duration) {
        loop {
            let end = self.since + Duration::from_millis(what.load(Ordering::Relaxed)) + limit;
            if Instant::now() >= end {
                return;
            }
            sleep_until(end).await;
        }
    }
}

/// The client of a connection.
pub(super) struct Client {
    /// The owner of its key, when the key came as a header.
    pub(super) caller: Option<Caller>,
    /// Its address.
    pub(super) address: Option<SocketAddr>,
    /// Headers for another server that its messages are forwarded to.
    pub(super) headers: ForwardHeaders,
    /// Set to true when its key was accepted, or none is needed.
    pub(super) authenticated: watch::Sender<bool>,
    /// Its place among the connections that wait for a key.
    pub(super) permit: Option<OwnedSemaphorePermit>,
}

/// Serves a connection until one side ends it.
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
    let connection = Connection(Mutex::new(connection));
    let pulse = Pulse::new();
    let (messages, unread) = mpsc::channel(UNREAD);
    let (outgoing, mut queue) = queue();
    let authenticated = client.authenticated.subscribe();
    let mut reading = pin!(read(&connection, messages, authenticated, config.max_message_bytes, &pulse));
    let close = {
        let handling = handle(app, client, outgoing.clone(), unread, error, handler);
        let mut handling = pin!(handling);
        let mut writing = pin!(write(&connection, &mut queue, config, &pulse));
        tokio::select! {
            close = &mut handling => close,
            close = &mut reading => match close {
                Some(close) => close,
                None => return,
            },
            () = &mut writing => return,
            () = silent(config, &pulse) => return,
            () = idle(config, &pulse, &outgoing) => Close::away("the connection was idle"),
            () = stopped(app, &outgoing) => Close::away("the server is stopping"),
        }
    };
    queue.close();
    let farewell = async {
        if part(&connection, &mut queue, close, error).await.is_ok() {
            // Until the other side has answered, what it had sent before does not matter.
            while connection.read().await.is_ok() {}
        }
    };
    if timeout(FAREWELL, farewell).await.is_err() {
        tracing::debug!("a WebSocket's close frame was not answered");
    }
}

/// Admits the client and lets the protocol have it.
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
    let Client { caller, address, mut headers, authenticated, permit } = client;
    let caller = if let Some(permit) = permit {
        match admission::admit(app, &mut incoming, &mut headers).await {
            Ok(caller) => {
                authenticated.send_replace(true);
                drop(permit);
                Some(caller)
            }
            Err(refused) => {
                // When the client has gone, there is nobody to tell.
                let _ = outgoing.send(error(&refused)).await;
                return admission::refusal();
            }
        }
    } else {
        caller
    };
    handler(Socket { caller, address, headers, incoming, outgoing }).await
}

/// Passes messages on until the client ends the connection, or breaks the rules: then there is something to tell it.
async fn read(
    connection: &Connection,
    messages: mpsc::Sender<Message>,
    mut authenticated: watch::Receiver<bool>,
    limit: usize,
    pulse: &Pulse,
) -> Option<Close> {
    let mut is_limited = !*authenticated.borrow();
    let mut assembly = Assembly::new(if is_limited { limit.min(MAX_MESSAGE_BYTES) } else { limit });
    loop {
        let frame = match connection.read().await {
            Ok(frame) => frame,
            Err(WebSocketError::IoError(error)) if error.kind() == ErrorKind::QuotaExceeded => {
                return Some(Close::policy("the first message must carry an API key, and have at most 16384 bytes"));
            }
            Err(error) => {
                tracing::debug!(%error, "a WebSocket ended");
                // The library has queued a close frame that says what was wrong; reading once more sends it.
                let _ = timeout(FAREWELL, connection.read()).await;
                return None;
            }
        };
        pulse.beat();
        match assembly.take(frame) {
            Ok(None) => {}
            Ok(Some(message)) => {
                pulse.message();
                // The handler has ended when it takes no more; then the connection is being closed.
                let _ = messages.send(message).await;
                if is_limited {
                    // Nothing is read while the key is checked. An error means that the handler refused it.
                    if authenticated.wait_for(|&accepted| accepted).await.is_err() {
                        std::future::pending::<()>().await;
                    }
                    is_limited = false;
                    assembly = Assembly::new(limit);
                }
                pulse.beat();
            }
            Err(close) => return Some(close),
        }
    }
}

/// Writes what is queued, and pings. Returns when nothing can be written any more.
async fn write(connection: &Connection, queue: &mut Queue, config: SocketConfig, pulse: &Pulse) {
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
                Some(unsent) => write_batch(connection, queue, unsent, pulse).await,
                None => return,
            },
            () = ping => connection.send(Frame::ping("")).await,
        };
        if let Err(error) = written {
            tracing::debug!(%error, "a WebSocket cannot be written to");
            return;
        }
    }
}

/// Writes a message, and those that wait behind it.
async fn write_batch(connection: &Connection, queue: &mut Queue, first: Unsent, pulse: &Pulse) -> SocketResult<()> {
    connection.feed(frame(first.message)).await?;
    for _ in 0..BATCH {
        let Ok(next) = queue.unsent.try_recv() else { break };
        connection.feed(frame(next.message)).await?;
    }
    connection.flush().await?;
    pulse.message();
    // A client that takes messages is alive; a ping may just lie in the system's buffer.
    pulse.beat();
    Ok(())
}

fn frame(message: Message) -> Frame {
    match message {
        Message::Text(text) => Frame::text(text),
        Message::Binary(bytes) => Frame::binary(bytes),
    }
}

/// Sends what is still queued, and the close frame.
async fn part(
    connection: &Connection,
    queue: &mut Queue,
    close: Close,
    error: fn(&ApiError) -> String,
) -> SocketResult<()> {
    while let Some(unsent) = queue.unsent.recv().await {
        connection.feed(frame(unsent.message)).await?;
    }
    if close.is_too_large() {
        let too_large = ApiError::new(crate::api::ErrorKind::TooLarge, close.reason.clone());
        connection.feed(Frame::text(error(&too_large))).await?;
    }
    connection.send(Frame::close(close.code, close.reason)).await
}

/// Returns when the client has shown no life for too long.
async fn silent(config: SocketConfig, pulse: &Pulse) {
    match config.ping {
        Some(ping) => pulse.still(&pulse.alive_ms, (ping * 3).max(LEAST_PATIENCE)).await,
        None => std::future::pending().await,
    }
}

/// Returns when the connection has had nothing to do for too long.
async fn idle(config: SocketConfig, pulse: &Pulse, outgoing: &Outgoing) {
    let Some(limit) = config.idle else { return std::future::pending().await };
    let mut work = outgoing.work();
    loop {
        // The sender is `outgoing`, so waiting cannot fail.
        let _ = work.wait_for(|&count| count == 0).await;
        tokio::select! {
            () = pulse.still(&pulse.message_ms, limit) => return,
            _ = work.wait_for(|&count| count > 0) => {}
        }
    }
}

/// Returns when the server stops, and what is under way has ended or its time is over.
async fn stopped(app: &App, outgoing: &Outgoing) {
    app.stopping().await;
    let mut work = outgoing.work();
    tokio::select! {
        _ = work.wait_for(|&count| count == 0) => {}
        // What is cut off still says so.
        () = async { app.stopped().await; sleep(LAST_WORDS).await } => {}
    }
}
