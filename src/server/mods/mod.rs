//! Uploaded mods: registration, stored versions, and synchronization with the database.

mod dry_run;
mod find;
mod source;
mod sync;
mod upload;
mod versions;

pub use dry_run::{DryRunOptions, DryRunReport, dry_run};
pub(crate) use find::find_mod;
pub use source::source_of;
pub use sync::ModSync;
pub use upload::register_upload;
pub(crate) use upload::{ImportError, RegisterModResponse, import, python_for_uploads, validate_upload};
pub use versions::{VersionList, store_used_versions, used_files, versions_of};
pub(crate) use versions::{find_version, load_version, store_local_sources};

use super::{ApiError, App, Caller, ErrorKind};

/// Maximum size of a request body: a source of maximum length with every character escaped.
pub const MAX_BODY_BYTES: usize = 8 << 20;

/// Returns the label of the caller, who must be allowed to change mods.
pub(crate) fn require_mod_rights(caller: &Caller) -> Result<Option<String>, ApiError> {
    if caller.rights.mods {
        return Ok(caller.label.clone());
    }
    Err(ApiError::new(
        ErrorKind::Forbidden,
        "this key may not change mods; use a key given with --mod-key or --admin-key, or marked `mods` or `admin` in the \
         key file",
    ))
}

/// Returns the label of the caller, who must be allowed to upload mods.
///
/// # Errors
/// Uploads are disabled, or the key lacks the right; the message names the required flags.
pub fn require_upload_rights(app: &App, caller: &Caller) -> Result<Option<String>, ApiError> {
    if !app.config().server.allow_mod_upload {
        let detail = "uploads of mods are disabled; start the server with --allow-mod-upload and a --mod-key";
        return Err(ApiError::new(ErrorKind::Forbidden, detail));
    }
    require_mod_rights(caller)
}

/// Returns the 404 error for an unknown mod.
pub(crate) fn unknown_mod(app: &App, name: &str) -> ApiError {
    let known: Vec<String> = app.registry().list_info(None).into_iter().map(|shown| shown.description.name).collect();
    let name: String = name.chars().take(100).collect();
    ApiError::new(ErrorKind::NotFound, format!("unknown mod '{name}'; known mods: {}", known.join(", ")))
}

/// Runs `work` on a blocking thread, which releases the permits when it ends. If the client disconnects, it ends later than
/// the request.
///
/// # Errors
/// The work panicked.
pub(crate) async fn run_with_permits<T: Send + 'static>(
    permits: impl Send + 'static,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    let run = move || {
        let _permits = permits;
        work()
    };
    tokio::task::spawn_blocking(run).await.map_err(ApiError::internal)
}

#[cfg(test)]
mod tests {
    use super::run_with_permits;
    use std::sync::{Arc, mpsc};
    use tokio::sync::Semaphore;

    #[tokio::test]
    async fn work_keeps_its_permits_when_its_request_is_dropped() {
        let permits = Arc::new(Semaphore::new(1));
        let (end, ended) = mpsc::channel();
        let permit = Arc::clone(&permits).acquire_owned().await.unwrap();
        let request = tokio::spawn(run_with_permits(permit, move || ended.recv()));
        tokio::task::yield_now().await;
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
        assert_eq!(permits.available_permits(), 0);
        end.send(()).unwrap();
        permits.acquire().await.unwrap().forget();
    }
}
