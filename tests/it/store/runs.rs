//! Lists of runs: filters, pages, migrations, and locks.

use super::{Data, LiveRun, document, psql, wait_for_psql};
use sqlx::{Connection, PgConnection};
use std::time::{Duration, Instant};
use thunder::events::Scope;
use thunder::store::{Error, RunQuery, Store};
use thunder::trace::document::Document;
use tokio::time::timeout;

async fn runs_matching(store: &Store, q: &str) -> Vec<String> {
    let query = RunQuery { q: q.to_owned(), ..RunQuery::default() };
    let page = store.runs(&Scope::All, &query).await.unwrap_or_else(|error| panic!("{q}: {error}"));
    page.runs.into_iter().map(|run| run.request_id).collect()
}

#[tokio::test]
async fn runs_are_listed_filtered_and_paged() {
    let data = Data::new();
    let store = data.open().await;
    for number in 0..7 {
        store.ingest(&Scope::All, None, document(&format!("doc-{number}"), 3 + number)).await.unwrap();
    }
    store.start_recorder();
    let thunder::recording::RecorderHandle { signals: recorder, .. } = store.recorder();
    let mut run = LiveRun::new("generated");
    for signal in run.all(2) {
        recorder.send(signal).await.unwrap();
    }
    while runs_matching(&store, "request:generated status:done").await.is_empty() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    let first = store.runs(&Scope::All, &RunQuery { limit: 5, ..RunQuery::default() }).await.unwrap();
    assert_eq!(first.runs.len(), 5);
    assert_eq!(first.runs[0].request_id, "generated");
    let second =
        store.runs(&Scope::All, &RunQuery { limit: 5, before: first.next, ..RunQuery::default() }).await.unwrap();
    assert_eq!((second.runs.len(), second.next), (3, None));
    assert_eq!(second.runs[2].request_id, "doc-0");

    assert_eq!(runs_matching(&store, "model:GEMINI").await.len(), 7);
    assert_eq!(runs_matching(&store, "-model:gemini").await, ["generated"]);
    assert_eq!(runs_matching(&store, "surface:openai").await, ["generated"]);
    assert_eq!(runs_matching(&store, "mod:watch request:doc-3").await, ["doc-3"]);
    assert_eq!(runs_matching(&store, "w9").await, ["doc-6"]);
    assert_eq!(runs_matching(&store, "\"w8 w9\"").await, ["doc-6"]);
    assert_eq!(runs_matching(&store, "\"w9 w8\"").await, Vec::<String>::new());
    assert_eq!(runs_matching(&store, "SK").await, ["generated"], "a word matches by its beginning");
    assert_eq!(runs_matching(&store, "blue -w1").await, ["generated"]);
    assert_eq!(runs_matching(&store, "before:2026-01-01").await.len(), 7);
    assert_eq!(runs_matching(&store, "after:1h").await, ["generated"]);
    assert_eq!(runs_matching(&store, "error:100%").await, Vec::<String>::new());
    assert_eq!(runs_matching(&store, "backtracks:0 error:0 actions<1 forced<=0 ??").await, Vec::<String>::new());
    assert_eq!(
        runs_matching(&store, "a\0b -\"c\0\" model:\0").await,
        Vec::<String>::new(),
        "PostgreSQL cannot store NUL characters"
    );
    let error = store.runs(&Scope::All, &RunQuery { q: "modle:x".into(), ..RunQuery::default() }).await.unwrap_err();
    assert!(matches!(error, Error::BadFilter(bad) if bad.did_you_mean.as_deref() == Some("model")));
    store.close().await;
}

