//! Translation of Python's Jinja syntax to minijinja's.
//!
//! minijinja lacks some constructs of chat templates: the `generation` block of transformers, which marks the model's
//! text and prints its body unchanged; `'…' % value`; lists that methods such as `append` change; a string plus an
//! undefined value. [`operators`] replaces operators whose results may be large. Text outside of tags is not parsed and
//! stays unchanged.

pub(super) mod operators;

/// Methods that change a list in place. A template without them keeps its list literals.
const CHANGING_METHODS: [&str; 7] = [".append(", ".extend(", ".insert(", ".pop(", ".remove(", ".reverse(", ".clear("];

/// Keywords after which a bracket starts a list.
const KEYWORDS: [&str; 9] = ["in", "not", "and", "or", "is", "if", "elif", "else", "recursive"];

/// Name of the function that creates a mutable list.
pub(super) const LIST: &str = "list_of";

/// A template in minijinja's syntax.
#[derive(Debug)]
pub(super) struct Translation {
    pub(super) source: String,
    /// Quoted texts, which the template may search in a message.
    pub(super) literals: Vec<String>,
    /// Bytes of the text outside of tags.
    pub(super) text_bytes: usize,
    /// Bytes of the longest text between two tags.
    pub(super) longest_text: usize,
    /// Words and operators of the longest tag.
    pub(super) longest_tag: usize,
    /// Number of `elif` tags.
    pub(super) elifs: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Name,
    Number,
    String,
    Open,
    Close,
    Operator,
}

#[derive(Debug, Clone, Copy)]
struct Token<'a> {
    kind: Kind,
    start: usize,
    text: &'a str,
}

impl Token<'_> {
    fn end(&self) -> usize {
        self.start + self.text.len()
    }

    fn is(&self, text: &str) -> bool {
        self.text == text
    }
}

/// Translates a template. Invalid parts stay unchanged, and minijinja reports their error.
pub(super) fn translate(source: &str) -> Translation {
    let lists_change = CHANGING_METHODS.iter().any(|method| source.contains(method));
    let mut edits: Vec<Edit> = Vec::new();
    let mut literals = Vec::new();
    let (mut tag_bytes, mut longest_text, mut text_from) = (0, 0, 0);
    let (mut longest_tag, mut elifs) = (0, 0);
    let mut at = 0;
    while let Some(found) = source[at..].find('{') {
        let start = at + found;
        let close = match source.as_bytes().get(start + 1) {
            Some(b'%') => "%}",
            Some(b'{') => "}}",
            Some(b'#') => {
                let begin = start + 2;
                longest_text = longest_text.max(start - text_from);
                at = source[begin..].find("#}").map_or(source.len(), |end| begin + end + 2);
                tag_bytes += at - start;
                text_from = at;
                continue;
            }
            _ => {
                at = start + 1;
                continue;
            }
        };
        let Some((tokens, end)) = tokens(source, start + 2, close) else { break };
        longest_text = longest_text.max(start - text_from);
        (at, text_from) = (end, end);
        tag_bytes += end - start;
        longest_tag = longest_tag.max(tokens.len());
        elifs += usize::from(tokens.first().is_some_and(|first| first.is("elif")));
        // The first word of a statement is no operand.
        let expressions = if close == "%}" { tokens.get(1..).unwrap_or_default() } else { &tokens[..] };
        operators::rewrite(expressions, &mut edits);
        match &tokens[..] {
            [only] if close == "%}" && only.is("raw") => at = end_of_raw(source, end),
            [first, ..] if close == "%}" && first.is("generation") => edits.push(Edit::replace(first, "with")),
            [first, ..] if close == "%}" && first.is("endgeneration") => edits.push(Edit::replace(first, "endwith")),
            _ => rewrite(&tokens, lists_change, &mut edits),
        }
        literals.extend(tokens.iter().filter(|token| token.kind == Kind::String).map(|token| unquoted(token.text)));
    }
    literals.sort_unstable();
    literals.dedup();
    longest_text = longest_text.max(source.len() - text_from);
    let text_bytes = source.len() - tag_bytes;
    Translation { source: apply_edits(source, edits), literals, text_bytes, longest_text, longest_tag, elifs }
}

/// A change of the source: the replaced bytes and the new text.
#[derive(Debug)]
struct Edit {
    start: usize,
    end: usize,
    text: String,
    order: EditOrder,
}

/// The order of changes at one position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EditOrder {
    /// The end of a slice before the position.
    AfterSlice,
    /// The end of another operand before the position.
    AfterOperand,
    /// The start of an operand.
    BeforeOperand,
    /// The start of a literal, which may be the first part of an operand.
    BeforeLiteral,
    /// The new text of a token.
    Replace,
}

impl Edit {
    fn replace(token: &Token<'_>, text: &str) -> Self {
        Self { start: token.start, end: token.end(), text: text.to_owned(), order: EditOrder::Replace }
    }

