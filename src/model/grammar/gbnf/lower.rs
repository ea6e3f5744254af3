//! Conversion of rules to productions over terminals.

use super::super::GrammarError;
use super::super::deadline::Deadline;
use super::MAX_TERMINALS;
use super::nfa::Nfa;
use super::parse::{GbnfGrammar, Node};
use crate::events::TokenId;
use std::collections::{HashMap, HashSet};

/// Maximum states and edges of the automata of all terminals; further terminals are not analyzed.
const MAX_TOTAL_SIZE: usize = 1_000_000;

/// A symbol on the right side of a production.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Symbol {
    /// A nonterminal, by index.
    Rule(usize),
    /// A terminal, by index.
    Terminal(usize),
    /// One token, or any other token if negated.
    Token { id: TokenId, negated: bool },
    /// A repeated sequence.
    Repeat(Vec<Symbol>, u32, Option<u32>),
}

/// A part of the grammar that is matched by one regular expression.
#[derive(Debug)]
pub(super) struct Terminal {
    pub(super) node: Node,
    /// `None` if it is too large to analyze.
    pub(super) nfa: Option<Nfa>,
}

/// A grammar over terminals; nonterminal 0 is its start symbol.
#[derive(Debug)]
pub(super) struct Productions {
    /// Alternatives of each nonterminal.
    pub(super) rules: Vec<Vec<Vec<Symbol>>>,
    pub(super) terminals: Vec<Terminal>,
}

/// Returns true for each rule that is regular: neither the rule nor the rules it refers to contain a token or are
/// recursive.
pub(super) fn regular_rules(grammar: &GbnfGrammar) -> Vec<bool> {
    let mut regular = vec![false; grammar.rules.len()];
    let mut needed_by = vec![Vec::new(); grammar.rules.len()];
    let mut missing: Vec<Option<usize>> = Vec::with_capacity(grammar.rules.len());
    for (index, rule) in grammar.rules.iter().enumerate() {
        let mut needs = HashSet::new();
        let plain = collect(rule, &mut needs);
        missing.push(plain.then_some(needs.len()));
        for need in needs {
            needed_by[need].push(index);
        }
    }
    let mut ready: Vec<usize> = (0..missing.len()).filter(|&index| missing[index] == Some(0)).collect();
    while let Some(index) = ready.pop() {
        regular[index] = true;
        for &user in &needed_by[index] {
            if let Some(left) = &mut missing[user] {
                *left -= 1;
                if *left == 0 {
                    ready.push(user);
                }
            }
        }
    }
    regular
}

/// Collects the rules that a node refers to; returns `false` if it contains a token.
fn collect(node: &Node, rules: &mut HashSet<usize>) -> bool {
    match node {
        Node::Text(_) | Node::Class(_) => true,
        Node::Rule(index) => {
            rules.insert(*index);
            true
        }
        Node::Token { .. } => false,
        Node::Sequence(nodes) | Node::Either(nodes) => {
            // No short-circuit: all rules must be collected.
            nodes.iter().filter(|node| !collect(node, rules)).count() == 0
        }
        Node::Repeat(inner, ..) => collect(inner, rules),
    }
}

/// Builds productions with the largest terminals that are regular and not in `split`.
pub(super) fn lower(
    grammar: &GbnfGrammar,
    regular: &[bool],
    split: &HashSet<Node>,
    deadline: Deadline,
) -> Result<Productions, GrammarError> {
    let mut lowering = Lowering {
        grammar,
        regular,
        split,
        rules: vec![Vec::new()],
        by_rule: HashMap::new(),
        by_node: HashMap::new(),
        todo: Vec::new(),
        terminals: Vec::new(),
        size: 0,
        deadline,
    };
    lowering.rules[0] = lowering.alternatives(&Node::Rule(grammar.root));
    while let Some((at, rule)) = lowering.todo.pop() {
        deadline.check()?;
        lowering.rules[at] = lowering.alternatives(&grammar.rules[rule]);
    }
    let mut productions = Productions { rules: lowering.rules, terminals: lowering.terminals };
    productions.prune(deadline)?;
    Ok(productions)
}

impl Productions {
    /// Removes symbols that no finite text can complete, because an answer must not start them.
    fn prune(&mut self, deadline: Deadline) -> Result<(), GrammarError> {
        let mut ends = vec![false; self.rules.len()];
        loop {
            deadline.check()?;
            let now: Vec<bool> =
                self.rules.iter().map(|alternatives| alternatives.iter().any(|items| can_end(items, &ends))).collect();
            if now == ends {
                break;
            }
            ends = now;
        }
        for alternatives in &mut self.rules {
            alternatives.retain(|items| can_end(items, &ends));
            alternatives.iter_mut().for_each(|items| remove_endless(items, &ends));
        }
        Ok(())
    }
}

fn can_end(items: &[Symbol], ends: &[bool]) -> bool {
    items.iter().all(|item| match item {
        Symbol::Rule(rule) => ends[*rule],
        Symbol::Repeat(inner, min, _) => *min == 0 || can_end(inner, ends),
        Symbol::Terminal(_) | Symbol::Token { .. } => true,
    })
}

