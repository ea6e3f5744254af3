//! Time limits of runs.

use crate::engine::{RunControl, RunOver};
use crate::events::EndCause;
use std::future::pending;
use std::time::Duration;
use tokio::time::sleep;

/// Interval between two checks of a run that was paused.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Waits until the run was active for `limit`; pauses do not count. Waits forever if the run ends before that.
pub(crate) async fn wait_for_time_limit(control: &RunControl, limit: Duration) {
    sleep(limit).await;
    loop {
        match control.progress().await {
            Ok(progress) if progress.active_time < limit => {
                sleep(limit.saturating_sub(progress.active_time).max(CHECK_INTERVAL)).await;
            }
            Ok(_) => return,
            Err(RunOver) => pending().await,
        }
    }
}

/// Ends the run with [`EndCause::Timeout`] when it was active for `limit`.
pub(crate) async fn stop_at_time_limit(control: RunControl, limit: Duration) {
    wait_for_time_limit(&control, limit).await;
    let message = format!("the run exceeded its time limit of {} s", limit.as_secs_f32());
    // The run may have ended already.
    let _ = control.stop(EndCause::Timeout, message).await;
}
