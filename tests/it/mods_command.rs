//! The commands `thunder mods` and `thunder replay --verify`.

use super::harness::{
    ErrorTable, MODS, Server, folder, message_of, model, output_of, server, text, thunder, with_fields,
};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

/// Runs the program with a mod timeout for a busy machine.
async fn output(arguments: &[&str]) -> Output {
    let mut command = thunder();
    command.env("THUNDER_MOD_TIMEOUT", "30000").args(arguments);
    output_of(command).await
}

/// Runs the program; returns its exit code, standard output and standard error.
async fn run(arguments: &[&str]) -> (i32, String, String) {
    let output = output(arguments).await;
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

/// Adds the exit code and the output of a command to the table.
async fn add_result(errors: &mut ErrorTable, arguments: &[&str]) {
    errors.add_output(arguments, &output(arguments).await);
}

fn path(folder: &Path, file: &str) -> String {
    folder.join(file).to_str().unwrap().to_owned()
}

#[tokio::test]
async fn mod_is_created_checked_and_pushed() {
    let folder = folder();
    let dir = folder.to_str().unwrap();
    let (code, _, stderr) = run(&["mods", "new", "calm", "--dir", dir]).await;
    assert_eq!(code, 0, "{stderr}");
    let file = path(&folder, "calm.py");
    let (code, stdout, stderr) = run(&["mods", "test", &file]).await;
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert!(stdout.contains("3 passed, 0 failed"), "{stdout}");
    let mut errors = ErrorTable::default();
    add_result(&mut errors, &["mods", "new", "calm", "--dir", dir]).await;
    add_result(&mut errors, &["mods", "new", "import", "--dir", dir]).await;

    let (code, stdout, _) = run(&["mods", "check", &file]).await;
    assert!(code == 0 && stdout.contains("Ends sentences calmly."), "{stdout}");
    let broken = path(&folder, "broken.py");
    std::fs::write(&broken, "from thunder_mods import mod\n\nundefined\n").unwrap();
    add_result(&mut errors, &["mods", "check", &file, &broken]).await;
    let (code, stdout, _) = run(&["mods", "check", "--json", &broken]).await;
    let result: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &result[0]["error"]["line"]), (1, &json!(3)));
    add_result(&mut errors, &["mods", "check", "missing.py"]).await;

    std::fs::write(path(&folder, "nothing.py"), "").unwrap();
    add_result(&mut errors, &["mods", "check", &path(&folder, "nothing.py")]).await;
    std::fs::write(path(&folder, "logging.py"), "raise RuntimeError('not this one')\n").unwrap();
    let mut command = thunder();
    command.args(["mods", "test", "calm.py"]).current_dir(&folder);
    let output = output_of(command).await;
    assert!(output.status.success(), "the file logging.py replaces Python's module: {}", text(&output.stderr));

    let source = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, source.replace("return actions.backtrack", "return None and actions.backtrack")).unwrap();
    let (code, stdout, _) = run(&["mods", "test", &file]).await;
    assert!(code == 1 && stdout.contains("AssertionError") && stdout.contains("1 passed, 2 failed"), "{stdout}");
    std::fs::write(&file, source).unwrap();
    assert_eq!(run(&["mods", "test", &broken]).await.0, 2);

    let server = Server::start(&["--mod-key", "boss-key", "--allow-mod-upload"]);
    server.wait_ready().await;
    let connection = ["--server", &server.base, "--api-key", "boss-key"];
    let (code, stdout, stderr) = run(&[&["mods", "push", &file][..], &connection].concat()).await;
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.starts_with("calm ") && stdout.contains("a new mod"), "{stdout}");
    let (code, stdout, stderr) = run(&[&["mods", "push", &file, "--json"][..], &connection].concat()).await;
    let answers: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &answers[0]["name"], &answers[0]["replaced"]), (0, &json!("calm"), &json!(true)), "{stderr}");
    let (_, list, _) = run(&[&["mods", "list"][..], &connection].concat()).await;
    let row = list.lines().find(|line| line.starts_with("calm ")).unwrap();
    assert!(row.contains("uploaded") && row.contains("Ends sentences calmly."), "{list}");
    add_result(&mut errors, &[&["mods", "push", &file, "--name", "ban-phrases"][..], &connection].concat()).await;
    for (change, state) in [("disable", "disabled"), ("enable", "enabled")] {
        let (code, stdout, stderr) = run(&[&["mods", change, "calm"][..], &connection].concat()).await;
        assert_eq!((code, stdout), (0, format!("calm: {state} on {}\n", server.base)), "{stderr}");
        let (_, list, _) = run(&[&["mods", "list"][..], &connection].concat()).await;
        let row = list.lines().find(|line| line.starts_with("calm ")).unwrap();
        assert!(row.contains(state), "{list}");
    }
    let (code, stdout, stderr) = run(&[&["mods", "remove", "calm"][..], &connection].concat()).await;
    assert_eq!((code, stdout), (0, format!("calm: removed from {}\n", server.base)), "{stderr}");
    for arguments in [["mods", "remove", "calm"], ["mods", "remove", "ban-phrases"], ["mods", "disable", "a/b"]] {
        add_result(&mut errors, &[&arguments[..], &connection].concat()).await;
    }
    let arguments = ["mods", "disable", "ban-phrases", "--server", &server.base, "--api-key", "wrong"];
    add_result(&mut errors, &arguments).await;
    let (code, _, stderr) = run(&["mods", "push", &file, "--server", &server.base, "--api-key", "wrong"]).await;
    assert!(code == 2 && stderr.starts_with("thunder: calm: "), "{stderr}");

    let package = folder.join("moods");
    std::fs::create_dir_all(package.join("words")).unwrap();
    let source = "from thunder_mods import Prefilled, mod\nfrom .words.few import END\n\n\n@mod(events=[Prefilled])\n\
                  def short(event, actions, tokenizer):\n    return actions.force_output(tokenizer.encode(END))\n";
    std::fs::write(package.join("short.py"), source).unwrap();
    std::fs::write(package.join("words/few.py"), "END = \"Yes.\"\n").unwrap();
    let test = "from thunder_mods.testing import run\nfrom .short import short\n\n\n\
                def test_answer():\n    assert run(short, model=\"a\").check().text == \"Yes.\"\n";
    std::fs::write(package.join("test_short.py"), test).unwrap();
    std::fs::write(
        path(&folder, "test_moods.py"),
        format!("import words_for_tests\n{}", test.replace("from .short", "from moods.short")),
    )
    .unwrap();
    std::fs::write(path(&folder, "words_for_tests.py"), "").unwrap();
    let moods = package.to_str().unwrap();
    let (code, stdout, stderr) = run(&["mods", "test", moods]).await;
    assert!(code == 0 && stdout.contains("moods/test_short.py::test_answer"), "{stdout}{stderr}");
    assert!(stdout.contains("test_moods.py::test_answer\n2 passed"), "{stdout}");
    let alone = path(&folder, "alone.py");
    std::fs::write(&alone, "from calm import calm\n").unwrap();
    let (code, _, stderr) = run(&["mods", "test", &alone]).await;
    assert!(code == 2 && stderr.contains("alone.py imports calm.py, but a server has only alone.py"), "{stderr}");
    let (code, checked, stderr) = run(&["mods", "check", moods]).await;
    assert!(code == 0 && checked.contains("short"), "{checked}{stderr}");
    let (code, stdout, stderr) = run(&[&["mods", "push", moods][..], &connection].concat()).await;
    assert!(code == 0 && stdout.starts_with("short "), "{stdout}{stderr}");
    let version = stdout.split([' ', ':']).nth(1).unwrap();
    assert!(checked.starts_with(&format!("{moods}: short {version} ")), "{checked}{stdout}");
    let body = json!({"prompt": "Well?", "mods": ["short"]});
    let request = crate::harness::http().post(format!("{}/v1/completions", server.base)).bearer_auth("boss-key");
    let answer: Value = request.json(&body).send().await.unwrap().json().await.unwrap();
    assert_eq!(answer["choices"][0]["text"], "Yes.", "{answer}");
    add_result(&mut errors, &[&["mods", "push", moods, "--module", "words"][..], &connection].concat()).await;
    insta::assert_snapshot!("mods_command_errors", errors);
    let (code, list, _) = run(&["mods", "list", "--mods-dir", dir]).await;
    assert!(code == 0 && list.contains("calm") && list.contains("ban-phrases"), "{list}");
}

