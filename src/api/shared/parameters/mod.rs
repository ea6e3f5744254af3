//! Parameters that several protocols accept: sampling, limits, stop strings, biases, token lists, streams, and
//! Thunder's own fields.

mod bias;
mod limits;
mod placement;
mod recording;
mod sampling;
mod streaming;
mod tokens;

pub(crate) use bias::logit_bias;
pub(crate) use limits::{MAX_TOKENS_FIELDS, limits, limits_with_min, n_predict};
pub(crate) use placement::placement;
pub(crate) use recording::{metadata, preview, record, request_id, user};
pub(crate) use sampling::sampling;
pub(crate) use streaming::{include_usage, ping_interval};
pub(crate) use tokens::{encode, encode_prompt, or_start_token, run_in_place, token, tokens};
