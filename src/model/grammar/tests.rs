use super::testing::{CONTROL, END, accepts, is_permitted, sentencepiece, start_matcher, vocabulary};
use super::*;
use proptest::prelude::*;
use serde_json::json;

fn error(source: GrammarSource) -> String {
    GrammarCompiler::new(vocabulary()).start_matcher(&Constraint::new("test", source)).unwrap_err().to_string()
}

#[test]
fn schema_permits_only_valid_json() {
    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer", "minimum": 10}},
        "required": ["name", "age"], "additionalProperties": false,
    });
    let mut matcher = start_matcher(GrammarSource::JsonSchema(schema));
    assert!(accepts(&mut matcher, r#"{"name":"Al","age":10}"#));
    assert!(accepts(&mut matcher, "{\n  \"name\": \"Al\",\n  \"age\": 99\n}"));
    for invalid in [r#"{"name":"Alan","age":10}"#, r#"{"name":"Al","age":9}"#, r#"{"name":"Al"}"#, "{", "null", ""] {
        assert!(!accepts(&mut matcher, invalid), "{invalid}");
    }
}

#[test]
fn white_space_is_bounded() {
    let mut matcher = start_matcher(GrammarSource::JsonObject);
    assert!(accepts(&mut matcher, "{ \"a\": {} }"));
    assert!(!accepts(&mut matcher, "{  \"a\": {}}"));
    assert!(!accepts(&mut matcher, &format!("{{\n{}\"a\":1}}", " ".repeat(21))));
}

#[test]
fn integers_have_64_bits_unless_the_schema_permits_more() {
    let longest = |schema: serde_json::Value, sign: &str| {
        let mut matcher = start_matcher(GrammarSource::JsonSchema(schema));
        (1..24).filter(|&digits| accepts(&mut matcher, &format!("{sign}{}", "7".repeat(digits)))).max()
    };
    let definitions = json!({"Id": {"type": "integer"}});
    for (schema, negative, positive) in [
        (json!({"type": "integer"}), Some(19), Some(19)),
        (json!({"type": ["integer", "null"], "minimum": 5}), None, Some(19)),
        (json!({"type": "integer", "maximum": 800}), Some(19), Some(3)),
        (json!({"type": "integer", "maximum": 1e17}), Some(19), Some(17)),
        (json!({"allOf": [{"type": "integer"}, {"maximum": 1e17}]}), Some(23), Some(17)),
        (json!({"anyOf": [{"type": "integer"}, {"type": "null"}], "maximum": 1e17}), Some(23), Some(17)),
        (json!({"$ref": "#/$defs/Id", "maximum": 9e18, "$defs": definitions}), Some(23), Some(19)),
        (json!({"$ref": "#/$defs/Id", "$defs": definitions}), Some(19), Some(19)),
        (json!({"type": "integer", "allOf": [{"minimum": 0}]}), None, Some(23)),
    ] {
        let found = (longest(schema.clone(), "-"), longest(schema.clone(), ""));
        assert_eq!(found, (negative, positive), "{schema}");
    }
    let accepted =
        |schema: serde_json::Value, text: &str| accepts(&mut start_matcher(GrammarSource::JsonSchema(schema)), text);
    let id = "12345678901234568";
    assert!(accepted(
        json!({"allOf": [{"$ref": "#/$defs/Id"}], "const": 12_345_678_901_234_568_u64, "$defs": definitions}),
        id
    ));
    assert!(accepted(json!({"anyOf": [{"type": "integer"}, {"type": "null"}], "minimum": 1e16}), id));
    assert!(accepted(json!({"type": "integer", "format": "int64"}), "9223372036854774784"));
    assert!(!accepted(json!({"type": "integer"}), "9223372036854775807"));
}

#[test]
fn unsupported_schemas_are_rejected_with_the_keyword() {
    assert!(error(GrammarSource::JsonSchema(json!({"type": "array", "uniqueItems": true}))).contains("uniqueItems"));
    assert!(error(GrammarSource::JsonSchema(json!({"not": {}}))).contains("not"));
    assert!(error(GrammarSource::JsonSchema(json!([1]))).contains("an array"));
    assert!(error(GrammarSource::JsonSchema(json!({"$ref": "https://example.org/schema"}))).contains("example.org"));
    assert!(error(GrammarSource::JsonSchema(json!({"type": "string", "pattern": "("}))).contains("unclosed group"));
}

#[test]
fn one_of_has_the_meaning_of_any_of() {
    let object = |name: &str| json!({"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]});
    let schema = json!({"oneOf": [object("x"), {"$ref": "#/$defs/y"}], "$defs": {"y": object("y")}});
    let mut matcher = start_matcher(GrammarSource::JsonSchema(schema));
    assert!(accepts(&mut matcher, r#"{"x":1}"#) && accepts(&mut matcher, r#"{"y":1}"#));
    assert!(!accepts(&mut matcher, r#"{"y":1,"arguments":{}}"#));
}

#[test]
fn position_of_an_error_in_lark_is_parsed() {
    let error = GrammarCompiler::new(vocabulary())
        .start_matcher(&Constraint::new("test", GrammarSource::Lark("start: a\na: %json {\"type\": \"int\"}".into())));
    let message = "failed to compile JSON schema: Invalid type: int".to_owned();
    assert_eq!(error.unwrap_err(), GrammarError::Syntax { line: 2, column: 4, message });
}

#[test]
fn regular_expressions_match_the_whole_answer() {
    let mut matcher = start_matcher(GrammarSource::Regex("^(yes|no)[!]{0,2}$".into()));
    assert!(accepts(&mut matcher, "yes!!"));
    assert!(!accepts(&mut matcher, "yes!!!"));
    assert!(!accepts(&mut matcher, " no"));
    assert!(error(GrammarSource::Regex("(".into())).contains("unclosed group"));
}

#[test]
fn answer_is_complete_when_nothing_can_follow() {
    let mut matcher = start_matcher(GrammarSource::Regex("a|abc".into()));
    matcher.accept(97, b"a");
    assert!(!matcher.is_complete() && is_permitted(&mut matcher, END));
    matcher.accept(98, b"b");
    assert!(!matcher.is_complete() && !is_permitted(&mut matcher, END));
    matcher.accept(99, b"c");
    assert!(matcher.is_complete());
    matcher.rewind(2);
    assert!(!matcher.is_complete() && is_permitted(&mut matcher, 98));
}

#[test]
fn control_tokens_do_not_match_text() {
    let mut matcher = start_matcher(GrammarSource::Regex("(?s).*".into()));
    assert!(is_permitted(&mut matcher, TokenId::from(b'<')));
    assert!(!is_permitted(&mut matcher, CONTROL));
    let mut named = start_matcher(GrammarSource::Lark("start: \"a\" <|control|> \"b\"".into()));
    named.accept(97, b"a");
    assert!(is_permitted(&mut named, CONTROL) && !is_permitted(&mut named, TokenId::from(b'<')));
    named.accept(CONTROL, b"<|control|>");
    assert!(is_permitted(&mut named, 98));
    let mut by_id = start_matcher(GrammarSource::Lark(format!("start: <[{CONTROL}]> \"b\"")));
    assert!(is_permitted(&mut by_id, CONTROL));
    assert!(!error(GrammarSource::Lark("start: <|unknown|>".into())).contains("panic"));
}

#[test]
fn unaccepted_forced_token_disables_grammar_until_removed() {
    let mut matcher = start_matcher(GrammarSource::Regex("abc".into()));
    assert_eq!(matcher.accept(97, b"a"), AcceptResult::Accepted);
    assert_eq!(matcher.accept(120, b"x"), AcceptResult::Rejected);
    assert!(!matcher.is_active() && matcher.mask().unwrap().is_none());
    assert_eq!(matcher.accept(121, b"y"), AcceptResult::Accepted);
    matcher.end();
    matcher.rewind(1);
    assert!(!matcher.is_active());
    matcher.rewind(2);
    assert!(matcher.is_active() && is_permitted(&mut matcher, 98) && !is_permitted(&mut matcher, 97));
}

#[test]
fn lazy_constraint_begins_after_its_trigger() {
    let constraint = Constraint::new("tools", GrammarSource::JsonObject).lazy(Trigger::text("<tool_call>"));
    let mut matcher = GrammarCompiler::new(vocabulary()).start_matcher(&constraint).unwrap();
    let word = |word: &str| 256 + testing::WORDS.iter().position(|known| *known == word).unwrap() as TokenId;
    assert!(matcher.mask().unwrap().is_none());
    matcher.accept(word("<tool"), b"<tool");
    assert!(matcher.permits(word("_call>"), b"_call>"));
    matcher.accept(word("_call>"), b"_call>");
    assert!(matcher.is_active() && !is_permitted(&mut matcher, 97) && is_permitted(&mut matcher, word("{\"")));
    matcher.rewind(1);
    assert!(!matcher.is_active());
    // A token that completes the trigger and also starts the grammar.
    matcher.rewind(1);
    assert!(matcher.permits(word("<tool_call>{"), b"<tool_call>{"));
    assert!(!matcher.permits(97, b"<tool_call>x"));
    matcher.accept(word("<tool_call>{"), b"<tool_call>{");
    assert!(matcher.is_active() && is_permitted(&mut matcher, TokenId::from(b'}')));
    assert!(!is_permitted(&mut matcher, TokenId::from(b'{')));
    matcher.rewind(1);
    assert!(matcher.mask().unwrap().is_none());
    // After a rejected token, another one may complete the trigger with any text.
    assert_eq!(matcher.accept(97, b"<tool_call>x"), AcceptResult::Rejected);
    assert!(matcher.permits(97, b"<tool_call>x"));
    matcher.accept(97, b"a");
    assert!(matcher.permits(97, b"<tool_call>x"));

    let by_token = constraint.lazy(Trigger::token(CONTROL));
    let mut matcher = GrammarCompiler::new(vocabulary()).start_matcher(&by_token).unwrap();
    matcher.accept(97, b"a");
    matcher.accept(CONTROL, b"<|control|>");
    assert!(matcher.is_active() && is_permitted(&mut matcher, word("{\"")));
}

#[test]
fn vocabulary_without_template_tokens_supports_schemas() {
    let grammars = GrammarCompiler::new(sentencepiece());
    let schema = json!({"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]});
    let mut matcher =
        grammars.start_matcher(&Constraint::new("json_schema", GrammarSource::JsonSchema(schema))).unwrap();
    let mask = matcher.mask().unwrap().unwrap();
    // `{` is a byte token here. Words start with a space, which the schema's JSON does not permit.
    assert!(mask.is_allowed(3 + u32::from(b'{')) && !mask.is_allowed(3 + 256) && !mask.is_allowed(1));
    for byte in br#"{"answer": "# {
        matcher.accept(TokenId::from(*byte) + 3, &[*byte]);
    }
    assert!(is_permitted(&mut matcher, 3 + TokenId::from(b'4')));
}

#[test]
fn clones_are_independent() {
    let mut one = start_matcher(GrammarSource::Regex("ab|ac".into()));
    one.accept(97, b"a");
    let mut other = one.clone();
    one.accept(98, b"b");
    assert!(one.is_complete() && !other.is_complete() && is_permitted(&mut other, 99));
}

#[test]
fn mask_computed_ahead_equals_mask_on_demand() {
    let mut prefetched = start_matcher(GrammarSource::JsonObject);
    let mut on_demand = prefetched.clone();
    for byte in br#"{"a": [1, {"b": null}], "c": "d"}"# {
        prefetched.prepare();
        assert_eq!(prefetched.mask().unwrap().as_deref(), on_demand.mask().unwrap().as_deref());
        prefetched.accept((*byte).into(), &[*byte]);
        on_demand.accept((*byte).into(), &[*byte]);
    }
    assert!(prefetched.is_complete() && on_demand.is_complete());
}

/// Every hostile grammar gives an error or a matcher in bounded time, and none aborts the process.
#[test]
fn hostile_grammars_are_bounded() {
    let deep = |open: &str, close: &str, depth: usize| format!("{}\"a\"{}", open.repeat(depth), close.repeat(depth));
    let chain = |name: &str| {
        let rules: Vec<String> = (0..3900).map(|rule| format!("{name}{rule}: {name}{}", rule + 1)).collect();
        format!("start: {name}0\n{}\n{name}3900: \"a\"", rules.join("\n"))
    };
    let doubling = |count: usize| {
        let rules: Vec<String> = (0..count).map(|rule| format!("r{rule} ::= r{} r{}", rule + 1, rule + 1)).collect();
        format!("root ::= r0\n{}\nr{count} ::= \"a\"?", rules.join("\n"))
    };
    let mut nested = json!({"type": "string"});
    for _ in 0..100 {
        nested = json!({"type": "array", "items": nested, "minItems": 2});
    }
    let all_of: Vec<_> = (0..12)
        .map(|_| json!({"anyOf": [{"type": "string", "maxLength": 9}, {"type": "string", "minLength": 2}, {"type": "null"}]}))
        .collect();
    let properties: serde_json::Map<_, _> = (0..2000).map(|n| (format!("p{n}"), json!({"type": "string"}))).collect();
    let sources = [
        GrammarSource::Lark(format!("start: {}", deep("(", ")", 20_000))),
        GrammarSource::Lark(chain("r")),
        GrammarSource::Lark(chain("T")),
        GrammarSource::Lark("start: start".into()),
        GrammarSource::Lark("start: /(a{1000}){1000}/".into()),
        GrammarSource::Lark("start: /((a*)*)*b/ start?".into()),
        GrammarSource::Lark(String::new()),
        GrammarSource::Regex("((((((((((a{9}){9}){9}){9}){9}){9}){9}){9}){9}){9})".into()),
        GrammarSource::Regex(deep("(", ")", 5000).replace('"', "")),
        GrammarSource::Gbnf(format!("root ::= {}", deep("(", ")", 20_000))),
        GrammarSource::Gbnf(doubling(40)),
        GrammarSource::Gbnf("root ::= root".into()),
        GrammarSource::Gbnf("root ::= root root | \"a\"".into()),
        GrammarSource::Gbnf("root ::= (((\"a\"{2000}){2000}){2000}){2000}".into()),
        GrammarSource::Gbnf(format!("root ::= {}", vec!["\"a\"?"; 3000].join(" "))),
        GrammarSource::JsonSchema(nested),
        GrammarSource::JsonSchema(json!({"allOf": all_of})),
        GrammarSource::JsonSchema(json!({"$ref": "#"})),
        GrammarSource::JsonSchema(
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        ),
        GrammarSource::JsonSchema(json!({"properties": properties})),
        GrammarSource::JsonSchema(
            json!({"type": "string", "pattern": "^(a+)+$", "minLength": 100_000, "maxLength": 1_000_000}),
        ),
        GrammarSource::JsonSchema(json!({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000})),
        GrammarSource::JsonSchema(json!({"type": "number", "multipleOf": 0.0})),
        GrammarSource::JsonSchema(json!({"type": "object", "x-guidance": {"whitespace_pattern": "("}})),
    ];
    let grammars = GrammarCompiler::new(vocabulary());
    for source in sources {
        let excerpt: String = serde_json::to_string(&source).unwrap().chars().take(80).collect();
        let started = std::time::Instant::now();
        let result = grammars.start_matcher(&Constraint::new("test", source));
        eprintln!("{:?} {excerpt}: {:?}", started.elapsed(), result.as_ref().err().map(ToString::to_string));
        if let Ok(mut matcher) = result {
            // The stack has the size of the decode thread's.
            let walk = move || {
                for _ in 0..40 {
                    let Ok(Some(mask)) = matcher.mask() else { return };
                    let Some(token) = (0..END).find(|&token| mask.is_allowed(token as u32)) else { return };
                    matcher.accept(token, b"?");
                    if matcher.is_complete() {
                        return;
                    }
                }
            };
            std::thread::spawn(walk).join().unwrap();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Rewinding and continuing gives the same state as no rewinding.
    #[test]
    fn rewinding_restores_the_earlier_state(moves in proptest::collection::vec((any::<u8>(), 0usize..4), 1..40)) {
        let mut matcher = start_matcher(GrammarSource::JsonObject);
        let mut sequence: Vec<TokenId> = Vec::new();
        for (pick, back) in moves {
            if matcher.is_complete() {
                break;
            }
            let mask = matcher.mask().unwrap().unwrap();
            let allowed: Vec<TokenId> = (0..END).filter(|&token| mask.is_allowed(token as u32)).collect();
            let token = allowed[usize::from(pick) % allowed.len()];
            prop_assert_eq!(matcher.accept(token, vocabulary().piece(token)), AcceptResult::Accepted);
            sequence.push(token);
            let back = back.saturating_sub(1).min(sequence.len());
            matcher.rewind(back);
            sequence.truncate(sequence.len() - back);
        }
        let mut straight = start_matcher(GrammarSource::JsonObject);
        for &token in &sequence {
            straight.accept(token, vocabulary().piece(token));
        }
        prop_assert_eq!(straight.is_complete(), matcher.is_complete());
        let (expected, rewound) = (straight.mask().unwrap(), matcher.mask().unwrap());
        prop_assert_eq!(expected, rewound);
    }

    #[test]
    fn any_text_gives_an_error_or_a_grammar(text in "(start|root|a|b| |:|::=|\\n|\"|/|\\[|\\]|\\(|\\)|\\*|\\?|\\||\\{|\\}|,|1|<|>|!|\\.|-|\\\\|%ignore|x|é){0,24}") {
        let grammars = GrammarCompiler::new(vocabulary());
        for source in [GrammarSource::Gbnf(text.clone()), GrammarSource::Lark(text.clone()), GrammarSource::Regex(text.clone())] {
            // Only the return matters.
            let _ = grammars.start_matcher(&Constraint::new("test", source));
        }
    }
}
