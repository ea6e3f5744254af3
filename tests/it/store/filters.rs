//! Every filter selects the same runs as a plain SQL condition, and no query plan reads all runs or reads them in a loop.
//! `THUNDER_TEST_RUNS=1000000` sets the number of runs and prints the median time of each first page.

use super::{Data, psql};
use std::time::{Duration, Instant};
use thunder::events::{RunId, Scope};
use thunder::store::{Database, RunPage, RunQuery, Store};

/// Number of runs without the variable. The search needs more than one window of run ids for them.
const RUNS: u32 = 30_000;
/// Number of runs that one statement inserts.
const BATCH: u32 = 50_000;

/// Filters and the equivalent SQL conditions.
const FILTERS: [(&str, &str); 65] = [
    ("", "true"),
    ("mod:STORY", "'story' = any(mods)"),
    ("mod:rare", "'rare-mod' = any(mods)"),
    ("mod:old", "'old-mod' = any(mods)"),
    ("mod:refusal", "'no-refusal' = any(mods)"),
    ("story", "search @@ 'story'"),
    ("haystack", "search @@ 'haystack'"),
    ("absentword", "false"),
    ("\"tell me a story\"", "search @@ phraseto_tsquery('simple', 'tell me a story')"),
    ("tell-me/a-sto", "search @@ to_tsquery('simple', 'tell <-> me <-> a <-> sto:*')"),
    ("\"story tell\"", "false"),
    ("w100 w200", "search @@ to_tsquery('simple', 'w100:* & w200:*')"),
    ("story model:qwen3-8b error>0", "search @@ 'story' and model = 'qwen3-8b' and errors > 0"),
    ("story mod:old", "search @@ 'story' and 'old-mod' = any(mods)"),
    ("model:fine-tune-17", "model = 'fine-tune-17'"),
    ("model:GEMMA -status:done", "model = 'gemma-3-4b' and status <> 'done'"),
    ("status:failed story mod:story", "status = 'failed' and search @@ 'story' and 'story' = any(mods)"),
    ("surface:websocket", "surface = 'websocket'"),
    ("surface:ingest haystack", "surface = 'ingest' and search @@ 'haystack'"),
    ("error:keyerror", "error_text ilike '%keyerror%'"),
    ("error:\"out of memory\" -mod:story", "message = 'out of memory' and not 'story' = any(mods)"),
    ("error:nothing", "false"),
    ("tokens>1900", "completion_tokens > 1900"),
    ("tokens>100000", "false"),
    ("tokens>1000 story", "completion_tokens > 1000 and search @@ 'story'"),
    ("actions>=100", "false"),
    ("backtracks>9", "false"),
    ("backtracks>0 story", "backtracked > 0 and search @@ 'story'"),
    ("forced:7 mod:guard", "forced = 7 and 'json-guard' = any(mods)"),
    ("user:user-77", "user_label = 'user-77'"),
    ("user:user-77 story", "user_label = 'user-77' and search @@ 'story'"),
    ("session:s-17", "labels @> array['session=s-17']"),
    ("metadata.env:test tokens>500", "labels @> array['metadata.env=test'] and completion_tokens > 500"),
    ("request:req-c4ca4238", "request_id like 'req-c4ca4238%'"),
    ("before:2026-01-01T02:00:00Z", "created_at < '2026-01-01T02:00:00Z'"),
    (
        "after:2026-01-01T01:00:00Z before:2026-01-01T02:00:00Z mod:story",
        "created_at >= '2026-01-01T01:00:00Z' and created_at < '2026-01-01T02:00:00Z' and 'story' = any(mods)",
    ),
    ("before:2025-01-01", "created_at < '2025-01-01'"),
    (
        "after:2026-01-01T03:00:00Z -mod:story haystack",
        "created_at >= '2026-01-01T03:00:00Z' and not 'story' = any(mods) and search @@ 'haystack'",
    ),
    ("w1 mod:rare", "search @@ to_tsquery('simple', 'w1:*') and 'rare-mod' = any(mods)"),
    ("w mod:rare", "search @@ to_tsquery('simple', 'w:*') and 'rare-mod' = any(mods)"),
    (
        "w1 mod:old tokens>1500",
        "search @@ to_tsquery('simple', 'w1:*') and 'old-mod' = any(mods) and completion_tokens > 1500",
    ),
    (
        "-mod:story -model:qwen3-8b haystack",
        "not 'story' = any(mods) and coalesce(model, '') <> 'qwen3-8b' and search @@ 'haystack'",
    ),
    ("request:req-", "true"),
    ("request:req-c mod:rare", "request_id like 'req-c%' and 'rare-mod' = any(mods)"),
    ("metadata.env:prod mod:rare", "labels @> array['metadata.env=prod'] and 'rare-mod' = any(mods)"),
    ("metadata.env:prod metadata.env:test", "false"),
    (
        "metadata.env:prod -session:s-3 user:user-77",
        "labels @> array['metadata.env=prod'] and not labels @> array['session=s-3'] and user_label = 'user-77'",
    ),
    ("error:ke mod:old", "error_text ilike '%ke%' and 'old-mod' = any(mods)"),
    ("error:memory story tokens<5000", "message = 'out of memory' and search @@ 'story'"),
    (
        "tokens<100 actions:12 forced<1 status:cancelled",
        "completion_tokens < 100 and actions = 12 and forced < 1 and status = 'cancelled'",
    ),
    ("backtracks>0 forced>0", "backtracked > 0 and forced > 0"),
    (
        "surface:websocket model:mistral \"tell me\" -error>0",
        "surface = 'websocket' and model = 'mistral-7b' and search @@ phraseto_tsquery('simple', 'tell me') and errors = 0",
    ),
    ("model:fine mod:guard story", "model like 'fine%' and 'json-guard' = any(mods) and search @@ 'story'"),
    (
        "mod:story user:user-1 surface:websocket",
        "'story' = any(mods) and user_label = 'user-1' and surface = 'websocket'",
    ),
    ("status:failed error>0 mod:story", "status = 'failed' and errors > 0 and 'story' = any(mods)"),
    ("tokens>500 user:user-2 mod:old", "completion_tokens > 500 and user_label = 'user-2' and 'old-mod' = any(mods)"),
    ("backtracks>0 error>0 surface:ingest", "backtracked > 0 and errors > 0 and surface = 'ingest'"),
    ("w100 w200 w300", "search @@ to_tsquery('simple', 'w100:* & w200:* & w300:*')"),
    ("story tell error>0", "search @@ 'story & tell' and errors > 0"),
    ("\"w1 w2\" mod:story", "search @@ phraseto_tsquery('simple', 'w1 w2') and 'story' = any(mods)"),
    ("session:s-17 metadata.env:prod", "labels @> array['session=s-17', 'metadata.env=prod']"),
    (
        "-metadata.env:prod -metadata.env:test error>0 user:user-3",
        "not labels && array['metadata.env=prod', 'metadata.env=test'] and errors > 0 and user_label = 'user-3'",
    ),
    (
        "after:2026-01-01T01:00:00Z before:2026-01-01T06:00:00Z status:failed mod:story",
        "created_at >= '2026-01-01T01:00:00Z' and created_at < '2026-01-01T06:00:00Z' and status = 'failed' \
        and 'story' = any(mods)",
    ),
    (
        "after:2026-01-01T01:00:00Z user:user-5 mod:guard status:interrupted",
        "created_at >= '2026-01-01T01:00:00Z' and user_label = 'user-5' and 'json-guard' = any(mods) \
        and status = 'interrupted'",
    ),
    (NO_SURFACE, "false"),
];

