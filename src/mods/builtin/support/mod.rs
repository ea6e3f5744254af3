//! Parts of the built-in mods: configuration, text and reasoning of the answer, phrases, and constraints.

pub mod answer_text;
pub mod answer_tracker;
pub mod avoided;
pub mod config;
pub mod constrain;
pub mod phrase;
pub mod phrase_search;
pub mod reasoning;
pub mod sentences;
pub mod sequence;
