//! The binary first paint of a replay.
