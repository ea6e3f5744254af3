//! Detection of terminals that cannot be matched greedily.
//!
//! GBNF has no terminals: any division of the text that fits the rules is valid. llguidance's lexer always takes the
//! longest match of all terminals that are possible at a position. Both are equivalent if, after a match of a terminal
//! or of an alternative, no terminal can continue with a byte that may also start the next symbol. Other terminals are
//! split, down to single characters if necessary.

use super::super::GrammarError;
use super::super::deadline::Deadline;
use super::lower::{Productions, Symbol, is_divisible};
use super::nfa::{ALL_BYTES, ByteSet, NO_BYTES, add_all, have_common_byte};
use super::parse::Node;
use std::collections::HashMap;

/// Maximum number of terminals to analyze. With more, all pairs of terminals are assumed to be possible at the same
/// position.
const MAX_ANALYZED_TERMINALS: usize = 300;

/// The byte 0xFF, which never starts UTF-8 text.
const MARKER: ByteSet = [0, 0, 0, 1 << 63];

/// Returns the terminals that must be split.
pub(super) fn find_terminals_to_split(grammar: &Productions, deadline: Deadline) -> Result<Vec<Node>, GrammarError> {
    let terminals = &grammar.terminals;
    let mut must_split = vec![false; terminals.len()];
    for (index, terminal) in terminals.iter().enumerate() {
        must_split[index] = terminal.nfa.is_none() && is_divisible(&terminal.node);
    }
    let sets = FollowSets::new(grammar, deadline)?;
    let mut check = |a: usize, b: usize, conflicts_with: &mut dyn FnMut(usize, usize) -> (ByteSet, bool)| {
        if must_split[a] || must_split[b] || !have_common_byte(&sets.followers[a], &conflicts_with(a, b).0) {
            return;
        }
        // Split the longer terminal, because it is the one that matches too much.
        if is_divisible(&terminals[b].node) {
            must_split[b] = true;
        } else if is_divisible(&terminals[a].node) {
            must_split[a] = true;
        }
    };
    if terminals.len() > MAX_ANALYZED_TERMINALS || grammar.rules.iter().flatten().any(|items| contains_token(items)) {
        // Every pair is compared once, so neither the pairs nor the results are stored.
        for a in 0..terminals.len() {
            for b in 0..terminals.len() {
                deadline.check()?;
                check(a, b, &mut |a, b| compare(grammar, a, b));
            }
        }
    } else {
        let mut pairs = PairCache { grammar, results: HashMap::new() };
        for (a, b) in sets.find_pairs(grammar, &mut pairs, deadline)? {
            check(a, b, &mut |a, b| pairs.conflicts_with(a, b));
        }
    }
    let split = must_split.iter().zip(terminals).filter(|(must_split, _)| **must_split);
    Ok(split.map(|(_, terminal)| terminal.node.clone()).collect())
}

/// The results of [`Nfa::conflicts_with`](super::nfa::Nfa::conflicts_with) for pairs of terminals.
struct PairCache<'a> {
    grammar: &'a Productions,
    results: HashMap<(usize, usize), (ByteSet, bool)>,
}

impl PairCache<'_> {
    fn conflicts_with(&mut self, a: usize, b: usize) -> (ByteSet, bool) {
        let grammar = self.grammar;
        *self.results.entry((a, b)).or_insert_with(|| compare(grammar, a, b))
    }
}

/// Returns the result of [`Nfa::conflicts_with`](super::nfa::Nfa::conflicts_with), or all bytes and true for a terminal
/// that is too large to analyze.
fn compare(grammar: &Productions, a: usize, b: usize) -> (ByteSet, bool) {
    match (&grammar.terminals[a].nfa, &grammar.terminals[b].nfa) {
        (Some(a), Some(b)) => a.conflicts_with(b),
        _ => (ALL_BYTES, true),
    }
}

/// A set of terminals, one bit each.
type TerminalSet = Vec<u64>;

