//! Serialization of productions as llguidance's Lark.

use super::lower::{Productions, Symbol, is_empty};
use super::parse::Node;
use std::collections::BTreeSet;
use std::fmt::Write;

/// Maximum nesting of groups in Lark; a deeper part becomes a separate rule.
const MAX_DEPTH: usize = 12;

/// Maximum nodes and bytes of a part with rules or repetitions that is written as one literal, so that many references to a
/// rule do not repeat a long text.
const MAX_EXPANSION: usize = 32;

/// Returns the grammar as Lark. `rules` are those that its terminals refer to.
pub(super) fn write(grammar: &Productions, rules: &[Node]) -> String {
    let mut writer = Writer { rules, text: String::new(), needed: BTreeSet::new(), deep: Vec::new(), named: 0 };
    for (index, alternatives) in grammar.rules.iter().enumerate().filter(|(_, alternatives)| !alternatives.is_empty()) {
        let name = if index == 0 { "start".to_owned() } else { format!("r{index}") };
        let alternatives: Vec<String> = alternatives.iter().map(|items| sequence(items)).collect();
        let _ = writeln!(writer.text, "{name}: {}", alternatives.join(" | "));
    }
    for (index, terminal) in grammar.terminals.iter().enumerate() {
        let body = writer.terminal(&terminal.node, 0);
        let _ = writeln!(writer.text, "T{index}: {body}");
    }
    // A rule that a terminal refers to may refer to others.
    let mut written = BTreeSet::new();
    loop {
        if let Some((index, node)) = writer.deep.pop() {
            let body = writer.terminal(&node, 0);
            let _ = writeln!(writer.text, "D{index}: {body}");
            continue;
        }
        let Some(&index) = writer.needed.iter().find(|index| !written.contains(*index)) else { break };
        written.insert(index);
        let body = writer.terminal(&rules[index], 0);
        let _ = writeln!(writer.text, "R{index}: {body}");
    }
    writer.text
}

struct Writer<'g> {
    rules: &'g [Node],
    text: String,
    needed: BTreeSet<usize>,
    /// Parts that were nested too deeply, with the number in their name.
    deep: Vec<(usize, Node)>,
    named: usize,
}

impl Writer<'_> {
    fn terminal(&mut self, node: &Node, depth: usize) -> String {
        if depth > MAX_DEPTH {
            self.named += 1;
            self.deep.push((self.named, node.clone()));
            return format!("D{}", self.named);
        }
        if is_empty(node) {
            return "\"\"".into();
        }
        if let Some(literal) = self.literal(node) {
            return quoted(&literal);
        }
        match node {
            Node::Text(text) => quoted(text),
            Node::Class(ranges) => class(ranges),
            Node::Rule(index) => {
                self.needed.insert(*index);
                format!("R{index}")
            }
            Node::Sequence(nodes) => self.sequence(nodes, depth),
            Node::Either(nodes) => {
                nodes.iter().map(|node| self.terminal(node, depth + 1)).collect::<Vec<_>>().join(" | ")
            }
            Node::Repeat(inner, min, max) => repeated(&self.terminal(inner, depth + 1), *min, *max),
            // Terminals are regular and contain no tokens.
            Node::Token { .. } => String::new(),
        }
    }

    /// Writes a sequence with as few literals as possible: derivre 0.3.13 panics if two alternatives are the same literal,
    /// divided differently.
    fn sequence(&mut self, nodes: &[Node], depth: usize) -> String {
        let (mut parts, mut literal) = (Vec::new(), String::new());
        for node in nodes {
            if let Node::Text(text) = node {
                literal.push_str(text);
            } else if let Some(text) = self.literal(node) {
                literal.push_str(&text);
            } else {
                if !literal.is_empty() {
                    parts.push(quoted(&std::mem::take(&mut literal)));
                }
                parts.push(self.grouped(node, depth));
            }
        }
        if !literal.is_empty() || parts.is_empty() {
            parts.push(quoted(&literal));
        }
        parts.join(" ")
    }

    /// Returns the only text that a node matches; `None` if it matches several or is too large.
    fn literal(&self, node: &Node) -> Option<String> {
        let (mut text, mut left) = (String::new(), MAX_EXPANSION);
        self.add_literal(node, &mut text, &mut left).then_some(text)
    }

    /// Appends the only text that a node matches. Returns false if it matches several or is larger than `left`.
    fn add_literal(&self, node: &Node, text: &mut String, left: &mut usize) -> bool {
        let bytes = if let Node::Text(literal) = node { literal.len() } else { 0 };
        let Some(rest) = left.checked_sub(1 + bytes) else { return false };
        *left = rest;
        match node {
            Node::Text(literal) => text.push_str(literal),
            Node::Class(ranges) => match ranges.as_slice() {
                [(first, last)] if first == last => text.extend(char::from_u32(*first)),
                _ => return false,
            },
            Node::Rule(index) => return self.add_literal(&self.rules[*index], text, left),
            Node::Sequence(nodes) => return nodes.iter().all(|node| self.add_literal(node, text, left)),
            Node::Repeat(inner, min, Some(max)) if min == max => {
                return (0..*min).all(|_| self.add_literal(inner, text, left));
            }
            Node::Token { .. } | Node::Either(_) | Node::Repeat(..) => return false,
        }
        true
    }

    fn grouped(&mut self, node: &Node, depth: usize) -> String {
        match node {
            Node::Either(_) | Node::Sequence(_) => format!("({})", self.terminal(node, depth + 1)),
            other => self.terminal(other, depth),
        }
    }
}

fn sequence(items: &[Symbol]) -> String {
    if items.is_empty() {
        return "\"\"".into();
    }
    let one = |item: &Symbol| match item {
        Symbol::Rule(index) => format!("r{index}"),
        Symbol::Terminal(index) => format!("T{index}"),
        Symbol::Token { id, negated } => format!("<[{}{id}]>", if *negated { "^" } else { "" }),
        Symbol::Repeat(inner, min, max) => repeated(&sequence(inner), *min, *max),
    };
    items.iter().map(one).collect::<Vec<_>>().join(" ")
}

fn repeated(inner: &str, min: u32, max: Option<u32>) -> String {
    match (min, max) {
        (0, Some(0)) => "\"\"".into(),
        (0, None) => format!("({inner})*"),
        (1, None) => format!("({inner})+"),
        (0, Some(1)) => format!("({inner})?"),
        (1, Some(1)) => format!("({inner})"),
        (min, None) => format!("({inner}){{{min},}}"),
        (min, Some(max)) => format!("({inner}){{{min},{max}}}"),
    }
}

fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => {
                quoted.push('\\');
                quoted.push(character);
            }
            '\0'..='\u{1f}' | '\u{7f}' => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(character));
            }
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

fn class(ranges: &[(u32, u32)]) -> String {
    let mut class = String::from("/[");
    for &(first, last) in ranges {
        let _ = if first == last {
            write!(class, "\\x{{{first:X}}}")
        } else {
            write!(class, "\\x{{{first:X}}}-\\x{{{last:X}}}")
        };
    }
    class.push_str("]/");
    class
}
