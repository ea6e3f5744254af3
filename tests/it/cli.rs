//! The command line, interactive and in scripts.

use super::harness::postgres::TestDatabase;
use super::harness::{
    ErrorTable, assert_no_postgres, can_receive, client_command, folder, model, output_of, psql, server, text, thunder,
};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use thunder::events::system;

/// Returns a trace of another engine with one token.
fn payload(request_id: &str) -> String {
    serde_json::json!({
        "request": {"request_id": request_id, "model": "elsewhere", "created_at": "2026-01-02T03:04:05Z"},
        "events": [
            {"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 3, "details": {"b": 1.50, "a": null}},
            {"event_type": "Sampled", "step": 1, "sequence_order": 1, "sampled_token": 5, "token_text": " hi"},
            {"event_type": "Added", "step": 1, "sequence_order": 2, "added_tokens": [5], "forced": false},
        ],
        "mod_calls": [], "mod_logs": [], "actions": [],
    })
    .to_string()
}

/// SIGHUP is the signal of a closed terminal.
#[test]
fn signal_to_a_command_also_ends_its_postgres() {
    let commands = [("HUP", &["chat"][..]), ("TERM", &["run", "hello", "-n", "2000"]), ("INT", &["chat"])];
    for (signal, arguments) in commands.into_iter().filter(|(signal, _)| can_receive(signal)) {
        let data_dir = folder();
        let mut command = thunder();
        command.args(arguments).args(["--threads", "1", "--data-dir"]).arg(&data_dir).arg("-m").arg(model());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let _open_input = child.stdin.take();
        let begun = Instant::now();
        let pid_file = data_dir.join("postgres/data/postmaster.pid");
        while !std::fs::read_to_string(&pid_file).is_ok_and(|text| text.contains("ready")) {
            assert!(begun.elapsed() < Duration::from_mins(3), "{arguments:?}: {:?}", child.try_wait());
            std::thread::sleep(Duration::from_millis(5));
        }
        let sent = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let ended = child.wait().unwrap();
        assert!(ended.code().is_some(), "{arguments:?}: {ended}");
        assert_no_postgres(&data_dir, signal);
    }
}

/// A GPU build finds the driver with `LD_LIBRARY_PATH`, so a worker must have the variable in a sandbox, too.
#[tokio::test]
async fn workers_use_library_path_of_program() {
    let data_dir = folder();
    let file = data_dir.join("look.py");
    let source = "import os\nfrom thunder_mods import Prefilled, mod\n\n\n@mod(events=[Prefilled])\n\
                  def look(event, actions, tokenizer):\n    \
                  return actions.force_output(tokenizer.encode(os.environ.get(\"LD_LIBRARY_PATH\", \"nowhere\")))\n";
    std::fs::write(&file, source).unwrap();
    for sandbox in ["off", "all"] {
        let mut command = thunder();
        command
            .env("LD_LIBRARY_PATH", "/opt/driver")
            .env("THUNDER_MOD_TIMEOUT", "30000")
            .args(["run", "Hello!", "--mod-sandbox", sandbox, "--mod"])
            .arg(&file);
        command.arg("--data-dir").arg(&data_dir).arg("-m").arg(model());
        let output = output_of(command).await;
        assert_eq!(text(&output.stdout).trim(), "/opt/driver", "{sandbox}: {}", text(&output.stderr));
    }
}

#[tokio::test]
async fn sandboxed_worker_does_not_run_as_root() {
    /// Every account can run this interpreter.
    const PYTHON: &str = "/usr/bin/python3";
    if !nix::unistd::geteuid().is_root() || !Path::new(PYTHON).exists() {
        return eprintln!("skipped: the test needs root and {PYTHON}");
    }
    let data_dir = folder();
    let file = data_dir.join("look.py");
    let source = "import os\nfrom thunder_mods import Prefilled, mod\n\n\n@mod(events=[Prefilled])\n\
                  def look(event, actions, tokenizer):\n    \
                  return actions.force_output(tokenizer.encode(str(os.getuid() > 0 and os.getgid() > 0)))\n";
    std::fs::write(&file, source).unwrap();
    let mut command = thunder();
    command.env("THUNDER_PYTHON", PYTHON).env("THUNDER_MOD_TIMEOUT", "30000");
    command.args(["run", "Hello!", "--mod-sandbox", "all", "--mod"]).arg(&file);
    command.arg("--data-dir").arg(&data_dir).arg("-m").arg(model());
    let output = output_of(command).await;
    let errors = text(&output.stderr);
    assert!(text(&output.stdout).trim() == "True" || errors.contains("there is no sandbox"), "{errors}");
}

#[tokio::test]
async fn trace_round_trips() {
    let server = server().await;
    let id = format!("cli-{}", system::new_id());
    let folder = folder();
    let (file, copy) = (folder.join("trace.json"), folder.join("copy.json"));
    std::fs::write(&file, payload(&id)).unwrap();
    let output = output_of(client_command(server, &["ingest", file.to_str().unwrap()])).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).trim(), format!("{}/runs/{id}", server.base));
    let output = output_of(client_command(server, &["export", &id, "-o", copy.to_str().unwrap()])).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    let copied = std::fs::read_to_string(&copy).unwrap();
    assert!(copied.contains("{\"b\":1.5,\"a\":null}"), "{copied}");
    // The copy is the same run, so it can be ingested again.
    let output = output_of(client_command(server, &["ingest", copy.to_str().unwrap()])).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = output_of(client_command(server, &["export", "no-such-run"])).await;
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr), "thunder: no run 'no-such-run' exists\n");
}

