//! Cost of `/ingest`: a payload of 256 generated tokens (about 2500 rows) posted to a server over HTTP, and parsed and
//! stored without HTTP, is compared with a binary COPY of the same rows into the same tables. The sides alternate,
//! so that other load on the machine affects all; the table shows medians and rates.
//!
//! `cargo bench --bench ingest -- [--database-url URL] [--rounds N]`; without a URL it uses an embedded server.

#[path = "shared/median.rs"]
mod median;

use clap::Parser;
use median::median;
use serde_json::json;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPoolCopyExt};
use sqlx::{Connection, PgPool};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thunder::config::Config;
use thunder::config::flags::{DataFlags, EngineFlags, ServerFlags};
use thunder::events::{RunId, Scope, system};
use thunder::mods::ModRegistry;
use thunder::server::{App, Listeners, ServerState};
use thunder::store::{Database, Store};
use thunder::trace::columns;
use thunder::trace::document::Document;
use thunder::trace::fold::Fold;

const TOKENS: usize = 256;
const COPY_OUT: [&str; 4] = [
    "copy (select e.* from events e where run_id = (select run_id from run_keys where request_id = 'sample')) to stdout (format binary)",
    "copy (select c.* from mod_calls c where run_id = (select run_id from run_keys where request_id = 'sample')) to stdout (format binary)",
    "copy (select l.* from mod_logs l where run_id = (select run_id from run_keys where request_id = 'sample')) to stdout (format binary)",
    "copy (select a.* from actions a where run_id = (select run_id from run_keys where request_id = 'sample')) to stdout (format binary)",
];
const COPY_IN: [&str; 4] = [
    "copy events from stdin (format binary)",
    "copy mod_calls from stdin (format binary)",
    "copy mod_logs from stdin (format binary)",
    "copy actions from stdin (format binary)",
];

#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    data: DataFlags,
    #[command(flatten)]
    server: ServerFlags,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let option = |name: &str| Some(arguments[arguments.iter().position(|argument| argument == name)? + 1].clone());
    let rounds: usize = option("--rounds").map_or(60, |rounds| rounds.parse().expect("a number of rounds"));
    let data_dir = std::env::temp_dir().join(format!("thunder-bench-{}", RunId::now()));
    let database = match option("--database-url") {
        Some(url) => Database::Url { url, direct_url: None, data_dir: data_dir.clone() },
        None => Database::Embedded { data_dir: data_dir.clone() },
    };
    let store = Store::open(database, |_| {}).await.expect("the store opens");
    let options = option("--database-url").map_or_else(|| embedded(&data_dir), |url| PgConnectOptions::from_str(&url));
    let options = options.expect("an address");
    let app = serve(&store).await;
    measure(&store, &app.1, options, rounds).await;
    app.0.set_state(ServerState::Stopping);
    store.close().await;
    let _ = std::fs::remove_dir_all(data_dir);
}

fn embedded(data_dir: &std::path::Path) -> Result<PgConnectOptions, sqlx::Error> {
    let file = std::fs::read_to_string(data_dir.join("postgres/data/postmaster.pid"))?;
    let socket = PathBuf::from(file.lines().nth(4).unwrap_or_default());
    Ok(PgConnectOptions::new_without_pgpass().socket(socket).username("thunder").database("thunder"))
}

/// Starts a server in this process. Returns it and the URL of its `/ingest`.
async fn serve(store: &Store) -> (App, String) {
    let flags = CommandLine::parse_from(["thunder", "--listen", "127.0.0.1:0"]);
    let config = Arc::new(Config::new(flags.engine, flags.data, &flags.server).expect("a configuration"));
    let listeners = Listeners::bind(&config.server.listen).await.expect("a free port");
    let url = format!("http://{}/ingest", listeners.addresses()[0]);
    let app = App::new(config, Arc::new(ModRegistry::with_builtin()), system::now);
    app.set_database(store.clone());
    app.set_state(ServerState::Ready);
    tokio::spawn(listeners.serve(app.clone(), thunder::api::router(&app, &thunder::ui::pages())));
    (app, url)
}

