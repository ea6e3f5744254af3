//! Statistics of runs: each past day is counted once and stored; other days are counted when they are read.

use super::{Data, psql, wait_for_psql};
use chrono::{Days, NaiveDate, TimeDelta};
use sqlx::{Connection, PgConnection};
use thunder::events::{Scope, Tenant};
use thunder::store::{CallTime, HourCount, ModCallStatistics, Statistics, StatisticsQuery, Store};

/// 288 ended runs, one every 15 minutes of three days, and a running one. Each tenth is ingested and very slow. The days are in the future, because the store's
/// maintenance counts past days.
const RUNS: &str = "
    insert into runs (run_id, request_id, created_at, status, finish_reason, surface, model, owner, mods, prompt_preview,
        output_preview, prompt_tokens, completion_tokens, cached_tokens, events, backtracked, forced, actions, errors,
        error_text, first_token_us, generation_us, has_attention, surprise_strip, search)
    select (lpad(to_hex(4102444800000 + n * 900000), 12, '0') || '70008000' || lpad(to_hex(n), 12, '0'))::uuid, 'r' || n,
        timestamptz '2100-01-01 00:00Z' + n * interval '15 minutes',
        case when n = 100 then 'running' when n % 7 = 0 then 'failed' when n % 11 = 0 then 'cancelled' else 'done' end,
        case when n % 7 = 0 then 'error' when n % 11 = 0 then 'cancelled' when n % 5 = 0 then 'length' else 'stop' end,
        case when n % 10 = 1 then 'ingest' else 'openai' end, case n % 3 when 0 then 'a' when 1 then 'b' end, case when n % 2 = 0 then 'ann' end,
        (array['{}', '{x}', '{x,y}', '{x,x}'])[1 + n % 4]::text[], '', '', n, 2 * n, n % 5, 9, n % 6, n % 9, 1, n % 13, '',
        case when n % 10 = 1 then 9000000000 when n % 10 > 0 then 1000 * n end,
        case when n % 10 = 1 then 10000000000000 when n % 10 > 1 then 100000 end, false, '', ''
    from generate_series(0, 288) n";

fn today() -> NaiveDate {
    NaiveDate::from_ymd_opt(2100, 1, 4).unwrap()
}

async fn read(store: &Store, scope: &Scope, query: &StatisticsQuery) -> Statistics {
    store.statistics(scope, query, today()).await.unwrap()
}

fn queries() -> Vec<StatisticsQuery> {
    let mut queries: Vec<StatisticsQuery> =
        [None, Some(1), Some(3), Some(30)].map(|days| StatisticsQuery::last_days(days, today())).to_vec();
    queries.push(StatisticsQuery { model: Some("a".into()), ..queries[0].clone() });
    queries.push(StatisticsQuery { used_mod: Some("x".into()), ..queries[2].clone() });
    queries
}

