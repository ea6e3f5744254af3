//! The handbook: generated tables, names of functions, and the code blocks of its pages.

mod generated;

pub use generated::assert_generated;

use super::harness::{Server, folder, model, output_of, thunder};
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn pages() -> PathBuf {
    Path::new(ROOT).join("templates/docs")
}

/// A reference is `src/FILE.rs:NAME` in backticks; the name is a function, type or constant of that file.
#[test]
fn architecture_page_names_functions_that_exist() {
    let text = std::fs::read_to_string(pages().join("architecture.md")).unwrap();
    let references = text.split('`').filter_map(|code| code.strip_prefix("src/")?.split_once(".rs:"));
    let mut count = 0;
    for (file, name) in references {
        let path = Path::new(ROOT).join(format!("src/{file}.rs"));
        let source = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("src/{file}.rs: {error}"));
        let declares = ["fn ", "struct ", "enum ", "trait ", "const "].iter().any(|kind| {
            source
                .match_indices(&format!("{kind}{name}"))
                .any(|(at, found)| !source[at + found.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_'))
        });
        assert!(declares, "src/{file}.rs declares no {name}");
        count += 1;
    }
    assert!(count >= 20, "there are only {count} references");
}

/// The README is an introduction; details belong in the handbook.
#[test]
fn readme_stays_short() {
    let readme = std::fs::read_to_string(Path::new(ROOT).join("README.md")).unwrap();
    assert!(readme.lines().count() <= 150 && readme.len() <= 12_000, "{} bytes", readme.len());
    for link in readme.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        let file = link.split('#').next().unwrap();
        assert!(link.contains("://") || Path::new(ROOT).join(file).exists(), "{link}");
    }
}

/// A fenced block of a page.
#[derive(Debug)]
struct Block {
    line: usize,
    language: String,
    /// The reason why it cannot run.
    not_run: Option<String>,
    /// The exit codes that it may have.
    exit_codes: Vec<i32>,
    /// The path of a comment `POST /path` right before it.
    post: Option<String>,
    text: String,
}

fn blocks(markdown: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let (mut open, mut post): (Option<Block>, Option<String>) = (None, None);
    for (number, line) in markdown.lines().enumerate() {
        if let Some(info) = line.strip_prefix("```") {
            if let Some(block) = open.take() {
                blocks.push(block);
            } else {
                let (language, rest) = info.split_once(' ').unwrap_or((info, ""));
                let not_run = rest.strip_prefix("not-run: ").map(str::to_owned);
                let codes = rest.strip_prefix("exit: ");
                assert!(rest.is_empty() || not_run.is_some() || codes.is_some(), "line {}: {info}", number + 1);
                let exit_codes = codes.unwrap_or("0").split(" or ").map(|code| code.parse().unwrap()).collect();
                let (language, text) = (language.to_owned(), String::new());
                open = Some(Block { line: number + 1, language, not_run, exit_codes, post: post.take(), text });
            }
        } else if let Some(block) = &mut open {
            block.text.push_str(line);
            block.text.push('\n');
        } else if let Some(comment) = line.strip_prefix("<!-- POST ") {
            post = comment.strip_suffix(" -->").map(str::to_owned);
        }
    }
    assert!(open.is_none(), "a block is not closed");
    blocks
}

/// Runner of the blocks of all pages. The blocks of a page run consecutively in a new folder.
struct PageRunner {
    folder: PathBuf,
    /// The data directory of commands that start PostgreSQL themselves; its creation takes longer than the commands.
    data_dir: PathBuf,
    servers: BTreeMap<Vec<String>, Server>,
    flags: Vec<String>,
    ran: usize,
    skipped: Vec<String>,
    failures: Vec<String>,
}

impl PageRunner {
    fn new() -> Self {
        Self {
            folder: folder(),
            data_dir: folder(),
            servers: BTreeMap::new(),
            flags: Vec::new(),
            ran: 0,
            skipped: Vec::new(),
            failures: Vec::new(),
        }
    }

