//! llama-server's own routes.

mod bare;
mod completion;
mod completions;
mod flags;
mod infill;
mod monitor;
mod props;
mod text;
