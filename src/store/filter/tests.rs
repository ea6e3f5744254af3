//! Tests of the filter language.

use super::*;
use crate::events::Scope;
use crate::store::{RunQuery, test_store};
use proptest::prelude::*;
use sqlx::QueryBuilder;

fn now() -> DateTime<Utc> {
    "2026-01-31T12:00:00Z".parse().unwrap()
}

fn one(text: &str) -> Condition {
    let mut terms = Filter::parse(text, now()).unwrap().terms;
    assert_eq!(terms.len(), 1, "{text}");
    terms.remove(0).condition
}

fn plan(text: &str) -> SearchPlan {
    SearchPlan::new(Filter::parse(text, now()).unwrap())
}

fn error(text: &str) -> BadFilter {
    Filter::parse(text, now()).unwrap_err()
}

#[test]
fn every_kind_of_term_is_parsed() {
    assert_eq!(one("sky"), Condition::Word("sky".into()));
    assert_eq!(one("\"the sky\""), Condition::Phrase("the sky".into()));
    assert_eq!(one("model:qwen"), Condition::Model("qwen".into()));
    assert_eq!(one("mod:\"no refusal\""), Condition::Mod("no refusal".into()));
    assert_eq!(one("status:done"), Condition::Status(RunStatus::Done));
    assert_eq!(one("surface:llama_server"), Condition::Surface(Surface::LlamaServer));
    assert_eq!(one("error:\"context window\""), Condition::Error("context window".into()));
    assert_eq!(one("error>0"), Condition::Count(CountField::Errors, Comparison::Above, 0));
    assert_eq!(one("tokens>=10"), Condition::Count(CountField::Tokens, Comparison::AtLeast, 10));
    assert_eq!(one("user:ann"), Condition::User("ann".into()));
    assert_eq!(one("session:abc"), Condition::Label("session=abc".into()));
    let id = "01936d3a-7c4e-7d31-8c7d-0d9a5e1b2f60";
    assert_eq!(one(&format!("parent:{id}")), Condition::Label(format!("parent={id}")));
    assert_eq!(one(&format!("parent:{}", id.to_uppercase())), Condition::Label(format!("parent={id}")));
    assert_eq!(one(&format!("experiment:{id}")), Condition::Label(format!("metadata.experiment={id}")));
    assert_eq!(one("experiment:baseline"), Condition::Label("metadata.experiment=baseline".into()));
    assert_eq!(one("seed:4294967295"), Condition::Seed(u32::MAX));
    assert_eq!(one("metadata.env:prod"), Condition::Label("metadata.env=prod".into()));
    assert_eq!(one("metadata.trace-id.2:\"a b\""), Condition::Label("metadata.trace-id.2=a b".into()));
    assert_eq!(one("tokens:7"), Condition::Count(CountField::Tokens, Comparison::Is, 7));
    assert_eq!(one("after:2026-01-01"), Condition::After("2026-01-01T00:00:00Z".parse().unwrap()));
    assert_eq!(one("after:24h"), Condition::After("2026-01-30T12:00:00Z".parse().unwrap()));
    assert_eq!(one("before:today"), Condition::Before("2026-01-31T00:00:00Z".parse().unwrap()));
    let filter = Filter::parse("  -status:failed sky -\"blue sea\" ", now()).unwrap();
    assert_eq!(filter.terms.iter().map(|term| term.negated).collect::<Vec<_>>(), [true, false, true]);
    assert_eq!(Filter::parse(" ", now()).unwrap(), Filter::default());
}

#[test]
fn model_terms_are_resolved_and_split_the_filter() {
    let known = ["Qwen3-4B", "qwen3-8b", "llama"].map(str::to_owned);
    let split = |text: &str| {
        let mut plan = plan(text);
        plan.resolve_models(&known);
        plan.split()
    };
    let models = |plan: &SearchPlan, term: usize| plan.terms[term].condition.clone();
    let both = split("tokens>1 model:QWEN");
    assert_eq!(both.len(), 2);
    assert_eq!(models(&both[0], 1), Condition::Models(vec!["Qwen3-4B".into()], "QWEN".into()));
    assert_eq!(models(&both[1], 1), Condition::Models(vec!["qwen3-8b".into()], "QWEN".into()));
    assert_eq!(models(&split("model:gemma")[0], 0), Condition::Models(vec![], "gemma".into()));
    assert_eq!(models(&split("-model:qwen")[0], 0), Condition::Model("qwen".into()));
    let others = split("-status:done");
    assert_eq!(others.len(), RunStatus::ALL.len() - 1);
    assert!(others.iter().all(|part| !part.terms[0].negated));
    assert!(others.iter().all(|part| part.terms[0].condition != Condition::Status(RunStatus::Done)));
}

