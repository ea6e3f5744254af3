//! llama.cpp's grammar format, translated to llguidance's Lark.
//!
//! The language stays the same, character for character. A grammar without recursion becomes one terminal. In others, parts
//! that need no recursion become terminals as long as the lexer, which matches greedily, cannot take more than the rules mean.

mod conflicts;
mod lark;
mod lower;
mod nfa;
mod parse;

use super::GrammarError;
use crate::model::Vocabulary;
use std::collections::HashSet;

/// How often parts are taken apart before the grammar counts as too entangled.
const MAX_ROUNDS: usize = 64;

/// Translates a grammar; `vocabulary` knows the tokens that it names as `<token>` or `<[id]>`.
///
/// # Errors
/// [`GrammarError::Syntax`] with line and column.
pub fn to_lark(source: &str, vocabulary: &Vocabulary) -> Result<String, GrammarError> {
    let token = |text: &str| {
        if let Some(id) = text.strip_prefix("<[").and_then(|text| text.strip_suffix("]>")) {
            return id.parse().ok().filter(|&id| vocabulary.contains(id));
        }
        match vocabulary.encode(text, false, true)[..] {
            [token] => Some(token),
            _ => None,
        }
    };
    let grammar = parse::parse(source, &token)?;
    let regular = lower::regular_rules(&grammar);
    let mut split = HashSet::new();
    for _ in 0..MAX_ROUNDS {
        let productions = lower::lower(&grammar, &regular, &split);
        if productions.rules[0].is_empty() {
            return Err(GrammarError::unsupported(
                "no text matches the rule 'root': its rules need each other without end",
            ));
        }
        // One terminal has nothing beside it that could go on where it ends.
        let apart = if regular[grammar.root] { Vec::new() } else { conflicts::find(&productions) };
        if apart.is_empty() {
            return Ok(lark::write(&productions, &grammar.rules));
        }
        split.extend(apart);
    }
    Err(GrammarError::unsupported("the grammar's rules are too entangled; fewer ways to read the same text are needed"))
}

#[cfg(test)]
mod tests;