#[tokio::test]
async fn words_next_to_punctuation_are_found() {
    let data = Data::new();
    let store = data.open().await;
    let mut payload: serde_json::Value = serde_json::from_slice(&super::payload("quoted", 2)).unwrap();
    payload["request"]["final_text"] = "Elle dit : «Hello there» — “yes”…".into();
    let document = Document::parse(&serde_json::to_vec(&payload).unwrap()).unwrap();
    store.ingest(&Scope::All, None, document).await.unwrap();
    for q in ["hello", "\"hello there\"", "“HELLO", "yes", "\"there — yes\"", "there»…yes"] {
        assert_eq!(runs_matching(&store, q).await, ["quoted"], "{q}");
    }
    let mut payload: serde_json::Value = serde_json::from_slice(&super::payload("markup", 2)).unwrap();
    payload["request"]["final_text"] = "<documents><document index=\"1\">Zebraquux report</document></documents> \
        <script>xylofoon()</script> visit https://zqsite.example/guide/zqinstall or /usr/local/zlib, \
        https://docs.example.org/path/page?x=1, <div class=\"hero-banner\"> don't 3.14 -42 東京 &amp;"
        .into();
    // PostgreSQL stores no higher position than 16383.
    let far = format!("{}{} zuser_zid", payload["request"]["final_text"].as_str().unwrap(), " x".repeat(17_000));
    payload["request"]["final_text"] = far.into();
    let document = Document::parse(&serde_json::to_vec(&payload).unwrap()).unwrap();
    store.ingest(&Scope::All, None, document).await.unwrap();
    for q in [
        "documents",
        "document",
        "zebraquux",
        "xylofoon",
        "\"xylofoon\"",
        "zqsite",
        "guide",
        "zqinstall",
        "div",
        "class",
        "hero",
        "banner",
        "hero-ban",
        "<div",
        "\"<div class=\"",
        "zlib",
        "local",
        "/usr/local/zl",
        "zqsite.example/guide",
        "\"https://docs.example.org/path/page\"",
        "don't",
        "3.14",
        "3.1",
        "42",
        "<div>",
        "zebraquux </documents>",
        "&amp;",
        "zebraquux &amp; \"https://\"",
        "zuser_zid",
        "zebraquux -<absent>",
        "banner-hero",
        "東京",
    ] {
        assert_eq!(runs_matching(&store, q).await, ["markup"], "{q}");
    }
    for q in ["\"banner-hero\"", "\"local/usr\"", "\"page/path\"", "zebraquux -<div>"] {
        assert_eq!(runs_matching(&store, q).await, Vec::<String>::new(), "{q}");
    }
    store.close().await;
}

#[tokio::test]
async fn words_are_found_in_new_and_old_runs() {
    let data = Data::new();
    let store = data.open().await;
    // There are more runs than one search reads. `common` is in all, `needle` in the oldest two, `tail` in the newest and the
    // oldest.
    let runs = "insert into runs (run_id, request_id, created_at, status, surface, mods, prompt_preview, output_preview,
            prompt_tokens, completion_tokens, cached_tokens, events, backtracked, forced, actions, errors, error_text,
            has_attention, surprise_strip, mod_text, search)
        select ('01900000-0000-7000-8000-' || lpad(to_hex(i), 12, '0'))::uuid, 'r' || i, now(),
            case when i = 1 then 'failed' else 'done' end, 'openai', '{}', '', '', 1, i, 0, 1, 0, 0, 0, 0, '', false, '', 'source',
            to_tsvector('simple', 'common' || case when i < 3 then ' the needle' else '' end
                || case when i in (1, 1200) then ' tail' else '' end)
        from generate_series(1, 1200) i";
    psql(&data.url(), runs).await;
    assert_eq!(runs_matching(&store, "needle").await, ["r2", "r1"]);
    assert_eq!(runs_matching(&store, "\"the needle\" -status:failed").await, ["r2"]);
    assert_eq!(runs_matching(&store, "tail common").await, ["r1200", "r1"]);
    assert_eq!(runs_matching(&store, "needle -tail").await, ["r2"]);
    assert_eq!(runs_matching(&store, "tail tokens<5").await, ["r1"]);
    let query = |before, limit| RunQuery { q: "comm".into(), before, limit };
    let (mut pages, mut before) = (Vec::new(), None);
    loop {
        let page = store.runs(&Scope::All, &query(before, 500)).await.unwrap();
        assert!(page.runs.iter().all(|run| run.mod_text.is_none()), "lists must not contain the texts of mods");
        pages.extend(page.runs.into_iter().map(|run| run.completion_tokens));
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    assert_eq!(pages, (1..=1200).rev().collect::<Vec<_>>(), "each run is listed once, newest first");
    let one = store.find(&Scope::All, "01900000-0000-7000-8000-000000000001").await.unwrap().unwrap();
    assert_eq!(one.mod_text.as_deref(), Some("source"));
    store.close().await;
}

