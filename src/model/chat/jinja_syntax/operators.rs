//! Replacement of operators that create texts and lists by filters, which limit the memory of a rendering.
//!
//! minijinja's `~`, `+` and `*` have no limit of their result, and a template can double a value with each. So
//! `a ~ b + c` becomes `((a)|concatenate(b))|add(c)`, and `a[1:]` becomes `((a[1:])|sliced)`.

use super::{Edit, EditOrder, KEYWORDS, Kind, Token, closing};

/// Name of the filter in place of `~`, and of `+` next to a string literal.
pub(in crate::model::chat) const CONCATENATE: &str = "concatenate";
/// Name of the filter in place of `+`.
pub(in crate::model::chat) const ADD: &str = "add";
/// Name of the filter in place of `*`.
pub(in crate::model::chat) const MULTIPLY: &str = "multiply";
/// Name of the filter of a slice.
pub(in crate::model::chat) const SLICED: &str = "sliced";

/// Maximum nesting of brackets; minijinja rejects templates with deeper ones.
const MAX_DEPTH: usize = 200;

/// Number of precedences: of `+` and `-`, of `~`, and of `*`, `/`, `//` and `%`.
const PRECEDENCES: usize = 3;

/// Adds the changes of the operators in expressions.
pub(super) fn rewrite(tokens: &[Token<'_>], edits: &mut Vec<Edit>) {
    rewrite_nested(tokens, 0, edits);
}

/// The position in a test such as `is divisibleby 3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TestPart {
    Outside,
    Name,
    Argument,
}

fn rewrite_nested(tokens: &[Token<'_>], depth: usize, edits: &mut Vec<Edit>) {
    if depth > MAX_DEPTH {
        return;
    }
    let mut operation = Operation::default();
    let mut test = TestPart::Outside;
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        let before = at.checked_sub(1).and_then(|before| tokens.get(before));
        at += 1;
        if token.kind == Kind::Open {
            let close = closing(tokens, at - 1).unwrap_or(tokens.len());
            let inner = &tokens[at..close];
            let is_slice = operation.primary.is_some() && token.is("[") && has_colon(inner);
            operation.extend(token);
            rewrite_nested(inner, depth + 1, edits);
            if let Some(end) = tokens.get(close) {
                operation.extend(end);
                if is_slice {
                    operation.add_slice(edits);
                }
            }
            at = close + 1;
            test = TestPart::Outside;
            continue;
        }
        match test {
            TestPart::Name => {
                operation.extend(token);
                if !token.is("not") {
                    test = TestPart::Argument;
                }
                continue;
            }
            TestPart::Argument if token.is(".") => {
                operation.extend(token);
                test = TestPart::Name;
                continue;
            }
            TestPart::Argument if is_sign(token) => {
                operation.extend(token);
                continue;
            }
            TestPart::Argument => {
                test = TestPart::Outside;
                let is_argument = match token.kind {
                    Kind::String | Kind::Number => true,
                    Kind::Name => !["and", "or", "else", "is"].contains(&token.text),
                    Kind::Open | Kind::Close | Kind::Operator => false,
                };
                if is_argument {
                    operation.extend(token);
                    continue;
                }
            }
            TestPart::Outside => {}
        }
        let has_operand = operation.operand.is_some();
        let is_after = |text: &str| has_operand && before.is_some_and(|before| before.is(text));
        match token.kind {
            Kind::Name if is_after(".") || is_after("|") => operation.extend(token),
            Kind::Name if token.is("is") && has_operand => {
                operation.extend(token);
                test = TestPart::Name;
            }
            Kind::Name if KEYWORDS.contains(&token.text) => operation.finish(edits),
            Kind::Name | Kind::Number | Kind::String => {
                let is_text = |token: &Token<'_>| token.kind == Kind::String;
                let joins = is_text(token) && before.is_some_and(is_text);
                if has_operand && !joins && before.is_some_and(|before| before.kind != Kind::Operator) {
                    operation.finish(edits);
                }
                operation.extend(token);
            }
            Kind::Operator => at += operation.add_operator(token, before, &tokens[at..], edits),
            Kind::Open | Kind::Close => operation.finish(edits),
        }
    }
    operation.finish(edits);
}

