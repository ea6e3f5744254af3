//! The filter language of the run list.
//!
//! Terms are separated by blanks and must all hold: free words (all words of prompt and answer, the last letters may be
//! missing), `"an exact phrase"`, `field:value`, `field>number`, `-` before a term negates it. A name that is no field is
//! an error with its position, and never an empty result.

use super::BadFilter;
use crate::events::{RunStatus, Surface};
use chrono::{DateTime, Days, NaiveDate, TimeDelta, Utc};
use sqlx::{Postgres, QueryBuilder};

/// The fields, in the order in which a page should offer them.
pub const FIELDS: [&str; 12] = [
    "model",
    "mod",
    "status",
    "surface",
    "error",
    "request",
    "tokens",
    "backtracks",
    "forced",
    "actions",
    "after",
    "before",
];

/// A filter that was understood.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Filter {
    terms: Vec<Term>,
}

#[derive(Debug, Clone, PartialEq)]
struct Term {
    negated: bool,
    condition: Condition,
}

#[derive(Debug, Clone, PartialEq)]
enum Condition {
    Word(String),
    Phrase(String),
    Model(String),
    Mod(String),
    Status(RunStatus),
    Surface(Surface),
    Error(String),
    Request(String),
    Count(Count, Comparison, i32),
    After(DateTime<Utc>),
    Before(DateTime<Utc>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Count {
    Tokens,
    Backtracks,
    Forced,
    Actions,
    Errors,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Is,
    Above,
    AtLeast,
    Below,
    AtMost,
}

impl Filter {
    /// Reads a filter. `now` is what `after:7d` counts back from.
    ///
    /// # Errors
    /// The first thing that is wrong, with its place.
    pub fn parse(text: &str, now: DateTime<Utc>) -> Result<Self, BadFilter> {
        let chars: Vec<char> = text.chars().collect();
        let mut scanner = Scanner { chars: &chars, at: 0 };
        let mut terms = Vec::new();
        while scanner.skip_blanks() {
            terms.push(scanner.term(now)?);
        }
        Ok(Self { terms })
    }

    /// Appends ` and …` for every term.
    pub(super) fn push(&self, query: &mut QueryBuilder<Postgres>) {
        for term in &self.terms {
            query.push(if term.negated { " and not coalesce(" } else { " and coalesce(" });
            term.condition.push(query);
            query.push(", false)");
        }
    }
}

struct Scanner<'a> {
    chars: &'a [char],
    at: usize,
}

/// A part of the filter and where it stood.
struct Part {
    text: String,
    at: usize,
    len: usize,
    quoted: bool,
}

impl Scanner<'_> {
    fn skip_blanks(&mut self) -> bool {
        while self.peek().is_some_and(char::is_whitespace) {
            self.at += 1;
        }
        self.at < self.chars.len()
    }

    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn take(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        self.at += usize::from(found);
        found
    }

    fn term(&mut self, now: DateTime<Utc>) -> Result<Term, BadFilter> {
        let minus = self.at;
        let negated = self.take('-');
        if negated && self.peek().is_none_or(char::is_whitespace) {
            return Err(bad(minus, 1, "'-' needs a term right after it"));
        }
        let begin = self.at;
        while self.peek().is_some_and(|c| c.is_ascii_alphabetic() || c == '_') {
            self.at += 1;
        }
        let name: String = self.chars[begin..self.at].iter().collect();
        let comparison = if name.is_empty() { None } else { self.comparison() };
        let condition = if let Some(comparison) = comparison {
            let value = self.value()?;
            condition(&name, begin, comparison, value, now)?
        } else {
            self.at = begin;
            let part = self.value()?;
            if part.quoted { Condition::Phrase(part.text) } else { Condition::Word(part.text) }
        };
        Ok(Term { negated, condition })
    }

    fn comparison(&mut self) -> Option<Comparison> {
        let strict = match self.peek()? {
            ':' | '=' => Comparison::Is,
            '>' => Comparison::Above,
            '<' => Comparison::Below,
            _ => return None,
        };
        self.at += 1;
        if strict == Comparison::Is || !self.take('=') {
            return Some(strict);
        }
        Some(if strict == Comparison::Above { Comparison::AtLeast } else { Comparison::AtMost })
    }

