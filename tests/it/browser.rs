//! Runs the tests of `tests/browser` on the dashboard in headless Chromium. They need node, npm and Chromium.

use super::harness::Server;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

#[tokio::test]
async fn dashboard_works_in_browser() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser");
    // The headless shell needs a quarter less CPU time than Chromium.
    let Some(chromium) = find(&["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"]) else {
        return report_skipped("Chromium");
    };
    let (Some(npm), Some(_)) = (find(&["npm"]), find(&["node"])) else { return report_skipped("node with npm") };
    if !folder.join("node_modules").exists() {
        let install = Command::new(&npm)
            .args(["install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"])
            .current_dir(&folder)
            .output()
            .unwrap();
        if !install.status.success() {
            return report_skipped("an npm package");
        }
    }
    // The default model of `thunder serve`; the harness would load the tiny one.
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/models/demo.gguf");
    let server = Server::start(&["--model", demo, "--attention", "on"]);
    server.wait_ready().await;
    let editor = super::steering::start(&[
        "--control-vector-init-without-apply",
        "--mod-key",
        "browser-key",
        "--allow-mod-upload",
    ]);
    editor.wait_ready().await;
    let projector = super::images::PROJECTOR;
    let models = super::harness::folder();
    std::fs::copy(super::harness::model(), models.join("other.gguf")).unwrap();
    let images = Server::start(&[
        "--model",
        demo,
        "--mmproj",
        projector,
        "--attention",
        "on",
        "--record-images",
        "--parallel",
        "1",
        "--ctx-size",
        "512",
        "--models-dir",
        models.to_str().unwrap(),
    ]);
    images.wait_ready().await;
    let empty = Server::start(&["--no-model"]);
    empty.wait_ready().await;
    let (base, editor_base, empty_base) = (server.base.clone(), editor.base.clone(), empty.base.clone());
    let images_base = images.base.clone();
    let tests = tokio::task::spawn_blocking(move || {
        Command::new(npm)
            .arg("test")
            .env("THUNDER_URL", base)
            .env("EDITOR_URL", editor_base)
            .env("MOD_KEY", "browser-key")
            .env("EMPTY_URL", empty_base)
            .env("IMAGES_URL", images_base)
            .env("CHROMIUM", chromium)
            .current_dir(folder)
            .output()
            .unwrap()
    });
    let tests = tests.await.unwrap();
    if !tests.status.success() {
        println!("server:\n{}\nserver with mods:\n{}", server.log(), editor.log());
        println!("{}", String::from_utf8_lossy(&tests.stderr));
        // Printed last, because long output is cut off at the start; node repeats the failing tests at the end.
        panic!("{}", String::from_utf8_lossy(&tests.stdout));
    }
    report(&format!("the slowest browser tests:\n{}", slowest(&String::from_utf8_lossy(&tests.stdout))));
    server.stop("TERM").await;
    editor.stop("TERM").await;
    empty.stop("TERM").await;
    images.stop("TERM").await;
}

/// Returns a line for each of the ten slowest tests in the output of node.
fn slowest(output: &str) -> String {
    let test = |line: &str| -> Option<(f64, String)> {
        let (name, duration) = line.trim().strip_prefix("✔ ")?.rsplit_once(" (")?;
        Some((duration.strip_suffix("ms)")?.parse().ok()?, name.to_owned()))
    };
    let mut tests: Vec<_> = output.lines().filter_map(test).collect();
    tests.sort_by(|a, b| b.0.total_cmp(&a.0));
    let lines: Vec<String> = tests.iter().take(10).map(|(ms, name)| format!("{:6.1} s  {name}", ms / 1e3)).collect();
    lines.join("\n")
}

fn report_skipped(missing: &str) {
    report(&format!("SKIPPED: the browser tests need {missing}, which is not installed"));
}

/// Prints to standard error directly, because the test runner hides the output of passing tests.
fn report(text: &str) {
    let mut terminal = std::io::stderr();
    writeln!(terminal, "{text}").unwrap();
}

fn find(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let candidates: Vec<PathBuf> =
        std::env::split_paths(&path).flat_map(|folder| names.iter().map(move |name| folder.join(name))).collect();
    candidates.into_iter().find(|candidate| candidate.is_file())
}