fn is_sign(token: &Token<'_>) -> bool {
    token.is("-") || token.is("+")
}

/// Returns true if tokens contain a colon outside of brackets, so that they are a slice.
fn has_colon(tokens: &[Token<'_>]) -> bool {
    let mut depth = 0usize;
    tokens.iter().any(|token| {
        match token.kind {
            Kind::Open => depth += 1,
            Kind::Close => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && token.is(":")
    })
}

/// An expression of operands and arithmetic operators.
#[derive(Debug, Default)]
struct Operation {
    /// Start of the current operand; `None` if none has begun.
    operand: Option<usize>,
    /// Start of the part of the operand that a subscript belongs to, after signs and powers.
    primary: Option<usize>,
    /// End of the last operand.
    end: usize,
    /// The left side of the next operator of each precedence.
    left: [Option<LeftSide>; PRECEDENCES],
    /// Precedences of the filters whose argument has not ended.
    calls: Vec<usize>,
}

/// The left side of an operator.
#[derive(Debug, Clone, Copy)]
struct LeftSide {
    start: usize,
    /// True if it ends with the filter in place of an operator of this precedence.
    is_filter: bool,
}

impl Operation {
    /// Adds a token to the current operand.
    fn extend(&mut self, token: &Token<'_>) {
        let start = *self.operand.get_or_insert(token.start);
        if !is_sign(token) {
            self.primary.get_or_insert(token.start);
        }
        self.end = token.end();
        for left in &mut self.left {
            left.get_or_insert(LeftSide { start, is_filter: false });
        }
    }

    /// Adds an operator, a sign or another token such as `.`. Returns the number of further tokens that belong to it.
    fn add_operator(
        &mut self,
        token: &Token<'_>,
        before: Option<&Token<'_>>,
        after: &[Token<'_>],
        edits: &mut Vec<Edit>,
    ) -> usize {
        let next = after.first().filter(|next| next.is(token.text) && next.start == token.end());
        // A sign is a part of the operand after it.
        let is_after_sign = before.is_some_and(|before| is_sign(before) && before.end() == self.end);
        match (token.text, next) {
            ("." | "|", _) if self.operand.is_some() => self.extend(token),
            ("-" | "+", _) if self.operand.is_none() || is_after_sign => self.extend(token),
            ("+" | "-" | "~" | "*" | "/" | "%", _) if self.operand.is_none() => {
                // The prefix of an argument, such as `*list`.
                self.finish(edits);
                return usize::from(next.is_some_and(|next| next.is("*")));
            }
            ("*", Some(next)) => {
                // A power is one operand.
                let signs = after[1..].iter().take_while(|token| is_sign(token)).count();
                self.extend(next);
                after[1..=signs].iter().for_each(|sign| self.extend(sign));
                self.primary = None;
                return 1 + signs;
            }
            ("/", Some(_)) => {
                self.replace(2, None, token, edits);
                return 1;
            }
            ("+", _) => {
                // Templates add undefined values to strings. Python fails, but llama.cpp treats them as empty.
                let is_text = |token: &Token<'_>| token.kind == Kind::String;
                let joins_text = before.is_some_and(is_text) || after.first().is_some_and(is_text);
                let (precedence, filter) = if joins_text { (1, CONCATENATE) } else { (0, ADD) };
                self.replace(precedence, Some(filter), token, edits);
            }
            ("-", _) => self.replace(0, None, token, edits),
            ("~", _) => self.replace(1, Some(CONCATENATE), token, edits),
            ("*", None) => self.replace(2, Some(MULTIPLY), token, edits),
            ("/" | "%", _) => self.replace(2, None, token, edits),
            _ => self.finish(edits),
        }
        0
    }

    /// Replaces an operator by a filter; without a filter, the operator stays.
    fn replace(&mut self, precedence: usize, filter: Option<&str>, token: &Token<'_>, edits: &mut Vec<Edit>) {
        self.end_calls(precedence, edits);
        let Some(left) = self.left[precedence] else { return };
        if let Some(filter) = filter {
            let mut close = "";
            if !left.is_filter {
                edits.push(Edit::insert(left.start, "(", EditOrder::BeforeOperand));
                close = ")";
            }
            edits.push(Edit::replace(token, &format!("{close}|{filter}(")));
            self.calls.push(precedence);
        }
        self.left[precedence] = Some(LeftSide { is_filter: filter.is_some(), ..left });
        self.left[precedence + 1..].fill(None);
        (self.operand, self.primary) = (None, None);
    }

    /// Ends the arguments of filters whose operator precedes one with this precedence.
    fn end_calls(&mut self, precedence: usize, edits: &mut Vec<Edit>) {
        while self.calls.pop_if(|open| *open >= precedence).is_some() {
            edits.push(Edit::insert(self.end, ")", EditOrder::AfterOperand));
        }
    }

    /// Puts the slice at the end of the current operand into a filter.
    fn add_slice(&mut self, edits: &mut Vec<Edit>) {
        let Some(start) = self.primary else { return };
        edits.push(Edit::insert(start, "((", EditOrder::BeforeOperand));
        edits.push(Edit::insert(self.end, &format!(")|{SLICED})"), EditOrder::AfterSlice));
    }

    fn finish(&mut self, edits: &mut Vec<Edit>) {
        self.end_calls(0, edits);
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::super::translate;

    #[test]
    fn operators_become_filters_with_the_same_precedence() {
        for (source, expected) in [
            ("{{ a ~ b ~ c }}", "{{ (a )|concatenate( b) |concatenate( c) }}"),
            ("{{ a+b-c+d }}", "{{ ((a)|add(b)-c)|add(d) }}"),
            ("{{ a + b ~ c * d }}", "{{ (a )|add( (b )|concatenate( (c )|multiply( d))) }}"),
            ("{{ a * b ~ c + d }}", "{{ (((a )|multiply( b) )|concatenate( c) )|add( d) }}"),
            ("{{ a // b * c ** -d }}", "{{ (a // b )|multiply( c ** -d) }}"),
            ("{{ -a.b|f(1) ~ c[d + 1] }}", "{{ (-a.b|f(1) )|concatenate( c[(d )|add( 1)]) }}"),
            ("{{ a ~ b is divisibleby 3 ~ c }}", "{{ (a )|concatenate( b is divisibleby 3) |concatenate( c) }}"),
            ("{{ a ~ b if c + 1 in d else e }}", "{{ (a )|concatenate( b) if (c )|add( 1) in d else e }}"),
            ("{% set a, b = c + d, -1 %}", "{% set a, b = (c )|add( d), -1 %}"),
            ("{% for a in b[1:] + [c] %}", "{% for a in (((b[1:])|sliced) )|add( [c]) %}"),
            ("{{ -a ** -b[1:].c }}", "{{ -a ** -((b[1:])|sliced).c }}"),
            ("{% if (a) ~ b == 1.5e+3 %}", "{% if ((a) )|concatenate( b) == 1.5e+3 %}"),
            ("{{ f(*a, **b) }}{{ a * b }}", "{{ f(*a, **b) }}{{ (a )|multiply( b) }}"),
            ("{#} {{ a #}{{ b ~ c }}", "{#} {{ a #}{{ (b )|concatenate( c) }}"),
            ("{% raw %}{% endraw x %}{{ a ~ b }}{% endraw %}", "{% raw %}{% endraw x %}{{ a ~ b }}{% endraw %}"),
        ] {
            assert_eq!(translate(source).source, expected, "{source}");
        }
    }
}
