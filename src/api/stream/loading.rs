//! Waits for a model and reports its loading progress.

use super::response::{StatusMessage, StatusOperation, StreamMessage};
use crate::api::shared::sse::to_json;
use crate::server::socket::Outgoing;
use crate::server::{ApiError, App, LoadedModel, ModelState, ServerState};
use std::time::Duration;
use tokio::time::{Instant, interval};

/// Interval between progress reports.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// Waits for the model with that name and returns it. `client` receives the loading progress.
///
/// # Errors
/// Same as [`App::get_or_load`], except that it waits for a starting server.
pub(super) async fn wait(
    app: &App,
    name: Option<&str>,
    request_id: &str,
    client: Option<&Outgoing>,
) -> Result<LoadedModel, ApiError> {
    let loaded = async {
        app.wait_until_started().await;
        app.get_or_load(name).await
    };
    let mut loaded = std::pin::pin!(loaded);
    let started = Instant::now();
    let mut ticks = interval(PROGRESS_INTERVAL);
    // The first tick is immediate; a loaded model needs no progress report.
    ticks.tick().await;
    loop {
        tokio::select! {
            biased;
            loaded = &mut loaded => return loaded,
            _ = ticks.tick() => if let Some(client) = client {
                // Sending fails only if the client has disconnected.
                let _ = client.send(progress(app, name, request_id, started)).await;
            },
        }
    }
}

fn progress(app: &App, name: Option<&str>, request_id: &str, started: Instant) -> String {
    let entry = app.models().entry_for_request(name).ok();
    let fraction = entry.as_ref().and_then(|entry| match entry.state {
        ModelState::Loading { progress, .. } => Some(progress),
        _ => None,
    });
    let activity = match (app.state(), entry, fraction) {
        (ServerState::Loading(activity), _, None) => activity,
        (_, Some(entry), Some(fraction)) if fraction >= 1.0 => format!("allocating the context of {}", entry.name),
        (_, Some(entry), Some(_)) => format!("loading the weights of {}", entry.name),
        (_, Some(entry), None) => format!("waiting for {}", entry.name),
        (_, None, _) => "starting".to_owned(),
    };
    let fraction = fraction.unwrap_or(0.0);
    let mut status =
        StatusMessage::new(StatusOperation::ModelLoading, (fraction * 100.0).round() as u8, activity, Some(request_id));
    if fraction > 0.05 {
        let left = started.elapsed().as_secs_f32() * (1.0 - fraction) / fraction;
        status.eta_seconds = Some((f64::from(left) * 10.0).round() / 10.0);
    }
    to_json(&StreamMessage::Status(status))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::config::flags::{DataFlags, EngineFlags, ServerFlags, default_flags};
    use crate::events::system;
    use crate::mods::ModRegistry;
    use std::path::Path;
    use std::sync::Arc;
    use tokio::sync::mpsc;

    #[tokio::test]
    async fn progress_names_the_requested_model() {
        let folder = std::env::temp_dir().join(format!("thunder-loading-{}", system::new_id()));
        std::fs::create_dir(&folder).unwrap();
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny.gguf");
        std::fs::copy(&tiny, folder.join("apple.gguf")).unwrap();
        let data = DataFlags { data_dir: Some(folder.join("data")), ..default_flags() };
        let engine =
            EngineFlags { model: Some(tiny), parallel: Some(1), batch_size: 1, ubatch_size: 1, ..default_flags() };
        let server = ServerFlags { models_dir: Some(folder.clone()), ..default_flags() };
        let config = Config::new(engine, data, &server).unwrap();
        let app = App::new(Arc::new(config), Arc::new(ModRegistry::default()), chrono::DateTime::default);
        app.models().open(None, mpsc::channel(1).0.into()).await.unwrap();
        app.set_state(ServerState::Ready);
        for name in ["apple", "apple/mod", "publisher/apple"] {
            let status = progress(&app, Some(name), "id", Instant::now());
            assert!(status.contains("waiting for apple\""), "{name}: {status}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
