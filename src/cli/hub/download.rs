//! Download of a file, which resumes a partial one, and the check of its bytes.

use super::remote::{Remote, RemoteFile, unreachable};
use crate::cli::progress::TaskProgress;
use crate::events::hex;
use anyhow::{Context as _, anyhow, bail};
use reqwest::StatusCode;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::time::Duration;

/// Attempts without a new byte before the download fails.
const MAX_ATTEMPTS: u32 = 5;
/// Delay before the second attempt without a new byte; doubled for each further one.
const RETRY_DELAY: Duration = Duration::from_millis(250);

/// The failure of a download attempt.
enum Failure {
    /// Another attempt may succeed.
    Temporary(anyhow::Error),
    Permanent(anyhow::Error),
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Permanent(anyhow::Error::new(error).context("cannot write the download"))
    }
}

/// Completes a partial file and verifies it.
///
/// # Errors
/// The server does not answer, or the file has another checksum. `partial` is then empty or a valid beginning.
pub async fn complete(
    remote: &Remote,
    file: &RemoteFile,
    mut partial: File,
    progress: &TaskProgress,
) -> anyhow::Result<()> {
    let mut failures = 0;
    loop {
        let length = partial.metadata()?.len();
        if length > 0 && file.size == Some(length) {
            break;
        }
        if file.size.is_some_and(|size| length > size) {
            partial.set_len(0)?;
        }
        let error = match receive(remote, file, &mut partial, progress).await {
            Ok(()) => break,
            Err(Failure::Permanent(error)) => return Err(error),
            Err(Failure::Temporary(error)) => error,
        };
        failures = if partial.metadata()?.len() > length { 0 } else { failures + 1 };
        if failures >= MAX_ATTEMPTS {
            return Err(error.context(format!("cannot download {}; the next attempt resumes it", file.path)));
        }
        tracing::info!(file = file.path, "the download is resumed: {error:#}");
        if failures > 0 {
            tokio::time::sleep(RETRY_DELAY * 2_u32.pow(failures - 1)).await;
        }
    }
    let Some(expected) = &file.sha256 else { return Ok(()) };
    progress.begin(&format!("verifying {}", file.path));
    let (partial, found) = tokio::task::spawn_blocking(move || sha256(partial)).await??;
    if !found.eq_ignore_ascii_case(expected) {
        partial.set_len(0)?;
        bail!(
            "the SHA-256 checksum of {} must be {expected}, got {found}; the downloaded bytes were removed; try again",
            file.path
        );
    }
    Ok(())
}

/// Appends the missing bytes to a partial file.
async fn receive(
    remote: &Remote,
    file: &RemoteFile,
    partial: &mut File,
    progress: &TaskProgress,
) -> Result<(), Failure> {
    let (host, path) = (file.url.host_str().unwrap_or_default(), &file.path);
    let temporary = |error: reqwest::Error| Failure::Temporary(unreachable(&file.url, &error));
    let mut received = partial.seek(SeekFrom::End(0))?;
    let response = remote.bytes(file, received).await.map_err(temporary)?;
    let status = response.status();
    if status.is_server_error() || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT) {
        return Err(Failure::Temporary(anyhow!("{host} answered {status}")));
    }
    // Several servers behind one address may disagree about the version; a checksum finds mixed bytes, too.
    if file.sha256.is_none() && status.is_success() && file.validators.differ(response.headers()) {
        return Err(Failure::Permanent(anyhow!(
            "{path} has changed on {host} since the download began; start it again"
        )));
    }
    let length = response.content_length();
    let range = response.headers().get("content-range").and_then(|range| range.to_str().ok());
    let continues = status == StatusCode::PARTIAL_CONTENT
        && range.is_some_and(|range| range.starts_with(&format!("bytes {received}-")));
    let content_type = response.headers().get("content-type").and_then(|value| value.to_str().ok());
    let is_page = content_type.is_some_and(|value| value.starts_with("text/html"));
    let is_whole =
        status == StatusCode::OK && !is_page && (length.is_none() || file.size.is_none_or(|size| Some(size) == length));
    let is_other_range = matches!(status, StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE);
    if received > 0 && !continues && (is_whole || is_other_range) {
        partial.set_len(0)?;
        received = partial.seek(SeekFrom::Start(0))?;
        if is_other_range {
            return Err(Failure::Temporary(anyhow!("the server cannot continue the download of {path}")));
        }
    }
    let mut response = remote.accept(response, path).map_err(Failure::Permanent)?;
    // Bytes of another response, such as the login page of a network, must not replace those of the file.
    let has_other_length = file.size.zip(length).is_some_and(|(size, length)| received + length != size);
    if is_page || has_other_length || received > 0 && !continues {
        return Err(Failure::Permanent(anyhow!(
            "{host} answered {status} without the missing bytes of {path}; check the network, e.g. for a login page"
        )));
    }
    let size = file.size.or_else(|| Some(received + length?));
    let step = match size {
        Some(size) => format!("downloading {}, {}", file.path, readable_size(size)),
        None => format!("downloading {}", file.path),
    };
    progress.begin(&step);
    while let Some(chunk) = response.chunk().await.map_err(temporary)? {
        received += chunk.len() as u64;
        if let Some(size) = size.filter(|&size| received > size) {
            partial.set_len(0)?;
            return Err(Failure::Permanent(anyhow!("the server sends more than the {size} bytes of {}", file.path)));
        }
        partial.write_all(&chunk)?;
        if let Some(size) = size {
            progress.advance(&step, received as f32 / size as f32);
        }
    }
    match size {
        Some(size) if received < size => {
            Err(Failure::Temporary(anyhow!("the connection ended after {received} of {size} bytes")))
        }
        _ => Ok(()),
    }
}

fn sha256(mut file: File) -> anyhow::Result<(File, String)> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    file.seek(SeekFrom::Start(0))?;
    loop {
        let count = file.read(&mut buffer).context("cannot read the download")?;
        if count == 0 {
            return Ok((file, hex(&hash.finalize())));
        }
        hash.update(&buffer[..count]);
    }
}

/// Returns a size in MiB, or in GiB from 1 GiB on.
pub fn readable_size(bytes: u64) -> String {
    match bytes >> 20 {
        mib if mib < 1024 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}
