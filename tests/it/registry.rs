//! `/v1/mods`: uploads, versions, enabling and disabling, and the watched folder.

use super::harness::redaction::redact_text;
use super::harness::{ErrorTable, Server, folder, message_of, server};
use reqwest::Method;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// The key that may upload mods.
pub const MOD_KEY: &str = "boss-key";

/// Flags of a server where [`MOD_KEY`] may upload mods, and `user-key` may not.
pub const UPLOAD_FLAGS: [&str; 4] = ["--api-key=user-key", "--mod-key", MOD_KEY, "--allow-mod-upload"];

async fn upload(server: &Server, body: &Value) -> (u16, Value) {
    server.send(MOD_KEY, Method::POST, "/v1/mods", Some(body)).await
}

/// Returns the source of a mod that forces the output `text`.
fn forced_answer(name: &str, text: &str) -> String {
    format!(
        "from thunder_mods import Prefilled, mod\n\n\n@mod(events=[Prefilled])\ndef {name}(event, actions, tokenizer):\n    \
         \"\"\"Says {text}.\"\"\"\n    return actions.force_output(tokenizer.encode(\"{text}\"))\n"
    )
}

fn completion_request(name: &str) -> Value {
    json!({"prompt": "Hello", "max_tokens": 4, "seed": 1, "mods": [name]})
}

async fn complete(server: &Server, key: &str, name: &str) -> (u16, Value) {
    server.send(key, Method::POST, "/v1/completions", Some(&completion_request(name))).await
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("no answer: {answer}"))
}

#[tokio::test]
async fn mod_list_has_no_duplicate_fields() {
    // A derived deserializer rejects duplicate fields; a map would use the last one.
    #[derive(serde::Deserialize)]
    struct ListedMod {
        name: String,
        origin: String,
    }
    #[derive(serde::Deserialize)]
    struct ModList {
        mods: Vec<ListedMod>,
    }
    let server = server().await;
    let text = server.request(Method::GET, "/v1/mods").send().await.unwrap().text().await.unwrap();
    let list: ModList = serde_json::from_str(&text).unwrap();
    let origin = |name: &str| list.mods.iter().find(|listed| listed.name == name).unwrap().origin.as_str();
    assert_eq!((origin("log-top"), origin("replace_start")), ("builtin", "file"));
}

#[tokio::test]
async fn mod_is_uploaded_used_disabled_and_removed() {
    let server = Server::start(&UPLOAD_FLAGS);
    server.wait_ready().await;
    let body =
        json!({"name": "fixed", "language": "python", "entrypoint": "fixed", "source": forced_answer("fixed", "one")});
    assert_eq!(server.send("", Method::POST, "/v1/mods", Some(&body)).await.0, 401);
    let (status, problem) = server.send("user-key", Method::POST, "/v1/mods", Some(&body)).await;
    assert_eq!(
        (status, message_of(&problem)),
        (
            403,
            "this key may not change mods; use a key given with --mod-key or --admin-key, or marked `mods` or `admin` in the key file"
        )
    );

    let (status, registered) = upload(&server, &body).await;
    assert_eq!(status, 200, "{registered}");
    assert_eq!((&registered["name"], &registered["replaced"]), (&json!("fixed"), &json!(false)));
    assert_eq!(registered["description"], "Says one.");
    let first = registered["hash"].as_str().unwrap().to_owned();
    let (status, answer) = complete(&server, "user-key", "fixed").await;
    assert_eq!((status, text(&answer)), (200, "one"));
    let run = answer["thunder"]["run_id"].as_str().unwrap().to_owned();
    let run = loop {
        let (_, run) = server.send("user-key", Method::GET, &format!("/api/v1/runs/{run}"), None).await;
        if run["run"]["status"] == "done" {
            break run;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(run["run"]["mods"], json!(["fixed"]));
    let recorded = &run["events"][0]["details"]["prompt"]["parameters"]["mods"][0];
    assert_eq!((&recorded["version"], &recorded["origin"]), (&json!(first), &json!("uploaded")));

    let second = json!({"name": "fixed", "source": forced_answer("fixed", "two"), "description": "Another."});
    let (_, registered) = upload(&server, &second).await;
    assert_eq!((&registered["replaced"], &registered["description"]), (&json!(true), &json!("Another.")));
    assert_eq!(registered["unchanged"], false);
    let (_, again) = upload(&server, &second).await;
    assert_eq!((&again["hash"], &again["unchanged"]), (&registered["hash"], &json!(true)));
    assert_eq!(text(&complete(&server, "user-key", "fixed").await.1), "two");
    let (_, versions) = server.send("user-key", Method::GET, "/v1/mods/fixed/versions", None).await;
    assert_eq!(versions["current"], registered["hash"]);
    let hashes: Vec<&Value> = versions["versions"].as_array().unwrap().iter().map(|version| &version["hash"]).collect();
    assert_eq!(hashes, [&registered["hash"], &json!(first)], "newest first");
    assert!(versions["versions"][0]["registered_by"].as_str().unwrap().starts_with("key-"), "{versions}");
    assert!(!versions.to_string().contains(MOD_KEY), "a key is shown");
    let path = format!("/v1/mods/fixed/source?version={}", &first[..8]);
    assert_eq!(
        server.send("user-key", Method::GET, &path, None).await,
        (200, Value::from(forced_answer("fixed", "one")))
    );

    let (status, _) = server.send("user-key", Method::POST, "/v1/mods/fixed/disable", None).await;
    assert_eq!(status, 403);
    let (status, shown) = server.send(MOD_KEY, Method::POST, "/v1/mods/fixed/disable", None).await;
    assert_eq!((status, &shown["enabled"]), (200, &json!(false)));
    let (status, answer) = complete(&server, "user-key", "fixed").await;
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("mod_disabled")), "{answer}");

    server.stop("TERM").await;
    let server = server.start_again(&UPLOAD_FLAGS);
    server.wait_ready().await;
    let (_, shown) = server.send("user-key", Method::GET, "/v1/mods/fixed", None).await;
    assert_eq!((&shown["enabled"], &shown["hash"]), (&json!(false), &registered["hash"]), "{shown}");
    server.send(MOD_KEY, Method::POST, "/v1/mods/fixed/enable", None).await;
    assert_eq!(text(&complete(&server, "user-key", "fixed").await.1), "two");

    assert_eq!(server.send(MOD_KEY, Method::DELETE, "/v1/mods/fixed", None).await.0, 204);
    let (status, problem) = server.send(MOD_KEY, Method::DELETE, "/v1/mods/fixed", None).await;
    assert_eq!((status, &*redact_text(message_of(&problem))), (404, "unknown mod 'fixed'; known mods: [mods]"));
    let (status, answer) = complete(&server, "user-key", "fixed").await;
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("unknown_mod")), "{answer}");
}

