//! Detection of terminals that cannot be matched greedily.
//!
//! GBNF has no terminals: any division of the text that fits the rules is valid. llguidance's lexer always takes the
//! longest match of all terminals that are possible at a position. Both are equivalent if, after a match of a terminal
//! or of an alternative, no terminal can continue with a byte that may also start the next symbol. Other terminals are
//! split, down to single characters if necessary.

use super::lower::{Productions, Symbol, is_divisible};
use super::nfa::{ALL_BYTES, ByteSet, NO_BYTES, add_all, have_common_byte};
use super::parse::Node;
use std::collections::HashMap;

/// Maximum number of terminals to analyze. With more, all pairs of terminals are assumed to be possible at the same
/// position.
const MAX_ANALYZED_TERMINALS: usize = 300;

/// The byte 0xFF, which never starts UTF-8 text.
const MARKER: ByteSet = [0, 0, 0, 1 << 63];

/// Finds the terminals that must be split.
pub(super) fn find(grammar: &Productions) -> Vec<Node> {
    let terminals = &grammar.terminals;
    let mut must_split = vec![false; terminals.len()];
    for (index, terminal) in terminals.iter().enumerate() {
        must_split[index] = terminal.nfa.is_none() && is_divisible(&terminal.node);
    }
    let sets = Sets::new(grammar);
    let mut pairs = Pairs { grammar, known: HashMap::new() };
    for (a, b) in sets.find_pairs(grammar, &mut pairs) {
        if must_split[a] || must_split[b] || !have_common_byte(&sets.followers[a], &pairs.conflicts_with(a, b).0) {
            continue;
        }
        // Split the longer terminal, because it is the one that matches too much.
        if is_divisible(&terminals[b].node) {
            must_split[b] = true;
        } else if is_divisible(&terminals[a].node) {
            must_split[a] = true;
        }
    }
    must_split
        .iter()
        .zip(terminals)
        .filter(|(must_split, _)| **must_split)
        .map(|(_, terminal)| terminal.node.clone())
        .collect()
}

struct Pairs<'a> {
    grammar: &'a Productions,
    known: HashMap<(usize, usize), (ByteSet, bool)>,
}

impl Pairs<'_> {
    fn conflicts_with(&mut self, a: usize, b: usize) -> (ByteSet, bool) {
        let terminals = &self.grammar.terminals;
        *self.known.entry((a, b)).or_insert_with(|| match (&terminals[a].nfa, &terminals[b].nfa) {
            (Some(a), Some(b)) => a.conflicts_with(b),
            _ => (ALL_BYTES, true),
        })
    }
}

/// A set of terminals.
type Set = Vec<u64>;

/// First and follow sets, in bytes and in terminals.
struct Sets {
    /// Bytes that may follow each terminal.
    followers: Vec<ByteSet>,
    /// Terminals that may follow each terminal.
    next: Vec<Set>,
    /// Terminals that the grammar may start with.
    start: Set,
}

/// The first set of a sequence of symbols.
#[derive(Clone, PartialEq)]
struct First {
    bytes: ByteSet,
    terminals: Set,
    nullable: bool,
}

impl First {
    fn nothing(width: usize) -> Self {
        Self { bytes: NO_BYTES, terminals: vec![0; width], nullable: false }
    }

    fn add_all(&mut self, other: &Self) -> bool {
        let mut changed = add_all(&mut self.bytes, &other.bytes) | unite(&mut self.terminals, &other.terminals);
        changed |= other.nullable && !self.nullable;
        self.nullable |= other.nullable;
        changed
    }
}