    /// A quoted text, or everything up to the next blank; may be empty.
    fn value(&mut self) -> Result<Part, BadFilter> {
        let at = self.at;
        if !self.take('"') {
            while self.peek().is_some_and(|c| !c.is_whitespace()) {
                self.at += 1;
            }
            let text = self.chars[at..self.at].iter().collect();
            return Ok(Part { text, at, len: self.at - at, quoted: false });
        }
        while self.peek().is_some_and(|c| c != '"') {
            self.at += 1;
        }
        let text = self.chars[at + 1..self.at].iter().collect();
        if !self.take('"') {
            return Err(bad(at, self.at - at, "this quotation mark is never closed"));
        }
        Ok(Part { text, at, len: self.at - at, quoted: true })
    }
}

fn condition(
    name: &str,
    name_at: usize,
    comparison: Comparison,
    value: Part,
    now: DateTime<Utc>,
) -> Result<Condition, BadFilter> {
    let count = match name {
        "tokens" => Some(Count::Tokens),
        "backtracks" => Some(Count::Backtracks),
        "forced" => Some(Count::Forced),
        "actions" => Some(Count::Actions),
        "error" if comparison != Comparison::Is => Some(Count::Errors),
        _ if FIELDS.contains(&name) => None,
        _ => {
            let message = format!(
                "'{name}' is not a field; the fields are {}. Put the term in quotation marks to search for it as text",
                FIELDS.join(", ")
            );
            let did_you_mean = nearest(name, FIELDS);
            return Err(BadFilter { at: name_at, len: name.chars().count(), message, did_you_mean });
        }
    };
    if value.text.is_empty() {
        let len = (value.at + value.len).saturating_sub(name_at);
        return Err(bad(name_at, len, &format!("'{name}' needs a value, for example {}", example(name))));
    }
    if let Some(count) = count {
        let number = value.text.parse().map_err(|_| {
            bad(
                value.at,
                value.len,
                &format!("'{name}' is compared with a whole number, for example {}", example(name)),
            )
        })?;
        return Ok(Condition::Count(count, comparison, number));
    }
    if comparison != Comparison::Is {
        let message = format!("'{name}' is not a number; right would be {}", example(name));
        return Err(bad(name_at, value.at + value.len - name_at, &message));
    }
    Ok(match name {
        "model" => Condition::Model(value.text),
        "mod" => Condition::Mod(value.text),
        "error" => Condition::Error(value.text),
        "request" => Condition::Request(value.text),
        "status" => {
            Condition::Status(one_of(name, &value, RunStatus::from_name, RunStatus::ALL.map(RunStatus::as_str))?)
        }
        "surface" => Condition::Surface(one_of(name, &value, Surface::from_name, Surface::ALL.map(Surface::as_str))?),
        "after" => Condition::After(moment(name, &value, now)?),
        _ => Condition::Before(moment(name, &value, now)?),
    })
}

fn example(field: &str) -> &'static str {
    match field {
        "model" => "model:qwen",
        "mod" => "mod:no-refusal",
        "status" => "status:failed",
        "surface" => "surface:openai",
        "error" => "error:\"context window\" or error>0",
        "request" => "request:req_abc123",
        "tokens" => "tokens>100",
        "backtracks" => "backtracks>0",
        "forced" => "forced>0",
        "actions" => "actions>=3",
        "after" => "after:2026-01-31 or after:24h",
        _ => "before:2026-01-31",
    }
}

