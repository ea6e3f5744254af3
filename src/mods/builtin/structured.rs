//! `json-schema`, `regex` and `grammar`: structured answers by constraint.

use super::describe;
use super::support::config::{self, schema};
use super::support::constrain::GrammarInstance;
use crate::model::grammar::{Constraint, GrammarSource};
use crate::mods::{ModDescription, ModFactory, ModInstance, RunView};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Documentation shared by the three mods.
const BEHAVIOR: &str = "At every step, only tokens that lead to a valid answer can be drawn. When the answer is complete and nothing \
                    can follow, the run ends with the finish reason `stop`. With `after`, the constraint begins after that \
                    text. Otherwise it begins after the reasoning at the beginning of the answer, or at the first token if there is no \
                    reasoning. If another mod forces text that the constraint does not permit, the text is kept and a warning is logged. \
                    Several constraints apply together if an answer can satisfy them all.";

fn after() -> Value {
    json!({"type": "string", "minLength": 1, "description": "The constraint begins after this text; the text before it is free."})
}

fn instance(
    source: GrammarSource,
    field: &str,
    trigger: Option<&str>,
    run: &RunView,
) -> Result<Box<dyn ModInstance>, String> {
    Ok(Box::new(GrammarInstance::start(Constraint::new(field, source), trigger, run)?))
}

/// `json-schema`: makes the answer JSON that is valid against a schema.
pub struct JsonSchema;