#[tokio::test]
async fn only_flags_of_the_command_line_select_a_database() {
    let server = server().await;
    let (id, folder) = (format!("cli-{}", system::new_id()), folder());
    let file = folder.join("trace.json").to_str().unwrap().to_owned();
    std::fs::write(&file, payload(&id)).unwrap();
    let with_variables = |arguments: &[&str]| {
        let mut command = client_command(server, arguments);
        command.env("THUNDER_DATA_DIR", folder.join("data")).env("DATABASE_URL", "postgres://127.0.0.1:1/x");
        command.env("THUNDER_MODS_DIR", &folder);
        output_of(command)
    };
    for arguments in [&["ingest", &file][..], &["export", &id], &["mods", "list"]] {
        let output = with_variables(arguments).await;
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    }
    let mut errors = ErrorTable::default();
    for arguments in [
        &["ingest", &file, "--data-dir", "data"][..],
        &["export", &id, "--database-url", "postgres://127.0.0.1:1/x"],
        &["mods", "list", "--mods-dir", "mods"],
        &[
            "mods",
            "test",
            concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/mods/call_tool.py"),
            "--data-dir",
            "data",
            "--against",
            &id,
        ],
    ] {
        errors.add_output(arguments, &with_variables(arguments).await);
    }
    insta::assert_snapshot!("flag_combination_errors", errors);
}

#[tokio::test]
async fn ingest_error_names_file_and_field() {
    let folder = folder();
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let right = write("right.json", &payload("r"));
    let wrong = write("wrong.json", r#"{"request": {"request_id": "w"}, "events": [{"event_type": "Nope"}]}"#);
    let check = |files: &[&PathBuf]| {
        let mut command = thunder();
        command.args(["ingest", "--check"]).args(files);
        command
    };
    let output = output_of(check(&[&right])).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), format!("{}: run r with 3 events\n", right.display()));
    let mut errors = ErrorTable::default();
    errors.add_output(&["ingest --check right.json wrong.json"], &output_of(check(&[&right, &wrong])).await);
    insta::assert_snapshot!("ingest_check_errors", errors);
}

