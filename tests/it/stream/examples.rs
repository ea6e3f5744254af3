//! The examples of `tests/examples`, run as documented.

use crate::harness::Server;
use std::path::Path;
use std::process::{Command, Output};

fn run(program: &str, flags: &[&str], file: &str, base: &str, key: &str) -> Option<Output> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/examples").join(file);
    let mut command = Command::new(program);
    command.args(flags).arg(file).args(["Once upon a time", base]).env("THUNDER_API_KEY", key);
    match command.output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("skipped: {program} is not installed");
            None
        }
        Err(error) => panic!("{program}: {error}"),
    }
}

async fn run_example(program: &'static str, flags: &'static [&'static str], file: &'static str) {
    let server = Server::start(&["--api-key", "secret"]);
    server.wait_ready().await;
    let base = server.base.clone();
    let output = tokio::task::spawn_blocking(move || run(program, flags, file, &base, "secret")).await.unwrap();
    let Some(output) = output else { return };
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{printed}");
    assert!(!output.stdout.is_empty(), "{printed}");
    // An example also prints that it changed the temperature, unless the run ends earlier.
    for expected in ["run ", "feedback: "] {
        assert!(printed.contains(expected), "{printed}");
    }
}

#[tokio::test]
async fn python_example_works() {
    run_example("python3", &[], "stream.py").await;
}

#[tokio::test]
async fn javascript_example_works() {
    let version = Command::new("node").arg("--version").output();
    let version = version.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let major: u32 = version.trim_start_matches('v').split('.').next().and_then(|text| text.parse().ok()).unwrap_or(0);
    match major {
        0 => eprintln!("skipped: node is not installed"),
        1..20 => eprintln!("skipped: node {version} has no WebSocket"),
        20 | 21 => run_example("node", &["--experimental-websocket"], "stream.mjs").await,
        22.. => run_example("node", &[], "stream.mjs").await,
    }
}
