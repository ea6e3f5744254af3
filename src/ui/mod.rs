//! The human surface: one file a page, assets embedded in the binary.