/// A filter that no run matches and that no index supports.
const NO_SURFACE: &str = "-surface:openai -surface:llama_server -surface:attention -surface:websocket -surface:ingest";

async fn insert_runs(url: &str, count: u32) {
    for first in (1..=count).step_by(BATCH as usize) {
        let last = (first + BATCH - 1).min(count);
        let numbers = [("runs_to_make", count), ("first_run", first), ("last_run", last)];
        let sql = numbers
            .iter()
            .fold(include_str!("filters.sql").to_owned(), |sql, (name, number)| sql.replace(name, &number.to_string()));
        psql(url, &sql).await;
    }
    psql(url, "insert into run_keys (request_id, run_id) select request_id, run_id from runs").await;
    psql(url, "vacuum analyze").await;
}

#[tokio::test]
async fn every_filter_finds_its_runs_without_reading_all() {
    let count = std::env::var("THUNDER_TEST_RUNS").ok().map(|count| count.parse().unwrap());
    let data = Data::embedded();
    let first = data.open().await;
    let url = data.url();
    psql(&url, "create database many").await;
    let many = format!("{}/many", url.strip_suffix("/thunder").unwrap());
    let database = || Database::Url { url: many.clone(), direct_url: None, data_dir: data.0.join("many") };
    Store::open(database(), |_| {}).await.unwrap().close().await;
    insert_runs(&many, count.unwrap_or(RUNS)).await;
    // From here on, PostgreSQL logs the plans of queries.
    psql(
        &many,
        "alter database many set session_preload_libraries = 'auto_explain';
        alter database many set auto_explain.log_min_duration = 0;
        alter database many set auto_explain.log_analyze = on;
        alter database many set auto_explain.log_timing = off",
    )
    .await;
    let store = Store::open(database(), |_| {}).await.unwrap();
    let mut slow = Vec::new();
    for (q, condition) in FILTERS {
        let mut times = Vec::new();
        for _ in 0..if count.is_some() { 5 } else { 1 } {
            let begun = Instant::now();
            let mut page = runs(&store, q, None).await;
            times.push(begun.elapsed());
            let mut found: Vec<String> = Vec::new();
            let mut pages = 1;
            loop {
                found.extend(page.runs.into_iter().map(|run| run.request_id));
                let Some(before) = page.next.filter(|_| found.len() < 50) else { break };
                page = runs(&store, q, Some(before)).await;
                pages += 1;
            }
            found.truncate(50);
            let plain = format!(
                "select coalesce(string_agg(request_id, ','), '') from (select request_id from runs where {condition}
                order by run_id desc limit 50) as newest"
            );
            assert_eq!(found.join(","), psql(&many, &plain).await, "{q}");
            assert!(pages > 1 || q != NO_SURFACE, "a page must end after a number of searched runs");
        }
        times.sort_unstable();
        let median = times[times.len() / 2];
        if count.is_some() {
            println!("{q:60} {median:?}");
        }
        if median > Duration::from_millis(100) {
            slow.push(format!("{q}: {median:?}"));
        }
    }
    if count.is_some() {
        println!("{} of {} filters take more than 100 ms: {slow:#?}", slow.len(), FILTERS.len());
    }
    store.close().await;
    first.close().await;
    let log = std::fs::read_to_string(data.0.join("postgres.log")).unwrap();
    let lists_runs = |plan: &&str| plan.contains("with candidates as materialized");
    let plans: Vec<&str> = log.split("Query Text:").skip(1).filter(lists_runs).collect();
    assert!(plans.len() >= FILTERS.len(), "{} plans are in the log", plans.len());
    for plan in plans {
        let loops = |line: &str| -> u64 {
            line.split("loops=").nth(1).and_then(|rest| rest.split(')').next()?.parse().ok()).unwrap_or(1)
        };
        let is_looped = |line: &str| line.contains(" on runs") && !line.contains("Parallel") && loops(line) > 1;
        let is_bad = |line: &&str| line.contains("Seq Scan on runs") || is_looped(line);
        let bad = plan.lines().find(is_bad);
        assert!(bad.is_none(), "{bad:?} in {plan}");
    }
}

async fn runs(store: &Store, q: &str, before: Option<RunId>) -> RunPage {
    let query = RunQuery { q: q.to_owned(), before, limit: 0 };
    store.runs(&Scope::All, &query).await.unwrap_or_else(|error| panic!("{q}: {error}"))
}
