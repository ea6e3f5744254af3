//! Parser of filter terms.

use super::{Comparison, Condition, CountField, FIELDS, Term};
use crate::events::{RunMetadata, RunStatus, Surface};
use crate::store::feedback::FeedbackKind;
use crate::store::notes::NoteKind;
use crate::store::{BadFilter, tags};
use chrono::{DateTime, Datelike, Days, NaiveDate, TimeDelta, Utc};
use uuid::Uuid;

/// A scanner of a filter's text.
pub(super) struct FilterScanner<'a> {
    chars: &'a [char],
    at: usize,
}

/// A value in the filter, with its position.
struct FilterValue {
    text: String,
    at: usize,
    len: usize,
    quoted: bool,
}

impl<'a> FilterScanner<'a> {
    /// Creates a scanner at the beginning of a text.
    pub fn new(chars: &'a [char]) -> Self {
        Self { chars, at: 0 }
    }

    /// Returns the current offset in characters.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Returns the error for more terms than `max`.
    pub fn too_many(&self, max: usize) -> BadFilter {
        filter_error(self.at, self.chars.len() - self.at, &format!("the filter has more than {max} terms"))
    }

    /// Skips spaces. Returns true if a term follows.
    pub fn skip_spaces(&mut self) -> bool {
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

    /// Parses the next term.
    pub fn term(&mut self, now: DateTime<Utc>) -> Result<Term, BadFilter> {
        let minus = self.at;
        let negated = self.take('-');
        if negated && self.peek().is_none_or(char::is_whitespace) {
            return Err(filter_error(minus, 1, "'-' must be followed by a term, without a space"));
        }
        let name_start = self.at;
        while self.peek().is_some_and(|c| c.is_ascii_alphabetic() || c == '_') {
            self.at += 1;
        }
        let mut name: String = self.chars[name_start..self.at].iter().collect();
        if name == "metadata" && self.peek() == Some('.') {
            while self.peek().is_some_and(|c| !c.is_whitespace() && !matches!(c, ':' | '=' | '<' | '>' | '"')) {
                self.at += 1;
            }
            name = self.chars[name_start..self.at].iter().collect();
        }
        let comparison = if name.is_empty() { None } else { self.comparison() };
        let condition = if let Some(comparison) = comparison {
            let value = self.value()?;
            condition(&name, name_start, comparison, value, now)?
        } else {
            self.at = name_start;
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

    /// Parses a quoted text, or all characters up to the next space; may be empty.
    fn value(&mut self) -> Result<FilterValue, BadFilter> {
        let at = self.at;
        if !self.take('"') {
            while self.peek().is_some_and(|c| !c.is_whitespace()) {
                self.at += 1;
            }
            let text = self.chars[at..self.at].iter().collect();
            return Ok(FilterValue { text, at, len: self.at - at, quoted: false });
        }
        while self.peek().is_some_and(|c| c != '"') {
            self.at += 1;
        }
        let text = self.chars[at + 1..self.at].iter().collect();
        if !self.take('"') {
            return Err(filter_error(at, self.at - at, "this quotation mark is not closed"));
        }
        Ok(FilterValue { text, at, len: self.at - at, quoted: true })
    }
}

fn condition(
    name: &str,
    name_at: usize,
    comparison: Comparison,
    value: FilterValue,
    now: DateTime<Utc>,
) -> Result<Condition, BadFilter> {
    let count = match name {
        "tokens" => Some(CountField::Tokens),
        "backtracks" => Some(CountField::Backtracks),
        "forced" => Some(CountField::Forced),
        "actions" => Some(CountField::Actions),
        "error" if comparison != Comparison::Is => Some(CountField::Errors),
        _ if FIELDS.contains(&name) || name.starts_with("metadata.") => None,
        _ => {
            let message = format!(
                "'{name}' is not a field; the fields are {}. Put the term in quotation marks to search for it as text",
                FIELDS.join(", ")
            );
            let did_you_mean = closest_name(name, FIELDS);
            return Err(BadFilter { at: name_at, len: name.chars().count(), message, did_you_mean });
        }
    };
    if value.text.is_empty() {
        let len = (value.at + value.len).saturating_sub(name_at);
        return Err(filter_error(name_at, len, &format!("'{name}' needs a value, for example {}", example(name))));
    }
    if let Some(count) = count {
        let number = value.text.parse().map_err(|_| {
            filter_error(value.at, value.len, &format!("'{name}' needs a whole number, for example {}", example(name)))
        })?;
        return Ok(Condition::Count(count, comparison, number));
    }
    if comparison != Comparison::Is {
        let message = format!("'{name}' is not a number and cannot be compared; use {}", example(name));
        return Err(filter_error(name_at, value.at + value.len - name_at, &message));
    }
    if let Some(key) = name.strip_prefix("metadata") {
        if key.len() < 2 {
            let message = format!("'metadata' needs a key, for example {}", example("metadata"));
            return Err(filter_error(name_at, value.at + value.len - name_at, &message));
        }
        return Ok(Condition::Label(format!("{name}={}", value.text)));
    }
    Ok(match name {
        "user" => Condition::User(value.text),
        "session" => Condition::Label(format!("session={}", value.text)),
        "parent" => Condition::Label(format!("parent={}", parse_run_id(name, &value)?)),
        // Clients may set this key of the metadata themselves, to any text.
        "experiment" => Condition::Label(format!("metadata.{}={}", RunMetadata::EXPERIMENT, value.text)),
        "seed" => Condition::Seed(value.text.parse().map_err(|_| {
            let message = format!("'seed' needs an integer from 0 to {}, for example {}", u32::MAX, example(name));
            filter_error(value.at, value.len, &message)
        })?),
        "tag" => Condition::Label(tags::label(&value.text)),
        "feedback" => {
            let find = |name: &str| FeedbackKind::ALL.into_iter().find(|kind| kind.as_str() == name);
            Condition::Label(parse_name(name, &value, find, FeedbackKind::ALL.map(FeedbackKind::as_str))?.label())
        }
        "note" => {
            let find = |name: &str| NoteKind::ALL.into_iter().find(|kind| kind.as_str() == name);
            Condition::Label(parse_name(name, &value, find, NoteKind::ALL.map(NoteKind::as_str))?.label().to_owned())
        }
        "model" => Condition::Model(value.text),
        "mod" => Condition::Mod(value.text),
        "error" => Condition::Error(value.text),
        "request" => Condition::Request(value.text),
        "status" => {
            Condition::Status(parse_name(name, &value, RunStatus::from_name, RunStatus::ALL.map(RunStatus::as_str))?)
        }
        "surface" => {
            Condition::Surface(parse_name(name, &value, Surface::from_name, Surface::ALL.map(Surface::as_str))?)
        }
        "after" => Condition::After(parse_time(name, &value, now)?),
        _ => Condition::Before(parse_time(name, &value, now)?),
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
        "user" => "user:ann",
        "session" => "session:abc",
        "tag" => "tag:interesting",
        "feedback" => "feedback:bad",
        "note" => "note:run",
        "metadata" => "metadata.project:demo",
        "parent" => "parent:01936d3a-7c4e-7d31-8c7d-0d9a5e1b2f60",
        "experiment" => "experiment:01936d3a-7c4e-7d31-8c7d-0d9a5e1b2f60",
        "seed" => "seed:42",
        "tokens" => "tokens>100",
        "backtracks" => "backtracks>0",
        "forced" => "forced>0",
        "actions" => "actions>=3",
        "after" => "after:2026-01-31 or after:24h",
        _ => "before:2026-01-31",
    }
}

fn parse_name<T, const N: usize>(
    name: &str,
    value: &FilterValue,
    read: impl Fn(&str) -> Option<T>,
    all: [&'static str; N],
) -> Result<T, BadFilter> {
    read(&value.text).ok_or_else(|| BadFilter {
        at: value.at,
        len: value.len,
        message: format!("'{}' is not a valid {name}; expected one of {}", value.text, all.join(", ")),
        did_you_mean: closest_name(&value.text, all),
    })
}

fn parse_run_id(name: &str, value: &FilterValue) -> Result<Uuid, BadFilter> {
    Uuid::parse_str(&value.text).map_err(|_| {
        let (text, example) = (&value.text, example(name));
        let message = format!("'{text}' is not a valid {name}; expected the id of a run, for example {example}");
        filter_error(value.at, value.len, &message)
    })
}

/// Parses a date, a time with a time zone, `today`, `yesterday`, or a duration before now.
fn parse_time(name: &str, value: &FilterValue, now: DateTime<Utc>) -> Result<DateTime<Utc>, BadFilter> {
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
        .or_else(|| duration(text).and_then(|duration| now.checked_sub_signed(duration)))
        .filter(|time| (1..=9999).contains(&time.year()))
        .ok_or_else(|| {
            let message = format!(
                "'{name}' needs a date (2026-01-31), a time (2026-01-31T18:30:00Z), today, yesterday or a duration \
                 before now (30m, 24h, 7d), in the years 1 to 9999"
            );
            filter_error(value.at, value.len, &message)
        })
}

fn duration(text: &str) -> Option<TimeDelta> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: i64 = number.parse().ok().filter(|number| (0..1_000_000).contains(number))?;
    match unit {
        "m" => TimeDelta::try_minutes(number),
        "h" => TimeDelta::try_hours(number),
        "d" => TimeDelta::try_days(number),
        _ => None,
    }
}

fn filter_error(at: usize, len: usize, message: &str) -> BadFilter {
    BadFilter { at, len, message: message.to_owned(), did_you_mean: None }
}

/// Returns the most similar name: one that begins with `name`, or one with an edit distance of 2 or less.
fn closest_name<const N: usize>(name: &str, all: [&'static str; N]) -> Option<String> {
    let name = name.to_lowercase();
    let distance = |other: &str| if other.starts_with(&name) { 1 } else { edit_distance(&name, other) };
    let best = all.into_iter().min_by_key(|other| distance(other))?;
    (distance(best) <= 2).then(|| best.to_owned())
}

/// Returns the Levenshtein distance.
fn edit_distance(a: &str, b: &str) -> usize {
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