#[tokio::test]
async fn counted_days_have_the_statistics_of_their_runs() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    psql(&url, RUNS).await;
    let ann = Scope::Owned { tenant: Some(Tenant::from("ann")), includes_unowned: false };
    let everyone = Scope::All;
    let mut before = Vec::new();
    for scope in [&everyone, &ann] {
        for query in &queries() {
            before.push(read(&store, scope, query).await);
        }
    }
    let (all, one_day, model_a, with_x) = (&before[0], &before[1], &before[4], &before[5]);
    assert_eq!((all.total.counts.runs, all.total.counts.failed), (288, 42), "the running run is not counted");
    assert_eq!(all.total.counts.completion_tokens, 2 * (288 * 289 / 2 - 100));
    assert_eq!(all.steps.len(), 4);
    assert_eq!(one_day.total.counts.runs, 1, "run 288 began at midnight");
    assert_eq!(model_a.total.counts.runs, 97);
    assert_eq!(model_a.models.len(), 1);
    // A run that names a mod twice counts once for it.
    assert_eq!(with_x.total.counts.runs, with_x.mods[0].with.counts.runs);
    let x = &all.mods[0];
    assert_eq!((x.name.as_str(), x.with.counts.runs, x.without.counts.runs), ("x", 216, 72));
    let median = all.total.first_token_ms_p50.unwrap();
    assert!((median / 144.0 - 1.0).abs() < 0.1, "{median}");
    assert!(all.total.first_token_ms_p95.unwrap() < 300.0, "durations of ingested runs do not count");
    let (tokens, runs) = (0..=288_i64).filter(|n| n % 10 > 1 && *n != 100).fold((0, 0), |(t, r), n| (t + 2 * n, r + 1));
    assert_eq!(all.total.tokens_per_second, Some(f64::from(i32::try_from(tokens).unwrap()) / (0.1 * f64::from(runs))));
    assert_eq!(before[6].total.counts.runs, 144, "the runs of one tenant");

    // Two servers count at the same time.
    let other = data.open().await;
    let (first, second) = tokio::join!(store.count_days(today()), other.count_days(today()));
    first.and(second).unwrap();
    let mut after = Vec::new();
    for scope in [&everyone, &ann] {
        for query in &queries() {
            after.push(read(&store, scope, query).await);
        }
    }
    assert_eq!(before, after);

    // A server of an earlier version counts a day without its sums.
    psql(&url, "delete from run_stats_by_day; delete from first_token_stats_by_day").await;
    assert_ne!(read(&store, &everyone, &queries()[0]).await, *all);
    store.count_days(today()).await.unwrap();
    assert_eq!(read(&store, &everyone, &queries()[0]).await, *all);

    // Deletions keep the counts of past days; runs that are stored late are added.
    psql(&url, "delete from runs where request_id = 'r5'").await;
    store.count_days(today()).await.unwrap();
    assert_eq!(read(&store, &everyone, &queries()[0]).await, *all);
    psql(&url, "update runs set status = 'done' where request_id = 'r100'").await;
    psql(&url, &RUNS.replace("(0, 288) n", "(5, 5) n")).await;
    store.count_days(today()).await.unwrap();
    assert_eq!(read(&store, &everyone, &queries()[0]).await.total.counts.runs, 289);
    let later = today() + Days::new(400);
    psql(&url, "delete from runs").await;
    let kept = store.statistics(&everyone, &StatisticsQuery::last_days(None, later), later).await.unwrap();
    assert_eq!(kept.total.counts.runs, 288, "counts of past days outlive the runs; the last day was not counted");
    other.close().await;
    store.close().await;
}

#[tokio::test]
async fn late_runs_are_added_to_an_hour_with_deleted_runs() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    psql(&url, RUNS).await;
    let runs = async || {
        store.count_days(today()).await.unwrap();
        read(&store, &Scope::All, &queries()[0]).await.total.counts.runs
    };
    assert_eq!(runs().await, 288);
    // Runs 4 to 7 are of one hour.
    let insert_late = |first: u32, last: u32| {
        let runs = RUNS.replace("(0, 288) n", &format!("({first}, {last}) n"));
        runs.replace("to_hex(n)", &format!("to_hex(n + 1000 * {last})"))
            .replace("'r' || n", &format!("'late{last}-' || n"))
    };
    psql(&url, "delete from runs where request_id in ('r4', 'r5', 'r6')").await;
    psql(&url, &insert_late(4, 4)).await;
    assert_eq!(runs().await, 289, "fewer late runs than deleted ones");
    psql(&url, &insert_late(4, 7)).await;
    assert_eq!(runs().await, 293, "more late runs than deleted ones");
    assert_eq!(runs().await, 293, "each run is counted once");
    store.close().await;
}

