//! The process of the embedded server: restarted when it ends, and stopped together with the program.

use super::Server;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::process::ExitStatus;
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::process::Child;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

/// Interval between checks of the server's state.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum duration of a fast shutdown. After it the server must exit without a checkpoint, which loses no data because
/// the next start replays the write-ahead log.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum duration of a fast shutdown while a person waits for the program's end, or clients wait for the database.
const SHORT_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum duration of a shutdown without a checkpoint. After it the server is killed.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The embedded servers of this process.
static SERVERS: LazyLock<Servers> =
    LazyLock::new(|| Servers { running: watch::Sender::new(0), stopping: watch::Sender::new(false) });

struct Servers {
    running: watch::Sender<usize>,
    stopping: watch::Sender<bool>,
}

/// Stops every embedded server of this process and waits until their processes have ended, including those whose start
/// was cancelled. No server can be started afterwards.
pub async fn stop_all() {
    SERVERS.stopping.send_replace(true);
    // The sender is static, so this cannot fail.
    let _ = SERVERS.running.subscribe().wait_for(|&running| running == 0).await;
}

async fn wait_for_stop_all() {
    // The sender is static, so this cannot fail.
    let _ = SERVERS.stopping.subscribe().wait_for(|&stopping| stopping).await;
}

/// A running server process. Dropping it stops the process in the background; [`stop_all`] waits for that.
pub struct Postmaster(Option<Process>);

/// A process that [`stop_all`] waits for.
struct Process(Child);

impl Postmaster {
    pub fn new(child: Child) -> Self {
        SERVERS.running.send_modify(|running| *running += 1);
        Self(Some(Process(child)))
    }

    /// Waits for the end of the process.
    async fn wait(&mut self) -> std::io::Result<ExitStatus> {
        match &mut self.0 {
            Some(process) => process.0.wait().await,
            None => std::future::pending().await,
        }
    }

    /// Returns the exit status of a process that has ended.
    pub fn try_wait(&mut self) -> std::io::Result<Option<ExitStatus>> {
        self.0.as_mut().map_or(Ok(None), |process| process.0.try_wait())
    }

    /// Ends the process with a fast shutdown: open transactions are rolled back, and a checkpoint is written.
    async fn stop(mut self) {
        if let Some(mut process) = self.0.take() {
            process.stop(SHUTDOWN_TIMEOUT).await;
        }
    }

    /// Ends a process whose clients are waiting for the restarted one.
    async fn replace(mut self) {
        if let Some(mut process) = self.0.take() {
            process.stop(SHORT_SHUTDOWN_TIMEOUT).await;
        }
    }
}

impl Drop for Postmaster {
    fn drop(&mut self) {
        // Without a runtime nothing can wait for the process. The next start on the data directory stops it.
        if let Some(mut process) = self.0.take()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(async move { process.stop(SHUTDOWN_TIMEOUT).await });
        }
    }
}

impl Process {
    async fn stop(&mut self, limit: Duration) {
        let requested_to_stop_all = async {
            wait_for_stop_all().await;
            sleep(SHORT_SHUTDOWN_TIMEOUT).await;
        };
        let stopped = tokio::select! {
            stopped = self.signal(Signal::SIGINT, limit) => stopped,
            () = requested_to_stop_all => false,
        };
        if !stopped && !self.signal(Signal::SIGQUIT, QUIT_TIMEOUT).await {
            let _ = self.0.kill().await;
        }
    }

    /// Sends a signal and returns true if the process ended in time.
    async fn signal(&mut self, signal: Signal, limit: Duration) -> bool {
        let Some(pid) = self.0.id() else { return true };
        let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
        let ended = timeout(limit, self.0.wait()).await.is_ok();
        if !ended {
            tracing::warn!(%signal, elapsed_s = limit.as_secs(), "the database server has not stopped");
        }
        ended
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        SERVERS.running.send_modify(|running| *running -= 1);
    }
}

/// Restarts the server whenever it ends or refuses connections, until `stopped` resolves or its sender is dropped; then
/// stops it.
pub async fn supervise(server: Arc<Server>, postmaster: Postmaster, stopped: oneshot::Receiver<()>) {
    if let Some(postmaster) = keep_running(&server, postmaster, stopped).await {
        postmaster.stop().await;
    }
    server.listen.remove();
}

/// Returns when the server must stop, with its process if it has one.
async fn keep_running(
    server: &Server,
    mut postmaster: Postmaster,
    mut stopped: oneshot::Receiver<()>,
) -> Option<Postmaster> {
    let mut restart_delay = Duration::from_millis(50);
    let mut check = interval(CHECK_INTERVAL);
    check.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let begin = Instant::now();
        loop {
            tokio::select! {
                status = postmaster.wait() => {
                    let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
                    tracing::error!(status, log = %server.log.display(), "the database server ended; restarting it");
                    drop(postmaster);
                    break;
                }
                _ = &mut stopped => return Some(postmaster),
                () = wait_for_stop_all() => return Some(postmaster),
                _ = check.tick() => {}
            }
            // SIGTERM requests a smart shutdown, which waits until all open connections, including ours, are closed.
            if server.is_stopping() {
                tracing::error!(log = %server.log.display(), "the database server is shutting down; restarting it");
                postmaster.replace().await;
                break;
            }
        }
        if begin.elapsed() > Duration::from_mins(1) {
            restart_delay = Duration::from_millis(50);
        }
        loop {
            tokio::select! {
                () = sleep(restart_delay) => {}
                _ = &mut stopped => return None,
                () = wait_for_stop_all() => return None,
            }
            restart_delay = (restart_delay * 2).min(Duration::from_secs(5));
            server.clear().await;
            match server.spawn() {
                Ok(started) => break postmaster = started,
                Err(error) => tracing::error!(%error, "cannot restart the database server"),
            }
        }
    }
}