/// Generates a run and returns its id when it is stored.
async fn generate(server: &Server, fields: Value) -> String {
    let body = json!({"prompt": "Once upon a time", "max_tokens": 24, "seed": 7, "temperature": 1.2, "ignore_eos": true,
        "logit_bias": {"65": -3.5}, "banned_tokens": [66], "stop": ["\u{1}\u{2}"]});
    let answer = server.answer("/v1/completions", &with_fields(body, &fields)).await;
    let id = answer["thunder"]["run_id"].as_str().unwrap().to_owned();
    server.finished(&id).await;
    id
}

#[tokio::test]
async fn rerun_reproduces_recorded_run() {
    let server = server().await;
    let connection = ["--server", &server.base];
    let plain = generate(server, json!({})).await;
    let mods = json!({"mods": ["log-top", {"name": "temperature-by-entropy"}, "replace_start"]});
    let with_mods = generate(server, mods).await;
    let grammar =
        json!({"grammar": "root ::= [a-z]+ \"!\"", "ignore_eos": false, "temperature": 0.0, "banned_tokens": []});
    let constrained = generate(server, grammar).await;
    for id in [&plain, &with_mods, &constrained] {
        let (code, stdout, stderr) = run(&[&["replay", "--verify", id, "--json"][..], &connection].concat()).await;
        assert_eq!(code, 0, "{stdout}{stderr}");
        let result: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!((&result["same"], &result["difference"]), (&json!(true), &Value::Null));
        let again = server.finished(result["again"].as_str().unwrap()).await;
        let original = server.finished(id).await;
        assert_eq!(again["run"]["mods"], original["run"]["mods"]);
        assert_eq!(again["run"]["output_preview"], original["run"]["output_preview"]);
        let parameters = |run: &Value| run["events"][0]["details"]["prompt"]["parameters"].clone();
        let (mut now, mut recorded) = (parameters(&again), parameters(&original));
        now["attention"].take();
        recorded["attention"].take();
        assert_eq!(now, recorded, "the rerun has the recorded parameters");
    }
    let folder = folder();
    let file = path(&folder, "run.json");
    assert_eq!(run(&[&["export", &plain, "-o", &file][..], &connection].concat()).await.0, 0);
    assert_eq!(run(&[&["replay", "--verify", &file][..], &connection].concat()).await.0, 0);

    let mut recorded: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let events = recorded["events"].as_array_mut().unwrap();
    let sampled = events.iter_mut().filter(|event| event["event_type"] == "Sampled").nth(4).unwrap();
    sampled["sampled_token"] = json!(1);
    let step = sampled["step"].clone();
    std::fs::write(&file, recorded.to_string()).unwrap();
    let (code, stdout, _) = run(&[&["replay", "--verify", &file, "--json"][..], &connection].concat()).await;
    let result: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &result["difference"]["kind"], &result["difference"]["step"]), (1, &json!("token"), &step));
    assert!(result["difference"]["recorded"].as_str().unwrap().ends_with("(1)"), "{result}");
}

