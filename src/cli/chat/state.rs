//! The KV state of a conversation, in a file beside the one that it is kept in: with it, going on needs no prompt
//! evaluated again. A state that cannot be had or used costs that time and nothing else.

use crate::cli::client::Server;
use anyhow::Context;
use reqwest::Method;
use reqwest::header::{ACCEPT, CONTENT_TYPE};
use serde_json::Value;
use std::path::{Path, PathBuf};

const OCTETS: &str = "application/octet-stream";

/// Where the state of a kept conversation is.
pub fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".ses1");
    name.into()
}

/// Writes the state of a slot beside a conversation, for its owner only. Returns its bytes.
pub async fn save(server: &Server, slot: u64, conversation: &Path) -> anyhow::Result<usize> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let request = server.request(Method::POST, &format!("/slots/{slot}?action=save-state"));
    let state = server.send(request.header(ACCEPT, OCTETS)).await?.bytes().await?;
    let path = beside(conversation);
    let file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path);
    file.and_then(|mut file| file.write_all(&state)).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(state.len())
}

/// Removes the state that an earlier conversation of that name left.
pub fn forget(conversation: &Path) {
    // Mostly there is none.
    let _ = std::fs::remove_file(beside(conversation));
}

/// Puts the state beside a conversation into a slot. `false` when there is none.
pub async fn restore(server: &Server, conversation: &Path) -> anyhow::Result<bool> {
    let path = beside(conversation);
    let state = match std::fs::read(&path) {
        Ok(state) => state,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let slot = free_slot(server).await?;
    let request = server.request(Method::POST, &format!("/slots/{slot}?action=restore-state"));
    server.send(request.header(CONTENT_TYPE, OCTETS).body(state)).await?;
    Ok(true)
}

/// A slot that nothing runs in; runs take the lowest ones first.
async fn free_slot(server: &Server) -> anyhow::Result<u64> {
    let slots: Value = server.send(server.request(Method::GET, "/slots")).await?.json().await?;
    let slots = slots.as_array().map_or(&[][..], Vec::as_slice);
    let free = slots.iter().rev().find(|slot| slot["is_processing"] == false).or(slots.last());
    free.and_then(|slot| slot["id"].as_u64()).context("the server has no slots")
}
