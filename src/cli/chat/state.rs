//! The KV state of a conversation, saved in a file next to the conversation. A restored conversation needs no prompt
//! processing with it. If the state cannot be saved or restored, only that time is lost.

use crate::cli::client::Server;
use crate::cli::replace_file::replace_file;
use anyhow::Context;
use reqwest::Method;
use reqwest::header::{ACCEPT, CONTENT_TYPE};
use serde_json::Value;
use std::path::{Path, PathBuf};

const BINARY: &str = "application/octet-stream";

/// Returns the path of the KV state of a saved conversation.
pub fn state_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".ses1");
    name.into()
}

/// Saves the state of a slot in a file next to a conversation, and returns its size in bytes. If the file is new, only its
/// owner can read it.
pub async fn save(server: &Server, slot: u64, conversation: &Path) -> anyhow::Result<usize> {
    let request = server.request(Method::POST, &format!("/slots/{slot}?action=save-state"));
    let state = server.send(request.header(ACCEPT, BINARY)).await?.bytes().await?;
    replace_file(&state_path(conversation), &state)?;
    Ok(state.len())
}

/// Removes the state of an earlier conversation with the same name.
pub fn remove(conversation: &Path) {
    // The file usually does not exist.
    let _ = std::fs::remove_file(state_path(conversation));
}

/// Restores the state of a conversation into a slot. Returns false if there is no state.
pub async fn restore(server: &Server, conversation: &Path) -> anyhow::Result<bool> {
    let path = state_path(conversation);
    let state = match std::fs::read(&path) {
        Ok(state) => state,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let slot = free_slot(server).await?;
    let request = server.request(Method::POST, &format!("/slots/{slot}?action=restore-state"));
    server.send(request.header(CONTENT_TYPE, BINARY).body(state)).await?;
    Ok(true)
}

/// Returns the highest id of an idle slot, because runs use the lowest ids first, or of any slot if none is idle.
async fn free_slot(server: &Server) -> anyhow::Result<u64> {
    let slots: Value = server.send(server.request(Method::GET, "/slots")).await?.json().await?;
    let slots = slots.as_array().map_or(&[][..], Vec::as_slice);
    let free = slots.iter().rev().find(|slot| slot["is_processing"] == false).or(slots.last());
    free.and_then(|slot| slot["id"].as_u64()).context("the server has no slots")
}