#[test]
fn unknown_argument_is_usage_error() {
    let mut errors = ErrorTable::default();
    for arguments in [&["frobnicate"][..], &["serve", "--frobnicate"], &["run"], &["serve", "--port", "99999"]] {
        errors.add_output(arguments, &thunder().args(arguments).output().unwrap());
    }
    insta::assert_snapshot!("usage_errors", errors);
    let help = thunder().arg("--help").output().unwrap();
    for command in ["serve", "run", "ingest", "export"] {
        assert!(text(&help.stdout).contains(command));
    }
}

#[tokio::test]
async fn command_line_and_environment_override_configuration_file() {
    let path = folder().join("thunder.toml");
    std::fs::write(&path, "ctx-size = 256\nalias = ['from-file', 'second']\n[serve]\nport = 6001\nmetrics = true\n")
        .unwrap();
    let mut command = thunder();
    command
        .arg("config")
        .arg("--config-file")
        .arg(&path)
        .env("THUNDER_CTX_SIZE", "128")
        .env("THUNDER_API_KEY", "hidden-key");
    let printed = output_of(command).await;
    assert!(printed.status.success(), "{}", text(&printed.stderr));
    let printed = text(&printed.stdout);
    let file = path.display();
    let lines: Vec<&str> = printed.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).collect();
    let expected = [
        format!("alias = [\"from-file\", \"second\"] # {file}"),
        "ctx-size = 128 # THUNDER_CTX_SIZE".to_owned(),
        format!("port = 6001 # {file}"),
        format!("metrics = \"true\" # {file}"),
    ];
    assert_eq!(lines, expected.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(
        printed.contains("# api-key = (secret of THUNDER_API_KEY)") && !printed.contains("hidden-key"),
        "{printed}"
    );

    // The printed file is a configuration file with the same values.
    let copy = path.with_file_name("again.toml");
    std::fs::write(&copy, &printed).unwrap();
    let mut command = thunder();
    command.arg("config").arg("--config-file").arg(&copy);
    let reread = text(&output_of(command).await.stdout);
    let values = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        lines.map(|line| line.split(" # ").next().unwrap().to_owned()).collect()
    };
    assert_eq!(values(&reread), values(&printed));
}

#[tokio::test]
async fn configuration_file_error_names_file_and_cause() {
    let path = folder().join("thunder.toml");
    let mut errors = ErrorTable::default();
    for content in ["prot = 1", "port = ", "port = 'high'"] {
        std::fs::write(&path, content).unwrap();
        let mut command = thunder();
        command.args(["serve", "--config-file"]).arg(&path);
        let output = output_of(command).await;
        assert!(!output.status.success(), "{content}");
        errors.add_text(content, &text(&output.stderr));
    }
    let mut command = thunder();
    command.args(["config", "--config-file", "/nonexistent/thunder.toml"]);
    errors.add_text("a file that does not exist", &text(&output_of(command).await.stderr));
    insta::assert_snapshot!("configuration_file_errors", errors);
}

#[tokio::test]
async fn completions_and_manual_pages_cover_every_command() {
    let commands: Vec<String> = {
        use clap::CommandFactory;
        let root = thunder::cli::Cli::command();
        root.get_subcommands().filter(|inner| !inner.is_hide_set()).map(|inner| inner.get_name().to_owned()).collect()
    };
    for shell in ["bash", "zsh", "fish"] {
        let mut command = thunder();
        command.args(["completions", shell]);
        let script = text(&output_of(command).await.stdout);
        assert!(commands.iter().all(|name| script.contains(name)) && script.contains("ctx-size"), "{shell}");
        if shell == "bash" {
            let file = folder().join("completions");
            std::fs::write(&file, &script).unwrap();
            let checked = Command::new("bash").arg("-n").arg(&file).output().unwrap();
            assert!(checked.status.success(), "{}", text(&checked.stderr));
        }
    }
    let pages = folder().join("man1");
    let mut command = thunder();
    command.arg("man").arg(&pages);
    let written = output_of(command).await;
    assert!(written.status.success(), "{}", text(&written.stderr));
    for name in &commands {
        let page = std::fs::read_to_string(pages.join(format!("thunder-{name}.1"))).unwrap();
        assert!(page.contains(".SH NAME"), "{name}: {page}");
    }
    assert!(std::fs::read_to_string(pages.join("thunder.1")).unwrap().contains("thunder\\-serve"));
}