#[test]
fn index_is_used_for_rare_words_and_for_all_labels_if_one_is_rare() {
    let indexed = |text: &str, shares: &[f64]| {
        let mut plan = plan(text);
        let indexes: Vec<usize> = plan.frequency_terms().iter().map(|(index, ..)| *index).collect();
        assert_eq!(indexes.len(), shares.len(), "{text}");
        let lowest = plan.set_frequencies(&indexes.into_iter().zip(shares.iter().copied()).collect::<Vec<_>>());
        (plan.terms.iter().map(|term| term.uses_index).collect::<Vec<_>>(), lowest)
    };
    assert_eq!(indexed("sky", &[0.1]), (vec![true], 0.1));
    assert_eq!(indexed("sky", &[0.2]), (vec![false], 1.0));
    assert_eq!(indexed("sky blue sea", &[0.06, 0.08, 0.01]), (vec![true, false, true], 0.01));
    assert_eq!(indexed("\"the sky\"", &[0.9, 0.3]), (vec![true], 0.3));
    assert_eq!(indexed("session:a metadata.env:prod", &[0.001, 0.5]), (vec![true, true], 0.001));
    assert_eq!(indexed("session:a metadata.env:prod", &[0.3, 0.5]), (vec![false, false], 1.0));
    assert_eq!(indexed("tokens>7", &[]), (vec![true], 1.0));
}

#[test]
fn words_that_the_index_is_not_searched_for_are_checked() {
    let leaves_out_words = |condition: &Condition| {
        let mut query = QueryBuilder::<sqlx::Postgres>::new("");
        condition.push_words(&mut query);
        query.sql().as_str().contains("regexp_replace")
    };
    // PostgreSQL splits the number from the letters after it.
    for (text, is_checked) in [("mind.a", true), ("1.5b", false), ("user_id", true), ("hero-banner", false)] {
        let condition = one(text);
        assert_eq!((condition.exceeds_index(), leaves_out_words(&condition)), (is_checked, is_checked), "{text}");
    }
    assert!(one("\"1.5b\"").exceeds_index() && !one("\"word\"").exceeds_index());
}

#[test]
fn frequencies_are_estimated_for_the_longest_words_of_phrases() {
    let words = |text: &str| -> Vec<String> {
        let terms = plan(text).frequency_terms();
        terms.into_iter().map(|(_, _, start)| start).collect()
    };
    assert_eq!(words("blue \"the sea\" sky blue \"The sea\""), ["blue", "sky", "sea", "the"]);
    assert_eq!(words("“Sky” \"नमस्ते…  sea\""), ["sky", "नमस्ते", "sea"]);
    let long: Vec<String> = (0..300).map(|number| format!("w{number}")).collect();
    assert_eq!(words(&format!("\"{0}\" \"{0} x\" session:a", long.join(" "))).len(), 1 + super::plan::MAX_PHRASE_WORDS);
}

/// Inserts runs as two earlier versions did, and the same runs of this version. The index of the first run contains `don’t` as
/// one word, that of the third one the address, its host and its path.
const INSERT_RUNS: &str = "
    insert into runs (run_id, request_id, created_at, status, surface, mods, prompt_preview, output_preview,
        prompt_tokens, completion_tokens, cached_tokens, events, backtracked, forced, actions, errors, error_text,
        has_attention, surprise_strip, search)
    select ('01900000-0000-7000-8000-00000000000' || n)::uuid, 'r' || n, now(), 'done', 'openai', '{}', '', '', 1, 1, 0,
        1, 0, 0, 0, 0, '', false, '', to_tsvector('simple', case n
            when 1 then 'i don’t mind l’amour at 25°c'
            when 2 then 'i don t mind l amour at 25 c'
            when 3 then 'see https://docs.example.org/path?x=1 on 2026-01-31, ann@example.org'
            else 'see https   docs example org path x 1 on 2026 01 31  ann example org' end)
    from generate_series(1, 4) n";