#[tokio::test]
async fn invalid_mod_is_rejected_with_reason() {
    let server = Server::start(&UPLOAD_FLAGS);
    server.wait_ready().await;
    let rejection = async |body: Value| {
        let (status, problem) = upload(&server, &body).await;
        (status, problem["pointer"].as_str().unwrap_or_default().to_owned(), problem["detail"].to_string())
    };
    let (status, pointer, detail) =
        rejection(json!({"name": "bad", "source": "from thunder_mods import mod\ndef x(:\n"})).await;
    assert_eq!((status, pointer.as_str()), (400, "source"), "{detail}");
    assert!(detail.contains("SyntaxError") && detail.contains("line 2"), "{detail}");
    let (status, _, detail) =
        rejection(json!({"name": "bad", "source": "import thunder_mods\n\n\nraise KeyError('x')\n"})).await;
    assert!(status == 400 && detail.contains("KeyError") && detail.contains("line 4"), "{detail}");
    let mut errors = ErrorTable::default();
    for (body, field) in [
        (json!({"name": "bad", "source": "x = 1\n"}), None),
        (json!({"name": "ban-phrases", "source": forced_answer("x", "x")}), None),
        (json!({"name": "../x", "source": "x"}), Some("name")),
        (json!({"name": "a", "source": {"../p.py": ""}, "module": "p"}), Some("source")),
        (json!({"name": "a", "source": "x", "language": "lua"}), Some("language")),
        (json!({"name": "a"}), None),
    ] {
        let answer = upload(&server, &body).await;
        if let Some(field) = field {
            assert_eq!(answer.1["pointer"], field, "{}", answer.1);
        }
        errors.add(body, &answer);
    }
    insta::assert_snapshot!("upload_errors", errors);
    let (status, list) = server.send(MOD_KEY, Method::GET, "/v1/mods", None).await;
    assert_eq!(status, 200);
    assert!(list["mods"].as_array().unwrap().iter().all(|found| found["origin"] == "builtin"), "no mod was registered");

    let files = json!({
        "calm_mods/__init__.py": "",
        "calm_mods/words.py": "WORD = \"calm\"\n",
        "calm_mods/main.py": forced_answer("calm", "x").replace("\"x\"", "WORD")
            .replace("\n\n\n@mod", "\nfrom .words import WORD\n\n\n@mod"),
    });
    let (status, registered) =
        upload(&server, &json!({"name": "calm", "module": "calm_mods.main", "entrypoint": "calm", "source": files}))
            .await;
    assert_eq!(status, 200, "{registered}");
    assert_eq!(text(&complete(&server, MOD_KEY, "calm").await.1), "calm");
}

