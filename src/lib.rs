//! Thunder runs a language model on llama.cpp, lets mods step into the decoding loop, keeps everything that
//! happened in PostgreSQL, and replays it next to the live API.
//!
//! # The way of a run
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
//! A payload posted to `/ingest` by somebody else's engine takes the same way from `store` on, and replays on the
//! same page.
//!
//! # Modules, in data-flow order
//! Imports go one way: `events` ← `model` ← `mods` ← `engine`; `trace` ← `events`; `store` ← `events`, `trace`; `api` ←
//! all of these; `ui` ← all but the contracts of `api`. A test reads the `use` lines and holds this.

pub mod api;
pub mod cli;
pub mod config;
pub mod engine;
pub mod events;
pub mod model;
pub mod mods;
pub mod store;
pub mod trace;
pub mod ui;
