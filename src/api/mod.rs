//! The machine surfaces, one folder a contract; each translates its wire types into one
//! [`crate::engine::Request`] and the engine's outputs back.
//!
//! [`App`] is what every handler can reach, [`ApiError`] the only type that knows status codes.

mod app;
mod error;
pub mod extract;

pub use app::{App, State};
pub use error::{ApiError, Kind, OpenAiError, Problem, request_id, with_request_id};