#[tokio::test]
async fn uploads_are_rejected_by_default() {
    let server = server().await;
    let (status, problem) = server.post("/v1/mods", &json!({"name": "x", "source": forced_answer("x", "x")})).await;
    assert_eq!(
        (status, message_of(&problem)),
        (403, "uploads of mods are disabled; start the server with --allow-mod-upload and a --mod-key")
    );
    let (status, problem) = server.get("/v1/mods/nope").await;
    assert_eq!((status, &*redact_text(message_of(&problem))), (404, "unknown mod 'nope'; known mods: [mods]"));
    let (_, list) = server.get("/v1/mods").await;
    let known = |name: &str| list["mods"].as_array().unwrap().iter().find(|found| found["name"] == name).cloned();
    assert_eq!(known("replace_start").unwrap()["origin"], "file");
    assert_eq!(known("log-top").unwrap()["origin"], "builtin");
}

/// Reads a mod with a key until it has the expected state; returns the mod.
async fn wait_for_mod(server: &Server, key: &str, name: &str, is_expected: impl Fn(u16, &Value) -> bool) -> Value {
    let begun = Instant::now();
    loop {
        let (status, shown) = server.send(key, Method::GET, &format!("/v1/mods/{name}"), None).await;
        if is_expected(status, &shown) {
            return shown;
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "{name}: {status} {shown}\n{}", server.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn write(folder: &Path, file: &str, text: &str) {
    std::fs::write(folder.join(file), text).unwrap();
}

#[tokio::test]
async fn mods_directory_is_watched() {
    let mods = folder();
    write(&mods, "fixed.py", &forced_answer("fixed", "one"));
    write(&mods, "broken.py", "def x(:\n");
    let server = Server::start(&["--mods-dir", mods.to_str().unwrap()]);
    server.wait_ready().await;
    assert_eq!(text(&complete(&server, "", "fixed").await.1), "one");
    let (_, answer) = complete(&server, "", "broken").await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("broken.py") && message.contains("SyntaxError"), "{message}");
    let first = wait_for_mod(&server, "", "fixed", |status, _| status == 200).await["hash"].clone();

    write(&mods, "fixed.py", &forced_answer("fixed", "two"));
    let second = wait_for_mod(&server, "", "fixed", |_, shown| shown["hash"] != first).await;
    assert_eq!(second["earlier"][0]["hash"], first);
    assert_eq!(text(&complete(&server, "", "fixed").await.1), "two");

    write(&mods, "fixed.py", "def fixed(:\n");
    let shown = wait_for_mod(&server, "", "fixed", |_, shown| shown["problem"].is_object()).await;
    assert_eq!(shown["hash"], second["hash"]);
    assert!(shown["problem"]["traceback"].as_str().unwrap().contains("line 1"), "{shown}");
    assert_eq!(text(&complete(&server, "", "fixed").await.1), "two", "the old version remains in use");
    let (_, list) = server.get("/v1/mods").await;
    assert_eq!(list["problems"].as_array().unwrap().len(), 2, "{list}");

    write(&mods, "broken.py", &forced_answer("mended", "three"));
    wait_for_mod(&server, "", "mended", |status, _| status == 200).await;
    assert_eq!(text(&complete(&server, "", "mended").await.1), "three");
    std::fs::remove_file(mods.join("fixed.py")).unwrap();
    wait_for_mod(&server, "", "fixed", |status, _| status == 404).await;

    let package = mods.join("pack");
    std::fs::create_dir_all(package.join("deep")).unwrap();
    write(&package, "deep/words.py", "WORD = \"four\"\n");
    let source = forced_answer("packed", "WORD").replace("\"WORD\"", "WORD");
    write(&package, "__init__.py", &format!("from .deep.words import WORD\n{source}"));
    let first = wait_for_mod(&server, "", "packed", |status, _| status == 200).await["hash"].clone();
    assert_eq!(text(&complete(&server, "", "packed").await.1), "four");
    write(&package, "deep/words.py", "WORD = \"five\"\n");
    wait_for_mod(&server, "", "packed", |_, shown| shown["hash"] != first).await;
    assert_eq!(text(&complete(&server, "", "packed").await.1), "five");
}

#[tokio::test]
async fn upload_whose_name_is_taken_during_its_import_is_not_stored() {
    let mods = folder();
    let server = Server::start(&[&UPLOAD_FLAGS[..], &["--mods-dir", mods.to_str().unwrap()]].concat());
    server.wait_ready().await;
    let source = forced_answer("late", "upload");
    let body = json!({"name": "late", "source": format!("import time\n\ntime.sleep(4)\n{source}")});
    let begun = Instant::now();
    let (uploaded, ()) = tokio::join!(upload(&server, &body), async {
        write(&mods, "late.py", &forced_answer("late", "file"));
        wait_for_mod(&server, MOD_KEY, "late", |status, _| status == 200).await;
    });
    assert!(begun.elapsed() >= Duration::from_secs(4), "the name was taken before the import");
    assert_eq!((uploaded.0, &uploaded.1["pointer"]), (409, &json!("name")), "{}", uploaded.1);
    let (_, shown) = server.send(MOD_KEY, Method::GET, "/v1/mods/late/versions", None).await;
    assert!(shown["versions"].as_array().unwrap().iter().all(|version| version["origin"] == "file"), "{shown}");
}

#[tokio::test]
async fn mod_disabled_during_a_run_is_no_longer_called() {
    let mods = folder();
    let slow = "import time\nfrom thunder_mods import Added, mod\n\n\n@mod(events=[Added])\ndef slow(event, actions):\n    \
                time.sleep(0.1)\n";
    write(&mods, "slow.py", slow);
    let server = Server::start(&["--mods-dir", mods.to_str().unwrap()]);
    server.wait_ready().await;
    let body = json!({"prompt": "Hello", "max_tokens": 100, "ignore_eos": true, "stream": true, "mods": ["slow"]});
    let mut response = server.request(Method::POST, "/v1/completions").json(&body).send().await.unwrap();
    let run = response.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
    response.chunk().await.unwrap().unwrap();
    assert_eq!(server.send("", Method::POST, "/v1/mods/slow/disable", None).await.0, 200);
    while response.chunk().await.unwrap().is_some() {}
    let run = server.finished(&run).await;
    assert_eq!(run["run"]["finish_reason"], "length", "the run continues without the mod");
    let calls = run["mod_calls"].as_array().unwrap();
    assert!(calls.len() < 100, "{} calls", calls.len());
    let (last, before) = calls.split_last().unwrap();
    assert_eq!(last["exception_message"], "the mod 'slow' was disabled during the run and is no longer called");
    assert!(before.iter().all(|call| call["exception_occurred"] == false));
    let shown = server.get("/v1/mods/slow").await.1;
    assert_eq!((&shown["enabled"], shown["calls"].as_u64()), (&json!(false), Some(before.len() as u64)), "{shown}");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn disabled_mod_is_not_called_in_forks_with_an_earlier_version() {
    let process = Server::start(&[&UPLOAD_FLAGS[..], &["--mod-timeout", "20000"]].concat());
    let server = Server::external(process.wait_ready().await.base.clone(), Some(MOD_KEY));
    let source = |seconds: f32| {
        format!(
            "import time\nfrom thunder_mods import Added, mod\n\n@mod(events=[Added])\ndef slow(event, actions):\n    \
             time.sleep({seconds})\n"
        )
    };
    assert_eq!(upload(&server, &json!({"name": "slow", "source": source(0.3)})).await.0, 200);
    let body = json!({"prompt": "Hello", "max_tokens": 30, "ignore_eos": true, "mods": ["slow"]});
    let run = server.answer("/v1/completions", &body).await["thunder"]["run_id"].as_str().unwrap().to_owned();
    server.finished(&run).await;
    assert_eq!(upload(&server, &json!({"name": "slow", "source": source(0.1)})).await.0, 200);
    let forks = format!("/api/v1/runs/{run}/forks");
    let (status, forked) = server.post(&forks, &json!({"at": {"step": 1}})).await;
    assert_eq!(status, 201, "{forked}");
    assert_eq!(server.post("/v1/mods/slow/disable", &json!({})).await.0, 200);
    let fork = server.finished(forked["runs"][0]["run_id"].as_str().unwrap()).await;
    let last = fork["mod_calls"].as_array().unwrap().last().unwrap();
    assert_eq!(last["exception_message"], "the mod 'slow' was disabled during the run and is no longer called");
    assert_eq!(fork["run"]["finish_reason"], "length", "the run continues without the mod: {}", fork["run"]);
    let (status, problem) = server.post(&forks, &json!({"at": {"step": 1}})).await;
    assert_eq!((status, message_of(&problem).contains("the mod 'slow' is disabled")), (409, true), "{problem}");
}

/// A mod whose import fails after a restart is kept: it can be viewed, disabled and removed.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn mod_that_fails_to_load_can_be_disabled_and_removed() {
    let server = Server::start(&[&UPLOAD_FLAGS[..], &["--mod-memory", "4G"]].concat());
    server.wait_ready().await;
    let needs_memory =
        "import resource\nif resource.getrlimit(resource.RLIMIT_AS)[0] < 3 << 30:\n    raise MemoryError('small')\n";
    let source = forced_answer("large", "one") + needs_memory;
    let (status, registered) = upload(&server, &json!({"name": "large", "source": source})).await;
    assert_eq!(status, 200, "{registered}");
    server.stop("TERM").await;

    let server = server.start_again(&[&UPLOAD_FLAGS[..], &["--mod-memory", "2G"]].concat());
    server.wait_ready().await;
    let (status, answer) = complete(&server, "user-key", "large").await;
    assert!(status == 400 && message_of(&answer).contains("MemoryError: small"), "{answer}");
    let html = server.request(Method::GET, "/mods/large").header("accept", "text/html").bearer_auth(MOD_KEY);
    let html = html.send().await.unwrap().text().await.unwrap();
    assert!(
        html.contains("not loaded") && html.contains("MemoryError: small") && !html.contains("was deleted"),
        "{html}"
    );
    assert!(html.contains("Says one") && html.contains("data-to=\"disable\""), "{html}");
    let (status, shown) = server.send("user-key", Method::GET, "/v1/mods/large", None).await;
    assert_eq!((status, &shown["hash"]), (200, &registered["hash"]), "{shown}");
    assert!(shown["problem"]["message"].as_str().unwrap().contains("MemoryError: small"), "{shown}");
    let (_, versions) = server.send("user-key", Method::GET, "/v1/mods/large/versions", None).await;
    assert_eq!(versions["current"], registered["hash"], "{versions}");
    let (status, shown) = server.send(MOD_KEY, Method::POST, "/v1/mods/large/disable", None).await;
    assert_eq!((status, &shown["enabled"], &shown["hash"]), (200, &json!(false), &registered["hash"]), "{shown}");
    assert_eq!(server.send(MOD_KEY, Method::DELETE, "/v1/mods/large", None).await.0, 204);
    assert_eq!(server.send(MOD_KEY, Method::DELETE, "/v1/mods/large", None).await.0, 404);
    let (_, list) = server.send(MOD_KEY, Method::GET, "/v1/mods", None).await;
    assert_eq!(list["problems"], json!([]));
    server.stop("TERM").await;
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn mod_changes_reach_other_servers_on_the_database() {
    let first = Server::start(&UPLOAD_FLAGS);
    first.wait_ready().await;
    let second = first.start_beside(&UPLOAD_FLAGS);
    second.wait_ready().await;
    let body = json!({"name": "fixed", "language": "python", "source": forced_answer("fixed", "one")});
    let (status, registered) = upload(&first, &body).await;
    assert_eq!(status, 200, "{registered}");
    // A mod that is stored and not loaded yet has no description.
    wait_for_mod(&second, "user-key", "fixed", |_, shown| shown["description"] == "Says one.").await;
    assert_eq!(text(&complete(&second, "user-key", "fixed").await.1), "one");

    let (_, registered) = upload(&second, &json!({"name": "fixed", "source": forced_answer("fixed", "two")})).await;
    assert_eq!(registered["replaced"], true);
    wait_for_mod(&first, "user-key", "fixed", |_, shown| shown["hash"] == registered["hash"]).await;
    assert_eq!(text(&complete(&first, "user-key", "fixed").await.1), "two");

    for enabled in [false, true, false] {
        let path = if enabled { "/v1/mods/fixed/enable" } else { "/v1/mods/fixed/disable" };
        assert_eq!(first.send(MOD_KEY, Method::POST, path, None).await.0, 200);
        wait_for_mod(&second, "user-key", "fixed", |_, shown| shown["enabled"] == enabled).await;
    }
    assert_eq!(second.send(MOD_KEY, Method::POST, "/v1/mods/log-top/disable", None).await.0, 200);
    wait_for_mod(&first, "user-key", "log-top", |_, shown| shown["enabled"] == false).await;

    assert_eq!(first.send(MOD_KEY, Method::DELETE, "/v1/mods/fixed", None).await.0, 204);
    wait_for_mod(&second, "user-key", "fixed", |_, shown| shown["hash"].is_null()).await;
    assert_eq!(complete(&second, "user-key", "fixed").await.0, 400);
    second.stop("TERM").await;
}