impl Sets {
    fn new(grammar: &Productions) -> Self {
        let width = grammar.terminals.len().div_ceil(64);
        let own: Vec<First> = grammar
            .terminals
            .iter()
            .enumerate()
            .map(|(index, terminal)| {
                let mut first = First::nothing(width);
                insert(&mut first.terminals, index);
                (first.bytes, first.nullable) = match &terminal.nfa {
                    Some(nfa) => (nfa.first_bytes(), nfa.is_nullable()),
                    None => (ALL_BYTES, true),
                };
                first
            })
            .collect();
        let mut rules = vec![First::nothing(width); grammar.rules.len()];
        let mut changed = true;
        while changed {
            changed = false;
            for (index, alternatives) in grammar.rules.iter().enumerate() {
                for items in alternatives {
                    let first = sequence(items, &rules, &own, width);
                    changed |= rules[index].add_all(&first);
                }
            }
        }
        let start = rules[0].terminals.clone();
        let mut follow = Follow {
            rules: &rules,
            own: &own,
            width,
            rule_followers: vec![First::nothing(width); grammar.rules.len()],
            followers: vec![First::nothing(width); grammar.terminals.len()],
            changed: true,
        };
        while std::mem::take(&mut follow.changed) {
            for (index, alternatives) in grammar.rules.iter().enumerate() {
                for items in alternatives {
                    let after = follow.rule_followers[index].clone();
                    follow.walk(items, &after);
                }
            }
        }
        let (followers, next) = follow.followers.into_iter().map(|first| (first.bytes, first.terminals)).unzip();
        Self { followers, next, start }
    }

    /// Returns the pairs of terminals that are possible at the same position.
    fn find_pairs(&self, grammar: &Productions, pairs: &mut Pairs<'_>) -> Vec<(usize, usize)> {
        let count = grammar.terminals.len();
        if count > MAX_ANALYZED_TERMINALS || grammar.rules.iter().flatten().any(|items| contains_token(items)) {
            return (0..count).flat_map(|a| (0..count).map(move |b| (a, b))).collect();
        }
        let mut coexisting: Vec<Set> = vec![vec![0; self.start.len()]; count];
        let mut todo = Vec::new();
        let mut add_pairs = |one: &Set, other: &Set, todo: &mut Vec<(usize, usize)>| {
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
            found.push((a, b));
            // If both match the same text, their followers are possible at the same position.
            if a == b || pairs.conflicts_with(a, b).1 {
                add_pairs(&self.next[a], &self.next[b], &mut todo);
                add_pairs(&self.next[b], &self.next[a], &mut todo);
            }
        }
        found.sort_unstable();
        found
    }
}

struct Follow<'a> {
    rules: &'a [First],
    own: &'a [First],
    width: usize,
    rule_followers: Vec<First>,
    followers: Vec<First>,
    changed: bool,
}

impl Follow<'_> {
    /// Records the follow set of every symbol of a sequence; `after` is the follow set of the whole sequence.
    fn walk(&mut self, items: &[Symbol], after: &First) {
        for (index, item) in items.iter().enumerate() {
            let mut followers = sequence(&items[index + 1..], self.rules, self.own, self.width);
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
                        let mut again = sequence(inner, self.rules, self.own, self.width);
                        again.nullable = false;
                        followers.add_all(&again);
                    }
                    self.walk(inner, &followers);
                }
            }
        }
    }
}

fn sequence(items: &[Symbol], rules: &[First], own: &[First], width: usize) -> First {
    let mut first = First::nothing(width);
    first.nullable = true;
    for item in items {
        let one = match item {
            Symbol::Rule(rule) => rules[*rule].clone(),
            Symbol::Terminal(terminal) => own[*terminal].clone(),
            // The marker byte occurs in no text and represents the token. A negated token may be any text.
            Symbol::Token { negated, .. } => {
                First { bytes: if *negated { ALL_BYTES } else { MARKER }, ..First::nothing(width) }
            }
            Symbol::Repeat(inner, min, _) => {
                let mut inner = sequence(inner, rules, own, width);
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

fn insert(set: &mut Set, index: usize) {
    set[index / 64] |= 1 << (index % 64);
}

fn contains(set: &Set, index: usize) -> bool {
    set[index / 64] & 1 << (index % 64) != 0
}

fn members(set: &Set) -> impl Iterator<Item = usize> + '_ {
    set.iter()
        .enumerate()
        .flat_map(|(word, &bits)| (0..64).filter(move |bit| bits & 1 << bit != 0).map(move |bit| word * 64 + bit))
}

fn unite(to: &mut Set, from: &Set) -> bool {
    let mut changed = false;
    for (to, from) in to.iter_mut().zip(from) {
        changed |= from & !*to != 0;
        *to |= from;
    }
    changed
}