#[tokio::test]
async fn ingested_run_with_mod_source_can_be_rerun() {
    let server = server().await;
    let id = generate(server, json!({"mods": ["replace_start"]})).await;
    let file = path(&folder(), "run.json");
    assert_eq!(run(&["export", &id, "-o", &file, "--server", &server.base]).await.0, 0);
    let mut document: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let hash =
        document["events"][0]["details"]["prompt"]["parameters"]["mods"][0]["version"].as_str().unwrap().to_owned();

    let other = Server::start(&["--mod-sandbox", "off"]);
    other.wait_ready().await;
    assert_eq!(other.post("/ingest", &document).await.0, 201);
    let (code, _, stderr) = run(&["replay", "--verify", &id, "--server", &other.base]).await;
    assert!(code == 2 && stderr.contains("which is not stored here"), "{stderr}");

    // `thunder run` stores the sources of mods in this folder for the local server.
    let stored_sources = other.data_dir.join("mod-sources");
    std::fs::create_dir(&stored_sources).unwrap();
    let source = std::fs::read_to_string(Path::new(MODS).join("replace_start.py")).unwrap();
    let upload = json!({ "source": source });
    std::fs::write(stored_sources.join(&hash), upload.to_string()).unwrap();
    document["request"]["request_id"] = json!("with-source");
    assert_eq!(other.post("/ingest", &document).await.0, 201);
    assert!(!stored_sources.join(&hash).exists(), "the server takes over the mod's source");
    let (code, stdout, stderr) = run(&["replay", "--verify", "with-source", "--server", &other.base]).await;
    assert_eq!(code, 0, "{stdout}{stderr}");
}

