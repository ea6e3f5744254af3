//! Speculative decoding: a drafter predicts the next tokens of a run, from its earlier tokens or with a draft model,
//! and one decode gives the logits after all of them.
//!
//! The run processes these logits in order, exactly as after decodes of single tokens: it samples with its own sampler
//! and dispatches every event to its mods. A drafted token is accepted if the run samples it; otherwise the logits
//! after it are dropped. Drafts therefore change the speed of an answer, but not how its tokens are sampled.

pub mod account;
pub mod draft_context;
pub mod ngram;
pub mod run_speculation;