    fn insert(at: usize, text: &str, order: EditOrder) -> Self {
        Self { start: at, end: at, text: text.to_owned(), order }
    }
}

fn apply_edits(source: &str, mut edits: Vec<Edit>) -> String {
    edits.sort_by_key(|edit| (edit.start, edit.order));
    let mut result = String::with_capacity(source.len() + 16 * edits.len());
    let mut at = 0;
    for edit in edits {
        result.push_str(&source[at..edit.start]);
        result.push_str(&edit.text);
        at = edit.end;
    }
    result.push_str(&source[at..]);
    result
}

fn rewrite(tokens: &[Token<'_>], lists_change: bool, edits: &mut Vec<Edit>) {
    for (index, token) in tokens.iter().enumerate() {
        let before = index.checked_sub(1).map(|before| &tokens[before]);
        if token.is("%") && before.is_some_and(|before| before.kind == Kind::String) {
            let operand = &tokens[index + 1..];
            let end = operand_end(operand);
            let Some(last) = end.checked_sub(1).map(|last| &operand[last]) else { continue };
            let is_tuple = operand[0].is("(") && closing(operand, 0) == Some(end - 1);
            edits.push(Edit::replace(token, if is_tuple { "|format" } else { "|format(" }));
            if !is_tuple {
                edits.push(Edit::insert(last.end(), ")", EditOrder::AfterOperand));
            }
        }
        if lists_change && token.is("[") && before.is_none_or(begins_operand) {
            let Some(close) = closing(tokens, index) else { continue };
            edits.push(Edit::insert(token.start, &format!("{LIST}("), EditOrder::BeforeLiteral));
            edits.push(Edit::insert(tokens[close].end(), ")", EditOrder::AfterOperand));
        }
    }
}

/// Returns true if an operand follows the token, rather than a subscript.
fn begins_operand(before: &Token<'_>) -> bool {
    match before.kind {
        Kind::Operator => !before.is("."),
        Kind::Open => true,
        Kind::Name => KEYWORDS.contains(&before.text),
        Kind::Number | Kind::String | Kind::Close => false,
    }
}

/// Returns the number of tokens of the operand at the start: a value, its subscripts, calls and filters.
fn operand_end(tokens: &[Token<'_>]) -> usize {
    let kind = |at: usize| tokens.get(at).map(|token| token.kind);
    let mut at = tokens.iter().take_while(|token| token.is("-") || token.is("+")).count();
    at = match kind(at) {
        Some(Kind::Open) => closing(tokens, at).map_or(tokens.len(), |close| close + 1),
        Some(Kind::String) => at + tokens[at..].iter().take_while(|token| token.kind == Kind::String).count(),
        Some(_) => at + 1,
        None => return 0,
    };
    while let Some(token) = tokens.get(at) {
        at = match token.text {
            "." | "|" if kind(at + 1) == Some(Kind::Name) => at + 2,
            "(" | "[" => closing(tokens, at).map_or(tokens.len(), |close| close + 1),
            _ => break,
        };
    }
    at
}

/// Returns the index of the bracket that closes the one at `open`.
fn closing(tokens: &[Token<'_>], open: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (index, token) in tokens.iter().enumerate().skip(open) {
        match token.kind {
            Kind::Open => depth += 1,
            Kind::Close => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(index);
                }
            }
            _ => {}
        }
    }
    None
}

/// Parses the tokens of a tag, and returns the position after it. Returns `None` if the tag has no end.
fn tokens<'a>(source: &'a str, start: usize, close: &str) -> Option<(Vec<Token<'a>>, usize)> {
    let mut found = Vec::new();
    let mut depth = 0usize;
    let mut at = start + usize::from(source[start..].starts_with(['-', '+']));
    loop {
        let rest = &source[at..];
        let first = rest.chars().next()?;
        if depth == 0 {
            let without_sign = rest.strip_prefix(['-', '+']).unwrap_or(rest);
            if without_sign.starts_with(close) {
                return Some((found, source.len() - without_sign.len() + close.len()));
            }
        }
        let (kind, len) = match first {
            _ if first.is_whitespace() => {
                at += first.len_utf8();
                continue;
            }
            '\'' | '"' => (Kind::String, quoted(rest)?),
            '(' | '[' | '{' => (Kind::Open, 1),
            ')' | ']' | '}' => (Kind::Close, 1),
            _ if first.is_alphabetic() || first == '_' => {
                (Kind::Name, length(rest, |letter| letter.is_alphanumeric() || letter == '_'))
            }
            _ if first.is_ascii_digit() => (Kind::Number, number(rest)),
            _ => (Kind::Operator, first.len_utf8()),
        };
        match kind {
            Kind::Open => depth += 1,
            Kind::Close => depth = depth.saturating_sub(1),
            _ => {}
        }
        found.push(Token { kind, start: at, text: &rest[..len] });
        at += len;
    }
}