/// Returns the SQL that inserts runs, of which a few have rare values; number 1 is the oldest. The store's maintenance does
/// not read them: their ids are of the year 2100, and `mod_call_names` is set.
fn insert_runs(count: u32) -> String {
    format!(
        "insert into runs (run_id, request_id, created_at, status, message, surface, model, mods, prompt_preview,
            output_preview, prompt_tokens, completion_tokens, cached_tokens, events, backtracked, forced, actions, errors,
            error_text, has_attention, surprise_strip, search, mod_call_names)
        select ('03bb2cc3-d800-7000-8000-' || lpad(to_hex(i), 12, '0'))::uuid, 'req-' || lpad(i::text, 6, '0'),
            timestamptz '2026-01-01' + i * interval '1 minute',
            case i % 1000 when 7 then 'failed' when 8 then 'cancelled' else 'done' end,
            case when i % 1000 = 7 then 'the Context is full' end, 'openai',
            case when i % 5000 = 9 then 'Rare-1B' when i % 5000 = 10 then 'rare-2b' when i % 2 = 0 then 'usual' end,
            case when i % 1000 = 3 then array['no-refusal', 'other'] else '{{}}' end, '', '', 1, 1, 0, 1,
            case when i % 1000 = 4 then 3 else 0 end, case when i % 1000 = 5 then 2 else 0 end, 0,
            case when i % 1000 = 6 then 1 else 0 end, case when i % 1000 = 6 then 'KeyError: 100%' else '' end,
            false, '', '', '{{}}'
        from generate_series(1, {count}) i;
        insert into run_keys (request_id, run_id) select request_id, run_id from runs;
        analyze runs; analyze run_keys"
    )
}