    /// Prepares the folder of a page: links to the repository's folders, and a program `thunder` that connects to the server.
    fn open_page(&mut self) {
        self.flags.clear();
        self.folder = folder();
        for name in ["fixtures", "tests", "src"] {
            std::os::unix::fs::symlink(Path::new(ROOT).join(name), self.folder.join(name)).unwrap();
        }
        std::fs::create_dir(self.folder.join("bin")).unwrap();
        let (program, model) = (thunder().get_program().to_owned(), model());
        let (program, data, model) = (program.display(), self.data_dir.display(), model.display());
        // A mod from a file runs in the command's process, with a separate database.
        let script = format!(
            "#!/bin/sh\ncase \"$*\" in\n\
             *'--mod ./'*) unset THUNDER_SERVER; exec {program} \"$@\" --threads 1 --data-dir {data} -m {model};;\n\
             'db '*) DATABASE_URL=$HANDBOOK_DATABASE THUNDER_DATA_DIR=$HANDBOOK_DATA exec {program} \"$@\";;\n\
             *' --against '*) exec {program} \"$@\" --model {model};;\n\
             *) exec {program} \"$@\";;\nesac\n"
        );
        let path = self.folder.join("bin/thunder");
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Returns the server that the page's last `thunder serve` line describes.
    async fn server(&mut self) -> &Server {
        if !self.servers.contains_key(&self.flags) {
            // The server runs in another folder.
            let paths = |flag: &String| {
                let path = self.folder.join(flag);
                if !flag.is_empty() && path.exists() { path.display().to_string() } else { flag.clone() }
            };
            let flags: Vec<String> = self.flags.iter().map(paths).collect();
            let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
            self.servers.insert(self.flags.clone(), Server::start(&flags));
        }
        self.servers[&self.flags].wait_ready().await
    }

    async fn run(&mut self, page: &str, block: &Block) {
        let location = format!("templates/docs/{page}:{}", block.line);
        match block.language.as_str() {
            "text" => {}
            _ if block.not_run.is_some() => {
                self.skipped.push(format!("{location}: {}", block.not_run.as_deref().unwrap()));
            }
            "json" => self.run_json(&location, block).await,
            "sh" if block.text.starts_with("thunder serve") => {
                let line = block.text.trim();
                assert_eq!(line.lines().count(), 1, "{location}: a block must start one server only");
                let arguments: Vec<String> =
                    line.split_whitespace().skip(2).map(|argument| argument.trim_matches('\'').to_owned()).collect();
                if arguments.iter().any(|argument| argument == "--list-devices") {
                    return self.run_command(&location, "bash", &["-ec", line], &block.exit_codes).await;
                }
                self.flags = arguments;
                self.server().await;
                self.ran += 1;
            }
            "sh" if block.text.contains("| jq ") && Command::new("jq").arg("--version").output().is_err() => {
                self.skipped.push(format!("{location}: jq is not installed"));
            }
            "sh" => {
                let arguments = ["-ec", &fail_on_errors(&block.text)];
                self.run_command(&location, "bash", &arguments, &block.exit_codes).await;
            }
            "python" => self.run_python(&location, &block.text).await,
            "toml" => {
                std::fs::write(self.folder.join("block.toml"), &block.text).unwrap();
                let arguments = ["config", "--config-file", "block.toml"];
                self.run_command(&location, "thunder", &arguments, &block.exit_codes).await;
            }
            other => panic!("{location}: blocks are sh, json, python, toml or text, not {other:?}"),
        }
    }

    async fn run_json(&mut self, location: &str, block: &Block) {
        let document = serde_json::from_str::<Value>(&block.text);
        if document.is_err() {
            for line in block.text.lines() {
                serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{location}: {error} in {line}"));
            }
        }
        if let Some(path) = &block.post {
            let (status, answer) = self.server().await.post(path, &document.unwrap()).await;
            if !(200..300).contains(&status) {
                self.failures.push(format!("{location}: {status} {answer}"));
            }
        }
        self.ran += 1;
    }

    async fn run_python(&mut self, location: &str, text: &str) {
        let first = text.lines().next().unwrap_or_default();
        let name = first
            .strip_prefix("# ")
            .filter(|name| has_extension(name, "py") && !name.contains(' '))
            .unwrap_or("block.py");
        let base = self.server().await.base.clone();
        std::fs::write(self.folder.join(name), text.replace("http://localhost:6767", &base)).unwrap();
        let imports: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("import ").or(line.strip_prefix("from ")))
            .flat_map(|rest| rest.split(" import ").next().unwrap().split(','))
            .map(|module| module.split(" as ").next().unwrap().trim().split('.').next().unwrap())
            .collect();
        let probe =
            format!("import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in {imports:?}))");
        let is_installed = self.command("python3", &["-c", &probe], &base).status().unwrap().success();
        if is_installed {
            self.run_command(location, "python3", &[name], &[0]).await;
        } else {
            self.skipped.push(format!("{location}: a package of {imports:?} is not installed"));
        }
    }

