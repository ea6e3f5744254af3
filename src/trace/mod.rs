//! What a list of events means; pure functions over [`crate::events`], no I/O.
//!
//! [`fold`] turns items into token instances (rows that are born and die), [`columns`] is the binary first paint of
//! a replay, [`attention`] the coding of attention rows, [`document`] the `/ingest` document in and out, [`difference`] where
//! two recordings part.

pub mod attention;
pub mod columns;
pub mod difference;
pub mod document;
pub mod fold;
