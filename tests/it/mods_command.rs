//! The commands `thunder mods` and `thunder replay --verify`.

use super::harness::{MODS, Server, folder, message_of, model, server, thunder};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};

async fn output(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

/// Runs the program; returns its exit code, standard output and standard error.
async fn run(words: &[&str]) -> (i32, String, String) {
    let mut command = thunder();
    command.args(words);
    let output = output(command).await;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn path(folder: &Path, file: &str) -> String {
    folder.join(file).to_str().unwrap().to_owned()
}

#[tokio::test]
async fn mod_is_created_checked_and_pushed() {
    let folder = folder();
    let dir = folder.to_str().unwrap();
    let (code, _, printed) = run(&["mods", "new", "calm", "--dir", dir]).await;
    assert_eq!(code, 0, "{printed}");
    let file = path(&folder, "calm.py");
    let (code, reported, printed) = run(&["mods", "test", &file]).await;
    assert_eq!(code, 0, "{reported}{printed}");
    assert!(reported.contains("3 passed, 0 failed"), "{reported}");
    assert_eq!(run(&["mods", "new", "calm", "--dir", dir]).await.0, 2, "nothing is overwritten");
    assert_eq!(run(&["mods", "new", "import", "--dir", dir]).await.0, 2);

    let (code, reported, _) = run(&["mods", "check", &file]).await;
    assert!(code == 0 && reported.contains("Ends sentences calmly."), "{reported}");
    let broken = path(&folder, "broken.py");
    std::fs::write(&broken, "from thunder_mods import mod\n\nundefined\n").unwrap();
    let (code, _, printed) = run(&["mods", "check", &file, &broken]).await;
    assert!(code == 1 && printed.contains("broken.py:3: ") && printed.contains("NameError"), "{printed}");
    let (code, reported, _) = run(&["mods", "check", "--json", &broken]).await;
    let result: Value = serde_json::from_str(&reported).unwrap();
    assert_eq!((code, &result[0]["error"]["line"]), (1, &json!(3)));
    assert_eq!(run(&["mods", "check", "missing.py"]).await.0, 2);

    std::fs::write(path(&folder, "nothing.py"), "").unwrap();
    let (code, _, printed) = run(&["mods", "check", &path(&folder, "nothing.py")]).await;
    assert!(
        code == 1
            && printed.matches("nothing.py has no mod").count() == 1
            && !printed.contains("nothing.py: nothing.py"),
        "{printed}"
    );
    std::fs::write(path(&folder, "logging.py"), "raise RuntimeError('not this one')\n").unwrap();
    let mut here = thunder();
    here.args(["mods", "test", "calm.py"]).current_dir(&folder);
    let reported = output(here).await;
    assert!(
        reported.status.success(),
        "Python's own modules are imported: {}",
        String::from_utf8_lossy(&reported.stderr)
    );

    let source = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, source.replace("return actions.backtrack", "return None and actions.backtrack")).unwrap();
    let (code, reported, _) = run(&["mods", "test", &file]).await;
    assert!(code == 1 && reported.contains("AssertionError") && reported.contains("1 passed, 2 failed"), "{reported}");
    std::fs::write(&file, source).unwrap();
    assert_eq!(run(&["mods", "test", &broken]).await.0, 2);

    let server = Server::start(&["--mod-key", "boss-key", "--allow-mod-upload"]);
    server.wait_ready().await;
    let to = ["--server", &server.base, "--api-key", "boss-key"];
    let (code, reported, printed) = run(&[&["mods", "push", &file][..], &to].concat()).await;
    assert_eq!(code, 0, "{printed}");
    assert!(reported.starts_with("calm ") && reported.contains("a new mod"), "{reported}");
    let (code, reported, printed) = run(&[&["mods", "push", &file, "--json"][..], &to].concat()).await;
    let answers: Value = serde_json::from_str(&reported).unwrap();
    assert_eq!((code, &answers[0]["name"], &answers[0]["replaced"]), (0, &json!("calm"), &json!(true)), "{printed}");
    let (_, list, _) = run(&[&["mods", "list"][..], &to].concat()).await;
    let row = list.lines().find(|line| line.starts_with("calm ")).unwrap();
    assert!(row.contains("uploaded") && row.contains("Ends sentences calmly."), "{list}");
    let (code, _, printed) = run(&[&["mods", "push", &file, "--name", "ban-phrases"][..], &to].concat()).await;
    assert!(code == 1 && printed.contains("built-in"), "{printed}");

    let package = folder.join("moods");
    std::fs::create_dir_all(package.join("words")).unwrap();
    let source = "from thunder_mods import Prefilled, mod\nfrom .words.few import END\n\n\n@mod(events=[Prefilled])\n\
                  def short(event, actions, tokenizer):\n    return actions.force_output(tokenizer.encode(END))\n";
    std::fs::write(package.join("short.py"), source).unwrap();
    std::fs::write(package.join("words/few.py"), "END = \"Yes.\"\n").unwrap();
    std::fs::write(package.join("test_short.py"), "import pytest\n").unwrap();
    let moods = package.to_str().unwrap();
    let (code, reported, printed) = run(&["mods", "check", moods]).await;
    assert!(code == 0 && reported.contains("short"), "{reported}{printed}");
    let (code, reported, printed) = run(&[&["mods", "push", moods][..], &to].concat()).await;
    assert!(code == 0 && reported.starts_with("short "), "{reported}{printed}");
    let ask = json!({"prompt": "Well?", "mods": ["short"]});
    let request = crate::harness::http().post(format!("{}/v1/completions", server.base)).bearer_auth("boss-key");
    let answer: Value = request.json(&ask).send().await.unwrap().json().await.unwrap();
    assert_eq!(answer["choices"][0]["text"], "Yes.", "{answer}");
    let (code, _, printed) = run(&[&["mods", "push", moods, "--module", "words"][..], &to].concat()).await;
    assert!(code == 2 && printed.contains("moods.words.few"), "{printed}");
    let (code, list, _) = run(&["mods", "list", "--mods-dir", dir]).await;
    assert!(code == 0 && list.contains("calm") && list.contains("ban-phrases"), "{list}");
}

/// Generates a run on the shared server and returns its id.
async fn generated(server: &Server, further: Value) -> String {
    let mut body = json!({"prompt": "Once upon a time", "max_tokens": 24, "seed": 7, "temperature": 1.2, "ignore_eos": true,
        "logit_bias": {"65": -3.5}, "banned_tokens": [66], "stop": ["\u{1}\u{2}"]});
    body.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
    let answer = server.answer("/v1/completions", &body).await;
    let id = answer["thunder"]["run_id"].as_str().unwrap().to_owned();
    server.finished(&id).await;
    id
}

#[tokio::test]
async fn rerun_reproduces_recorded_run() {
    let server = server().await;
    let to = ["--server", &server.base];
    let plain = generated(server, json!({})).await;
    let mods = json!({"mods": ["log-top", {"name": "temperature-by-entropy"}, "replace_start"]});
    let with_mods = generated(server, mods).await;
    let grammar =
        json!({"grammar": "root ::= [a-z]+ \"!\"", "ignore_eos": false, "temperature": 0.0, "banned_tokens": []});
    let constrained = generated(server, grammar).await;
    for id in [&plain, &with_mods, &constrained] {
        let (code, reported, printed) = run(&[&["replay", "--verify", id, "--json"][..], &to].concat()).await;
        assert_eq!(code, 0, "{reported}{printed}");
        let result: Value = serde_json::from_str(&reported).unwrap();
        assert_eq!((&result["same"], &result["difference"]), (&json!(true), &Value::Null));
        let again = server.finished(result["again"].as_str().unwrap()).await;
        let then = server.finished(id).await;
        assert_eq!(again["run"]["mods"], then["run"]["mods"]);
        assert_eq!(again["run"]["output_preview"], then["run"]["output_preview"]);
        let parameters = |run: &Value| run["events"][0]["details"]["prompt"]["parameters"].clone();
        let (mut now, mut recorded) = (parameters(&again), parameters(&then));
        now["attention"].take();
        recorded["attention"].take();
        assert_eq!(now, recorded, "the rerun has the recorded parameters");
    }
    let folder = folder();
    let file = path(&folder, "run.json");
    assert_eq!(run(&[&["export", &plain, "-o", &file][..], &to].concat()).await.0, 0);
    assert_eq!(run(&[&["replay", "--verify", &file][..], &to].concat()).await.0, 0);

    let mut recorded: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let events = recorded["events"].as_array_mut().unwrap();
    let sampled = events.iter_mut().filter(|event| event["event_type"] == "Sampled").nth(4).unwrap();
    sampled["sampled_token"] = json!(1);
    let step = sampled["step"].clone();
    std::fs::write(&file, recorded.to_string()).unwrap();
    let (code, reported, _) = run(&[&["replay", "--verify", &file, "--json"][..], &to].concat()).await;
    let result: Value = serde_json::from_str(&reported).unwrap();
    assert_eq!((code, &result["difference"]["kind"], &result["difference"]["step"]), (1, &json!("token"), &step));
    assert!(result["difference"]["recorded"].as_str().unwrap().ends_with("(1)"), "{result}");
}

#[tokio::test]
async fn ingested_run_with_mod_source_can_be_rerun() {
    let server = server().await;
    let id = generated(server, json!({"mods": ["replace_start"]})).await;
    let file = path(&folder(), "run.json");
    assert_eq!(run(&["export", &id, "-o", &file, "--server", &server.base]).await.0, 0);
    let mut document: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let hash =
        document["events"][0]["details"]["prompt"]["parameters"]["mods"][0]["version"].as_str().unwrap().to_owned();

    let other = Server::start(&["--mod-sandbox", "off"]);
    other.wait_ready().await;
    assert_eq!(other.post("/ingest", &document).await.0, 201);
    let (code, _, printed) = run(&["replay", "--verify", &id, "--server", &other.base]).await;
    assert!(code == 2 && printed.contains("which is not stored here"), "{printed}");

    // As stored by `thunder run`, which sends its runs only to the local server.
    let stored_sources = other.data_dir.join("mod-sources");
    std::fs::create_dir(&stored_sources).unwrap();
    let source = std::fs::read_to_string(Path::new(MODS).join("replace_start.py")).unwrap();
    std::fs::write(stored_sources.join(&hash), serde_json::to_vec(&source).unwrap()).unwrap();
    document["request"]["request_id"] = json!("handed");
    assert_eq!(other.post("/ingest", &document).await.0, 201);
    assert!(!stored_sources.join(&hash).exists(), "the server takes over the mod's source");
    let (code, reported, printed) = run(&["replay", "--verify", "handed", "--server", &other.base]).await;
    assert_eq!(code, 0, "{reported}{printed}");
}

#[tokio::test]
async fn rerun_of_unsuitable_run_reports_reason() {
    let server = server().await;
    let to = ["--server", &server.base];
    let (code, _, printed) = run(&[&["replay", "--verify", "no-such-run"][..], &to].concat()).await;
    assert!(code == 2 && printed.contains("no-such-run"), "{printed}");
    assert_eq!(run(&["replay", "x"]).await.0, 2, "without --verify it is a usage error");
    let id = generated(server, json!({"mods": ["replace_start"]})).await;
    let run_of = server.finished(&id).await;
    let mut prompt = run_of["events"][0]["details"]["prompt"].clone();
    let again = |prompt: &Value| json!({"prompt": prompt});
    prompt["parameters"]["mods"][0]["version"] = json!("0".repeat(64));
    let (status, problem) = server.post("/api/v1/reruns", &again(&prompt)).await;
    let expected = "the recorded run used version 000000000000 of the mod 'replace_start', which is not stored here; \
                    the current version is ";
    assert!(status == 409 && message_of(&problem).starts_with(expected), "{problem}");
    let (status, answer) = server.post("/api/v1/reruns", &json!({"prompt": prompt, "any_version": true})).await;
    assert_eq!(status, 200, "{answer}");
    let mut far = run_of["events"][0]["details"]["prompt"].clone();
    far["spans"] = json!([{"role": "user", "start": 3, "end": 1_000_000}]);
    assert_eq!(server.post("/api/v1/reruns", &again(&far)).await.0, 400);
    let hostile = [
        ("/tokens", json!([1_000_000])),
        ("/tokens", json!([])),
        ("/parameters", json!(null)),
        ("/parameters/sampling/temperature", json!(-1)),
        ("/parameters/limits/max_tokens", json!(-5)),
        ("/parameters/overflow", json!("sideways")),
        ("/parameters/sampling/logit_bias", json!([[999_999, 1]])),
        ("/parameters/visible_tokens", json!([-1])),
        ("/parameters/model/fingerprint", json!("0")),
        ("/parameters/overflow", json!({"shift": {"keep": u64::MAX, "discard": 1}})),
        ("/parameters/mods", json!([{"config": 1}])),
        ("/parameters/mods", json!("replace_start")),
        ("/parameters/constraint", json!({"kind": "regex"})),
    ];
    for (place, value) in hostile {
        let mut wrong = run_of["events"][0]["details"]["prompt"].clone();
        *wrong.pointer_mut(place).unwrap() = value;
        let (status, problem) = server.post("/api/v1/reruns", &again(&wrong)).await;
        assert!((400..500).contains(&status), "{place}: {status} {problem}");
    }
}

#[tokio::test]
async fn mod_is_tested_with_recorded_runs() {
    let mods = folder();
    let file = path(&mods, "stamp.py");
    let source = "from thunder_mods import Added, ForwardPass, mod\n\n\n@mod(events=[ForwardPass, Added], config={\"every\": 3})\n\
                  def stamp(event, actions, tokenizer):\n    count = len(event.context_info.generated)\n    \
                  if isinstance(event, ForwardPass) and count == event.config[\"every\"]:\n        print(\"now\")\n        \
                  return actions.force_tokens(tokenizer.encode(\"stop\"))\n";
    std::fs::write(&file, source).unwrap();
    let server = Server::start(&["--mods-dir", mods.to_str().unwrap()]);
    server.wait_ready().await;
    let model = model();
    let with = ["--server", &server.base, "--model", model.to_str().unwrap()];
    let recorded = generated(&server, json!({"mods": [{"name": "stamp", "config": {"every": 5}}, "log-top"]})).await;
    let without = generated(&server, json!({"seed": 9})).await;

    let (code, reported, printed) =
        run(&[&["mods", "test", &file, "--against", &recorded, "--json"][..], &with].concat()).await;
    assert_eq!(code, 0, "{reported}{printed}");
    let result: Value = serde_json::from_str(&reported).unwrap();
    assert_eq!((&result["same"], &result["runs"][0]["recorded"]), (&json!(true), &json!(true)));
    let events = result["runs"][0]["events"].as_array().unwrap();
    assert_eq!((events.len(), &events[0]["action"]["action"]), (1, &json!("ForceTokens")), "{result}");
    assert_eq!(events[0]["logs"], json!(["INFO: now"]));

    std::fs::write(&file, source.replace("== event.config", "+ 1 == event.config")).unwrap();
    let (code, reported, _) = run(&[&["mods", "test", &file, "--against", &recorded][..], &with].concat()).await;
    assert!(code == 1 && reported.contains("first difference at step 5"), "{reported}");
    assert!(reported.contains("recorded: Noop") && reported.contains("now:      ForceTokens"), "{reported}");

    let exported = path(&mods, "run.json");
    assert_eq!(run(&["export", &without, "-o", &exported, "--server", &server.base]).await.0, 0);
    let config = json!({"every": 1000}).to_string();
    let words = ["mods", "test", &file, "--against", &exported, "--config", &config];
    let (code, reported, printed) = run(&[&words[..], &with[2..]].concat()).await;
    assert!(code == 0 && reported.contains("the recorded run did not use the mod"), "{reported}{printed}");
    let (code, _, printed) = run(&[&["mods", "test", &file, "--against", "nope"][..], &with].concat()).await;
    assert!(code == 2 && printed.contains("nope"), "{printed}");

    std::fs::write(&file, source.replace("\"now\"", "\"later\"")).unwrap();
    let begun = std::time::Instant::now();
    while !server.get("/v1/mods/stamp/source").await.1.to_string().contains("later") {
        assert!(begun.elapsed().as_secs() < 60, "{}", server.log());
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    // The version that the run used is kept, and runs in the sandbox.
    let (code, reported, printed) = run(&["replay", "--verify", &recorded, "--server", &server.base]).await;
    if server.get("/props").await.1["mod_sandbox"]["available"] == true {
        assert_eq!(code, 0, "{reported}{printed}");
    } else {
        assert!(code == 2 && printed.contains("sandbox") && printed.contains("stamp"), "{printed}");
    }
    let (_, versions) = server.get("/v1/mods/stamp/versions").await;
    let origins: Vec<&Value> =
        versions["versions"].as_array().unwrap().iter().map(|version| &version["origin"]).collect();
    assert!(origins.len() >= 2 && origins.iter().all(|origin| **origin == "file"), "{versions}");
    let words = ["replay", "--verify", &recorded, "--any-version", "--server", &server.base];
    let (code, reported, printed) = run(&words).await;
    assert_eq!(code, 0, "log lines are no difference: {reported}{printed}");
}
