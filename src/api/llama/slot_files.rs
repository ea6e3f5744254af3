//! States in files below `--slot-save-path`, named by clients: a name, never a path.

use crate::api::{ApiError, App, ErrorKind};
use bytes::Bytes;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Longest name, which all file systems take with our ending for unfinished files.
const LONGEST: usize = 200;

/// The path of a file that a client names. `field` is where it named it.
///
/// # Errors
/// 501 without `--slot-save-path`; 400 for what is not a plain name.
pub(super) fn path(app: &App, field: &str, name: &str) -> Result<PathBuf, ApiError> {
    let dir = app.config().server.routes.slot_save_path.as_ref();
    let dir = dir.ok_or_else(|| {
        ApiError::not_supported("states are not kept in files; start the server with --slot-save-path DIR")
    })?;
    if !is_plain(name) {
        let detail = format!(
            "{field} must be a plain file name of 1 to {LONGEST} letters, digits, spaces, dots, dashes and the like, without / \\ : * ? \" < > | and not beginning with a dot, got {name:?}"
        );
        return Err(ApiError::invalid(field, detail));
    }
    Ok(dir.join(name))
}

fn is_plain(name: &str) -> bool {
    (1..=LONGEST).contains(&name.len())
        && !name.starts_with(['.', ' '])
        && !name.ends_with(['.', ' '])
        && !name.contains("..")
        && !name.chars().any(|c| c.is_control() || "/\\:*?\"<>|\u{fffd}".contains(c))
}

/// Writes a state, all of it or nothing.
pub(super) async fn write(path: PathBuf, block: Bytes) -> Result<(), ApiError> {
    let write = move || {
        let partial = unfinished(&path);
        // For the server's own user: a state tells the conversation that it is of.
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
            // What could not be written whole is of no use; that it cannot be removed changes nothing.
            let _ = std::fs::remove_file(&partial);
        }
        written.map_err(|error| match error.kind() {
            io::ErrorKind::IsADirectory => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                ApiError::bad_request(format!("'{name}' is a folder below --slot-save-path; choose another name"))
            }
            _ => ApiError::internal(format!("cannot write {}: {error}", path.display())),
        })
    };
    blocking(write).await?
}

/// Reads a state of at most that many bytes.
pub(super) async fn read(path: PathBuf, name: &str, most: usize) -> Result<Bytes, ApiError> {
    let read = move || -> io::Result<Option<Vec<u8>>> {
        // A pipe would be waited for until somebody writes into it.
        let file = std::fs::OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() || metadata.len() > most as u64 {
            return Ok(None);
        }
        let mut block = Vec::with_capacity(metadata.len() as usize);
        (&file).take(most as u64).read_to_end(&mut block)?;
        Ok(Some(block))
    };
    match blocking(read).await? {
        Ok(Some(block)) => Ok(block.into()),
        Ok(None) => Err(ApiError::bad_request(format!(
            "'{name}' is no state of this server's slots: it is no file of at most {most} bytes"
        ))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(ApiError::not_found("saved state", name)),
        Err(error) => Err(ApiError::internal(format!("cannot read the state {name}: {error}"))),
    }
}

/// Each writer has its own, so that two cannot write into each other.
fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", uuid::Uuid::now_v7().simple()));
    path.with_file_name(name)
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| ApiError::new(ErrorKind::Internal, "a file task panicked"))
}

#[cfg(test)]
mod tests {
    use super::is_plain;

    #[test]
    fn a_name_is_no_path() {
        for name in ["slot.bin", "session_42.bin", "a b-c.ses1", "ü"] {
            assert!(is_plain(name), "{name}");
        }
        let long = "x".repeat(201);
        for name in ["", "..", ".hidden", "a/b", "/etc/passwd", "a\\b", "a..b", "c:x", "a\0b", "end.", "x\n", &long] {
            assert!(!is_plain(name), "{name:?}");
        }
    }
}
