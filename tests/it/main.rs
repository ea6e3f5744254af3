//! All integration tests, in one binary: one file a surface, on one real server ([`harness`]).
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod architecture;
mod broken;
mod browser;
mod chat;
mod cli;
mod engine;
mod harness;
mod health;
mod ingest;
mod llama;
mod models;
mod mods;
mod native;
mod openai;
mod security;
mod store;
mod ui_pages;
