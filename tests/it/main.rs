//! All integration tests, in one binary: one file a surface, on one real server ([`harness`]).
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod anthropic;
mod architecture;
mod attention;
mod broken;
mod browser;
mod builtins;
mod chat;
mod cli;
mod connections;
mod constraints;
mod editor;
mod engine;
mod exact;
mod gpu;
mod harness;
mod health;
mod ingest;
mod kobold;
mod llama;
mod models;
mod mods;
mod mods_faults;
mod native;
mod openai;
mod prefix;
mod registry;
mod regression;
mod responses;
mod security;
mod slots;
mod store;
mod stream;
mod terminal;
mod tls;
mod ui_pages;
