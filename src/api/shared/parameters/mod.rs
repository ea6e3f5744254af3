//! Parameters of a run that several protocols accept, including Thunder's own fields.

mod adapters;
mod attention;
mod bias;
mod constraint;
mod context;
mod defaults;
mod limits;
mod mods;
mod recording;
mod sampling;
mod steering;
mod streaming;
mod tokens;

pub(crate) use adapters::{ADAPTER_LIST, parse_loras, requested_adapters};
pub(crate) use attention::{recorded_attention, stored_heads};
pub(crate) use bias::logit_bias;
pub(crate) use constraint::{SeveralConstraints, parse_constraint, reject_lazy_grammar};
pub(crate) use context::{answer_room, context_settings};
pub use defaults::check_request_defaults;
pub(crate) use limits::{MAX_TOKENS_FIELDS, MinTokens, limits, n_predict};
pub(crate) use mods::{MAX_RUN_MODS, requested_mods};
pub(crate) use recording::{metadata, preview, record, request_id, user};
pub(crate) use sampling::sampling;
pub(crate) use steering::parse_steering;
pub(crate) use streaming::{include_usage, ping_interval};
pub(crate) use tokens::{encode, encode_prompt, or_start_token, run_in_place, token, tokens};
