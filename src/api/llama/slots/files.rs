//! Slot snapshots in files below `--slot-save-path`. Clients send a file name, never a path.

use crate::events::{Scope, system};
use crate::server::{ApiError, App, ErrorKind, encode_file_name};
use bytes::Bytes;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Maximum length of a name; with the suffix of partial files, all file systems accept it.
const MAX_NAME_BYTES: usize = 200;

/// Returns the path of a file named by a client in `field`.
///
/// # Errors
/// 501 without `--slot-save-path`; 400 if the name is not a plain file name.
pub(super) fn path(app: &App, scope: &Scope, field: &str, name: &str) -> Result<PathBuf, ApiError> {
    let dir = app.config().server.routes.slot_save_path.as_ref();
    let dir = dir.ok_or_else(|| {
        ApiError::not_supported("snapshot files are disabled; start the server with --slot-save-path DIR")
    })?;
    if !is_plain(name) {
        let detail = format!(
            "`{field}` must be a plain file name of 1 to {MAX_NAME_BYTES} bytes, without control characters, / \\ : * ? \" < > |, consecutive dots, and dots or \
             spaces at its start or end, got {name:?}"
        );
        return Err(ApiError::invalid(field, detail));
    }
    Ok(folder(dir, scope).join(name))
}

/// Returns the folder of a client's files: the tenant's folder below `dir`, or `dir` if the client can also access
/// files without an owner.
fn folder(dir: &Path, scope: &Scope) -> PathBuf {
    tenant_folder(scope).map_or_else(|| dir.to_owned(), |name| dir.join(name))
}

/// Returns the name of the folder with the client's files; `None` if it can also access files without an owner.
fn tenant_folder(scope: &Scope) -> Option<String> {
    match scope {
        Scope::Owned { tenant: Some(tenant), includes_unowned: false } => {
            Some(format!("tenant-{}", encode_file_name(tenant.as_str())))
        }
        _ => None,
    }
}

fn is_plain(name: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && !name.starts_with(['.', ' '])
        && !name.ends_with(['.', ' '])
        && !name.contains("..")
        && !name.chars().any(|c| c.is_control() || "/\\:*?\"<>|\u{fffd}".contains(c))
}

/// Writes a snapshot atomically.
pub(super) async fn write(path: PathBuf, block: Bytes) -> Result<(), ApiError> {
    let write = move || {
        let partial = partial_path(&path);
        if let Some(folder) = path.parent() {
            let created = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
            created.map_err(|error| ApiError::internal(format!("cannot create {}: {error}", folder.display())))?;
        }
        // Only the server's user may read it, because a snapshot contains the conversation.
        let written = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&partial)
            .and_then(|mut file| {
                file.write_all(&block)?;
                file.sync_all()
            })
            .and_then(|()| std::fs::rename(&partial, &path));
        if written.is_err() {
            // A failure to remove the partial file is ignored.
            let _ = std::fs::remove_file(&partial);
        }
        written.map_err(|error| match error.kind() {
            io::ErrorKind::IsADirectory => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                ApiError::bad_request(format!("'{name}' is a directory below --slot-save-path; choose another name"))
            }
            _ => ApiError::internal(format!("cannot write {}: {error}", path.display())),
        })
    };
    blocking(write).await?
}

/// Reads a snapshot of up to `max_bytes` bytes of the client with this scope.
pub(super) async fn read(path: PathBuf, scope: &Scope, name: &str, max_bytes: usize) -> Result<Bytes, ApiError> {
    let read = move || -> io::Result<Option<Vec<u8>>> {
        // Opening a pipe would block until another process writes to it.
        let file = std::fs::OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() || metadata.len() > max_bytes as u64 {
            return Ok(None);
        }
        let mut block = Vec::with_capacity(metadata.len() as usize);
        (&file).take(max_bytes as u64).read_to_end(&mut block)?;
        Ok(Some(block))
    };
    match blocking(read).await? {
        Ok(Some(block)) => Ok(block.into()),
        Ok(None) => Err(ApiError::bad_request(format!(
            "'{name}' is not a snapshot of this server's slots: expected a file of at most {max_bytes} bytes"
        ))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(match tenant_folder(scope) {
            Some(folder) => ApiError::new(
                ErrorKind::NotFound,
                format!(
                    "no snapshot file '{name}' exists in the folder {folder} below --slot-save-path, which has the files of \
                     this API key"
                ),
            ),
            None => ApiError::not_found("snapshot file", name),
        }),
        Err(error) => Err(ApiError::internal(format!("cannot read snapshot {name}: {error}"))),
    }
}

/// Returns a unique path for the partial file, so that two writers never share one.
fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", system::new_id().simple()));
    path.with_file_name(name)
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| ApiError::new(ErrorKind::Internal, "a file task panicked"))
}

#[cfg(test)]
mod tests {
    use super::{Scope, is_plain, read};

    #[tokio::test]
    async fn missing_file_of_a_key_names_its_folder() {
        let scope = Scope::Owned { tenant: Some("key:1".into()), includes_unowned: false };
        let error = read("/nowhere/a.bin".into(), &scope, "a.bin", 9).await.unwrap_err().problem();
        assert!(
            error.status == 404 && error.detail.contains("'a.bin' exists in the folder tenant-key%3A1"),
            "{error:?}"
        );
        let error = read("/nowhere/a.bin".into(), &Scope::All, "a.bin", 9).await.unwrap_err().problem();
        assert_eq!(error.detail, "no snapshot file 'a.bin' exists");
    }

    #[test]
    fn path_is_rejected_as_name() {
        for name in ["slot.bin", "session_42.bin", "a b-c.ses1", "ü"] {
            assert!(is_plain(name), "{name}");
        }
        let long = "x".repeat(201);
        for name in ["", "..", ".hidden", "a/b", "/etc/passwd", "a\\b", "a..b", "c:x", "a\0b", "end.", "x\n", &long] {
            assert!(!is_plain(name), "{name:?}");
        }
    }
}
