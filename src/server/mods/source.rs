//! Sources of mods, current and stored.

use super::unknown_mod;
use crate::mods::{self, ModSource};
use crate::server::{ApiError, App, ErrorKind};

/// Returns the hash of a version and its source; default is the version that runs use.
///
/// # Errors
/// Unknown mod or version, an ambiguous prefix, a mod without source, or the database failed.
pub async fn source_of(app: &App, name: &str, version: Option<String>) -> Result<(String, ModSource), ApiError> {
    let current = app.registry().get(name);
    let Some(wanted) = version else {
        let factory = current.ok_or_else(|| unknown_mod(app, name))?;
        let upload = factory.upload();
        let upload = upload.ok_or_else(|| ApiError::new(ErrorKind::NotFound, format!("'{name}' is a built-in mod")))?;
        return Ok((mods::version_of(&*factory), upload.source.clone()));
    };
    if wanted.len() < 6 || !wanted.chars().all(|c| c.is_ascii_hexdigit()) {
        let detail = format!("`version` must be 6 to 64 hexadecimal digits, got {wanted:?}");
        return Err(ApiError::invalid("version", detail));
    }
    let is_wanted = |hash: &str| hash.starts_with(&wanted.to_ascii_lowercase());
    if let Some(factory) = current.filter(|factory| is_wanted(&mods::version_of(&**factory)))
        && let Some(upload) = factory.upload()
    {
        return Ok((mods::version_of(&*factory), upload.source.clone()));
    }
    let store = app.store()?;
    let mut hashes: Vec<String> = store.mod_versions(name).await?.into_iter().map(|version| version.hash).collect();
    hashes.retain(|hash| is_wanted(hash));
    if hashes.len() > 1 {
        let message = format!("{} versions of '{name}' start with {wanted}; send more digits", hashes.len());
        return Err(ApiError::invalid("version", message));
    }
    let version = match hashes.pop() {
        Some(hash) => store.mod_version(name, &hash).await?,
        None => None,
    };
    let Some(mut version) = version else {
        let detail = format!("no source of version {wanted} of '{name}' is stored");
        return Err(ApiError::new(ErrorKind::NotFound, detail));
    };
    let source = serde_json::from_value(version.upload["source"].take()).map_err(ApiError::internal)?;
    Ok((version.hash, source))
}
