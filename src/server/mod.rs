//! The application that all APIs and the dashboard share: state, models, access checks, limits, listeners, errors.
//!
//! This module does not depend on a protocol. A [`Protocol`] defines routes, each with an access class and an error
//! format; the guard in [`auth`] applies them.

pub(crate) mod access_log;
mod app;
pub(crate) mod auth;
mod client_tls;
mod connections;
pub(crate) mod error;
mod event_permits;
pub(crate) mod experiments;
pub(crate) mod extract;
pub(crate) mod limits;
mod listener;
pub(crate) mod login;
pub(crate) mod models;
pub(crate) mod mods;
pub(crate) mod peers;
mod percent;
pub(crate) mod prefix;
mod protocol;
pub(crate) mod request_metrics;
pub(crate) mod socket;

pub(crate) use access_log::note_started_run;
pub use app::{App, ServerState};
pub use auth::Caller;
pub(crate) use client_tls::client_tls;
pub use error::{ApiError, ErrorCode, ErrorKind, Problem, request_id, root_cause, with_request_id, with_run_id};
pub(crate) use event_permits::EventPermits;
pub use listener::{BindError, Listeners};
pub use login::load_login_secret;
pub use models::{LoadStep, LoadedModel, ModelEntry, ModelRegistry, ModelState};
pub use peers::announce;
pub(crate) use percent::{encode_component, encode_file_name};
pub use prefix::base;
pub use protocol::{Access, ErrorFormat, ErrorFormats, LoginForm, LoginPage, Pages, Protocol, RouteGroup};
