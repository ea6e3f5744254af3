//! How the server is set up: flags, then environment, then defaults, validated once.

/// A validated configuration.
#[derive(Debug, Clone)]
pub struct Config {}