#[tokio::test]
async fn rare_values_are_found_without_reading_all_runs() {
    const COUNT: u32 = 20_000;
    const READ: &str =
        "select coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) from pg_stat_user_tables where relname = 'runs'";
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    // Autovacuum would change the counters.
    psql(&url, "alter table runs set (autovacuum_enabled = off)").await;
    psql(&url, &insert_runs(COUNT)).await;
    psql(&url, "vacuum runs").await;
    // PostgreSQL counts the reads of a connection when it closes, which can be after psql has ended.
    let writers = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
        and application_name = 'psql'";
    wait_for_psql(&url, writers, "0").await;
    let before_lists: u32 = psql(&url, READ).await.parse().unwrap();
    let runs_with = |remainder: u32, modulus: u32| -> Vec<String> {
        (1..=COUNT).rev().filter(|i| i % modulus == remainder).map(|i| format!("req-{i:06}")).collect()
    };
    let runs_with_either = |a: u32, b: u32, modulus: u32| -> Vec<String> {
        (1..=COUNT).rev().filter(|i| i % modulus == a || i % modulus == b).map(|i| format!("req-{i:06}")).collect()
    };
    let none: Vec<String> = Vec::new();
    let filters = [
        ("status:failed", runs_with(7, 1000)),
        ("status:interrupted", none.clone()),
        ("-status:done", runs_with_either(7, 8, 1000)),
        ("model:RARE", runs_with_either(9, 10, 5000)),
        ("model:rare-1", runs_with(9, 5000)),
        ("model:rare tokens>1", none.clone()),
        ("model:unknown", none.clone()),
        ("error:\"context is\"", runs_with(7, 1000)),
        ("error:100%", runs_with(6, 1000)),
        ("error:nothing", none.clone()),
        ("error>0", runs_with(6, 1000)),
        ("error>=2", none.clone()),
        ("backtracks>0", runs_with(4, 1000)),
        ("forced>1", runs_with(5, 1000)),
        ("backtracks>9 -status:done", none.clone()),
        ("mod:REFUSAL", runs_with(3, 1000)),
        ("mod:\"refusal other\"", none.clone()),
        ("request:req-012345", runs_with(12_345, COUNT)),
        ("request:nothing", none.clone()),
        ("before:2025-01-01", none.clone()),
        ("-model:usual -model:rare status:failed", runs_with(7, 1000)),
    ];
    let mut lists = u32::try_from(filters.len()).unwrap();
    for (q, expected) in filters {
        assert_eq!(runs_matching(&store, q).await, expected, "{q}");
    }
    // Each run is listed once, newest first, also over several pages.
    let (mut ids, mut before) = (Vec::new(), None);
    loop {
        let page = store.runs(&Scope::All, &RunQuery { q: "-status:done".into(), before, limit: 7 }).await.unwrap();
        lists += 1;
        ids.extend(page.runs.into_iter().map(|run| run.request_id));
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    assert_eq!(ids, runs_with_either(7, 8, 1000));

    store.close().await;
    let others = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
        and backend_type = 'client backend'";
    wait_for_psql(&url, others, "0").await;
    let rows = psql(&url, READ).await.parse::<u32>().unwrap() - before_lists;
    assert!(rows / lists < COUNT / 10, "{rows} rows were read for {lists} short lists");
}

#[tokio::test]
async fn lists_continue_below_deleted_runs_and_times_without_runs() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    psql(&url, &insert_runs(4500)).await;
    let move_runs = async |first: &str, runs: &str| {
        let run_id = format!("run_id = overlay(run_id::text placing '{first}' from 1 for 2)::uuid");
        psql(&url, &format!("update runs set {run_id} where {runs}")).await;
    };
    let list = async |q: &str, limit: u32| -> Vec<String> {
        let (mut ids, mut before) = (Vec::new(), None);
        for _ in 0..3 {
            let query = RunQuery { q: q.into(), before, limit };
            let page = timeout(Duration::from_mins(1), store.runs(&Scope::All, &query)).await;
            let page = page.unwrap_or_else(|_| panic!("{q}: the list does not end")).unwrap();
            ids.extend(page.runs.into_iter().map(|run| run.request_id));
            before = page.next;
            if before.is_none() {
                break;
            }
        }
        ids
    };
    // Two of the five matches are among the newest 1500 runs; the others are 35 years older.
    psql(&url, "update runs set labels = array['tag=rare'] where backtracked > 0").await;
    move_runs("02", "request_id <= 'req-003000'").await;
    let matches = ["req-004004", "req-003004", "req-002004", "req-001004", "req-000004"];
    assert_eq!(list("tag:rare", 10).await, matches);
    // First with consecutive ids, then with a large distance between the first two.
    let delete =
        "update runs set deletion = 'ffffffff-ffff-7fff-bfff-ffffffffffff' where request_id between 'req-004497'
        and 'req-004499'";
    psql(&url, delete).await;
    let newest = ["req-004500", "req-004496", "req-004495"];
    assert_eq!(list("", 1).await, newest);
    move_runs("04", "request_id = 'req-004500'").await;
    assert_eq!(list("", 1).await, newest);
    store.close().await;
}

