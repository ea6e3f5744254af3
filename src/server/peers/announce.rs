//! Announces the address and the models of this server to the other servers.

use crate::server::App;
use crate::store::Announcement;

/// Announces this server, and every change of its models, until it stops.
pub fn announce(app: &App, url: Option<String>) {
    let app = app.clone();
    tokio::spawn(async move {
        let mut changes = app.models().changes();
        loop {
            changes.mark_unchanged();
            let models = app.models().list().into_iter().map(|entry| entry.name).collect();
            let Ok(store) = app.store() else { return };
            store.announce(Announcement { url: url.clone(), models });
            tokio::select! {
                () = app.wait_until_stopping() => return,
                // The sender lives as long as the models.
                _ = changes.changed() => {}
            }
        }
    });
}
