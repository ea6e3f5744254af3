//! Items to token instances.
