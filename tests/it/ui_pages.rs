//! The dashboard's pages, rendered by the server.

use super::harness::{Server, server};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::Method;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::io::Read;

struct Page {
    status: u16,
    policy: String,
    html: String,
}

async fn page(server: &Server, path: &str) -> Page {
    let response = server.request(Method::GET, path).header("accept", "text/html").send().await.unwrap();
    let status = response.status().as_u16();
    let policy = response.headers().get("content-security-policy").map(|value| value.to_str().unwrap().to_owned());
    Page { status, policy: policy.unwrap_or_default(), html: response.text().await.unwrap() }
}

/// Ingests a small run of another engine, with text that must not become markup.
async fn ingest(server: &Server, request_id: &str) -> String {
    ingest_request(server, json!({"request_id": request_id, "model": "<i>other</i>"})).await
}

async fn ingest_request(server: &Server, request: Value) -> String {
    let request_id = request["request_id"].as_str().unwrap().to_owned();
    let document = json!({
        "request": request,
        "events": [
            {"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 2},
            {"event_type": "ForwardPass", "step": 1, "sequence_order": 1, "top_tokens": [{"token": 5, "prob": 0.5}]},
            {"event_type": "Sampled", "step": 1, "sequence_order": 2, "sampled_token": 5, "token_text": "<script>x</script>"},
            {"event_type": "Added", "step": 1, "sequence_order": 3, "added_tokens": [5], "added_token_count": 1, "forced": false}
        ],
        "mod_calls": [{"event_sequence_order": 3, "mod_name": "m", "event_type": "Added", "step": 1, "exception_occurred": true, "exception_message": "<b>boom</b>"}],
        "mod_logs": [{"mod_call_sequence": 0, "mod_name": "m", "log_message": "<u>line</u>"}],
        "actions": [{"mod_call_sequence": 0, "action_type": "Noop", "action_order": 0}]
    });
    let (status, answer) = server.post("/ingest", &document).await;
    assert_eq!(status, 201, "{answer}");
    let (_, found) = server.get(&format!("/api/v1/runs/{request_id}")).await;
    found["run"]["run_id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn pages_have_safe_markup_and_working_links() {
    let server = server().await;
    let run = ingest(server, "ui-pages").await;
    let other = ingest(server, "ui-pages-other").await;
    let pages = [
        "/runs".to_owned(),
        "/runs?q=request:ui-pages".to_owned(),
        "/runs?q=request:nothing-has-this-id".to_owned(),
        format!("/runs/{run}"),
        "/runs/ui-pages".to_owned(),
        format!("/runs/{run}?view=text"),
        format!("/compare?a={run}&b={other}"),
        "/playground".to_owned(),
        "/mods".to_owned(),
        "/mods/-new".to_owned(),
        "/mods/ban-phrases".to_owned(),
        "/stats".to_owned(),
        "/experiments".to_owned(),
        "/experiments/-new".to_owned(),
    ];
    let mut links = BTreeSet::new();
    for path in &pages {
        let Page { status, policy, html } = page(server, path).await;
        assert_eq!(status, 200, "{path}: {html}");
        assert!(policy.contains("default-src 'self'") && !policy.contains("unsafe"), "{path}: {policy}");
        assert_eq!(html.matches("<h1").count(), 1, "{path}");
        assert!(!html.contains(" style=") && !html.contains("<script>") && !html.contains("<b>boom"), "{path}");
        for attribute in [" href=\"", " src=\""] {
            let found = html.split(attribute).skip(1).filter_map(|rest| rest.split('"').next());
            links.extend(found.filter(|link| link.starts_with('/')).map(|link| link.replace("&#38;", "&")));
        }
    }
    for link in links {
        let Page { status, html, .. } = page(server, &link).await;
        assert!(status < 400, "{link}: {status} {html}");
    }
}

#[tokio::test]
async fn invalid_filter_is_explained_on_page() {
    let found = page(server().await, "/runs?q=modle:x").await;
    assert_eq!(found.status, 400);
    assert!(found.html.contains("<mark>") && found.html.contains("model"), "{}", found.html);
}

#[tokio::test]
async fn not_found_pages_link_to_the_run_list() {
    for path in ["/runs/nothing-has-this-id", "/nowhere"] {
        let found = page(server().await, path).await;
        assert_eq!(found.status, 404);
        assert!(found.html.contains("href=\"/runs\""), "{}", found.html);
    }
}

#[tokio::test]
async fn run_list_is_served_as_a_fragment_to_scripts() {
    let server = server().await;
    ingest(server, "ui-fragment").await;
    let response = server.request(Method::GET, "/runs?q=request:ui-fragment").header("x-fragment", "list").send().await;
    let html = response.unwrap().text().await.unwrap();
    assert!(!html.contains("<html") && html.contains("data-run="), "{html}");
}

#[tokio::test]
async fn older_and_newer_runs_follow_the_filter() {
    let server = server().await;
    let first = ingest(server, "ui-neighbor-1").await;
    // The list is ordered by the time of ingestion, not by the date of the run.
    let old = json!({"request_id": "ui-neighbor-2", "created_at": "2020-01-01T00:00:00Z"});
    let second = ingest_request(server, old).await;
    let filter = "request:ui-neighbor";
    let older = server.request(Method::GET, &format!("/runs/{second}/older?q={filter}")).send().await.unwrap();
    assert!(older.url().path().ends_with(&first), "{}", older.url());
    let newer = server.request(Method::GET, &format!("/runs/{first}/newer?q={filter}")).send().await.unwrap();
    assert!(newer.url().path().ends_with(&second), "{}", newer.url());
    let beyond = server.request(Method::GET, &format!("/runs/{first}/older?q={filter}")).send().await.unwrap();
    assert_eq!(beyond.url().path(), "/runs");
}

#[tokio::test]
async fn exported_page_has_all_items_and_runs_only_its_own_script() {
    let server = server().await;
    let run = ingest(server, "ui-export").await;
    let response = server.request(Method::GET, &format!("/runs/{run}/export.html")).send().await.unwrap();
    let header = |name: &str| response.headers()[name].to_str().unwrap().to_owned();
    assert_eq!(response.status(), 200);
    assert_eq!(header("content-disposition"), format!("attachment; filename=\"{run}.html\""));
    assert!(header("content-security-policy").starts_with("default-src 'self'"));
    let html = response.text().await.unwrap();
    let between = |start: &str, end: &str| html.split_once(start).unwrap().1.split_once(end).unwrap().0.to_owned();
    let hash = |text: &str| format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text.as_bytes())));
    let policy = between("http-equiv=\"Content-Security-Policy\" content=\"", "\"").replace("&#39;", "'");
    assert_eq!(
        policy,
        format!(
            "default-src 'none'; script-src {}; style-src {}; img-src data:; base-uri 'none'; form-action 'none'",
            hash(&between("<script>", "</script>")),
            hash(&between("<style>", "</style>"))
        )
    );
    assert_eq!(html.matches("<script").count(), 2, "the items and the viewer");
    assert!(!html.contains("<b>boom") && !html.contains("<i>other") && !html.contains("src=\""));
    let packed = STANDARD.decode(between("data-items>", "</script>")).unwrap();
    let mut items = String::new();
    flate2::read::GzDecoder::new(&packed[..]).read_to_string(&mut items).unwrap();
    let listed = server.request(Method::GET, &format!("/api/v1/runs/{run}/events")).send().await.unwrap();
    assert_eq!(items, listed.text().await.unwrap());
    assert_eq!(page(server, "/runs/nothing-has-this-id/export.html").await.status, 404);
}