fn length(text: &str, belongs: impl Fn(char) -> bool) -> usize {
    text.find(|letter| !belongs(letter)).unwrap_or(text.len())
}

/// Returns the length of the number at the start: digits, a base and an exponent. A fraction is a separate token.
fn number(text: &str) -> usize {
    let len = length(text, |digit| digit.is_ascii_alphanumeric() || digit == '_');
    let has_exponent = text[..len].ends_with(['e', 'E']) && !text.starts_with("0x") && !text.starts_with("0X");
    let exponent = text[len..].strip_prefix(['+', '-']).filter(|_| has_exponent);
    len + exponent.map_or(0, |digits| match length(digits, |digit| digit.is_ascii_digit()) {
        0 => 0,
        digits => digits + 1,
    })
}

/// Returns the length of the quoted text at the start, including its quotes.
fn quoted(text: &str) -> Option<usize> {
    let quote = text.chars().next()?;
    let mut escaped = false;
    for (at, letter) in text.char_indices().skip(1) {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if letter == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

fn unquoted(text: &str) -> String {
    let inner = &text[1..text.len() - 1];
    let mut result = String::with_capacity(inner.len());
    let mut letters = inner.chars();
    while let Some(letter) = letters.next() {
        result.push(match letter {
            '\\' => match letters.next() {
                Some('n') => '\n',
                Some('t') => '\t',
                Some('r') => '\r',
                Some(other) => other,
                None => '\\',
            },
            other => other,
        });
    }
    result
}

/// Returns the end of a raw block that starts at `from`.
fn end_of_raw(source: &str, from: usize) -> usize {
    let mut at = from;
    while let Some(found) = source[at..].find("{%") {
        let start = at + found + 2;
        match tokens(source, start, "%}") {
            Some((tokens, end)) if matches!(&tokens[..], [only] if only.is("endraw")) => return end,
            _ => at = start,
        }
    }
    source.len()
}

#[cfg(test)]
mod tests {
    use super::translate;

    fn translated(source: &str) -> String {
        translate(source).source
    }

    #[test]
    fn generation_blocks_print_their_body() {
        assert_eq!(
            translated("{%- generation -%} a {%- endgeneration %}{{ generation }}"),
            "{%- with -%} a {%- endwith %}{{ generation }}"
        );
        let untouched = "{% generation";
        assert_eq!(translated(untouched), untouched, "a tag without an end stays as it is");
    }

    #[test]
    fn percent_after_text_formats() {
        for (source, expected) in [
            ("{{ '%s' % x }}", "{{ '%s' |format( x) }}"),
            ("{{ '%s-%d' % (a.b, 2) ~ 'c' }}", "{{ ('%s-%d' |format (a.b, 2) )|concatenate( 'c') }}"),
            (
                "{{ 'a' ~ '%s' % x.y[0](1)|upper + 1 }}",
                "{{ (('a' )|concatenate( '%s' |format( x.y[0](1)|upper)) )|add( 1) }}",
            ),
            (
                "{{ a + b + 'c' + d }}{{ 'a' + -1 }}{{ 1 + 1 }}",
                "{{ (a )|add( (b )|concatenate( 'c') |concatenate( d)) }}{{ ('a' )|concatenate( -1) }}{{ (1 )|add( 1) }}",
            ),
            ("{{ '%s' % (a)[0] }}", "{{ '%s' |format( (a)[0]) }}"),
            ("{{ (i + 1) % 2 }}{{ i % 2 }}", "{{ ((i )|add( 1)) % 2 }}{{ i % 2 }}"),
            ("'%s' % x {# '%s' % x #}", "'%s' % x {# '%s' % x #}"),
            (
                "{% raw %}{{ '%s' % x }}{% endraw %}{{ '%s' % x }}",
                "{% raw %}{{ '%s' % x }}{% endraw %}{{ '%s' |format( x) }}",
            ),
            ("{{ '%s' % }}", "{{ '%s' % }}"),
        ] {
            assert_eq!(translated(source), expected, "{source}");
        }
    }

    #[test]
    fn list_literals_become_mutable_if_a_method_changes_a_list() {
        assert_eq!(
            translated("{% set a = [1, [2]] %}{% set _ = a.append(m['x'][0]) %}{% if 1 in [1] %}{% endif %}"),
            "{% set a = list_of([1, list_of([2])]) %}{% set _ = a.append(m['x'][0]) %}{% if 1 in list_of([1]) %}{% endif %}"
        );
        assert_eq!(translated("{% set a = [1] %}"), "{% set a = [1] %}");
    }

    #[test]
    fn quoted_texts_in_tags_are_collected() {
        let literals = translate(r#"'a' {{ '</think>' ~ "x\n\"" }}{% if '}}' in b %}{# 'c' #}"#).literals;
        assert_eq!(literals, ["</think>", "x\n\"", "}}"]);
    }
}
