//! llama.cpp's grammar format (GBNF), translated to llguidance's Lark.
//!
//! The translation describes exactly the same texts. A grammar without recursion becomes one terminal. In other
//! grammars, parts without recursion become terminals if the lexer, which matches greedily, cannot match more than the
//! rules permit.

mod conflicts;
mod lark;
mod lower;
mod nfa;
mod parse;

use super::GrammarError;
use crate::model::Vocabulary;
use std::collections::HashSet;

/// Maximum rounds of splitting terminals before the grammar counts as too complex.
const MAX_ROUNDS: usize = 64;

/// Translates a grammar. `vocabulary` resolves the tokens that it names as `<token>` or `<[id]>`.
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
                "no text matches the rule 'root': its rules refer to each other without end",
            ));
        }
        // A single terminal has no neighbour that could continue after it.
        let apart = if regular[grammar.root] { Vec::new() } else { conflicts::find(&productions) };
        if apart.is_empty() {
            return Ok(lark::write(&productions, &grammar.rules));
        }
        split.extend(apart);
    }
    Err(GrammarError::unsupported(
        "the grammar's rules are too ambiguous; reduce the number of ways to match the same text",
    ))
}

#[cfg(test)]
mod tests;