/// The follow set of each terminal, in bytes and in terminals.
struct FollowSets {
    /// Bytes that may follow each terminal.
    followers: Vec<ByteSet>,
    /// Terminals that may follow each terminal.
    next: Vec<TerminalSet>,
    /// Terminals that the grammar may start with.
    start: TerminalSet,
}

/// The first set of a sequence of symbols.
#[derive(Clone, PartialEq)]
struct FirstSet {
    bytes: ByteSet,
    terminals: TerminalSet,
    nullable: bool,
}

impl FirstSet {
    fn empty(width: usize) -> Self {
        Self { bytes: NO_BYTES, terminals: vec![0; width], nullable: false }
    }

    fn add_all(&mut self, other: &Self) -> bool {
        let mut changed = add_all(&mut self.bytes, &other.bytes) | unite(&mut self.terminals, &other.terminals);
        changed |= other.nullable && !self.nullable;
        self.nullable |= other.nullable;
        changed
    }
}

impl FollowSets {
    fn new(grammar: &Productions, deadline: Deadline) -> Result<Self, GrammarError> {
        let width = grammar.terminals.len().div_ceil(64);
        let terminal_firsts: Vec<FirstSet> = grammar
            .terminals
            .iter()
            .enumerate()
            .map(|(index, terminal)| {
                let mut first = FirstSet::empty(width);
                insert(&mut first.terminals, index);
                (first.bytes, first.nullable) = match &terminal.nfa {
                    Some(nfa) => (nfa.first_bytes(), nfa.is_nullable()),
                    None => (ALL_BYTES, true),
                };
                first
            })
            .collect();
        let mut rule_firsts = vec![FirstSet::empty(width); grammar.rules.len()];
        let mut changed = true;
        while changed {
            changed = false;
            for (index, alternatives) in grammar.rules.iter().enumerate() {
                deadline.check()?;
                for items in alternatives {
                    let first = first_set(items, &rule_firsts, &terminal_firsts, width);
                    changed |= rule_firsts[index].add_all(&first);
                }
            }
        }
        let start = rule_firsts[0].terminals.clone();
        let mut follow = FollowBuilder {
            rule_firsts: &rule_firsts,
            terminal_firsts: &terminal_firsts,
            width,
            rule_followers: vec![FirstSet::empty(width); grammar.rules.len()],
            followers: vec![FirstSet::empty(width); grammar.terminals.len()],
            changed: true,
            deadline,
        };
        while std::mem::take(&mut follow.changed) {
            for (index, alternatives) in grammar.rules.iter().enumerate() {
                for items in alternatives {
                    let after = follow.rule_followers[index].clone();
                    follow.add_followers(items, &after)?;
                }
            }
        }
        let (followers, next) = follow.followers.into_iter().map(|first| (first.bytes, first.terminals)).unzip();
        Ok(Self { followers, next, start })
    }

    /// Returns the pairs of terminals that are possible at the same position in a grammar without tokens.
    fn find_pairs(
        &self,
        grammar: &Productions,
        pairs: &mut PairCache<'_>,
        deadline: Deadline,
    ) -> Result<Vec<(usize, usize)>, GrammarError> {
        let count = grammar.terminals.len();
        let mut coexisting: Vec<TerminalSet> = vec![vec![0; self.start.len()]; count];
        let mut todo = Vec::new();
        let mut add_pairs = |one: &TerminalSet, other: &TerminalSet, todo: &mut Vec<(usize, usize)>| {
            for a in members(one) {
                for b in members(other) {
                    if !contains(&coexisting[a], b) {
                        insert(&mut coexisting[a], b);
                        todo.push((a, b));
                    }
                }
            }
        };
        add_pairs(&self.start, &self.start, &mut todo);
        let mut found = Vec::new();
        while let Some((a, b)) = todo.pop() {
            deadline.check()?;
            found.push((a, b));
            // If both match the same text, their followers are possible at the same position.
            if a == b || pairs.conflicts_with(a, b).1 {
                add_pairs(&self.next[a], &self.next[b], &mut todo);
                add_pairs(&self.next[b], &self.next[a], &mut todo);
            }
        }
        found.sort_unstable();
        Ok(found)
    }
}