impl ModFactory for JsonSchema {
    fn describe(&self) -> ModDescription {
        describe(
            "json-schema",
            "Makes the answer JSON that is valid against a schema.",
            &format!(
                "{BEHAVIOR} JSON Schema keywords that cannot be enforced, such as `uniqueItems`, `contains`, `not`, `if` and `propertyNames`, are rejected \
                 with an error. `oneOf` has the meaning of `anyOf`."
            ),
            json!({"schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}}),
            schema(
                &["schema"],
                json!({
                    "schema": {"type": "object", "description": "The JSON schema."},
                    "after": after(),
                }),
            ),
        )
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let JsonSchemaConfig { schema, after } = config::parse(self, config)?;
        instance(GrammarSource::JsonSchema(schema), "schema", after.as_deref(), run)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonSchemaConfig {
    schema: Value,
    after: Option<String>,
}

/// `regex`: makes the whole answer match a regular expression.
pub struct Regex;

impl ModFactory for Regex {
    fn describe(&self) -> ModDescription {
        describe(
            "regex",
            "Makes the answer match a regular expression.",
            &format!("The expression matches the whole answer. {BEHAVIOR}"),
            json!({"pattern": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}),
            schema(
                &["pattern"],
                json!({
                    "pattern": {"type": "string", "minLength": 1,
                        "description": "Regular expression, without look-around and back-references."},
                    "after": after(),
                }),
            ),
        )
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let RegexConfig { pattern, after } = config::parse(self, config)?;
        instance(GrammarSource::Regex(pattern), "pattern", after.as_deref(), run)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RegexConfig {
    pattern: String,
    after: Option<String>,
}

/// `grammar`: makes the answer follow a grammar.
pub struct Grammar;

impl ModFactory for Grammar {
    fn describe(&self) -> ModDescription {
        describe(
            "grammar",
            "Makes the answer follow a grammar, in GBNF or Lark.",
            &format!("Either `gbnf` or `lark` is required. {BEHAVIOR}"),
            json!({"gbnf": "root ::= (\"yes\" | \"no\") \".\""}),
            schema(
                &[],
                json!({
                    "gbnf": {"type": "string", "minLength": 1,
                        "description": "Grammar in llama.cpp's format; it begins at the rule root."},
                    "lark": {"type": "string", "minLength": 1,
                        "description": "Grammar in llguidance's variant of Lark; it begins at the rule start."},
                    "after": after(),
                }),
            ),
        )
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let GrammarConfig { gbnf, lark, after } = config::parse(self, config)?;
        match (gbnf, lark) {
            (Some(text), None) => instance(GrammarSource::Gbnf(text), "gbnf", after.as_deref(), run),
            (None, Some(text)) => instance(GrammarSource::Lark(text), "lark", after.as_deref(), run),
            (None, None) => {
                Err("`gbnf` or `lark` is missing, e.g. {\"gbnf\": \"root ::= \\\"yes\\\" | \\\"no\\\"\"}".into())
            }
            (Some(_), Some(_)) => Err("`gbnf` and `lark` are mutually exclusive; set one of them".into()),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GrammarConfig {
    gbnf: Option<String>,
    lark: Option<String>,
    after: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::{Grammar, JsonSchema, Regex};
    use crate::mods::ModFactory;
    use crate::mods::builtin::testing::{Simulation, SimulationResult, run};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn simulate(mods: &[(&dyn ModFactory, Value)], seed: u64) -> SimulationResult {
        Simulation { seed, ..Simulation::default() }.run_mods(mods)
    }

    #[test]
    fn errors_name_field() {
        let mods: [(&dyn ModFactory, Value, &str); 7] = [
            (&JsonSchema, json!({}), "`schema` is missing"),
            (&JsonSchema, json!({"schema": 3}), "`schema` must be an object, got 3"),
            (&Regex, json!({"pattern": 3}), "`pattern` must be a string, got 3"),
            (
                &Grammar,
                json!({"gbnf": "root ::= x"}),
                "`gbnf`: line 1, column 10: the rule 'x' is used here but not defined",
            ),
            (
                &Grammar,
                json!({}),
                "`gbnf` or `lark` is missing, e.g. {\"gbnf\": \"root ::= \\\"yes\\\" | \\\"no\\\"\"}",
            ),
            (&Grammar, json!({"gbnf": "a", "lark": "b"}), "`gbnf` and `lark` are mutually exclusive; set one of them"),
            (&Regex, json!({"pattern": "a", "after": ""}), "`after` must not be empty"),
        ];
        for (factory, config, message) in mods {
            assert_eq!(factory.start(&config, &run()).err().unwrap(), message);
        }
        assert!(Regex.start(&json!({"pattern": "["}), &run()).err().unwrap().starts_with("`pattern`: "));
    }

    #[test]
    fn constraint_begins_after_text() {
        let result = Simulation { script: "Well, x: ".into(), seed: 3, ..Simulation::default() }
            .run_mods(&[(&Regex, json!({"pattern": "[0-9]{3}", "after": "x: "}))]);
        let digits = result.text.strip_prefix("Well, x: ").expect("the script comes first");
        assert!(digits.len() == 3 && digits.bytes().all(|byte| byte.is_ascii_digit()), "{:?}", result.text);
        assert!(result.ended);
    }

    #[test]
    fn forced_contradiction_is_kept_and_logged() {
        let result = simulate(
            &[
                (&crate::mods::builtin::force_prefix::ForcePrefix, json!({"text": "ab"})),
                (&Regex, json!({"pattern": "a[0-9]"})),
            ],
            1,
        );
        assert!(result.text.starts_with("ab"));
        assert_eq!(result.logs[0], "\"b\" is not permitted by `pattern`; the constraint is suspended while it remains");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn answer_always_satisfies_constraint(seed: u64) {
            let schema = json!({"type": "object", "properties": {"a": {"enum": [1, "b"]}, "c": {"type": "boolean"}},
                "required": ["a", "c"], "additionalProperties": false});
            let result = simulate(&[(&JsonSchema, json!({"schema": schema}))], seed);
            prop_assert!(result.ended);
            let value: Value = serde_json::from_str(&result.text).unwrap();
            prop_assert!(crate::mods::schema_check::first_error(&value, &schema).is_none());
            let result = simulate(&[(&Grammar, json!({"gbnf": "root ::= \"(\" root \")\" | \"x\""}))], seed);
            let depth = result.text.find('x').unwrap_or(result.text.len());
            prop_assert!(!result.ended || result.text == "(".repeat(depth) + "x" + &")".repeat(depth), "{}", result.text);
        }

        #[test]
        fn two_constraints_and_ban_apply_together(seed: u64) {
            let result = simulate(
                &[
                    (&Regex, json!({"pattern": "[a-d]{4,8}"})),
                    (&Grammar, json!({"lark": "start: PAIR PAIR PAIR?\nPAIR: /[abcx][bcd]/"})),
                    (&crate::mods::builtin::ban_phrases::BanPhrases, json!({"phrases": ["ab", "cc"], "max_retries": 64})),
                ],
                seed,
            );
            prop_assert!(result.ended, "{:?}", result);
            let text = result.text.as_bytes();
            prop_assert!(text.len() == 4 || text.len() == 6);
            prop_assert!(text.chunks(2).all(|pair| b"abc".contains(&pair[0]) && b"bcd".contains(&pair[1])));
            prop_assert!(!result.text.contains("ab") && !result.text.contains("cc"), "{}", result.text);
        }
    }
}