    fn command(&self, program: &str, arguments: &[&str], base: &str) -> Command {
        let mut command = Command::new(program);
        let path = format!("{}:{}", self.folder.join("bin").display(), std::env::var("PATH").unwrap());
        command.args(arguments).current_dir(&self.folder).stdin(Stdio::null()).env("PATH", path);
        command
            .env("THUNDER_SERVER", base)
            .env("THUNDER_CONFIG_FILE", "")
            .env("THUNDER_MOD_TIMEOUT", "30000")
            .env("PYTHONPATH", format!("{ROOT}/src/mods/python/sdk"))
            .env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    async fn run_command(&mut self, location: &str, program: &str, arguments: &[&str], exit_codes: &[i32]) {
        let server = self.server().await;
        let (base, data, database) = (server.base.clone(), server.data_dir.clone(), server.database_url());
        // A prefix is part of the page's addresses.
        let origin = base.splitn(4, '/').take(3).collect::<Vec<_>>().join("/");
        let host = origin.trim_start_matches("http://").to_owned();
        let arguments: Vec<String> = arguments
            .iter()
            .map(|text| text.replace("localhost:6767", &host).replace("127.0.0.1:6767", &host))
            .collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut command = self.command(program, &arguments, &base);
        command.env("HANDBOOK_DATA", data).env("HANDBOOK_DATABASE", database);
        let output = output_of(command).await;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if !output.status.code().is_some_and(|code| exit_codes.contains(&code)) {
            let script = arguments.join(" ");
            self.failures.push(format!("{location}: {}\n{script}\n{out}\n{err}", output.status));
        }
        self.ran += 1;
    }
}

fn has_extension(name: &str, extension: &str) -> bool {
    Path::new(name).extension().is_some_and(|found| found == extension)
}

/// Makes curl fail on HTTP errors, unless the page checks the status.
fn fail_on_errors(text: &str) -> String {
    text.replace("curl ", "curl --fail-with-body ")
        .replace("curl --fail-with-body -s -o answer.json", "curl -s -o answer.json")
}

#[tokio::test]
async fn blocks_of_the_handbook_run() {
    let only = std::env::var("HANDBOOK_PAGE").ok();
    let mut files: Vec<String> =
        std::fs::read_dir(pages()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    files.retain(|name| has_extension(name, "md") && only.as_ref().is_none_or(|only| name == only));
    files.sort();
    let mut runner = PageRunner::new();
    let readme = ("README.md", Path::new(ROOT).join("README.md"));
    let readme = only.is_none().then_some(readme).into_iter();
    for (name, path) in files.iter().map(|name| (name.as_str(), pages().join(name))).chain(readme) {
        runner.open_page();
        for block in blocks(&std::fs::read_to_string(path).unwrap()) {
            runner.run(name, &block).await;
        }
    }
    assert!(runner.failures.is_empty(), "{}", runner.failures.join("\n\n"));
    assert!(only.is_some() || runner.ran > 60, "only {} blocks ran", runner.ran);
    let reasons = runner.skipped.join("\n");
    eprintln!("{} blocks ran on {} servers; skipped:\n{reasons}", runner.ran, runner.servers.len());
    for server in runner.servers.into_values() {
        server.stop("TERM").await;
    }
}