#[tokio::test]
async fn model_with_any_name_is_recorded_and_found() {
    let data = Data::new();
    let store = data.open().await;
    // The name is larger than an index entry, and not compressible.
    let mut state = 1_u64;
    let first: String = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(b'a' + u8::try_from((state >> 33) % 26).unwrap())
    })
    .take(9000)
    .collect();
    let second = format!("{}-tail", &first[..150]);
    for (request_id, model) in [("long-1", &first), ("long-2", &second)] {
        let mut payload: serde_json::Value = serde_json::from_slice(&super::payload(request_id, 2)).unwrap();
        payload["request"]["model"] = model.as_str().into();
        let document = Document::parse(&serde_json::to_vec(&payload).unwrap()).unwrap();
        store.ingest(&Scope::All, None, document).await.unwrap();
    }
    assert_eq!(
        runs_matching(&store, &format!("model:{}", &first[..40])).await,
        ["long-2", "long-1"],
        "both names have the same beginning"
    );
    assert_eq!(runs_matching(&store, "model:-TAIL").await, ["long-2"], "the text is after the indexed part");
    assert_eq!(runs_matching(&store, "model:-head").await, Vec::<String>::new());
    store.close().await;
}

#[tokio::test]
async fn model_name_length_is_limited() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    psql(&url, &insert_runs(20)).await;
    psql(&url, "update runs set model = '' where request_id = 'req-000001'").await;
    let names = |max: u32| format!("select string_agg(name, '|') from model_names({max}) name");
    assert_eq!(psql(&url, &names(9)).await, "|Rare-1B|rare-2b|usual", "an empty name is a name");
    assert_eq!(psql(&url, &names(2)).await, "|Rare-1B");
    store.close().await;
}

#[tokio::test]
async fn older_database_is_migrated_and_logged() {
    let data = Data::empty();
    let url = data.url();
    let output = std::sync::Mutex::new(Vec::new());
    let open =
        async || Store::open(data.database(), |text| output.lock().unwrap().push(text.to_owned())).await.unwrap();
    open().await.close().await;
    assert!(output.lock().unwrap().is_empty(), "a new database needs no migration: {output:?}");
    psql(
        &url,
        "delete from refinery_schema_history where version >= 7; alter table runs drop column deletion, drop column request_extras, drop column owner, drop column end_cause,
            drop column parent_run, drop column parent_event, drop column parent_step, drop column parent_change, drop column user_notes, drop column mod_call_names,
            drop column mod_call_counts, drop column mod_call_us, drop column mod_call_max_us;
        alter table attention drop column head_rows;
        insert into runs (run_id, request_id, created_at, status, finish_reason, message, surface, mods, prompt_preview,
                output_preview, prompt_tokens, completion_tokens, cached_tokens, events, backtracked, forced, actions, errors,
                error_text, has_attention, surprise_strip, search)
            select gen_random_uuid(), name, now(), status, reason, message, 'cli', '{}', '', '', 1, 0, 0, 0, 0, 0, 0, 0, '', false, '', ''
            from (values ('stopped', 'cancelled', 'cancelled', 'the client stopped it; mod x is off'),
                ('late', 'cancelled', 'cancelled', 'the time is over'),
                ('gone', 'cancelled', 'cancelled', 'the client disconnected'),
                ('full', 'failed', 'error', 'llama.cpp cannot decode: out of memory; use a smaller --ctx-size')
            ) old (name, status, reason, message);
        insert into responses values ('r', gen_random_uuid(), now(), 'key-0123ab', '{}', '[]'), ('s', gen_random_uuid(), now(), 'ann', '{}', '[]'); drop table servers, shared_secrets, saved_filters, experiment_cells, experiments, run_stats, first_token_stats, run_stats_days, mod_call_stats, run_images, images, run_stats_by_day, first_token_stats_by_day, mod_call_stats_by_day, run_stats_hours, removed_runs, removed_days, counted_runs; drop function remove_images, sum_statistics, lock_runs, lock_days;
        alter table runs drop column metadata, drop column labels, drop column final_tokens, drop column final_actions;
        drop index runs_user, runs_surface, runs_error_count, runs_backtracked, runs_forced; drop index if exists runs_error_text;
        drop function mod_sets;
        drop function mod_set cascade; drop function is_displaced cascade;
        drop index runs_status, runs_model, runs_errors, runs_changed; drop index if exists run_keys_contain; drop extension if exists pg_trgm;
        create index runs_running on runs (run_id) where status = 'running'",
    )
    .await;
    let store = open().await;
    let ann = Scope::Owned { tenant: Some("ann".into()), includes_unowned: true };
    assert!(store.response(&ann, "s").await.unwrap().is_some());
    assert!(store.response(&ann, "r").await.unwrap().is_some(), "the label of a key without a name is not a tenant");
    store.close().await;
    let causes = "select string_agg(coalesce(end_cause, '-'), ' ' order by request_id) from runs";
    assert_eq!(psql(&url, causes).await, "out_of_memory - timeout client_stop");
    assert_eq!(
        *output.lock().unwrap(),
        [
            "bringing the database up to date: V7__list_indexes, V8__request_extras, V9__owners, V11__servers, V12__citus, V13__filters, V14__end_cause, V15__parents, V16__head_rows, V17__tags, V18__statistics, V19__experiments, V20__run_list, V21__notes, V22__mod_call_time, V23__images, V24__statistics_by_day, V25__removed_runs, V26__counted_runs"
        ]
    );
}