#[tokio::test]
async fn start_page_is_run_list_if_runs_exist() {
    let server = server().await;
    ingest(server, "ui-start").await;
    let response = server.request(Method::GET, "/").send().await.unwrap();
    assert_eq!(response.url().path(), "/runs");
}

/// Returns the gzip-compressed size of the scripts that a page loads initially, in bytes.
async fn script_bytes(server: &Server, path: &str) -> usize {
    let html = page(server, path).await.html;
    let attribute = |tag: &str, name: &str| {
        let rest = tag.split(&format!("{name}=\"")).nth(1)?;
        Some(rest.split('"').next()?.to_owned())
    };
    let tags = html.split('<').filter(|tag| tag.starts_with("script ") || tag.contains("rel=\"modulepreload\""));
    let mut pending: Vec<String> = tags.filter_map(|tag| attribute(tag, "src").or(attribute(tag, "href"))).collect();
    let without_decompression = crate::harness::client().no_gzip().no_zstd().pool_max_idle_per_host(0).build().unwrap();
    let (mut seen, mut bytes) = (BTreeSet::new(), 0);
    while let Some(path) = pending.pop() {
        if !seen.insert(path.clone()) {
            continue;
        }
        let request = without_decompression.get(format!("{}{path}", server.base)).header("accept-encoding", "gzip");
        let response = request.send().await.unwrap();
        assert_eq!(response.headers()["content-encoding"], "gzip", "{path}");
        bytes += response.bytes().await.unwrap().len();
        let text = server.request(Method::GET, &path).send().await.unwrap().text().await.unwrap();
        let base = reqwest::Url::parse("http://x").unwrap().join(&path).unwrap();
        let imports = text.lines().filter(|line| line.starts_with("import ") || line.starts_with("} from "));
        let targets = imports.filter_map(|line| line.split('\'').nth(1));
        pending.extend(targets.map(|target| base.join(target).unwrap().path().to_owned()));
    }
    assert!(bytes > 1000, "{path} loads no scripts");
    bytes
}

#[tokio::test]
async fn scripts_of_pages_are_within_their_budgets() {
    let server = server().await;
    let run = ingest(server, "ui-budget").await;
    for (path, kilobytes) in [("/runs".to_owned(), 25), (format!("/runs/{run}"), 49), ("/mods/-new".to_owned(), 220)] {
        let bytes = script_bytes(server, &path).await;
        assert!(bytes < kilobytes * 1024, "{path} loads {bytes} bytes of scripts, its budget is {kilobytes} kB");
    }
}
