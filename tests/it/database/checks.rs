//! The checks: features that clients and the dashboard need from a database.

use crate::harness::{Server, SseReader};
use chrono::Days;
use futures::FutureExt;
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection, Row};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thunder::events::{RunId, RunMetadata, RunStart, RunStatus, Scope, Signal, Surface, system};
use thunder::store::{Database, ModState, Retention, Store};
use thunder::trace::columns;
use tokio::time::sleep;
use uuid::{NoContext, Timestamp, Uuid};

/// A server and its database.
pub struct Target {
    pub server: Server,
    url: String,
    /// Part of every name, so that the database may contain earlier data.
    nonce: String,
}

impl Target {
    pub fn new(server: Server, url: &str) -> Self {
        let nonce = RunId::now().0.simple().to_string()[4..20].to_owned();
        Self { server, url: url.to_owned(), nonce }
    }

    fn name(&self, name: &str) -> String {
        format!("{name}-{}", self.nonce)
    }

    /// A second program on the same database.
    async fn store(&self, name: &str) -> Store {
        let database =
            Database::Url { url: self.url.clone(), direct_url: None, data_dir: self.server.data_dir.join(name) };
        Store::open(database, |_| {}).await.unwrap()
    }

    async fn ingest(&self, name: &str) -> u16 {
        const SAMPLE: &str = include_str!("../../../fixtures/sample_payload.json");
        let body = SAMPLE.replace("req_abc123", &self.name(name));
        self.server.request(Method::POST, "/ingest").body(body).send().await.unwrap().status().as_u16()
    }

    /// A finished generation: its summary and events.
    async fn generated(&self, further: Value) -> Value {
        let mut body = json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "seed": 3, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
        let answer = self.server.answer("/v1/chat/completions", &body).await;
        self.server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await
    }

    /// Returns the request ids of this target's runs that match a filter.
    async fn found(&self, filter: &str) -> Vec<String> {
        let query = format!("q={}&limit=500", urlencode(filter));
        let (status, page) = self.server.get(&format!("/api/v1/runs?{query}")).await;
        assert_eq!(status, 200, "{filter}: {page}");
        let ids = page["runs"].as_array().unwrap().iter().map(|run| run["request_id"].as_str().unwrap().to_owned());
        ids.filter(|id| id.ends_with(&self.nonce)).collect()
    }
}