/// Computation of the follow sets.
struct FollowBuilder<'a> {
    rule_firsts: &'a [FirstSet],
    terminal_firsts: &'a [FirstSet],
    width: usize,
    rule_followers: Vec<FirstSet>,
    followers: Vec<FirstSet>,
    changed: bool,
    deadline: Deadline,
}

impl FollowBuilder<'_> {
    /// Records the follow set of every symbol of a sequence; `after` is the follow set of the whole sequence.
    fn add_followers(&mut self, items: &[Symbol], after: &FirstSet) -> Result<(), GrammarError> {
        for (index, item) in items.iter().enumerate() {
            self.deadline.check()?;
            let mut followers = first_set(&items[index + 1..], self.rule_firsts, self.terminal_firsts, self.width);
            if followers.nullable {
                followers.add_all(after);
            }
            // The end of the text may follow here; it conflicts with no byte.
            followers.nullable = false;
            match item {
                Symbol::Rule(rule) => self.changed |= self.rule_followers[*rule].add_all(&followers),
                Symbol::Terminal(terminal) => self.changed |= self.followers[*terminal].add_all(&followers),
                Symbol::Token { .. } => {}
                Symbol::Repeat(inner, _, max) => {
                    if *max != Some(1) {
                        let mut again = first_set(inner, self.rule_firsts, self.terminal_firsts, self.width);
                        again.nullable = false;
                        followers.add_all(&again);
                    }
                    self.add_followers(inner, &followers)?;
                }
            }
        }
        Ok(())
    }
}

/// Returns the first set of a sequence of symbols.
fn first_set(items: &[Symbol], rule_firsts: &[FirstSet], terminal_firsts: &[FirstSet], width: usize) -> FirstSet {
    let mut first = FirstSet::empty(width);
    first.nullable = true;
    for item in items {
        let one = match item {
            Symbol::Rule(rule) => rule_firsts[*rule].clone(),
            Symbol::Terminal(terminal) => terminal_firsts[*terminal].clone(),
            // The marker byte occurs in no text and represents the token. A negated token may be any text.
            Symbol::Token { negated, .. } => {
                FirstSet { bytes: if *negated { ALL_BYTES } else { MARKER }, ..FirstSet::empty(width) }
            }
            Symbol::Repeat(inner, min, _) => {
                let mut inner = first_set(inner, rule_firsts, terminal_firsts, width);
                inner.nullable |= *min == 0;
                inner
            }
        };
        let nullable = one.nullable;
        first.add_all(&one);
        first.nullable = nullable;
        if !nullable {
            break;
        }
    }
    first
}

fn contains_token(items: &[Symbol]) -> bool {
    items.iter().any(|item| match item {
        Symbol::Token { .. } => true,
        Symbol::Repeat(inner, ..) => contains_token(inner),
        Symbol::Rule(_) | Symbol::Terminal(_) => false,
    })
}

fn insert(set: &mut TerminalSet, index: usize) {
    set[index / 64] |= 1 << (index % 64);
}

fn contains(set: &TerminalSet, index: usize) -> bool {
    set[index / 64] & 1 << (index % 64) != 0
}

fn members(set: &TerminalSet) -> impl Iterator<Item = usize> + '_ {
    set.iter()
        .enumerate()
        .flat_map(|(word, &bits)| (0..64).filter(move |bit| bits & 1 << bit != 0).map(move |bit| word * 64 + bit))
}

fn unite(to: &mut TerminalSet, from: &TerminalSet) -> bool {
    let mut changed = false;
    for (to, from) in to.iter_mut().zip(from) {
        changed |= from & !*to != 0;
        *to |= from;
    }
    changed
}
