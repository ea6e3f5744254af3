use super::parse::{self, Node};
use super::to_lark;
use crate::events::TokenId;
use crate::model::grammar::deadline::Deadline;
use crate::model::grammar::testing::{CONTROL, END, accepts, is_permitted, start_matcher, vocabulary};
use crate::model::grammar::{GrammarError, GrammarSource};
use proptest::prelude::*;
use std::time::{Duration, Instant};

fn lark(source: &str) -> Result<String, GrammarError> {
    to_lark(source, &vocabulary(), Deadline::start())
}

fn gbnf(source: &str) -> GrammarSource {
    GrammarSource::Gbnf(source.to_owned())
}

#[test]
fn errors_report_line_and_column() {
    let error = |source: &str| lark(source).unwrap_err().to_string();
    assert_eq!(error("root ::= \"a"), "line 1, column 12: the text ends without its closing '\"'");
    assert_eq!(error("root ::= x\n"), "line 1, column 10: the rule 'x' is used here but not defined");
    assert_eq!(
        error("# no root\nx ::= \"a\""),
        "line 2, column 10: the grammar has no rule 'root', which is its start"
    );
    assert_eq!(error("root ::= \"a\"\nx = \"b\""), "line 2, column 3: expected ::= after the name 'x'");
    assert_eq!(
        error("root ::= \"\\q\""),
        "line 1, column 13: unknown escape \\q; expected one of \\n \\r \\t \\\\ \\\" \\[ \\] \\- \\x41 \\u0041 \\U00000041"
    );
    assert_eq!(error("root ::= *"), "line 1, column 11: '*' has nothing before it to repeat");
    assert_eq!(
        error("root ::= \"a\"{3,2}"),
        "line 1, column 18: the maximum number of repetitions is below the minimum"
    );
    assert_eq!(error("root ::= \"a\"{3000}"), "line 1, column 19: 3000 repetitions are too many; the maximum is 2000");
    assert_eq!(error("root ::= <unknown>"), "line 1, column 19: <unknown> is not a single token of this model");
    assert_eq!(error("root ::= [^]"), "line 1, column 12: the character class is empty");
    assert_eq!(error("root ::= [z-a]"), "line 1, column 14: the last character of the range is before the first");
    assert_eq!(error("root ::= \"é\" ("), "line 1, column 15: expected ')'");
    assert_eq!(error("root ::= _"), "line 1, column 10: expected the end of the rule 'root', got '_'");
}

#[test]
fn llama_cpp_syntax_is_accepted() {
    let source = "
        # comment
        root ::= ( # in a group, lines do not end rules
            item |
            \"\\x41\\u00e9\\U0001F600\\t\\\"\"
        )+ [^a-z\\]\\-]{2} .? | # nor after a bar
            \"\"
        item ::= [a-c0-] \"x\"{1,}";
    let mut matcher = start_matcher(gbnf(source));
    for valid in ["", "ax!!", "-xxx  ", "A\u{e9}\u{1f600}\t\"!!\n", "bxcx?!z"] {
        assert!(accepts(&mut matcher, valid), "{valid:?}");
    }
    for invalid in ["ax!", "ax]!", "dx!!", "ax!!!!"] {
        assert!(!accepts(&mut matcher, invalid), "{invalid:?}");
    }
}

#[test]
fn grammar_with_too_many_terminals_is_rejected() {
    let words = |count: usize| {
        let words: Vec<String> = (0..count).map(|index| format!("\"{index:x}\"")).collect();
        format!("root ::= \"(\" root \")\" | {}", words.join("|"))
    };
    let error = lark(&words(35_000)).unwrap_err().to_string();
    assert!(error.contains("more than 2000 different literals") && error.contains("remove some"), "{error}");
    assert!(lark(&words(500)).is_ok());
}