#[tokio::test]
async fn rerun_of_unsuitable_run_reports_reason() {
    let server = server().await;
    let connection = ["--server", &server.base];
    let (code, _, stderr) = run(&[&["replay", "--verify", "no-such-run"][..], &connection].concat()).await;
    assert!(code == 2 && stderr.contains("no-such-run"), "{stderr}");
    assert_eq!(run(&["replay", "x"]).await.0, 2, "without --verify it is a usage error");
    let id = generate(server, json!({"mods": ["replace_start"]})).await;
    let stored_run = server.finished(&id).await;
    let mut prompt = stored_run["events"][0]["details"]["prompt"].clone();
    let rerun = |prompt: &Value| json!({"prompt": prompt});
    prompt["parameters"]["mods"][0]["version"] = json!("0".repeat(64));
    let (status, problem) = server.post("/api/v1/reruns", &rerun(&prompt)).await;
    let expected = "the recorded run used version 000000000000 of the mod 'replace_start', which is not stored here; \
                    the current version is ";
    assert!(status == 409 && message_of(&problem).starts_with(expected), "{problem}");
    let (status, answer) = server.post("/api/v1/reruns", &json!({"prompt": prompt, "any_version": true})).await;
    assert_eq!(status, 200, "{answer}");
    let mut out_of_range = stored_run["events"][0]["details"]["prompt"].clone();
    out_of_range["spans"] = json!([{"role": "user", "start": 3, "end": 1_000_000}]);
    assert_eq!(server.post("/api/v1/reruns", &rerun(&out_of_range)).await.0, 400);
    let hostile = [
        ("/tokens", json!([1_000_000])),
        ("/tokens", json!([])),
        ("/parameters", json!(null)),
        ("/parameters/sampling/temperature", json!(-1)),
        ("/parameters/limits/max_tokens", json!(-5)),
        ("/parameters/overflow", json!("sideways")),
        ("/parameters/sampling/logit_bias", json!([[999_999, 1]])),
        ("/parameters/sampling/logit_bias", json!([[5]])),
        ("/parameters/visible_tokens", json!([-1])),
        ("/parameters/model/fingerprint", json!("0")),
        ("/parameters/overflow", json!({"shift": {"keep": u64::MAX, "discard": 1}})),
        ("/parameters/mods", json!([{"config": 1}])),
        ("/parameters/mods", json!("replace_start")),
        ("/parameters/constraint", json!({"kind": "regex"})),
    ];
    for (pointer, value) in hostile {
        let mut wrong = stored_run["events"][0]["details"]["prompt"].clone();
        *wrong.pointer_mut(pointer).unwrap() = value;
        let (status, problem) = server.post("/api/v1/reruns", &rerun(&wrong)).await;
        assert!((400..500).contains(&status), "{pointer}: {status} {problem}");
    }
}