/// Three calls of `x` and one of `y` in each run that has the mod, and calls with durations that do not count.
const CALLS: &str = "
    insert into mod_calls (run_id, call_index, event_sequence_order, mod_name, event_type, step, execution_time_ms,
        exception_occurred)
    select run_id, i, 0, m, 'Added', 0, ms, false from runs, (values (0, 'x', 1.5), (1, 'x', 0.25), (2, 'x', 10),
        (3, 'y', 2), (4, 'y', 'NaN'), (5, 'x', -1), (6, 'y', 'infinity'), (7, 'x', null)) as c (i, m, ms)
    where m = any(mods)";

/// Deletes the stored statistics, so that every day is counted when it is read.
const DELETE_STATISTICS: &str = "delete from run_stats; delete from first_token_stats; delete from mod_call_stats;
    delete from run_stats_by_day; delete from first_token_stats_by_day; delete from mod_call_stats_by_day;
    delete from run_stats_days; delete from run_stats_hours; delete from counted_runs";

fn calls<'a>(statistics: &'a Statistics, name: &str) -> &'a ModCallStatistics {
    statistics.mod_calls.iter().find(|one| one.name == name).unwrap()
}

#[tokio::test]
async fn mod_call_time_is_counted_once_per_past_day() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    // The store's maintenance measures runs, unless another connection has this lock.
    let mut lock_holder = PgConnection::connect(&url).await.unwrap();
    sqlx::raw_sql("select pg_advisory_lock(7237120550122)").execute(&mut lock_holder).await.unwrap();
    psql(&url, RUNS).await;
    psql(&url, CALLS).await;
    let query = &queries()[0];
    assert_eq!(read(&store, &Scope::All, query).await.mod_calls, [], "runs of earlier versions are not measured yet");
    sqlx::raw_sql("select pg_advisory_unlock(7237120550122)").execute(&mut lock_holder).await.unwrap();
    lock_holder.close().await.unwrap();

    // Two servers measure and count at the same time.
    let other = data.open().await;
    let (first, second) = tokio::join!(store.count_days(today()), other.count_days(today()));
    first.and(second).unwrap();
    wait_for_psql(&url, "select count(*) from runs where status <> 'running' and mod_call_names is null", "0").await;
    let all = read(&store, &Scope::All, query).await;
    // 288 ended runs: 216 with x, 72 with y. Run 288 is of a day that is not counted.
    let x = calls(&all, "x");
    assert_eq!(x.time, CallTime { calls: 648, total_ms: 216.0 * 11.75, mean_ms: 11.75 / 3.0, max_ms: 10.0 });
    assert_eq!(calls(&all, "y").time, CallTime { calls: 72, total_ms: 144.0, mean_ms: 2.0, max_ms: 2.0 });
    assert_eq!(all.mod_calls[0].name, "x", "the largest total is first");
    assert_eq!(x.steps.iter().map(|step| step.time.calls).sum::<i64>(), 648);
    assert_eq!((x.steps.len(), x.models.len()), (3, 3));
    let ann = Scope::Owned { tenant: Some(Tenant::from("ann")), includes_unowned: false };
    let mut after = Vec::new();
    for scope in [&Scope::All, &ann] {
        for query in &queries() {
            after.push(read(&store, scope, query).await);
        }
    }
    let with_x = &after[5];
    assert_eq!(with_x.mod_calls.iter().map(|one| &*one.name).collect::<Vec<_>>(), ["x"]);
    // Ann's runs have even numbers, so each has either no mod or both x and y.
    assert_eq!(calls(&after[6], "x").time.calls + calls(&after[6], "y").time.calls, 4 * 72);
    assert_eq!(calls(&after[4], "x").models.len(), 1, "the query names a model");
    psql(&url, DELETE_STATISTICS).await;
    let mut before = Vec::new();
    for scope in [&Scope::All, &ann] {
        for query in &queries() {
            before.push(read(&store, scope, query).await);
        }
    }
    assert_eq!(before, after);

    // Deletions keep the durations of past days.
    store.count_days(today()).await.unwrap();
    psql(&url, "delete from runs where request_id = 'r6'").await;
    store.count_days(today()).await.unwrap();
    assert_eq!(read(&store, &Scope::All, query).await, all);

    // An earlier version counted the days, and runs were deleted since then.
    psql(&url, "update run_stats_days set has_mod_calls = false; delete from mod_call_stats").await;
    store.count_days(today()).await.unwrap();
    let upgraded = read(&store, &Scope::All, query).await;
    assert_eq!((upgraded.total.counts.runs, calls(&upgraded, "x").time.calls), (288, 645));

    // A run that ends late is added.
    let end =
        "update runs set status = 'done', mod_call_names = '{x}', mod_call_counts = '{7}', mod_call_us = '{14000}',
        mod_call_max_us = '{2000}' where request_id = 'r100'";
    psql(&url, end).await;
    store.count_days(today()).await.unwrap();
    let late = read(&store, &Scope::All, query).await;
    assert_eq!((late.total.counts.runs, calls(&late, "x").time.calls), (289, 652));
    other.close().await;
    store.close().await;
}