#[tokio::test]
async fn doctor_reports_working_and_missing_features() {
    let data_dir = folder();
    let doctor = |port: &str, data_dir: &Path, arguments: &[&str]| {
        let mut command = thunder();
        command.args(["doctor", "--port", port, "--data-dir"]).arg(data_dir).args(arguments);
        command
    };
    let healthy = output_of(doctor("0", &data_dir, &["-m", model().to_str().unwrap()])).await;
    let report = text(&healthy.stdout);
    assert!(healthy.status.success(), "{report}{}", text(&healthy.stderr));
    let subjects =
        ["configuration", "model", "devices", "addresses", "data directory", "database", "Python", "mod sandbox"];
    for (line, subject) in report.lines().skip(1).zip(subjects) {
        assert!(line[9..].starts_with(subject) && !line.starts_with("FAILED"), "{report}");
    }
    assert_eq!(report.lines().count(), subjects.len() + 1, "{report}");
    assert!(report.contains("embedded, PostgreSQL"), "{report}");
    assert_no_postgres(&data_dir, "doctor");

    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().port().to_string();
    let damaged = folder().join("damaged.gguf");
    std::fs::write(&damaged, "GGUF").unwrap();
    let model_and_database = ["-m", damaged.to_str().unwrap(), "--database-url", "postgres://127.0.0.1:1/x"];
    let arguments = [&model_and_database[..], &["--grammar", "root ::= ["]].concat();
    let broken = output_of(doctor(&taken, &damaged.join("data"), &arguments)).await;
    assert_eq!(broken.status.code(), Some(1));
    let report = text(&broken.stdout);
    let failed: Vec<&str> = report.lines().filter(|line| line.starts_with("FAILED")).collect();
    assert_eq!(failed.len(), 5, "{report}");
    let reasons = [
        "--grammar sets an invalid default of requests",
        "damaged.gguf",
        "another program, perhaps another Thunder",
        "damaged.gguf/data/spool: Not a directory",
        "127.0.0.1:1",
    ];
    for (line, reason) in failed.iter().zip(reasons) {
        assert!(line.contains(reason), "{report}");
    }
}

#[tokio::test]
async fn doctor_reports_databases_in_which_the_server_cannot_create_tables() {
    let data_dir = folder().join("none");
    let doctor = async |url: &str| {
        let mut command = thunder();
        command.args(["doctor", "--no-model", "--port", "0", "--database-url", url, "--data-dir"]).arg(&data_dir);
        let output = output_of(command).await;
        let report = text(&output.stdout);
        let failed = report.lines().find(|line| line.starts_with("FAILED")).unwrap_or_default().to_owned();
        assert_eq!(output.status.code(), Some(i32::from(!failed.is_empty())), "{report}");
        failed
    };
    let database = TestDatabase::empty();
    let url = database.url();
    assert_eq!(doctor(&url).await, "");
    let tables = psql(&url, "select count(*) from pg_tables where schemaname = 'public'").await;
    assert!(tables == "0" && !data_dir.exists(), "the check changed something: {tables} tables");

    psql(&url, "create role doctor login; revoke create on schema public from public").await;
    let failed = doctor(&url.replace("//postgres@", "//doctor@")).await;
    assert!(failed.contains("permission denied for schema public; the role"), "{failed}");

    psql(&url, "do $$ begin execute format('alter database %I set default_transaction_read_only = on', current_database()); end $$")
        .await;
    let failed = doctor(&url).await;
    assert!(failed.contains("does not accept writes: it is a standby"), "{failed}");
}
