//! The `/ingest` document: parsing with JSON paths in every error, and writing.