fn urlencode(text: &str) -> String {
    text.bytes()
        .map(|byte| if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// The server's file mods.
pub const MODS: [(&str, &str); 2] = [
    (
        "breaks",
        "from thunder_mods import Prefilled, mod\n\n\n@mod(events=[Prefilled])\ndef breaks(event, actions, tokenizer):\n    \
         \"\"\"Raises.\"\"\"\n    raise ValueError('a broken mod')\n",
    ),
    (
        "greets",
        "from thunder_mods import Prefilled, mod\n\n\n@mod(events=[Prefilled])\ndef greets(event, actions, tokenizer):\n    \
         \"\"\"Says hello.\"\"\"\n    return actions.force_output(tokenizer.encode('hello'))\n",
    ),
];

fn says(text: &str) -> Value {
    json!([{ "name": "force-prefix", "config": { "text": format!("{text}<|im_end|>") } }])
}

fn run_of(answer: &Value) -> &str {
    answer["run"]["run_id"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

macro_rules! checks {
    ($($name:ident,)*) => {
        /// Number of checks.
        pub const COUNT: usize = [$(stringify!($name)),*].len();

        /// Runs all checks and returns the failed ones with their reasons.
        pub async fn run(target: &Target) -> Vec<String> {
            let mut failed = Vec::new();
            $(
                if let Err(panic) = AssertUnwindSafe($name(target)).catch_unwind().await {
                    let why = panic.downcast_ref::<String>().cloned();
                    let why = why.or_else(|| panic.downcast_ref::<&str>().map(|&why| why.to_owned()));
                    failed.push(format!("{}: {}", stringify!($name), why.unwrap_or_default()));
                }
            )*
            failed
        }
    };
}

checks! {
    schema_is_of_the_last_migration,
    partitions_of_the_next_days_exist,
    second_program_opens_the_database,
    server_is_healthy,
    ingest_stores_document,
    ingest_takes_document_twice,
    ingest_refuses_other_content,
    ingest_takes_many_at_once,
    one_of_two_racing_documents_wins,
    chat_is_recorded,
    chat_stream_is_recorded,
    completion_is_recorded,
    many_runs_at_once_are_recorded,
    request_id_used_twice_is_a_conflict,
    mod_is_recorded,
    mod_error_is_recorded,
    backtrack_is_recorded,
    mod_of_a_file_runs,
    mod_is_switched_off_and_on,
    attention_is_stored,
    replay_columns_are_stored,
    replay_page_is_shown,
    events_are_listed,
    alternatives_are_listed,
    running_run_is_readable,
    running_run_is_cancelled,
    list_changes_are_sent,
    list_is_paged,
    filter_by_request,
    filter_by_model,
    filter_by_mod,
    filter_by_status,
    filter_by_surface,
    filter_by_error,
    filter_by_counts,
    filter_by_time,
    filter_by_user,
    filter_by_session_and_metadata,
    filter_by_words,
    filter_by_phrase,
    filters_combine_and_negate,
    feedback_is_kept,
    response_is_continued,
    response_is_deleted,
    run_is_deleted,
    run_runs_again,
    comparison_page_is_shown,
    document_with_nul_is_stored,
    dead_programs_run_is_interrupted,
    old_day_is_dropped,
    recorder_survives_terminated_connections,
    no_link_is_damaged,
    server_log_has_no_database_error,
}

async fn connection(target: &Target) -> PgConnection {
    PgConnection::connect(&target.url).await.unwrap()
}

/// Returns one number, by a statement that works with every pooler.
async fn number(target: &Target, sql: &'static str) -> i64 {
    let mut connection = connection(target).await;
    let row = sqlx::raw_sql(sql).fetch_one(&mut connection).await.unwrap();
    let number = row.try_get(0).unwrap();
    connection.close().await.unwrap();
    number
}

async fn schema_is_of_the_last_migration(target: &Target) {
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations")).unwrap().count();
    let applied = number(target, "select count(*) from refinery_schema_history").await;
    assert_eq!(applied, i64::try_from(files).unwrap());
}

async fn partitions_of_the_next_days_exist(target: &Target) {
    let today = "select count(*) from pg_class where relname ~ '^(events|attention)_[0-9]+$' and relkind = 'r'
        and right(relname, 8) = to_char(now() at time zone 'utc', 'YYYYMMDD')";
    assert_eq!(number(target, today).await, 2);
}

async fn second_program_opens_the_database(target: &Target) {
    let store = target.store("second").await;
    store.ready().await.unwrap();
    store.close().await;
}

async fn server_is_healthy(target: &Target) {
    assert_eq!(target.server.get("/healthz").await.0, 200);
}

async fn ingest_stores_document(target: &Target) {
    assert_eq!(target.ingest("doc").await, 201);
    let (status, run) = target.server.get(&format!("/api/v1/runs/{}", target.name("doc"))).await;
    assert_eq!((status, &run["run"]["status"], &run["run"]["mods"]), (200, &json!("done"), &json!(["sample_mod"])));
}

async fn ingest_takes_document_twice(target: &Target) {
    assert_eq!(target.ingest("doc").await, 201);
    assert_eq!(target.found(&format!("request:{}", target.name("doc"))).await.len(), 1);
}

async fn ingest_refuses_other_content(target: &Target) {
    let body = json!({"request": {"request_id": target.name("doc"), "model": "other"}, "events": []});
    let (status, problem) = target.server.post("/ingest", &body).await;
    assert_eq!(status, 409, "{problem}");
}

async fn ingest_takes_many_at_once(target: &Target) {
    let names: Vec<String> = (0..24).map(|number| format!("many{number}")).collect();
    let statuses = futures::future::join_all(names.iter().map(|name| target.ingest(name))).await;
    assert_eq!(statuses, [201; 24]);
}

async fn one_of_two_racing_documents_wins(target: &Target) {
    let post = async |model: &str| {
        let body = json!({"request": {"request_id": target.name("race"), "model": model}, "events": []});
        target.server.post("/ingest", &body).await.0
    };
    let (first, second) = tokio::join!(post("one"), post("two"));
    assert_eq!([first.min(second), first.max(second)], [201, 409]);
}

async fn chat_is_recorded(target: &Target) {
    let run = target.generated(json!({"request_id": target.name("chat")})).await;
    assert_eq!((&run["run"]["status"], &run["run"]["completion_tokens"]), (&json!("done"), &json!(8)));
}

async fn chat_stream_is_recorded(target: &Target) {
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "ignore_eos": true,
        "stream": true, "request_id": target.name("stream")});
    let chunks = target.server.stream("/v1/chat/completions", &body).await;
    assert_eq!(chunks.last().unwrap(), "[DONE]");
    let run = target.server.finished(&target.name("stream")).await;
    assert_eq!(run["run"]["completion_tokens"], 6);
}

async fn completion_is_recorded(target: &Target) {
    let body = json!({"prompt": "Once", "max_tokens": 5, "ignore_eos": true, "request_id": target.name("text")});
    target.server.answer("/v1/completions", &body).await;
    assert_eq!(target.server.finished(&target.name("text")).await["run"]["completion_tokens"], 5);
}

async fn many_runs_at_once_are_recorded(target: &Target) {
    let ask =
        async |number: i32| target.generated(json!({"request_id": target.name(&format!("at-once{number}"))})).await;
    let runs = futures::future::join_all((0..8).map(ask)).await;
    assert!(runs.iter().all(|run| run["run"]["status"] == "done" && run["run"]["completion_tokens"] == 8), "{runs:?}");
}

async fn request_id_used_twice_is_a_conflict(target: &Target) {
    let body = json!({
        "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2, "request_id": target.name("chat"),
    });
    // A server that waits too long for its database accepts the request.
    let mut answer = target.server.post("/v1/chat/completions", &body).await;
    for _ in 0..20 {
        if answer.0 == 409 {
            break;
        }
        answer = target.server.post("/v1/chat/completions", &body).await;
    }
    let (status, error) = answer;
    assert_eq!((status, &error["error"]["param"]), (409, &json!("request_id")), "{error}");
}

async fn mod_is_recorded(target: &Target) {
    let run = target
        .generated(json!({"mods": says("a tall story"), "max_tokens": 60, "request_id": target.name("mod")}))
        .await;
    assert_eq!(run["run"]["mods"], json!(["force-prefix"]));
    assert!(
        run["run"]["forced"].as_i64().unwrap() > 0 && run["run"]["actions"].as_i64().unwrap() > 0,
        "{}",
        run["run"]
    );
}

async fn mod_error_is_recorded(target: &Target) {
    let run = target.generated(json!({"mods": ["breaks"], "request_id": target.name("error")})).await;
    assert_eq!(run["run"]["errors"], 1, "{}", run["run"]);
}

async fn backtrack_is_recorded(target: &Target) {
    let mods = json!([{"name": "ban-phrases", "config": {"phrases": ["e", "a", "t", "o"]}}]);
    let run = target.generated(json!({"mods": mods, "max_tokens": 24, "request_id": target.name("back")})).await;
    assert_eq!(run["run"]["status"], "done");
}

async fn mod_of_a_file_runs(target: &Target) {
    let run = target.generated(json!({"mods": ["greets"], "request_id": target.name("greets")})).await;
    assert_eq!((&run["run"]["mods"], &run["run"]["output_preview"]), (&json!(["greets"]), &json!("hello")));
}

async fn mod_is_switched_off_and_on(target: &Target) {
    let store = target.store("mods").await;
    let enabled = async |store: &Store| {
        let states = store.mod_states().await.unwrap();
        states.into_iter().find(|state: &ModState| state.name == "switched").map(|state| state.enabled)
    };
    for expected in [false, true] {
        store.enable_mod("switched", expected, system::now(), None).await.unwrap();
        assert_eq!(enabled(&store).await, Some(expected));
    }
    store.remove_mod("switched").await.unwrap();
    assert_eq!(enabled(&store).await, None);
    store.close().await;
}

async fn attention_is_stored(target: &Target) {
    let run = target.generated(json!({"attention": true, "request_id": target.name("attention")})).await;
    let events = run["events"].as_array().unwrap();
    let last = events.iter().rev().find(|event| event["event_type"] == "ForwardPass").unwrap();
    let path = format!("/api/v1/runs/{}/attention?at={}", run_of(&run), last["sequence_order"]);
    let (status, attention) = target.server.get(&path).await;
    assert_eq!((status, &attention["attention"]["sequence_order"]), (200, &last["sequence_order"]), "{attention}");
}

async fn replay_columns_are_stored(target: &Target) {
    let path = format!("/api/v1/runs/{}/columns", target.name("chat"));
    let bytes = target.server.request(Method::GET, &path).send().await.unwrap().bytes().await.unwrap();
    assert!(!columns::decode(&bytes).unwrap().answer_text().is_empty());
}

async fn replay_page_is_shown(target: &Target) {
    for path in ["/runs/{}", "/runs/{}?view=text"] {
        let path = path.replace("{}", &target.name("mod"));
        let (status, page) = target.server.get(&path).await;
        assert!(status == 200 && page.as_str().unwrap().contains("force-prefix"), "{path}: {status}");
    }
}

async fn events_are_listed(target: &Target) {
    let response = target.server.request(Method::GET, &format!("/api/v1/runs/{}/events", target.name("mod")));
    let text = response.send().await.unwrap().text().await.unwrap();
    for part in ["\"Prefilled\"", "\"mod_call\"", "\"action\"", "\"Added\""] {
        assert!(text.contains(part), "no {part}: {text}");
    }
}

async fn alternatives_are_listed(target: &Target) {
    let (status, answer) = target.server.get(&format!("/api/v1/runs/{}/alternatives", target.name("chat"))).await;
    assert_eq!(status, 200, "{answer}");
}

/// Starts a streamed run and returns its id after its first token.
async fn begun(target: &Target, name: &str) -> (String, reqwest::Response) {
    let body = json!({"prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "stream": true, "request_id": target.name(name)});
    let request = target.server.request(Method::POST, "/v1/completions").json(&body);
    let mut response = request.send().await.unwrap();
    let id = response.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
    response.chunk().await.unwrap();
    (id, response)
}

async fn running_run_is_readable(target: &Target) {
    let (id, _response) = begun(target, "running").await;
    let (status, run) = target.server.get(&format!("/api/v1/runs/{id}")).await;
    assert_eq!((status, &run["run"]["request_id"]), (200, &json!(target.name("running"))));
    assert_eq!(target.found("status:running").await, [target.name("running")]);
}

async fn running_run_is_cancelled(target: &Target) {
    // the client of the previous run has disconnected
    let run = target.server.finished(&target.name("running")).await;
    assert_eq!(run["run"]["status"], "cancelled");
}

async fn list_changes_are_sent(target: &Target) {
    let mut changes = SseReader::get(&target.server, "/api/v1/runs/live").await;
    assert_eq!(target.ingest("news").await, 201);
    assert_eq!(changes.next().await.unwrap().name, "change");
}

async fn list_is_paged(target: &Target) {
    let (mut seen, mut next) =
        (Vec::new(), format!("?q={}&limit=7", urlencode(&format!("request:many request:{}", target.nonce))));
    loop {
        let (status, page) = target.server.get(&format!("/api/v1/runs{next}")).await;
        assert_eq!(status, 200, "{page}");
        seen.extend(page["runs"].as_array().unwrap().iter().map(|run| run["run_id"].as_str().unwrap().to_owned()));
        match page["meta"]["next"].as_str() {
            Some(more) => more.clone_into(&mut next),
            None => break,
        }
    }
    assert_eq!(seen.len(), 24);
    assert!(seen.is_sorted_by(|a, b| a > b), "newest first");
}

async fn filter_by_request(target: &Target) {
    assert_eq!(target.found(&format!("request:{}", target.name("mod"))).await, [target.name("mod")]);
}

async fn filter_by_model(target: &Target) {
    let found = target.found("model:GEMINI").await;
    assert!(found.contains(&target.name("doc")) && !found.contains(&target.name("chat")), "{found:?}");
    assert_eq!(target.found("model:nothing-has-it").await, Vec::<String>::new());
}

async fn filter_by_mod(target: &Target) {
    assert_eq!(target.found("mod:greets").await, [target.name("greets")]);
    assert!(target.found("mod:SAMPLE").await.contains(&target.name("doc")));
}

async fn filter_by_status(target: &Target) {
    assert_eq!(target.found("status:cancelled").await, [target.name("running")]);
    assert_eq!(target.found("-status:done").await, [target.name("running")]);
}

async fn filter_by_surface(target: &Target) {
    let found = target.found("surface:ingest").await;
    assert!(found.contains(&target.name("doc")) && !found.contains(&target.name("chat")), "{found:?}");
}

async fn filter_by_error(target: &Target) {
    assert_eq!(target.found("error:\"broken mod\"").await, [target.name("error")]);
    assert!(target.found("error>0").await.contains(&target.name("error")));
}

async fn filter_by_counts(target: &Target) {
    assert!(target.found("forced>0").await.contains(&target.name("mod")));
    assert!(target.found("tokens:6").await.contains(&target.name("stream")));
    assert!(target.found("actions>=1").await.contains(&target.name("mod")));
    assert!(!target.found("backtracks>0").await.contains(&target.name("chat")));
}

async fn filter_by_time(target: &Target) {
    let (new, old) = (target.found("after:1h").await, target.found("before:2026-01-01").await);
    assert!(new.contains(&target.name("chat")) && !new.contains(&target.name("doc")), "{new:?}");
    assert!(old.contains(&target.name("doc")) && !old.contains(&target.name("chat")), "{old:?}");
}

/// Waits until a filter finds that many runs: a run is stored a moment after its answer.
async fn wait_for_runs(target: &Target, q: &str, count: usize) {
    let begun = Instant::now();
    loop {
        let (_, page) = target.server.get(&format!("/api/v1/runs?q={}", urlencode(q))).await;
        if page["runs"].as_array().unwrap().len() == count {
            return;
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "{q}: {page}");
        sleep(Duration::from_millis(20)).await;
    }
}

async fn filter_by_user(target: &Target) {
    let name = target.name("user");
    target.generated(json!({"user": name, "request_id": target.name("user-field")})).await;
    target.generated(json!({"safety_identifier": name, "request_id": target.name("safety")})).await;
    let body = json!({"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], "metadata": {"user_id": name}});
    target.server.answer("/v1/messages", &body).await;
    wait_for_runs(target, &format!("user:{name}"), 3).await;
    assert_eq!(target.found(&format!("user:{name} -request:safety")).await, [target.name("user-field")]);
    assert_eq!(target.found("user:nobody").await, Vec::<String>::new());
}

async fn filter_by_session_and_metadata(target: &Target) {
    let metadata = json!({"session_id": target.name("s"), "project": "a b", "stage": "x"});
    let run = target.generated(json!({"metadata": metadata, "request_id": target.name("meta")})).await;
    assert_eq!(run["run"]["metadata"], metadata);
    let body =
        json!({"input": "Hi", "max_output_tokens": 4, "session_id": target.name("s"), "metadata": {"project": "b"}});
    assert_eq!(target.server.answer("/v1/responses", &body).await["metadata"], json!({"project": "b"}));
    assert_eq!(target.found(&format!("session:{}", target.name("s"))).await, [target.name("meta")]);
    assert_eq!(
        target.found(&format!("metadata.project:\"a b\" session:{}", target.name("s"))).await,
        [target.name("meta")]
    );
    assert_eq!(target.found("metadata.project:a").await, Vec::<String>::new());
    wait_for_runs(target, &format!("session:{}", target.name("s")), 2).await;
    let (_, shown) = target.server.get(&format!("/runs/{}", target.name("meta"))).await;
    assert!(shown.as_str().unwrap().contains("project"), "the page shows the metadata");
    for (metadata, pointer) in [
        (json!({"a": 1}), "metadata.a"),
        (json!({"a": "x".repeat(513)}), "metadata.a"),
        (json!({"k".repeat(65): "x"}), "metadata"),
        (json!((0..17).map(|key| (key.to_string(), "x".into())).collect::<serde_json::Map<_, _>>()), "metadata"),
    ] {
        let body = json!({"messages": [{"role": "user", "content": "Hi"}], "metadata": metadata});
        let (status, problem) = target.server.post("/v1/chat/completions", &body).await;
        assert_eq!((status, &problem["error"]["param"]), (400, &json!(pointer)), "{problem}");
    }
}

async fn filter_by_words(target: &Target) {
    assert_eq!(target.found("TALL stor").await, [target.name("mod")]);
}

async fn filter_by_phrase(target: &Target) {
    assert_eq!(target.found("\"tall story\"").await, [target.name("mod")]);
    assert_eq!(target.found("\"story tall\"").await, Vec::<String>::new());
}

async fn filters_combine_and_negate(target: &Target) {
    assert_eq!(target.found("story mod:force status:done forced>0 -error>0 tokens>1").await, [target.name("mod")]);
    let none = target.found(&format!("story -mod:force request:{}", target.nonce)).await;
    assert_eq!(none, Vec::<String>::new());
    let models = target.found("model:gemini -status:failed mod:sample error:nothing").await;
    assert_eq!(models, Vec::<String>::new());
}

async fn feedback_is_kept(target: &Target) {
    let path = format!("/api/v1/runs/{}/feedback", target.name("chat"));
    let (status, kept) = target.server.post(&path, &json!({"rating": 1, "text": "good"})).await;
    assert_eq!(status, 201, "{kept}");
    let (_, list) = target.server.get(&path).await;
    assert_eq!(list["feedback"][0]["text"], "good");
}

async fn response_is_continued(target: &Target) {
    let body = json!({"input": "Hello!", "max_output_tokens": 8});
    let first = target.server.answer("/v1/responses", &body).await;
    let id = first["id"].as_str().unwrap();
    let body = json!({"input": "More!", "max_output_tokens": 8, "previous_response_id": id});
    let second = target.server.answer("/v1/responses", &body).await;
    assert_eq!(second["previous_response_id"], json!(id));
    let (status, stored) = target.server.get(&format!("/v1/responses/{id}")).await;
    assert_eq!((status, &stored["id"]), (200, &json!(id)));
}

async fn response_is_deleted(target: &Target) {
    let first = target.server.answer("/v1/responses", &json!({"input": "Hello!", "max_output_tokens": 8})).await;
    let path = format!("/v1/responses/{}", first["id"].as_str().unwrap());
    assert_eq!(target.server.request(Method::DELETE, &path).send().await.unwrap().status(), 200);
    assert_eq!(target.server.get(&path).await.0, 404);
}

async fn run_is_deleted(target: &Target) {
    assert_eq!(target.ingest("unwanted").await, 201);
    let path = format!("/api/v1/runs/{}", target.name("unwanted"));
    let status = target.server.request(Method::DELETE, &path).send().await.unwrap().status();
    assert!(status.is_success(), "{status}");
    assert_eq!(target.server.get(&path).await.0, 404);
    assert_eq!(target.ingest("unwanted").await, 201, "its id is free again");
}

async fn run_runs_again(target: &Target) {
    let (_, run) = target.server.get(&format!("/api/v1/runs/{}", target.name("text"))).await;
    let prompt = &run["events"][0]["details"]["prompt"];
    let (status, again) = target.server.post("/api/v1/reruns", &json!({"prompt": prompt, "any_version": true})).await;
    assert_eq!(status, 200, "{again}");
    let second = target.server.finished(again["run_id"].as_str().unwrap()).await;
    assert_eq!(second["run"]["output_preview"], run["run"]["output_preview"]);
}

async fn comparison_page_is_shown(target: &Target) {
    let path = format!("/compare?a={}&b={}", target.name("chat"), target.name("text"));
    assert_eq!(target.server.get(&path).await.0, 200);
}

async fn document_with_nul_is_stored(target: &Target) {
    let body = json!({"request": {"request_id": target.name("nul"), "model": "a\0b", "mod_text": "\0"}, "events": []});
    let (status, problem) = target.server.post("/ingest", &body).await;
    assert_eq!(status, 201, "{problem}");
}

fn start(target: &Target, name: &str, run_id: RunId) -> Signal {
    Signal::Started(Arc::new(RunStart {
        run_id,
        request_id: target.name(name),
        created_at: system::now(),
        surface: Surface::Openai,
        model: "elsewhere".into(),
        owner: None,
        user_label: None,
        metadata: RunMetadata::default(),
        max_tokens: None,
        temperature: None,
        seed: None,
        mods: Vec::new(),
        prompt_preview: String::new(),
    }))
}

async fn stored(target: &Target, name: &str) -> Value {
    for _ in 0..400 {
        let (status, run) = target.server.get(&format!("/api/v1/runs/{}", target.name(name))).await;
        if status == 200 {
            return run;
        }
        sleep(Duration::from_millis(25)).await;
    }
    panic!("{name} is not stored")
}

async fn dead_programs_run_is_interrupted(target: &Target) {
    let dead = target.store("dead").await;
    dead.recorder().0.signals.send(start(target, "dead", RunId::now())).await.unwrap();
    stored(target, "dead").await;
    // it closes its connections without storing the end of the run
    dead.close().await;
    for _ in 0..400 {
        let other = target.store("survivor").await;
        let status = other.find(&Scope::All, &target.name("dead")).await.unwrap().unwrap().status;
        other.close().await;
        if status == RunStatus::Interrupted {
            return;
        }
        sleep(Duration::from_millis(25)).await;
    }
    panic!("the run of a dead program still has the status running");
}

async fn old_day_is_dropped(target: &Target) {
    let store = target.store("retention").await;
    let today = system::now().date_naive();
    // before all days with other runs
    let noon = (today - Days::new(9000)).and_hms_opt(12, 0, 0).unwrap().and_utc();
    let id = RunId(Uuid::new_v7(Timestamp::from_unix(NoContext, noon.timestamp().cast_unsigned(), 0)));
    store.recorder().0.signals.send(start(target, "old", id)).await.unwrap();
    stored(target, "old").await;
    store.close().await;
    let store = target.store("retention").await;
    let gone = store.prune(Retention { days: Some(8999), bytes: None }, today).await.unwrap();
    assert_eq!(gone, [(noon.date_naive(), 1)]);
    assert_eq!(target.server.get(&format!("/api/v1/runs/{}", target.name("old"))).await.0, 404);
    store.close().await;
}

async fn recorder_survives_terminated_connections(target: &Target) {
    let mut connection = connection(target).await;
    let end = "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database()
        and pid <> pg_backend_pid() and backend_type = 'client backend'";
    sqlx::raw_sql(end).execute(&mut connection).await.unwrap();
    drop(connection);
    let run = target.generated(json!({"request_id": target.name("after")})).await;
    assert_eq!(run["run"]["status"], "done");
}

async fn no_link_is_damaged(target: &Target) {
    let store = target.store("links").await;
    assert_eq!(store.damaged_links().await.unwrap(), Vec::<String>::new());
    store.close().await;
}

async fn server_log_has_no_database_error(target: &Target) {
    let log = target.server.log();
    for word in ["panic", "prepared statement", "syntax error", "does not exist", "unsupported startup parameter"] {
        assert!(!log.contains(word), "{word}: {log}");
    }
}