fn remove_endless(items: &mut Vec<Symbol>, ends: &[bool]) {
    items.retain(|item| !matches!(item, Symbol::Repeat(inner, ..) if !can_end(inner, ends)));
    for item in items {
        if let Symbol::Repeat(inner, ..) = item {
            remove_endless(inner, ends);
        }
    }
}

struct Lowering<'a> {
    grammar: &'a GbnfGrammar,
    regular: &'a [bool],
    split: &'a HashSet<Node>,
    rules: Vec<Vec<Vec<Symbol>>>,
    by_rule: HashMap<usize, usize>,
    by_node: HashMap<Node, usize>,
    todo: Vec<(usize, usize)>,
    terminals: Vec<Terminal>,
    /// States and edges of the automata of all terminals.
    size: usize,
    deadline: Deadline,
}

impl Lowering<'_> {
    fn alternatives(&mut self, node: &Node) -> Vec<Vec<Symbol>> {
        match node {
            Node::Either(nodes) if !self.is_single_terminal(node) => {
                nodes.iter().map(|node| self.items(node)).collect()
            }
            other => vec![self.items(other)],
        }
    }

    fn items(&mut self, node: &Node) -> Vec<Symbol> {
        if self.is_single_terminal(node) {
            return self.terminal(node);
        }
        match node {
            Node::Text(text) => {
                text.chars().flat_map(|character| self.terminal(&Node::Text(character.into()))).collect()
            }
            Node::Class(_) => self.terminal(node),
            Node::Rule(index) => vec![Symbol::Rule(self.rule(*index))],
            Node::Token { id, negated } => vec![Symbol::Token { id: *id, negated: *negated }],
            Node::Sequence(nodes) => {
                let mut items = Vec::new();
                let mut at = 0;
                while at < nodes.len() {
                    // Adjacent regular nodes form one terminal.
                    let count = nodes[at..].iter().take_while(|node| self.is_regular(node)).count();
                    let merged =
                        if count == nodes.len() { None } else { Some(Node::Sequence(nodes[at..at + count].to_vec())) };
                    match merged {
                        Some(merged) if count > 1 && self.is_single_terminal(&merged) => {
                            items.extend(self.terminal(&merged));
                            at += count;
                        }
                        _ => {
                            items.extend(self.items(&nodes[at]));
                            at += 1;
                        }
                    }
                }
                items
            }
            Node::Either(_) => {
                let alternatives = self.alternatives(node);
                self.rules.push(alternatives);
                vec![Symbol::Rule(self.rules.len() - 1)]
            }
            Node::Repeat(inner, min, max) => {
                let inner = self.items(inner);
                if inner.is_empty() || *max == Some(0) { Vec::new() } else { vec![Symbol::Repeat(inner, *min, *max)] }
            }
        }
    }

    fn rule(&mut self, index: usize) -> usize {
        if let Some(&known) = self.by_rule.get(&index) {
            return known;
        }
        let at = self.rules.len();
        self.rules.push(Vec::new());
        self.by_rule.insert(index, at);
        self.todo.push((at, index));
        at
    }

    fn terminal(&mut self, node: &Node) -> Vec<Symbol> {
        if is_empty(node) {
            return Vec::new();
        }
        let index = self.by_node.get(node).copied().unwrap_or_else(|| {
            // A grammar with more terminals, or one after its deadline, is rejected.
            let is_analyzed =
                self.terminals.len() < MAX_TERMINALS && self.size < MAX_TOTAL_SIZE && !self.deadline.is_over();
            let nfa = if is_analyzed { Nfa::from_node(node, &self.grammar.rules) } else { None };
            self.size += nfa.as_ref().map_or(0, Nfa::size);
            self.terminals.push(Terminal { node: node.clone(), nfa });
            self.by_node.insert(node.clone(), self.terminals.len() - 1);
            self.terminals.len() - 1
        });
        vec![Symbol::Terminal(index)]
    }

    /// Returns true if a node is a single terminal.
    fn is_single_terminal(&self, node: &Node) -> bool {
        self.is_regular(node) && !self.split.contains(node)
    }

    fn is_regular(&self, node: &Node) -> bool {
        match node {
            Node::Text(_) | Node::Class(_) => true,
            Node::Rule(index) => self.regular[*index],
            Node::Token { .. } => false,
            Node::Sequence(nodes) | Node::Either(nodes) => nodes.iter().all(|node| self.is_regular(node)),
            Node::Repeat(inner, ..) => self.is_regular(inner),
        }
    }
}

/// Returns true if a node matches only the empty text.
pub(super) fn is_empty(node: &Node) -> bool {
    match node {
        Node::Text(text) => text.is_empty(),
        Node::Sequence(nodes) => nodes.iter().all(is_empty),
        Node::Repeat(inner, _, max) => *max == Some(0) || is_empty(inner),
        _ => false,
    }
}

/// Returns true if a terminal can be split.
pub(super) fn is_divisible(node: &Node) -> bool {
    match node {
        Node::Class(_) | Node::Token { .. } => false,
        Node::Text(text) => text.chars().nth(1).is_some(),
        _ => true,
    }
}