#[tokio::test]
async fn words_with_punctuation_are_found_in_new_and_old_runs() {
    let (_folder, store) = test_store::open().await;
    sqlx::query(INSERT_RUNS).execute(&store.inner.pool).await.unwrap();
    let matches = async |q: &str| {
        let query = RunQuery { q: q.into(), before: None, limit: 10 };
        let page = store.runs(&Scope::All, &query).await.unwrap();
        page.runs.into_iter().map(|run| run.request_id).collect::<Vec<_>>()
    };
    for q in ["don’t", "L’AM", "25°C", "\"don’t mind\"", "\"mind l’amour at\"", "don’t l’amour"] {
        assert_eq!(matches(q).await, ["r2", "r1"], "{q}");
    }
    for q in [
        "docs.example.org",
        "\"https://docs.example.org/path?x=1\"",
        "2026-01-31",
        "\"on 2026-01-31\"",
        "ann@example.org",
    ] {
        assert_eq!(matches(q).await, ["r4", "r3"], "{q}");
    }
    assert_eq!(matches("/path").await, ["r4", "r3"]);
    assert_eq!(matches("path").await, ["r4"]);
    assert_eq!(matches("docs.example.org/p").await, ["r4"], "the index is not searched for `p`");
    assert_eq!(matches("mind.a").await, ["r2", "r1"], "`amour` and `at`");
    assert_eq!(matches("example.docs").await, ["r4"], "only phrases have an order");
    for q in ["don’t absent", "-don’t -see", "\"mind don’t\"", "\"example.docs\"", "mind.z", "docs.example.org/q"]
    {
        assert!(matches(q).await.is_empty(), "{q}");
    }
    store.close().await;
}

#[test]
fn unknown_field_is_an_error_with_its_position() {
    let bad_filter = error("sky modle:qwen");
    assert_eq!((bad_filter.at, bad_filter.len, bad_filter.did_you_mean.as_deref()), (4, 5, Some("model")));
    assert_eq!(error("-backtrack>0").did_you_mean.as_deref(), Some("backtracks"));
    assert_eq!(error("http://example.org").did_you_mean, None);
}

#[test]
fn invalid_values_are_errors_with_their_position() {
    let bad_filter = error("status:finished");
    assert_eq!((bad_filter.at, bad_filter.len), (7, 8));
    assert_eq!(error("status:cancel").did_you_mean.as_deref(), Some("cancelled"));
    assert_eq!((error("tokens>many").at, error("tokens>many").len), (7, 4));
    assert_eq!((error("ä \"open").at, error("ä \"open").len), (2, 5));
    assert_eq!((error("model:").at, error("model:").len), (0, 6));
    assert_eq!(error("model>3").at, 0);
    assert_eq!(error("a - b").at, 2);
    assert_eq!((error("metadata:prod").at, error("metadata.:prod").at), (0, 0));
    assert_eq!((error("parent:nc-1").at, error("parent:nc-1").len), (7, 4));
    assert_eq!(
        error("parent:0190").to_string(),
        "'0190' is not a valid parent; expected the id of a run, for example \
         parent:01936d3a-7c4e-7d31-8c7d-0d9a5e1b2f60"
    );
    assert_eq!((error("seed:4294967296").at, error("seed:-1").len, error("seed>1").at), (5, 2, 0));
    assert_eq!(error("after:soon").at, 6);
    for time in ["-5000-01-01", "0000-12-31", "10000-01-01", "9999-12-31T23:30:00-01:00", "999999d"] {
        assert_eq!(error(&format!("after:{time}")).at, 6, "{time}");
    }
    let many = error(&"a ".repeat(65));
    assert_eq!((many.at, many.len), (128, 2));
    let long = error(&format!("\"{}\"", "wörd ".repeat(1000)));
    assert_eq!((long.at, long.len), (4000, 1002));
}

proptest! {
    #[test]
    fn any_text_is_parsed_or_rejected_with_a_valid_position(text in "(\\PC|[-:<>=\" \t]|tokens|after|status){0,40}") {
        if let Err(bad_filter) = Filter::parse(&text, now()) {
            prop_assert!(bad_filter.at + bad_filter.len <= text.chars().count(), "{bad_filter:?}");
        }
    }
}