fn one_of<T, const N: usize>(
    name: &str,
    value: &Part,
    read: impl Fn(&str) -> Option<T>,
    all: [&'static str; N],
) -> Result<T, BadFilter> {
    read(&value.text).ok_or_else(|| BadFilter {
        at: value.at,
        len: value.len,
        message: format!("'{}' is no {name}; it is one of {}", value.text, all.join(", ")),
        did_you_mean: nearest(&value.text, all),
    })
}

/// A date, a date with time and zone, or a span back from now.
fn moment(name: &str, value: &Part, now: DateTime<Utc>) -> Result<DateTime<Utc>, BadFilter> {
    let text = value.text.as_str();
    let day = |date: NaiveDate| date.and_time(chrono::NaiveTime::MIN).and_utc();
    let named = match text {
        "today" => Some(day(now.date_naive())),
        "yesterday" => now.date_naive().checked_sub_days(Days::new(1)).map(day),
        _ => None,
    };
    named
        .or_else(|| NaiveDate::parse_from_str(text, "%Y-%m-%d").ok().map(day))
        .or_else(|| DateTime::parse_from_rfc3339(text).ok().map(Into::into))
        .or_else(|| span(text).and_then(|span| now.checked_sub_signed(span)))
        .ok_or_else(|| {
            let message = format!(
                "'{name}' needs a date (2026-01-31), a time (2026-01-31T18:30:00Z) or a span back from now (30m, 24h, 7d)"
            );
            bad(value.at, value.len, &message)
        })
}

fn span(text: &str) -> Option<TimeDelta> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: i64 = number.parse().ok().filter(|number| (0..1_000_000).contains(number))?;
    match unit {
        "m" => TimeDelta::try_minutes(number),
        "h" => TimeDelta::try_hours(number),
        "d" => TimeDelta::try_days(number),
        _ => None,
    }
}

fn bad(at: usize, len: usize, message: &str) -> BadFilter {
    BadFilter { at, len, message: message.to_owned(), did_you_mean: None }
}

