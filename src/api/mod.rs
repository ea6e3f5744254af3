//! The HTTP and WebSocket APIs, one folder per protocol. Each converts its request bodies into a
//! [`crate::engine::Request`] and the engine's outputs into responses.
//!
//! A protocol imports [`crate::server`] and `shared`, never another protocol. [`router()`] puts all of them together.

mod anthropic;
mod attention;
mod health;
mod ingest;
mod kobold;
mod llama;
mod mods;
mod native;
mod ollama;
mod openai;
mod responses;
mod router;
mod shared;
mod stream;

pub use llama::sleep_when_idle;
pub use router::router;
pub use shared::parameters::check_request_defaults;
