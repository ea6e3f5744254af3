//! Interpretation of recorded runs; pure functions over [`crate::events`], no I/O.
//!
//! [`fold`] turns trace items into token instances (rows with a first and a last event), [`columns`] is the binary
//! format that a replay loads first, [`attention`] encodes attention rows, [`document`] parses and writes the `/ingest`
//! document, [`difference`] compares two recordings, and [`parquet`] writes files for exports.

pub mod attention;
pub mod columns;
pub mod difference;
pub mod document;
pub mod fold;
pub mod parquet;
