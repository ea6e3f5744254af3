//! `thunder experiment`.

use super::ROUTE;
use crate::harness::{ErrorTable, Server, folder, output_of, server, text, thunder};
use serde_json::{Value, json};
use std::time::Duration;

/// Runs `thunder experiment` with a definition in the file `NAME.toml`, which also names the experiment.
pub async fn command(server: &Server, name: &str, definition: &str, flags: &[&str]) -> (Option<i32>, String, String) {
    let file = folder().join(format!("{name}.toml"));
    std::fs::write(&file, definition).unwrap();
    let mut command = thunder();
    command.args(["experiment", file.to_str().unwrap(), "--server", &server.base]).args(flags);
    let output = output_of(command).await;
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[tokio::test]
async fn command_runs_definition_and_prints_cells() {
    let server = server().await;
    let definition = "prompts = [\"Hello\"]\nseeds = [1, 2]\nmods = [[], [{ name = \"force-prefix\", config = { text = \"{} \" } }]]\n\
                      parameters = [{ max_tokens = 6 }]\nscore = { json = true }\n";
    let csv = folder().join("cells.csv");
    let (code, out, err) = command(server, "command-csv", definition, &["--csv", csv.to_str().unwrap()]).await;
    assert_eq!(code, Some(0), "{out}{err}");
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 5, "{out}");
    let head: Vec<&str> = lines[0].split_whitespace().collect();
    assert_eq!(head, ["CELL", "MODS", "SEED", "STATE", "TOKENS", "SCORE", "ANSWER"]);
    assert!(lines[3].contains("force-prefix {\"text\":\"{} \"}") && lines[3].contains("done"), "{out}");
    assert!(err.contains("4 cells: 4 done; mean score"), "{err}");
    assert!(lines[1].starts_with("1 ") && lines[4].starts_with("4 "), "{out}");
    let csv = std::fs::read_to_string(csv).unwrap();
    assert_eq!(csv.lines().count(), 5);
    assert!(csv.lines().nth(1).unwrap().starts_with("0,"), "the fields of the API count from 0: {csv}");
    // A file that cannot be written is an error before the experiment.
    let (code, out, err) = command(server, "command-csv", definition, &["--csv", "/nowhere/cells.csv"]).await;
    assert!(code == Some(1) && out.is_empty() && err.contains("cannot write /nowhere/cells.csv"), "{out}{err}");
    let (_, list) = server.get(ROUTE).await;
    let names = list["experiments"].as_array().unwrap().iter().map(|experiment| &experiment["name"]);
    assert_eq!(names.filter(|&name| name == "command-csv").count(), 1, "{list}");

    let (code, out, _) = command(server, "command-json", definition, &["--json"]).await;
    assert_eq!(code, Some(0));
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["grid"].as_array().unwrap().len(), 4);

    let mut errors = ErrorTable::default();
    for definition in ["prompts = [", "prompts = []\nseeds = [1]", "seeds = [1]"] {
        let (code, _, err) = command(server, "greetings", definition, &[]).await;
        assert_eq!(code, Some(1), "{err}");
        errors.add_text(format!("{definition:?}"), &err);
    }
    insta::assert_snapshot!("command_errors", errors);
}

/// A mod that was disabled after the cells had been checked interrupts the experiment.
#[tokio::test]
async fn command_fails_if_a_cell_failed() {
    let server = Server::start(&["--parallel", "1"]);
    server.wait_ready().await;
    let definition = "prompts = [\"Hello\"]\nseeds = [1, 2, 3]\nmods = [[], [\"log-top\"]]\nparameters = [{ max_tokens = 200, ignore_eos = true }]\n";
    let disabling = async {
        loop {
            let (_, list) = server.get(ROUTE).await;
            if !list["experiments"].as_array().unwrap().is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        server.post("/v1/mods/log-top/disable", &json!({})).await
    };
    let ((code, out, err), (status, _)) = tokio::join!(command(&server, "command-fails", definition, &[]), disabling);
    assert_eq!(status, 200);
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(out.contains("failed") && err.contains("failed"), "{out}{err}");
    assert!(err.contains("thunder: the experiment was interrupted; the dashboard can resume it"), "{err}");
}