#[tokio::test]
async fn mod_test_compares_with_recorded_run() {
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
    let connection = ["--server", &server.base, "--model", model.to_str().unwrap()];
    let recorded = generate(&server, json!({"mods": [{"name": "stamp", "config": {"every": 5}}, "log-top"]})).await;
    let without = generate(&server, json!({"seed": 9})).await;

    let (code, stdout, stderr) =
        run(&[&["mods", "test", &file, "--against", &recorded, "--json"][..], &connection].concat()).await;
    assert_eq!(code, 0, "{stdout}{stderr}");
    let result: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&result["same"], &result["runs"][0]["recorded"]), (&json!(true), &json!(true)));
    let events = result["runs"][0]["events"].as_array().unwrap();
    assert_eq!((events.len(), &events[0]["action"]["action"]), (1, &json!("ForceTokens")), "{result}");
    assert_eq!(events[0]["logs"], json!(["INFO: now"]));

    std::fs::write(&file, source.replace("== event.config", "+ 1 == event.config")).unwrap();
    let (code, stdout, _) = run(&[&["mods", "test", &file, "--against", &recorded][..], &connection].concat()).await;
    assert!(code == 1 && stdout.contains("first difference at step 5"), "{stdout}");
    assert!(stdout.contains("recorded: Noop") && stdout.contains("now:      ForceTokens"), "{stdout}");

    let exported = path(&mods, "run.json");
    assert_eq!(run(&["export", &without, "-o", &exported, "--server", &server.base]).await.0, 0);
    let config = json!({"every": 1000}).to_string();
    let arguments = ["mods", "test", &file, "--against", &exported, "--config", &config];
    let (code, stdout, stderr) = run(&[&arguments[..], &connection[2..]].concat()).await;
    assert!(code == 0 && stdout.contains("the recorded run did not use the mod"), "{stdout}{stderr}");
    let printing = path(&mods, "_printing.py");
    let source_of_printing = "from thunder_mods import Prefilled, mod\n\n\n@mod(events=[Prefilled])\n\
                              def printing(event, actions, tokenizer):\n    print(\"seen\")\n";
    std::fs::write(&printing, source_of_printing).unwrap();
    let arguments = ["mods", "test", &printing, "--against", &exported];
    let (code, stdout, stderr) = run(&[&arguments[..], &connection[2..]].concat()).await;
    assert!(code == 0 && stdout.contains(": 1 calls, 0 with an effect, 1 log lines"), "{stdout}{stderr}");
    let (code, _, stderr) = run(&[&["mods", "test", &file, "--against", "nope"][..], &connection].concat()).await;
    assert!(code == 2 && stderr.contains("nope"), "{stderr}");

    std::fs::write(&file, source.replace("\"now\"", "\"later\"")).unwrap();
    let begun = std::time::Instant::now();
    while !server.get("/v1/mods/stamp/source").await.1.to_string().contains("later") {
        assert!(begun.elapsed().as_secs() < 60, "{}", server.log());
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    // The version that the run used is kept, and runs in the sandbox.
    let (code, stdout, stderr) = run(&["replay", "--verify", &recorded, "--server", &server.base]).await;
    if server.get("/props").await.1["mod_sandbox"]["available"] == true {
        assert_eq!(code, 0, "{stdout}{stderr}");
    } else {
        assert!(code == 2 && stderr.contains("sandbox") && stderr.contains("stamp"), "{stderr}");
    }
    let (_, versions) = server.get("/v1/mods/stamp/versions").await;
    let origins: Vec<&Value> =
        versions["versions"].as_array().unwrap().iter().map(|version| &version["origin"]).collect();
    assert!(origins.len() >= 2 && origins.iter().all(|origin| **origin == "file"), "{versions}");
    let arguments = ["replay", "--verify", &recorded, "--any-version", "--server", &server.base];
    let (code, stdout, stderr) = run(&arguments).await;
    assert_eq!(code, 0, "log lines are no difference: {stdout}{stderr}");
}
