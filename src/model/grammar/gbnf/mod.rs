//! llama.cpp's grammar format (GBNF), translated to llguidance's Lark.
//!
//! The translation matches exactly the same texts. A grammar without recursion becomes one terminal. In other grammars,
//! parts without recursion become terminals if the lexer, which matches greedily, cannot match more than the rules
//! permit.

mod conflicts;
mod cursor;
mod lark;
mod lower;
mod nfa;
mod parse;

use super::GrammarError;
use super::deadline::Deadline;
use crate::model::Vocabulary;
use std::collections::HashSet;

/// Maximum rounds of splitting terminals; a grammar that needs more is rejected.
const MAX_ROUNDS: usize = 64;

/// Maximum terminals of a grammar: every terminal is compared with every other.
const MAX_TERMINALS: usize = 2000;

/// Checks the syntax of a grammar. Every token reference is accepted.
pub(super) fn check_syntax(source: &str) -> Result<(), GrammarError> {
    parse::parse(source, &|_| Some(0)).map(drop)
}

/// Translates a grammar. `vocabulary` resolves token references, `<token>` or `<[id]>`.
///
/// # Errors
/// [`GrammarError::Syntax`] with line and column; [`GrammarError::Unsupported`] if no text matches the grammar or the
/// grammar is too ambiguous or has too many terminals; [`GrammarError::TooSlow`] after the deadline.
pub(super) fn to_lark(source: &str, vocabulary: &Vocabulary, deadline: Deadline) -> Result<String, GrammarError> {
    let token = |text: &str| {
        if let Some(id) = text.strip_prefix("<[").and_then(|text| text.strip_suffix("]>")) {
            return id.parse().ok().filter(|&id| vocabulary.contains(id));
        }
        match vocabulary.encode_markup(text)[..] {
            [token] => Some(token),
            _ => None,
        }
    };
    let grammar = parse::parse(source, &token)?;
    let regular = lower::regular_rules(&grammar);
    let mut split = HashSet::new();
    for _ in 0..MAX_ROUNDS {
        let productions = lower::lower(&grammar, &regular, &split, deadline)?;
        if productions.rules[0].is_empty() {
            return Err(GrammarError::unsupported(
                "no text matches the rule 'root': its rules refer to each other without end",
            ));
        }
        if productions.terminals.len() > MAX_TERMINALS {
            return Err(GrammarError::unsupported(format!(
                "the grammar has more than {MAX_TERMINALS} different literals and character classes; the maximum is \
                 {MAX_TERMINALS}; move alternatives into rules without recursion, or remove some"
            )));
        }
        // A single terminal has no following symbol.
        let must_split = if regular[grammar.root] {
            Vec::new()
        } else {
            conflicts::find_terminals_to_split(&productions, deadline)?
        };
        if must_split.is_empty() {
            return Ok(lark::write(&productions, &grammar.rules));
        }
        split.extend(must_split);
    }
    Err(GrammarError::unsupported(
        "the grammar's rules are too ambiguous; reduce the number of ways to match the same text",
    ))
}

#[cfg(test)]
mod tests;