async fn measure(store: &Store, url: &str, options: PgConnectOptions, rounds: usize) {
    let sample = Document::parse(&payload("sample")).expect("a document");
    let rows = sample.events.len() + sample.mod_calls.len() + sample.mod_logs.len() + sample.actions.len();
    store.ingest(&Scope::All, None, sample).await.expect("ingested");
    let pool = PgPool::connect_with(options.clone()).await.expect("connected");
    let mut tables = Vec::new();
    for statement in COPY_OUT {
        let mut bytes = Vec::new();
        let mut copy = pool.copy_out_raw(statement).await.expect("copied");
        while let Some(chunk) = futures::StreamExt::next(&mut copy).await {
            bytes.extend_from_slice(&chunk.expect("copied"));
        }
        tables.push(bytes);
    }
    let mut connection = PgConnection::connect_with(&options).await.expect("connected");
    let (mut bare, mut ingest, mut parse) = (Vec::new(), Vec::new(), Vec::new());
    let (mut fingerprint, mut fold, mut http) = (Vec::new(), Vec::new(), Vec::new());
    // An error means that a provider is already installed.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::new();
    let prefix = RunId::now();
    for round in 0..rounds + 5 {
        let run_id = RunId::now();
        tables.iter_mut().for_each(|table| set_run_id(table, run_id));
        let begun = Instant::now();
        let mut transaction = connection.begin().await.expect("begun");
        for (statement, table) in COPY_IN.into_iter().zip(&tables) {
            let mut copy = transaction.copy_in_raw(statement).await.expect("copied");
            copy.send(table.as_slice()).await.expect("copied");
            copy.finish().await.expect("copied");
        }
        transaction.commit().await.expect("committed");
        let bare_took = begun.elapsed();

        let payload = payload(&format!("{prefix}-{round}"));
        let separate = Document::parse(&payload).expect("a document");
        let begun = Instant::now();
        std::hint::black_box(separate.fingerprint());
        fingerprint.push(begun.elapsed());
        let begun = Instant::now();
        let mut folded = Fold::new();
        separate.items().iter().for_each(|item| folded.apply(item));
        std::hint::black_box(columns::encode(&folded));
        fold.push(begun.elapsed());
        drop(separate);
        let begun = Instant::now();
        let document = Document::parse(&payload).expect("a document");
        let parse_took = begun.elapsed();
        store.ingest(&Scope::All, None, document).await.expect("ingested");
        let ingest_took = begun.elapsed();

        let body = self::payload(&format!("{prefix}-{round}-http"));
        let begun = Instant::now();
        let answer = client.post(url).body(body).send().await.expect("an answer");
        assert_eq!(answer.status(), 201);
        let http_took = begun.elapsed();
        // The first rounds fill caches and plans.
        if round >= 5 {
            bare.push(bare_took);
            ingest.push(ingest_took);
            http.push(http_took);
            parse.push(parse_took);
        }
    }
    let (bare, http, ingest, parse) = (median(bare), median(http), median(ingest), median(parse));
    println!("{rows} rows a payload, {rounds} rounds, medians");
    let parts = [
        ("bare binary COPY", bare),
        ("POST /ingest", http),
        ("parse + ingest", ingest),
        ("  parse", parse),
        ("  fingerprint", median(fingerprint)),
        ("  fold, columns", median(fold)),
    ];
    for (name, took) in parts {
        println!("{name:<18} {:>8.2} ms {:>9.0} rows/s", took.as_secs_f64() * 1e3, rows as f64 / took.as_secs_f64());
    }
    let of_bare = |took: Duration| 100.0 * bare.as_secs_f64() / took.as_secs_f64();
    println!("of the rate of COPY: over HTTP {:.0}%, without HTTP {:.0}%", of_bare(http), of_bare(ingest));
    drop(connection);
    pool.close().await;
}

/// Replaces the `run_id`, the first field, of every tuple of a binary COPY.
fn set_run_id(table: &mut [u8], run_id: RunId) {
    const HEADER: usize = 19;
    let mut at = HEADER;
    loop {
        let fields = i16::from_be_bytes([table[at], table[at + 1]]);
        if fields < 0 {
            return;
        }
        at += 2;
        table[at + 4..at + 20].copy_from_slice(run_id.0.as_bytes());
        for _ in 0..fields {
            let length = i32::from_be_bytes([table[at], table[at + 1], table[at + 2], table[at + 3]]);
            at += 4 + usize::try_from(length).unwrap_or(0);
        }
    }
}

fn payload(request_id: &str) -> Vec<u8> {
    let mut events = vec![json!({"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 12,
        "tokens_so_far_len": 0, "max_steps": TOKENS, "created_at": "2025-12-01T18:30:00Z"})];
    for step in 1..=TOKENS {
        let top: Vec<_> = (0..10).map(|i| json!({"token": step * 10 + i, "prob": 0.5 / (i as f64 + 1.0)})).collect();
        let order = events.len();
        events.push(json!({"event_type": "ForwardPass", "step": step, "sequence_order": order,
            "input_text": "Once upon a time there was a small engine that could run backwards, an", "top_tokens": top,
            "created_at": "2025-12-01T18:30:01.5Z", "details": {"step": step, "logits": {"shape": [1, 32000]}}}));
        events.push(json!({"event_type": "Sampled", "step": step, "sequence_order": order + 1, "sampled_token": step,
            "created_at": "2025-12-01T18:30:01.5Z", "token_text": format!(" w{step}"), "details": {"step": step, "sampled": step}}));
        events.push(json!({"event_type": "Added", "step": step, "sequence_order": order + 2, "added_tokens": [step],
            "created_at": "2025-12-01T18:30:01.5Z", "added_token_count": 1, "forced": false, "details": {"step": step}}));
    }
    let calls: Vec<_> = events
        .iter()
        .map(|event| {
            json!({"event_sequence_order": event["sequence_order"], "mod_name": "watcher", "event_type": event["event_type"],
                "step": event["step"], "created_at": "2025-12-01T18:30:01.5Z", "execution_time_ms": 0.25, "exception_occurred": false})
        })
        .collect();
    let logs: Vec<_> = (0..calls.len())
        .step_by(4)
        .map(|call| json!({"mod_call_sequence": call, "mod_name": "watcher", "log_message": format!("call {call}"), "log_level": "DEBUG"}))
        .collect();
    let actions: Vec<_> = (0..calls.len())
        .map(|call| json!({"mod_call_sequence": call, "action_type": "Noop", "action_order": 0, "created_at": "2025-12-01T18:30:01.5Z", "details": {"type": "noop"}}))
        .collect();
    serde_json::to_vec(&json!({
        "request": {"request_id": request_id, "created_at": "2025-12-01T18:30:00Z", "model": "bench"},
        "events": events, "mod_calls": calls, "mod_logs": logs, "actions": actions,
    }))
    .unwrap_or_default()
}