#[tokio::test]
async fn hours_with_many_runs_are_counted_before_their_day() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    let dense = RUNS.replace("900000", "12000").replace("15 minutes", "12 seconds");
    psql(&url, &dense).await;
    let end = "update runs set status = 'done', mod_call_names = mods, mod_call_counts = array_fill(3, array[cardinality(mods)]),
        mod_call_us = array_fill(9, array[cardinality(mods)]), mod_call_max_us = array_fill(5, array[cardinality(mods)])";
    psql(&url, &format!("{end} where request_id <> 'r100'")).await;
    let (day, now) = (today() - Days::new(3), (today() - Days::new(3)).and_hms_opt(2, 0, 0).unwrap().and_utc());
    let read_all = async || {
        let mut read = Vec::new();
        let last_days = [None, Some(1), Some(30)].map(|days| StatisticsQuery::last_days(days, day));
        let with_x = StatisticsQuery { used_mod: Some("x".into()), ..last_days[0].clone() };
        for query in last_days.iter().chain([&with_x]) {
            read.push(store.statistics(&Scope::All, query, day).await.unwrap());
        }
        read
    };
    let runs = async || read_all().await[0].total.counts.runs;

    store.count_hours(now, HourCount::New).await.unwrap();
    psql(&url, "delete from runs where request_id = 'r5'").await;
    assert_eq!(runs().await, 287, "an hour with a running run is not counted");
    psql(&url, &format!("{end} where request_id = 'r100'")).await;
    store.count_hours(now - TimeDelta::minutes(51), HourCount::New).await.unwrap();
    psql(&url, "delete from runs where request_id = 'r6'").await;
    assert_eq!(runs().await, 287, "the hour ended less than ten minutes ago");
    let before = read_all().await;
    store.count_hours(now, HourCount::New).await.unwrap();
    assert_eq!(read_all().await, before);

    psql(&url, "delete from runs where request_id = 'r7'").await;
    assert_eq!(read_all().await, before, "deletions keep the counts");
    psql(&url, &dense.replace("(0, 288) n", "(5, 7) n")).await;
    psql(&url, end).await;
    store.count_hours(now, HourCount::New).await.unwrap();
    assert_eq!(runs().await, 287, "counted once");
    store.count_hours(now, HourCount::All).await.unwrap();
    assert_eq!(runs().await, 289, "runs that were stored late are added");

    // The second hour has few runs, so only the first one is counted before the day.
    psql(&url, &dense.replace("(0, 288) n", "(301, 310) n")).await;
    psql(&url, end).await;
    let all = read_all().await;
    assert_eq!(all[0].total.counts.runs, 299);
    psql(&url, "delete from runs where request_id in ('r8', 'r9', 'r10')").await;
    assert_eq!(read_all().await, all);
    store.count_days(day + Days::new(1)).await.unwrap();
    assert_eq!(read_all().await, all, "the count of the day keeps deleted runs of the counted hour");
    assert_eq!(psql(&url, "select runs from run_stats_days").await, "299");
    assert_eq!(psql(&url, "select count(*) from run_stats_hours").await, "0");
    psql(&url, &dense.replace("(0, 288) n", "(311, 311) n")).await;
    psql(&url, end).await;
    store.count_days(day + Days::new(1)).await.unwrap();
    assert_eq!(runs().await, 300, "a run that was stored late is added to the deleted ones");
    let all = read_all().await;
    psql(&url, "delete from runs").await;
    assert_eq!(read_all().await, all, "the day is counted");
    store.close().await;
}

