//! Thunder runs a language model on llama.cpp, lets mods step into the decoding loop, keeps everything that
//! happened in PostgreSQL, and replays it next to the live API.
//!
//! # The path of a run
//! ```text
//!  request ─► api/* ─► engine::Request ─► engine ⇄ model             numbers
//!                                           │  ⇅
//!                                           │  mods                   interventions
//!                                           ▼
//!                                        events ─► store::writer ─► PostgreSQL
//!                                           │                          │
//!                           live subscribers│            store         │
//!                                           ▼                          ▼
//!                          api/* streams      trace: fold, columns, attention
//!                                           └───────────┬──────────────┘
//!                                                       ▼
//!                                             ui: replay = live
//! ```
//! A document that another engine posts to `/ingest` takes the same path from `store` on, and is replayed on the same
//! page.
//!
//! # Modules, in data-flow order
//! Imports go one way: `events` ← `model` ← `mods` ← `engine`; `recording`, `trace` ← `events`; `engine`, `store` ←
//! `recording`; `store` ← `events`, `trace`; `server` ← all of these; `api` ← `server`; `ui` ← `server`, `api::shared`;
//! `cli` ← all. `config` imports only `events`. A test parses the imports and checks this.
//!
//! # Surfaces
//! `server` is the application: state, models, access checks, limits, listeners. A folder or file of `api` is one
//! protocol: `openai`, `responses`, `anthropic`, `ollama`, `llama` (llama-server's own routes), `kobold`, `attention`
//! (tokens with their attention rows), `stream` (runs that clients can pause, change and resume), `native` (recorded runs
//! and experiments), `mods` (the registry), `ingest` (traces of other engines), `health`. `api::router` combines them.
//! They share `api::shared`: parameters, conversations, and the way from a request to a run and its outputs.
//!
//! # Whose code runs where
//! One thread decodes, for all runs of a model; it waits for nobody. Built-in mods run on it. Python mods run in worker
//! processes, uploaded ones in a sandbox (`mods::python::sandbox`). Attention is coded on a thread of its own, and
//! everything is written to the database by tasks that read what the decode thread has queued.

pub mod api;
pub mod cli;
pub mod config;
pub mod engine;
pub mod events;
pub mod model;
pub mod mods;
pub mod recording;
pub mod server;
pub mod store;
pub mod trace;
pub mod ui;
