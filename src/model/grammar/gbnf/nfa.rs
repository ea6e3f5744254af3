//! A nondeterministic finite automaton over the characters of a regular part of a grammar, used only to compare parts.

use super::parse::Node;

/// Maximum states; larger parts are not analyzed.
const MAX_STATES: usize = 4000;
/// Maximum edges; larger parts are not analyzed.
const MAX_EDGES: usize = 50 * MAX_STATES;
/// Maximum nodes that are visited to build an automaton. Empty parts add no states, but rules can multiply them.
const MAX_VISITED_NODES: usize = 100_000;
/// Maximum pairs of edges to examine when comparing two parts.
const MAX_PAIRS: usize = 400_000;

/// A set of first bytes of characters.
pub(super) type ByteSet = [u64; 4];

pub(super) const NO_BYTES: ByteSet = [0; 4];
pub(super) const ALL_BYTES: ByteSet = [u64::MAX; 4];

#[derive(Debug, Clone)]
pub(super) struct Nfa {
    /// Character edges of each state, with their targets.
    edges: Vec<Vec<((u32, u32), usize)>>,
    /// Targets of the epsilon transitions of each state.
    epsilon: Vec<Vec<usize>>,
    /// States reachable from the start by epsilon transitions.
    start: Vec<usize>,
    accepts: Vec<bool>,
    visited_nodes: usize,
}

impl Nfa {
    /// Builds the automaton; `None` if it would be too large.
    pub(super) fn from_node(node: &Node, rules: &[Node]) -> Option<Self> {
        let mut nfa =
            Self { edges: Vec::new(), epsilon: Vec::new(), start: Vec::new(), accepts: Vec::new(), visited_nodes: 0 };
        let first = nfa.add_state()?;
        let last = nfa.add_node(node, rules, first)?;
        nfa.start = nfa.closure(first);
        nfa.accepts = (0..nfa.edges.len()).map(|state| nfa.closure(state).contains(&last)).collect();
        // Replace every edge with edges to all states that it reaches without further characters.
        let edges = std::mem::take(&mut nfa.edges);
        let mut total = 0;
        for outgoing in &edges {
            let mut reached = Vec::new();
            for &(range, to) in outgoing {
                let targets = nfa.closure(to).into_iter();
                reached.extend(
                    targets.filter(|&to| !edges[to].is_empty() || nfa.accepts[to]).map(|target| (range, target)),
                );
                if total + reached.len() > MAX_EDGES {
                    return None;
                }
            }
            total += reached.len();
            nfa.edges.push(reached);
        }
        Some(nfa)
    }

    /// Returns the number of states and edges.
    pub(super) fn size(&self) -> usize {
        self.edges.len() + self.edges.iter().map(Vec::len).sum::<usize>()
    }

    /// Returns true if it matches the empty string.
    pub(super) fn is_nullable(&self) -> bool {
        self.start.iter().any(|&state| self.accepts[state])
    }

    /// Returns the first bytes of its matches.
    pub(super) fn first_bytes(&self) -> ByteSet {
        let mut bytes = NO_BYTES;
        for &state in &self.start {
            for &(range, _) in &self.edges[state] {
                add_first_bytes(&mut bytes, range);
            }
        }
        bytes
    }

    /// Returns the bytes that can continue a non-empty match of `self` to a longer match of `other`, and true if some
    /// text matches both. Returns all bytes and true if the computation would take too long.
    pub(super) fn conflicts_with(&self, other: &Self) -> (ByteSet, bool) {
        let width = other.edges.len();
        if self.edges.len() * width > 10 * MAX_PAIRS {
            return (ALL_BYTES, true);
        }
        let mut seen = vec![false; self.edges.len() * width];
        let mut todo: Vec<(usize, usize)> = Vec::new();
        let (mut bytes, mut common) = (NO_BYTES, false);
        let mut work = 0;
        let step = |a: usize, b: usize, todo: &mut Vec<(usize, usize)>, seen: &mut Vec<bool>| {
            let mut work = 0;
            for &(x, to_a) in &self.edges[a] {
                for &(y, to_b) in &other.edges[b] {
                    work += 1;
                    if x.0 <= y.1 && y.0 <= x.1 && !std::mem::replace(&mut seen[to_a * width + to_b], true) {
                        todo.push((to_a, to_b));
                    }
                }
            }
            work
        };
        for &a in &self.start {
            for &b in &other.start {
                work += step(a, b, &mut todo, &mut seen);
            }
        }
        while let Some((a, b)) = todo.pop() {
            if self.accepts[a] {
                common |= other.accepts[b];
                for &(range, _) in &other.edges[b] {
                    add_first_bytes(&mut bytes, range);
                }
            }
            work += step(a, b, &mut todo, &mut seen);
            if work > MAX_PAIRS {
                return (ALL_BYTES, true);
            }
        }
        (bytes, common)
    }

