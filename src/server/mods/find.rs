//! Registered mods, and uploaded mods that are only stored: their import failed, or uploads are disabled.

use super::upload::uploaded_version;
use crate::events::Scope;
use crate::mods::{CallStats, ModDescription, ModInfo, ModOrigin};
use crate::server::{ApiError, App};

/// Returns information about a mod: a registered one, or an uploaded one that is only stored. The last failure is that of
/// a run that the scope covers.
///
/// # Errors
/// The mod is not registered, and the database failed.
pub(crate) async fn find_mod(app: &App, name: &str, scope: &Scope) -> Result<Option<ModInfo>, ApiError> {
    if let Some(info) = app.registry().info(name, Some(scope)) {
        return Ok(Some(info));
    }
    let Ok(store) = app.store() else { return Ok(None) };
    let Some(stored) = store.uploaded_mod(name).await? else { return Ok(None) };
    Ok(Some(ModInfo {
        description: ModDescription {
            description: stored.upload["description"].as_str().unwrap_or_default().to_owned(),
            language: "python".to_owned(),
            version: stored.hash.chars().take(12).collect(),
            origin: ModOrigin::Uploaded,
            name: stored.name,
            ..ModDescription::default()
        },
        enabled: !app.registry().is_disabled(name),
        earlier: Vec::new(),
        stats: CallStats::default(),
        problem: app.registry().problems().into_iter().find(|problem| problem.file == name),
        current: uploaded_version(stored.hash, stored.created_at, stored.created_by),
    }))
}
