//! Sources and versions of mods, current and stored.

use super::{find_mod, unknown_mod};
use crate::events::Scope;
use crate::mods::{self, ModOrigin, ModSource, RegisteredVersion};
use crate::server::{ApiError, App, ErrorKind};
use serde::Serialize;
use utoipa::ToSchema;

/// The versions of a mod.
#[derive(Debug, Serialize, ToSchema)]
pub struct VersionList {
    /// Name of the mod.
    pub name: String,
    /// Hash of the version that runs use, or would use if it could be loaded; `null` for a deleted mod.
    pub current: Option<String>,
    /// Newest first.
    #[schema(value_type = Vec<Object>)]
    pub versions: Vec<RegisteredVersion>,
}

/// Returns the versions of a mod.
///
/// # Errors
/// 404 if no such mod ever existed; an error if the database failed.
pub async fn versions_of(app: &App, name: String, scope: &Scope) -> Result<VersionList, ApiError> {
    let shown = find_mod(app, &name, scope).await?;
    let current = shown.as_ref().map(|shown| shown.current.hash.clone());
    let mut versions: Vec<RegisteredVersion> = Vec::new();
    if let Some(mut shown) = shown {
        versions.append(&mut shown.earlier);
        versions.push(shown.current);
    }
    for stored in app.store()?.mod_versions(&name).await? {
        if versions.iter().all(|known| known.hash != stored.hash) {
            versions.push(RegisteredVersion {
                hash: stored.hash,
                origin: if stored.from_file { ModOrigin::File } else { ModOrigin::Uploaded },
                registered_at: Some(stored.created_at),
                registered_by: stored.created_by,
            });
        }
    }
    if versions.is_empty() {
        return Err(unknown_mod(app, &name));
    }
    // The current version comes first, even if it was registered earlier.
    versions.sort_by_key(|version| std::cmp::Reverse((current.as_ref() == Some(&version.hash), version.registered_at)));
    Ok(VersionList { name, current, versions })
}

/// Returns the source of a version; default is the version that runs use.
///
/// # Errors
/// Unknown mod or version, an ambiguous prefix, a mod without source, or the database failed.
pub async fn source_of(app: &App, name: &str, version: Option<String>) -> Result<ModSource, ApiError> {
    let current = app.registry().get(name);
    let Some(wanted) = version else {
        let factory = current.ok_or_else(|| unknown_mod(app, name))?;
        let text = factory.source_text();
        let text = text.ok_or_else(|| ApiError::new(ErrorKind::NotFound, format!("'{name}' is a built-in mod")))?;
        return serde_json::from_value(text).map_err(ApiError::internal);
    };
    if wanted.len() < 6 || !wanted.chars().all(|c| c.is_ascii_hexdigit()) {
        let detail = format!("`version` must be 6 to 64 hexadecimal digits, got {wanted:?}");
        return Err(ApiError::invalid("version", detail));
    }
    let is_wanted = |hash: &str| hash.starts_with(&wanted.to_ascii_lowercase());
    if let Some(factory) = current.filter(|factory| is_wanted(&mods::version_of(&**factory)))
        && let Some(text) = factory.source_text()
    {
        return serde_json::from_value(text).map_err(ApiError::internal);
    }
    let mut stored = app.store()?.mod_versions(name).await?;
    stored.retain(|version| is_wanted(&version.hash));
    match (stored.pop(), stored.len()) {
        (Some(mut version), 0) => serde_json::from_value(version.upload["source"].take()).map_err(ApiError::internal),
        (Some(_), others) => {
            let message = format!("{} versions of '{name}' start with {wanted}; send more digits", others + 1);
            Err(ApiError::invalid("version", message))
        }
        (None, _) => {
            let detail = format!("no source of version {wanted} of '{name}' is stored");
            Err(ApiError::new(ErrorKind::NotFound, detail))
        }
    }
}