/// The name that is at most two edits away, or that this one begins.
fn nearest<const N: usize>(name: &str, all: [&'static str; N]) -> Option<String> {
    let name = name.to_lowercase();
    let distance = |other: &str| if other.starts_with(&name) { 1 } else { edits(&name, other) };
    let best = all.into_iter().min_by_key(|other| distance(other))?;
    (distance(best) <= 2).then(|| best.to_owned())
}

/// Levenshtein distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replace = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

impl Condition {
    fn push(&self, query: &mut QueryBuilder<Postgres>) {
        match self {
            // a word of punctuation alone has no place in an index of words
            Self::Word(word) | Self::Phrase(word) if !word.contains(char::is_alphanumeric) => {
                query.push("position(").push_bind(word.clone()).push(" in prompt_preview || output_preview) > 0");
            }
            Self::Word(word) => {
                query.push("search @@ (nullif(plainto_tsquery('simple', ").push_bind(word.to_lowercase());
                query.push(")::text, '') || ':*')::tsquery");
            }
            Self::Phrase(phrase) => {
                query.push("search @@ phraseto_tsquery('simple', ").push_bind(phrase.to_lowercase()).push(")");
            }
            Self::Model(text) => push_contains(query, "model", text),
            Self::Mod(text) => {
                query.push("exists (select from unnest(mods) as name where ");
                push_contains(query, "name", text);
                query.push(")");
            }
            Self::Error(text) => push_contains(query, "concat(error_text, ' ', message)", text),
            Self::Request(text) => push_contains(query, "request_id", text),
            Self::Status(status) => {
                query.push("status = ").push_bind(status.as_str());
            }
            Self::Surface(surface) => {
                query.push("surface = ").push_bind(surface.as_str());
            }
            Self::Count(count, comparison, number) => {
                query.push(count.column()).push(comparison.operator()).push_bind(*number);
            }
            Self::After(time) => {
                query.push("created_at >= ").push_bind(*time);
            }
            Self::Before(time) => {
                query.push("created_at < ").push_bind(*time);
            }
        }
    }
}

fn push_contains(query: &mut QueryBuilder<Postgres>, column: &'static str, text: &str) {
    let mut pattern = String::from("%");
    for c in text.chars().filter(|c| *c != '\0') {
        if matches!(c, '%' | '_' | '\\') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern.push('%');
    query.push(column).push(" ilike ").push_bind(pattern);
}

impl Count {
    const fn column(self) -> &'static str {
        match self {
            Self::Tokens => "completion_tokens",
            Self::Backtracks => "backtracked",
            Self::Forced => "forced",
            Self::Actions => "actions",
            Self::Errors => "errors",
        }
    }
}

impl Comparison {
    const fn operator(self) -> &'static str {
        match self {
            Self::Is => " = ",
            Self::Above => " > ",
            Self::AtLeast => " >= ",
            Self::Below => " < ",
            Self::AtMost => " <= ",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn now() -> DateTime<Utc> {
        "2026-01-31T12:00:00Z".parse().unwrap()
    }

    fn one(text: &str) -> Condition {
        let mut terms = Filter::parse(text, now()).unwrap().terms;
        assert_eq!(terms.len(), 1, "{text}");
        terms.remove(0).condition
    }

    fn error(text: &str) -> BadFilter {
        Filter::parse(text, now()).unwrap_err()
    }

    #[test]
    fn reads_every_kind_of_term() {
        assert_eq!(one("sky"), Condition::Word("sky".into()));
        assert_eq!(one("\"the sky\""), Condition::Phrase("the sky".into()));
        assert_eq!(one("model:qwen"), Condition::Model("qwen".into()));
        assert_eq!(one("mod:\"no refusal\""), Condition::Mod("no refusal".into()));
        assert_eq!(one("status:done"), Condition::Status(RunStatus::Done));
        assert_eq!(one("surface:llama_server"), Condition::Surface(Surface::LlamaServer));
        assert_eq!(one("error:\"context window\""), Condition::Error("context window".into()));
        assert_eq!(one("error>0"), Condition::Count(Count::Errors, Comparison::Above, 0));
        assert_eq!(one("tokens>=10"), Condition::Count(Count::Tokens, Comparison::AtLeast, 10));
        assert_eq!(one("tokens:7"), Condition::Count(Count::Tokens, Comparison::Is, 7));
        assert_eq!(one("after:2026-01-01"), Condition::After("2026-01-01T00:00:00Z".parse().unwrap()));
        assert_eq!(one("after:24h"), Condition::After("2026-01-30T12:00:00Z".parse().unwrap()));
        assert_eq!(one("before:today"), Condition::Before("2026-01-31T00:00:00Z".parse().unwrap()));
        let filter = Filter::parse("  -status:failed sky -\"blue sea\" ", now()).unwrap();
        assert_eq!(filter.terms.iter().map(|term| term.negated).collect::<Vec<_>>(), [true, false, true]);
        assert_eq!(Filter::parse(" ", now()).unwrap(), Filter::default());
    }

    #[test]
    fn a_name_that_is_no_field_is_an_error_with_its_place() {
        let wrong = error("sky modle:qwen");
        assert_eq!((wrong.at, wrong.len, wrong.did_you_mean.as_deref()), (4, 5, Some("model")));
        assert_eq!(error("-backtrack>0").did_you_mean.as_deref(), Some("backtracks"));
        assert_eq!(error("http://example.org").did_you_mean, None);
    }

    #[test]
    fn wrong_values_are_errors_with_their_place() {
        let wrong = error("status:finished");
        assert_eq!((wrong.at, wrong.len), (7, 8));
        assert_eq!(error("status:cancel").did_you_mean.as_deref(), Some("cancelled"));
        assert_eq!((error("tokens>many").at, error("tokens>many").len), (7, 4));
        assert_eq!((error("ä \"open").at, error("ä \"open").len), (2, 5));
        assert_eq!((error("model:").at, error("model:").len), (0, 6));
        assert_eq!(error("model>3").at, 0);
        assert_eq!(error("a - b").at, 2);
        assert_eq!(error("after:soon").at, 6);
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_within_its_bounds(text in "(\\PC|[-:<>=\" \t]|tokens|after|status){0,40}") {
            if let Err(wrong) = Filter::parse(&text, now()) {
                prop_assert!(wrong.at + wrong.len <= text.chars().count(), "{wrong:?}");
            }
        }
    }
}
