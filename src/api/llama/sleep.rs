//! Unloads models that are idle; the next request loads them again.

use super::props;
use crate::model::chat::ChatTemplate;
use crate::server::models::SleepingModel;
use crate::server::{App, LoadedModel};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval between two checks for idle models.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Unloads each model after `--sleep-idle-seconds` of inactivity, until the server stops.
pub fn sleep_when_idle(app: &App) {
    let Some(delay) = app.config().server.models.sleep_after else { return };
    let app = app.clone();
    tokio::spawn(async move {
        // Per idle model: its last use, and the time it was first seen idle.
        let mut idle: HashMap<String, (u64, Instant)> = HashMap::new();
        loop {
            tokio::select! {
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
                () = app.wait_until_stopping() => return,
            }
            let unused = app.models().idle();
            idle.retain(|name, (used, _)| unused.iter().any(|(other, last)| other == name && last == used));
            for (name, used) in unused {
                let since = idle.entry(name.clone()).or_insert_with(|| (used, Instant::now())).1;
                if since.elapsed() >= delay {
                    put_to_sleep(&app, &name, used).await;
                }
            }
        }
    });
}

async fn put_to_sleep(app: &App, name: &str, used: u64) {
    let Some(loaded) = app.models().entry_by_name(name).ok().and_then(|entry| entry.ready().cloned()) else { return };
    let Some(sleeping) = describe(app, &loaded).await else { return };
    // A model with another reference stays loaded.
    drop(loaded);
    app.models().begin_sleep(name, used, sleeping);
}

/// Returns the data of a model that routes report while it sleeps.
async fn describe(app: &App, loaded: &LoadedModel) -> Option<SleepingModel> {
    let mut props = props::describe(app, loaded).await.ok()?;
    props.is_sleeping = true;
    let props = serde_json::value::to_raw_value(&props).ok()?;
    let statuses = [Arc::clone(loaded.engine().status()), Arc::clone(loaded.encoder().status())];
    let template = loaded.template().ok().map(ChatTemplate::source).or(loaded.model().card().chat_template.as_deref());
    let chat_template = template.filter(|template| !template.is_empty()).map(str::to_owned);
    Some(SleepingModel { props, chat_template, vision: loaded.model().images().is_some(), statuses })
}