/// Names with 4,000 random characters, which cannot be compressed to the maximum size of a key.
const LONG_NAMES: &str = "
    with random_name as materialized
        (select string_agg(chr(33 + floor(random() * 90)::integer), '') as name from generate_series(1, 4000))
    update runs set model = name, mods = array[name, name || 'x', 'x', name], mod_call_names = array[name, name || 'x'],
        mod_call_counts = '{2,3}', mod_call_us = '{20,30}', mod_call_max_us = '{5,6}'
    from random_name where request_id in ('r3', 'r5')";

#[tokio::test]
async fn runs_with_long_names_are_counted_with_shortened_names() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    psql(&url, RUNS).await;
    psql(&url, LONG_NAMES).await;
    let name = psql(&url, "select model from runs where request_id = 'r3'").await;
    assert_eq!(name.len(), 4000);
    let mut queries = queries();
    queries.push(StatisticsQuery { model: Some(name.clone()), ..queries[0].clone() });
    queries.push(StatisticsQuery { used_mod: Some(format!("{name}x")), ..queries[0].clone() });
    let mut before = Vec::new();
    for query in &queries {
        before.push(read(&store, &Scope::All, query).await);
    }
    let short = &name[..100];
    let (all, of_model, with_mod) = (&before[0], &before[6], &before[7]);
    assert_eq!(all.total.counts.runs, 288);
    assert_eq!(all.models.iter().find(|one| one.model == short).unwrap().statistics.counts.runs, 2);
    let used = all.mods.iter().find(|one| one.name == short).unwrap();
    assert_eq!(used.with.counts.runs, 2, "names with the same beginning are one mod of a run");
    assert_eq!(calls(all, short).time.calls, 10);
    assert_eq!((of_model.total.counts.runs, with_mod.total.counts.runs), (2, 2));
    assert_eq!((calls(of_model, short).time.calls, calls(with_mod, short).time.calls), (10, 10));

    store.count_days(today()).await.unwrap();
    assert_eq!(psql(&url, "select count(*) from run_stats_days where has_mod_calls").await, "3");
    let mut after = Vec::new();
    for query in &queries {
        after.push(read(&store, &Scope::All, query).await);
    }
    assert_eq!(before, after);
    store.close().await;
}

#[tokio::test]
async fn day_that_cannot_be_counted_does_not_stop_the_others() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    psql(&url, RUNS).await;
    let before = read(&store, &Scope::All, &queries()[0]).await;
    let check = "alter table run_stats add constraint failing check (hour < '2100-01-02 00:00Z' or hour >= '2100-01-03 00:00Z')";
    psql(&url, check).await;
    let error = store.count_days(today()).await.unwrap_err().to_string();
    assert!(error.contains("failing"), "{error}");
    let counted = "select string_agg(day::text, ' ' order by day) from run_stats_days";
    assert_eq!(psql(&url, counted).await, "2100-01-01 2100-01-03");
    assert_eq!(read(&store, &Scope::All, &queries()[0]).await, before);
    psql(&url, "alter table run_stats drop constraint failing").await;
    store.count_days(today()).await.unwrap();
    assert_eq!(psql(&url, counted).await, "2100-01-01 2100-01-02 2100-01-03");
    store.close().await;
}
