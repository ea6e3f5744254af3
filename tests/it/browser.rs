//! Runs the tests of `tests/browser` on the dashboard in headless Chromium, in two groups at the same time. They need node, npm
//! and Chromium.

use super::harness::{Server, output_of};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use tokio::sync::OnceCell;

/// The default model of `thunder serve`; the harness would load the tiny one.
const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/models/demo.gguf");

#[tokio::test]
async fn dashboard_works_in_browser() {
    let Some(tests) = BrowserTests::prepare().await else { return };
    let empty = Server::start(&["--no-model"]);
    tests.run(|source| !needs_another_server(source), vec![("EMPTY_URL", empty)]).await;
}

#[tokio::test]
async fn editor_and_images_work_in_browser() {
    let Some(tests) = BrowserTests::prepare().await else { return };
    let editor = super::steering::start(&[
        "--control-vector-init-without-apply",
        "--mod-key",
        "browser-key",
        "--allow-mod-upload",
    ]);
    let models = super::harness::folder();
    std::fs::copy(super::harness::model(), models.join("other.gguf")).unwrap();
    let images = Server::start(&[
        "--model",
        DEMO,
        "--mmproj",
        super::images::PROJECTOR,
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
    tests.run(needs_another_server, vec![("EDITOR_URL", editor), ("IMAGES_URL", images)]).await;
}

/// Returns true for the source of tests that need the server with uploaded mods or the one with a projector.
fn needs_another_server(source: &str) -> bool {
    ["EDITOR_URL", "IMAGES_URL"].iter().any(|name| source.contains(name))
}

/// The files of `tests/browser`, and the programs that run them.
struct BrowserTests {
    folder: PathBuf,
    npm: PathBuf,
    chromium: PathBuf,
}

impl BrowserTests {
    /// Installs the packages of npm. Returns `None` and says so if a program or a package is missing.
    async fn prepare() -> Option<Self> {
        static INSTALLED: OnceCell<bool> = OnceCell::const_new();
        // The headless shell needs a quarter less CPU time than Chromium.
        let chromium = find(&["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"]);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser");
        let missing = match (chromium, find(&["npm"]), find(&["node"])) {
            (Some(chromium), Some(npm), Some(_)) => {
                let tests = Self { folder, npm, chromium };
                if *INSTALLED.get_or_init(|| tests.install()).await {
                    return Some(tests);
                }
                "an npm package"
            }
            (None, ..) => "Chromium",
            _ => "node with npm",
        };
        report(&format!("SKIPPED: the browser tests need {missing}, which is not installed"));
        None
    }

    async fn install(&self) -> bool {
        if self.folder.join("node_modules").exists() {
            return true;
        }
        let mut install = Command::new(&self.npm);
        install
            .args(["install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"])
            .current_dir(&self.folder);
        output_of(install).await.status.success()
    }

    /// Runs the test files whose source is chosen, with the addresses of a server and of `others` in environment variables.
    async fn run(self, is_chosen: fn(&str) -> bool, others: Vec<(&str, Server)>) {
        let is_test = |name: &String| {
            name.ends_with(".test.mjs") && is_chosen(&std::fs::read_to_string(self.folder.join(name)).unwrap())
        };
        let entries = std::fs::read_dir(&self.folder).unwrap();
        let mut files: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).filter(is_test).collect();
        files.sort();
        let mut servers = others;
        servers.push(("THUNDER_URL", Server::start(&["--model", DEMO, "--attention", "on"])));
        let mut npm = Command::new(&self.npm);
        npm.arg("test").envs([("MOD_KEY", "browser-key"), ("TEST_FILES", &files.join(","))]);
        npm.env("CHROMIUM", &self.chromium).current_dir(&self.folder);
        for (variable, server) in &servers {
            server.wait_ready().await;
            npm.env(variable, &server.base);
        }
        let output = output_of(npm).await;
        let printed = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            for (variable, server) in &servers {
                println!("{variable}:\n{}", server.log());
            }
            println!("{}", String::from_utf8_lossy(&output.stderr));
            // Printed last, because long output is cut off at the start; node repeats the failing tests at the end.
            panic!("{printed}");
        }
        report(&format!("the slowest browser tests of {}:\n{}", files.join(", "), slowest(&printed)));
        for (_, server) in servers {
            server.stop("TERM").await;
        }
    }
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