#[tokio::test]
async fn tags_lock_runs_in_order_of_their_ids() {
    let data = Data::new();
    let store = data.open().await;
    let mut ids = Vec::new();
    for number in 0..2 {
        ids.push(store.ingest(&Scope::All, None, document(&format!("tagged-{number}"), 3)).await.unwrap().run_id);
    }
    ids.sort_unstable();
    let mut blocker = PgConnection::connect(&data.url()).await.unwrap();
    sqlx::raw_sql("begin").execute(&mut blocker).await.unwrap();
    sqlx::query("select 1 from runs where run_id = $1 for update").bind(ids[0].0).execute(&mut blocker).await.unwrap();
    let (other, tags) = (store.clone(), ["checked".to_owned()]);
    let reversed = [ids[1], ids[0]];
    let change = tokio::spawn(async move { other.change_tags(&Scope::All, &reversed, &tags, &[]).await.unwrap() });
    let waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like 'update runs%'";
    wait_for_psql(&data.url(), waiting, "1").await;
    // The change waits for the first run and has not locked the second one.
    let free = format!("select 1 from runs where run_id = '{}' for no key update nowait", ids[1]);
    assert_eq!(psql(&data.url(), &free).await, "1");
    sqlx::raw_sql("rollback").execute(&mut blocker).await.unwrap();
    let changed = change.await.unwrap();
    assert_eq!(changed.iter().map(|run| run.run_id).collect::<Vec<_>>(), ids);
    assert!(changed.iter().all(|run| run.tags == ["checked"]), "{changed:?}");
    blocker.close().await.unwrap();
    store.close().await;
}

/// Requests end at any moment because clients disconnect. A connection that a cancelled read left inside its read-only
/// transaction would fail the next writes.
#[tokio::test]
async fn cancelled_reads_leave_no_connection_in_a_transaction() {
    let data = Data::new();
    let store = data.open().await;
    let stored = store.ingest(&Scope::All, None, document("doc", 3)).await.unwrap();
    let reads = || futures::future::join_all((0..4).map(|_| store.items(&Scope::All, stored.run_id, 0..10)));
    reads().await;
    for round in 0..100 {
        let begun = Instant::now();
        // A timer has a resolution of one millisecond, which is longer than the read.
        let cancel = async {
            while begun.elapsed() < Duration::from_micros(40 * round) {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = cancel => {}
            _ = reads() => {}
        }
        for ready in futures::future::join_all((0..4).map(|_| store.ready())).await {
            ready.unwrap();
        }
    }
    store.close().await;
}