#[test]
fn translation_ends_after_its_deadline() {
    // Every part of the sequence may be empty, so its follow sets take minutes.
    let slow = format!("root ::= \"a\" | {}", "root? ".repeat(20_000));
    let started = Instant::now();
    for (source, time) in [(slow.as_str(), 100), ("root ::= \"(\" root \")\" | \"a\"", 0)] {
        let error = to_lark(source, &vocabulary(), Deadline::after(Duration::from_millis(time))).unwrap_err();
        assert!(matches!(error, GrammarError::TooSlow { .. }), "{error}");
    }
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

#[test]
fn grammar_without_recursion_is_one_terminal() {
    let text = lark("root ::= (\"a\" | \"ab\") x{2,3}\nx ::= [bc]+").unwrap();
    assert!(text.starts_with("start: T0\nT0: R"), "{text}");
}

#[test]
fn tokens_are_referenced_by_text_and_by_id() {
    let mut matcher = start_matcher(gbnf(&format!("root ::= <|control|> !<[{CONTROL}]> \"b\"")));
    assert!(is_permitted(&mut matcher, CONTROL) && !is_permitted(&mut matcher, 97));
    matcher.accept(CONTROL, b"<|control|>");
    assert!(
        !is_permitted(&mut matcher, CONTROL) && is_permitted(&mut matcher, 97) && is_permitted(&mut matcher, 270 - 2)
    );
    matcher.accept(97, b"a");
    assert!(is_permitted(&mut matcher, 98) && !is_permitted(&mut matcher, 97) && !is_permitted(&mut matcher, END));
    matcher.accept(98, b"b");
    assert!(matcher.is_complete());
}

#[test]
fn complete_grammars_are_translated() {
    for (name, valid, invalid) in [
        (
            "value",
            &[r#"{"a":[1,2.5e3,{"b":null}],"c":"x\u00e9\n"}"#, "[]", "\n7 "][..],
            &["{a:1}", r#"{"a"}"#, "01"][..],
        ),
        ("sums", &["1=2\n", "(a_1 +2)*3 = 7\nx= -1\n"], &["1=2", "1+=2\n", "(1=2\n", "01=2\n"]),
        ("notes", &["* a\n", "* a b\n* ü\n"], &["* \n", "a\n"]),
        ("letters", &["αβγ", "привет ώ"], &["αв", "abc", "α "]),
        (
            "orders",
            &["go 3", "turn left; go 12 fast;", "# a square\nrepeat 4 { go 1; turn right }"],
            &["go", "go 03", "turnleft", "repeat 2 {}", "go 1 turn left"],
        ),
    ] {
        let path = format!("{}/fixtures/grammars/{name}.gbnf", env!("CARGO_MANIFEST_DIR"));
        let source = std::fs::read_to_string(path).unwrap();
        let mut matcher = start_matcher(GrammarSource::Gbnf(source));
        valid.iter().for_each(|text| assert!(accepts(&mut matcher, text), "{name}: {text:?}"));
        invalid.iter().for_each(|text| assert!(!accepts(&mut matcher, text), "{name}: {text:?}"));
    }
}

/// Returns the possible ends of a match of `node` in `text` from `from`, as bits, by exhaustive search.
fn ends(node: &Node, rules: &[Vec<u32>], text: &[u8], from: usize) -> u32 {
    let after = |starts: u32, node: &Node| {
        (0..=text.len()).filter(|at| starts & 1 << at != 0).fold(0, |ends_at, at| ends_at | ends(node, rules, text, at))
    };
    match node {
        Node::Text(literal) => {
            if text[from..].starts_with(literal.as_bytes()) {
                1 << (from + literal.len())
            } else {
                0
            }
        }
        Node::Class(ranges) => match text.get(from) {
            Some(&byte) if ranges.iter().any(|range| (range.0..=range.1).contains(&byte.into())) => 1 << (from + 1),
            _ => 0,
        },
        Node::Rule(index) => rules[*index][from],
        Node::Token { .. } => 0,
        Node::Sequence(nodes) => nodes.iter().fold(1 << from, after),
        Node::Either(nodes) => nodes.iter().fold(0, |all, node| all | ends(node, rules, text, from)),
        Node::Repeat(inner, min, max) => {
            let mut now = 1 << from;
            for _ in 0..*min {
                now = after(now, inner);
            }
            let mut all = now;
            for _ in *min..max.unwrap_or(min + text.len() as u32 + 1) {
                now = after(now, inner);
                all |= now;
            }
            all
        }
    }
}

fn matches(source: &str, text: &[u8]) -> bool {
    let grammar = parse::parse(source, &|_| None).unwrap();
    let mut rules = vec![vec![0; text.len() + 1]; grammar.rules.len()];
    loop {
        let next: Vec<Vec<u32>> = grammar
            .rules
            .iter()
            .map(|rule| (0..=text.len()).map(|from| ends(rule, &rules, text, from)).collect())
            .collect();
        if next == rules {
            return rules[grammar.root][0] & 1 << text.len() != 0;
        }
        rules = next;
    }
}

/// Returns grammars over a and b that combine literals, classes, repetitions and mutually recursive rules.
fn grammars() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("\"a\""),
        Just("\"b\""),
        Just("\"ab\""),
        Just("\"aba\""),
        Just("[ab]"),
        Just("[^a]"),
        Just("\"\""),
        Just("root"),
        Just("x"),
        Just("y"),
    ]
    .prop_map(str::to_owned);
    let body = leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 1..4).prop_map(|items| items.join(" ")),
            proptest::collection::vec(inner.clone(), 2..4).prop_map(|items| format!("({})", items.join(" | "))),
            (inner, prop_oneof![Just("*"), Just("+"), Just("?"), Just("{2}"), Just("{1,2}"), Just("{2,}")])
                .prop_map(|(item, times)| format!("({item}){times}")),
        ]
    });
    (body.clone(), body.clone(), body).prop_map(|(root, x, y)| format!("root ::= {root}\nx ::= {x}\ny ::= {y}\n"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// The translation matches exactly the texts that GBNF matches, for every text over a and b up to a maximum length.
    #[test]
    fn translation_matches_the_same_texts(source in grammars()) {
        let Ok(mut matcher) = crate::model::grammar::GrammarCompiler::new(vocabulary())
            .start_matcher(&crate::model::grammar::Constraint::new("test", gbnf(&source)))
        else {
            // A grammar that no text matches cannot be compared.
            for text in texts() {
                prop_assert!(!matches(&source, text.as_bytes()), "{source}\n{text:?} matches: {:?}", lark(&source));
            }
            return Ok(());
        };
        for text in texts() {
            let wanted = matches(&source, text.as_bytes());
            prop_assert_eq!(accepts(&mut matcher, &text), wanted, "{}\n{:?}\n{:?}", source, text, lark(&source));
        }
    }
}

fn texts() -> Vec<String> {
    (0..=5usize)
        .flat_map(|length| {
            (0..1u32 << length)
                .map(move |bits| (0..length).map(|at| if bits >> at & 1 == 0 { 'a' } else { 'b' }).collect())
        })
        .collect()
}

#[test]
fn token_ids_outside_the_vocabulary_are_rejected() {
    let count = vocabulary().len() as TokenId;
    assert!(lark(&format!("root ::= <[{}]>", count - 1)).is_ok());
    assert!(lark(&format!("root ::= <[{count}]>")).is_err());
}

/// llguidance panics on these if their literals are not joined.
#[test]
fn equal_alternatives_may_be_divided_differently() {
    for alternatives in [
        r#""abab" | "ab" "ab""#,
        r#""a" "b" "ab" | "aba" y """#,
        r#""a" "b" "ab" | "a" "bab""#,
        r#""abab" | ("ab"){2}"#,
        r#""abab" | ("a" y){2}"#,
        r#""abab" | "ab" "a" [b]"#,
        &format!(r#""abab" | {}"#, "e ".repeat(40)),
        &format!(r#"[a]{{60}} | "ab" {}"ab""#, "e ".repeat(40)),
    ] {
        let source = format!("root ::= ({alternatives})\ny ::= \"b\"\ne ::= \"\"\n");
        let mut matcher = start_matcher(GrammarSource::Gbnf(source.clone()));
        assert!(accepts(&mut matcher, "abab") && !accepts(&mut matcher, "aba"), "{source}");
    }
}

/// Without a limit, 2^40 nodes would be visited.
#[test]
fn doubled_empty_rules_are_translated() {
    let doubled: Vec<String> = (1..=40).map(|rule| format!("r{rule} ::= r{} r{}\n", rule - 1, rule - 1)).collect();
    let source = format!("root ::= r40 \"a\"\nr0 ::= \"\"\n{}", doubled.concat());
    let mut matcher = start_matcher(GrammarSource::Gbnf(source));
    assert!(accepts(&mut matcher, "a") && !accepts(&mut matcher, "b"));
}