    fn add_state(&mut self) -> Option<usize> {
        if self.edges.len() == MAX_STATES {
            return None;
        }
        self.edges.push(Vec::new());
        self.epsilon.push(Vec::new());
        Some(self.edges.len() - 1)
    }

    /// Adds the states of `node` after `from`, and returns the final state.
    fn add_node(&mut self, node: &Node, rules: &[Node], from: usize) -> Option<usize> {
        self.visited_nodes += 1;
        if self.visited_nodes > MAX_VISITED_NODES {
            return None;
        }
        match node {
            Node::Text(text) => text.chars().try_fold(from, |from, character| {
                let to = self.add_state()?;
                self.edges[from].push(((character.into(), character.into()), to));
                Some(to)
            }),
            Node::Class(ranges) => {
                let to = self.add_state()?;
                self.edges[from].extend(ranges.iter().map(|&range| (range, to)));
                Some(to)
            }
            Node::Rule(index) => self.add_node(&rules[*index], rules, from),
            Node::Token { .. } => None,
            Node::Sequence(items) => items.iter().try_fold(from, |from, item| self.add_node(item, rules, from)),
            Node::Either(alternatives) => {
                let to = self.add_state()?;
                for alternative in alternatives {
                    let begin = self.add_state()?;
                    self.epsilon[from].push(begin);
                    let end = self.add_node(alternative, rules, begin)?;
                    self.epsilon[end].push(to);
                }
                Some(to)
            }
            Node::Repeat(inner, min, max) => {
                let mut at = from;
                for _ in 0..*min {
                    at = self.add_node(inner, rules, at)?;
                }
                if let Some(max) = max {
                    let to = self.add_state()?;
                    for _ in *min..*max {
                        self.epsilon[at].push(to);
                        let begin = self.add_state()?;
                        self.epsilon[at].push(begin);
                        at = self.add_node(inner, rules, begin)?;
                    }
                    self.epsilon[at].push(to);
                    Some(to)
                } else {
                    let hub = self.add_state()?;
                    self.epsilon[at].push(hub);
                    let begin = self.add_state()?;
                    self.epsilon[hub].push(begin);
                    let end = self.add_node(inner, rules, begin)?;
                    self.epsilon[end].push(hub);
                    let to = self.add_state()?;
                    self.epsilon[hub].push(to);
                    Some(to)
                }
            }
        }
    }

    fn closure(&self, from: usize) -> Vec<usize> {
        let mut reached = vec![from];
        let mut is_reached = vec![false; self.epsilon.len()];
        is_reached[from] = true;
        let mut next = 0;
        while next < reached.len() {
            for &to in &self.epsilon[reached[next]] {
                if !std::mem::replace(&mut is_reached[to], true) {
                    reached.push(to);
                }
            }
            next += 1;
        }
        reached
    }
}

/// Adds the first bytes of a range of characters.
fn add_first_bytes(bytes: &mut ByteSet, (first, last): (u32, u32)) {
    let lead = |code: u32| match code {
        0..=0x7f => code as u8,
        0x80..=0x7ff => 0xc0 | (code >> 6) as u8,
        0x800..=0xffff => 0xe0 | (code >> 12) as u8,
        _ => 0xf0 | (code >> 18) as u8,
    };
    for byte in lead(first)..=lead(last) {
        bytes[usize::from(byte >> 6)] |= 1 << (byte & 63);
    }
}

/// Returns true if two sets have a common byte.
pub(super) fn have_common_byte(a: &ByteSet, b: &ByteSet) -> bool {
    a.iter().zip(b).any(|(a, b)| a & b != 0)
}

/// Adds the bytes of `from` to `to`; returns true if `to` changed.
pub(super) fn add_all(to: &mut ByteSet, from: &ByteSet) -> bool {
    let before = *to;
    to.iter_mut().zip(from).for_each(|(to, from)| *to |= from);
    *to != before
}
