//! Splitting of an SQL script into statements.

/// Returns the statements of a script without their final semicolons.
///
/// Semicolons in comments, quotes and dollar quotes are ignored. Backslashes in quotes are ordinary characters; the scripts
/// do not use `E'…'`.
pub fn statements(script: &str) -> Vec<&str> {
    let (mut statements, mut start, mut at, mut has_code) = (Vec::new(), 0, 0, false);
    while let Some(first) = script[at..].chars().next() {
        let rest = &script[at..];
        if rest.starts_with("--") {
            at += rest.find('\n').unwrap_or(rest.len());
            continue;
        }
        if rest.starts_with("/*") {
            at += rest.find("*/").map_or(rest.len(), |end| end + 2);
            continue;
        }
        if first == ';' {
            if has_code {
                statements.push(script[start..at].trim());
            }
            at += 1;
            (start, has_code) = (at, false);
            continue;
        }
        has_code |= !first.is_whitespace();
        at += match first {
            '\'' | '"' => length_until(rest, 1, &rest[..1]),
            '$' => dollar_quote(rest).map_or(1, |tag| length_until(rest, tag.len(), tag)),
            _ => first.len_utf8(),
        };
    }
    if has_code {
        statements.push(script[start..].trim());
    }
    statements
}

/// Returns the length of the quoted text at the start, including both quotes; `open` is the length of the opening quote.
fn length_until(text: &str, open: usize, close: &str) -> usize {
    text[open..].find(close).map_or(text.len(), |end| open + end + close.len())
}

/// Returns the `$tag$` at the start of the text.
fn dollar_quote(text: &str) -> Option<&str> {
    let end = text[1..].find('$')? + 1;
    let tag = &text[1..end];
    let is_name =
        tag.chars().all(|c| c.is_alphanumeric() || c == '_') && !tag.starts_with(|c: char| c.is_ascii_digit());
    is_name.then(|| &text[..=end])
}

#[cfg(test)]
mod tests {
    use super::statements;
    use proptest::prelude::*;

    #[test]
    fn semicolons_in_quotes_and_comments_do_not_end_a_statement() {
        let script = "-- first; second\nselect ';', \"a;\"\"b\"; /* ; */\n;; do $x$ begin $$ ; $$; end $x$;\nselect $1;\n-- end;";
        let expected = ["-- first; second\nselect ';', \"a;\"\"b\"", "do $x$ begin $$ ; $$; end $x$", "select $1"];
        assert_eq!(statements(script), expected);
        assert_eq!(statements("select 'open; "), ["select 'open;"]);
        assert!(statements(" -- nothing\n ; ").is_empty());
    }

    #[test]
    fn function_bodies_in_migrations_are_not_split() {
        let script = include_str!("../../migrations/V1__runs.sql");
        let statements = statements(script);
        let function = statements.iter().find(|sql| sql.contains("create function make_partitions")).unwrap();
        assert!(function.ends_with("end\n$$"), "{function}");
        assert_eq!(statements.iter().filter(|sql| sql.contains("create table")).count(), 15);
    }

    proptest! {
        #[test]
        fn any_text_is_split_without_a_panic(script in "(\\PC|[;'\"$ä/*\n-]|\\$a\\$){0,60}") {
            prop_assert!(statements(&script).iter().all(|sql| !sql.is_empty()));
        }
    }
}
