//! `thunder chat` in a pipe and on a pseudo-terminal created by Python.

use super::harness::{Server, client_command, folder, model, output_of, server, text, thunder};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Maximum wait for an expected output.
pub const WAIT_TIMEOUT: Duration = Duration::from_mins(2);

/// Runs `thunder chat` on a server with these lines in a pipe.
async fn piped(server: &Server, arguments: &[&str], lines: &str) -> Output {
    let mut command = thunder();
    command.args(["chat", "--server", &server.base]).args(arguments).env("THUNDER_DATA_DIR", &server.data_dir);
    output_with_input(command, lines.to_owned()).await
}

/// Runs a command with this input.
async fn output_with_input(mut command: Command, lines: String) -> Output {
    let run = move || {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

/// Returns the chat command that turns on a mod, which forces a text.
fn forced_answer(text: &str) -> String {
    format!("/mods on force-prefix {}", json!({"text": text}))
}

#[tokio::test]
async fn piped_input_is_answered_line_by_line() {
    let server = server().await;
    let lines = format!("{}\nHello!\nAnd\\\nagain?\n/replay\n", forced_answer("Bread."));
    let output = piped(server, &["-n", "6", "--seed", "4", "--system", "Be short."], &lines).await;
    let (answers, notes) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{notes}");
    assert_eq!(answers.matches("Bread.").count(), 2, "{answers}");
    assert!(!answers.contains('\x1b') && !notes.contains('\x1b'), "{answers}{notes}");
    assert_eq!(notes.lines().filter(|line| line.starts_with("6 tokens, ")).count(), 2, "{notes}");
    // The second prompt begins with the first and its answer, which are cached.
    let cached: Vec<u64> =
        notes.lines().filter_map(|line| line.split("; ").nth(1)?.split_once(" of ")?.0.parse().ok()).collect();
    assert!(cached.len() == 2 && cached[1] > cached[0], "{notes}");
    let replay = notes.lines().find_map(|line| line.strip_prefix("replay: ")).unwrap();
    let run = server.finished(replay.rsplit('/').next().unwrap()).await;
    assert_eq!(run["run"]["surface"], "cli");
    let (_, found) = server.get(&format!("/api/v1/runs/{}", replay.rsplit('/').next().unwrap())).await;
    assert_eq!(found["run"]["mods"], json!(["force-prefix"]));
}

#[tokio::test]
async fn full_context_is_noted_once_and_shown() {
    let server = Server::start(&["-c", "256", "-np", "1"]);
    server.wait_ready().await;
    let long = "word ".repeat(36);
    let lines =
        format!("/params ignore_eos true\none {long}\ntwo {long}\nthree {long}\nHi\n/params max_tokens 100\nGo\n");
    let output = piped(&server, &["-n", "20", "--seed", "4", "--temperature", "0"], &lines).await;
    let notes = text(&output.stderr);
    assert!(output.status.success(), "{notes}");
    let contexts: Vec<u64> = notes
        .lines()
        .filter_map(|line| line.split_once("; context ")?.1.split_once(" of 256 ")?.0.parse().ok())
        .collect();
    assert_eq!(contexts.len(), 5, "{notes}");
    assert!(contexts.iter().all(|&tokens| tokens <= 256), "{contexts:?}");
    let answers: Vec<&str> = notes.split("ended by").collect();
    let noted: Vec<bool> = answers[..5].iter().map(|answer| answer.contains("were evicted")).collect();
    assert_eq!(noted, [false, false, true, false, true], "{notes}");
    // The reason is the context only if the requested maximum is higher than the room.
    let prompt = "word ".repeat(60);
    let count = server.answer("/tokenize", &json!({"content": prompt, "add_special": true})).await;
    let room = 256 - count["tokens"].as_array().unwrap().len();
    for (max_tokens, reason) in [
        ("512".to_owned(), "the context of 256 tokens is full".to_owned()),
        ("-1".to_owned(), "the context of 256 tokens is full".to_owned()),
        (room.to_string(), format!("the limit of {room} tokens is reached (--max-tokens)")),
    ] {
        let arguments = ["run", &prompt, "--raw", "--seed", "4", "--temperature", "0", "-n", &max_tokens];
        let output = output_of(client_command(&server, &arguments)).await;
        let notes = text(&output.stderr);
        assert!(notes.contains(&format!("ended by length: {reason}\n")), "{max_tokens}: {notes}");
    }
}

#[tokio::test]
async fn saved_conversation_can_be_continued() {
    let server = server().await;
    let folder = folder();
    let file = folder.join("conversation.json");
    let shown = file.display();
    let lines = format!("/system Be short.\n/params temperature 0\n{}\nHello!\n/save {shown}\n", forced_answer("Yes."));
    let output = piped(server, &["-n", "5"], &lines).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    let saved: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(saved["system"], "Be short.");
    assert_eq!(saved["parameters"], json!({"max_tokens": 5, "temperature": 0}));
    assert_eq!(saved["messages"].as_array().unwrap().len(), 2);
    assert_eq!(saved["messages"][1]["tokens"].as_array().unwrap().len(), 5, "{saved}");
    assert!(saved["messages"][1]["content"].as_str().unwrap().starts_with("Yes."));
    // The KV state is saved next to the conversation, and another server continues with it.
    let state = std::fs::metadata(folder.join("conversation.json.ses1")).unwrap();
    assert!(state.len() > 1000 && state.permissions().mode() & 0o777 == 0o600, "{state:?}");
    let other = Server::start(&[]);
    other.wait_ready().await;
    let output = piped(&other, &["-n", "5"], &format!("/restore {shown}\nAnd now?\n")).await;
    let notes = text(&output.stderr);
    let cached = notes.lines().find_map(|line| line.split("; ").nth(1)?.split_once(" of ")?.0.parse::<u64>().ok());
    assert!(output.status.success() && cached.is_some_and(|cached| cached > 20), "{notes}");
    std::fs::write(folder.join("conversation.json.ses1"), "SES1 with invalid content").unwrap();
    let output = piped(&other, &["-n", "5"], &format!("/restore {shown}\nAnd now?\n")).await;
    assert!(
        output.status.success() && text(&output.stderr).contains("processes the whole"),
        "{}",
        text(&output.stderr)
    );
    // The restored conversation gets the same answer to the same message.
    let answers_to = |lines: String| async move {
        let output = piped(server, &["-n", "5"], &lines).await;
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let two_answers = answers_to(format!("/restore {shown}\nAnd now?\n/regenerate\n")).await;
    let one_answer = answers_to(format!("/restore {shown}\n/mods off\n{}\nAnd now?\n", forced_answer("Yes."))).await;
    let answers: Vec<&str> = two_answers.split_inclusive("Yes.").collect();
    assert_eq!(answers.len(), 3, "{two_answers}");
    assert!(two_answers.starts_with(&one_answer), "{two_answers:?} {one_answer:?}");
    for invalid in
        ["/restore /nowhere.json", "/save", "/frobnicate", "/mods on nope", "/regenerate", "/mods off log-top"]
    {
        let output = piped(server, &[], &format!("{invalid}\n")).await;
        assert_eq!(output.status.code(), Some(1), "{invalid}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains("thunder: "), "{invalid}: {}", text(&output.stderr));
    }
}

#[tokio::test]
async fn failed_regeneration_keeps_the_answer() {
    let server = server().await;
    let file = folder().join("conversation.json");
    let lines = format!(
        "Hello!\n/params temperature \"hot\"\n/regenerate\n/replay\n/save {}\n/reset\n/replay\n",
        file.display()
    );
    let output = piped(server, &["-n", "4"], &lines).await;
    let notes = text(&output.stderr);
    assert!(output.status.code() == Some(1) && notes.contains("temperature"), "{notes}");
    assert_eq!(notes.matches("replay: ").count(), 1, "{notes}");
    assert!(notes.ends_with("there is no recorded answer yet\n"), "{notes}");
    let saved: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let roles: Vec<&Value> = saved["messages"].as_array().unwrap().iter().map(|message| &message["role"]).collect();
    assert_eq!(roles, ["user", "assistant"]);
}

#[tokio::test]
async fn tool_is_called_and_user_enters_result() {
    let server = server().await;
    let file = folder().join("tools.json");
    std::fs::write(
        &file,
        r#"[{"name": "lookup", "description": "Looks something up", "parameters": {"type": "object"}}]"#,
    )
    .unwrap();
    let lines = "/tools\n/mods on call_tool\nWhere?\n/mods off\nin the garden\n";
    let output = piped(server, &["-n", "6", "--tools", file.to_str().unwrap()], lines).await;
    let notes = text(&output.stderr);
    assert!(output.status.success(), "{notes}");
    assert!(notes.contains("lookup  Looks something up"), "{notes}");
    assert!(notes.contains("the model calls "), "{notes}");
    assert_eq!(notes.matches("tokens, ").count(), 2, "the model answers the result: {notes}");
}

#[tokio::test]
async fn chat_works_without_server() {
    let data_dir = folder();
    let mut command = thunder();
    command.args(["chat", "-n", "4", "--threads", "1", "--data-dir"]).arg(&data_dir).arg("-m").arg(model());
    let output = output_with_input(command, "Hello!\nAgain!\n/replay\n".to_owned()).await;
    let notes = text(&output.stderr);
    assert!(output.status.success(), "{notes}");
    let replay = notes.lines().find_map(|line| line.strip_prefix("replay: ")).unwrap();
    let run_id = replay.split("/runs/").nth(1).unwrap().split(' ').next().unwrap();
    let export = thunder().args(["export", run_id, "--data-dir"]).arg(&data_dir).output().unwrap();
    let document: Value = serde_json::from_slice(&export.stdout).unwrap();
    assert_eq!(document["request"]["request_id"], run_id);
}

/// A pseudo-terminal in which the program runs.
pub struct Terminal {
    child: Child,
    keys: ChildStdin,
    shown: Arc<Mutex<String>>,
}

impl Terminal {
    fn start(server: &Server, arguments: &[&str]) -> Self {
        Self::start_at(&server.base, arguments)
    }

    pub fn start_at(base: &str, arguments: &[&str]) -> Self {
        let home = folder();
        let program = env!("CARGO_BIN_EXE_thunder");
        let mut command = Command::new("python3");
        command.args(["-c", "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)", program, "chat", "--server"]);
        command.arg(base).args(arguments).current_dir(&home).env("THUNDER_DATA_DIR", &home).env("TERM", "xterm");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let shown = Arc::new(Mutex::new(String::new()));
        let (mut output, into) = (child.stdout.take().unwrap(), Arc::clone(&shown));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count) = output.read(&mut bytes) {
                if count == 0 {
                    break;
                }
                into.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        let keys = child.stdin.take().unwrap();
        Self { child, keys, shown }
    }

    pub fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
        self.keys.flush().unwrap();
    }

    /// Waits for a text after `from` and returns its end.
    pub fn wait(&mut self, from: usize, expected: &str) -> usize {
        let begun = Instant::now();
        loop {
            let shown = self.shown.lock().unwrap().clone();
            if let Some(at) = shown[from..].find(expected) {
                return from + at + expected.len();
            }
            assert!(begun.elapsed() < WAIT_TIMEOUT, "'{expected}' is not shown:\n{shown:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until that many bytes are shown after `from`.
    fn wait_for_bytes(&mut self, from: usize, bytes: usize) {
        let begun = Instant::now();
        while self.shown.lock().unwrap().len() < from + bytes {
            assert!(begun.elapsed() < WAIT_TIMEOUT, "{bytes} bytes are not shown:\n{:?}", self.shown.lock().unwrap());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the program ends; returns its exit code.
    pub fn wait_for_end(&mut self) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(begun.elapsed() < WAIT_TIMEOUT, "the program does not end:\n{:?}", self.shown.lock().unwrap());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The program has ended unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn key_press_stops_answer_but_not_program() {
    let server = server().await;
    let session = move || {
        let mut terminal = Terminal::start(server, &["--no-attention"]);
        let mut at = terminal.wait(0, "/help lists");
        at = terminal.wait(at, "> ");
        terminal.press("/params ignore_eos true\r");
        at = terminal.wait(at, "true");
        at = terminal.wait(at, "> ");
        for key in ["\x03", "\x1b"] {
            terminal.press("Hello!\r");
            at = terminal.wait(at, "Hello!");
            // The answer has begun and is long.
            terminal.wait_for_bytes(at, 40);
            terminal.press(key);
            at = terminal.wait(at, "stopped");
            at = terminal.wait(at, "> ");
        }
        terminal.press("/params max_tokens 4\r");
        at = terminal.wait(at, "max_tokens 4");
        at = terminal.wait(at, "> ");
        terminal.press("Again!\r");
        at = terminal.wait(at, "4 tokens");
        at = terminal.wait(at, "> ");
        // The up arrow recalls the last message.
        terminal.press("\x1b[A");
        at = terminal.wait(at, "Again!");
        terminal.press("\x03");
        at = terminal.wait(at, "to quit");
        terminal.wait(at, "> ");
        terminal.press("\x03");
        assert_eq!(terminal.wait_for_end(), Some(0));
        let shown = terminal.shown.lock().unwrap().clone();
        assert!(!shown.contains("panicked"), "{shown:?}");
    };
    tokio::task::spawn_blocking(session).await.unwrap();
}

#[tokio::test]
async fn tool_name_cannot_change_the_terminal() {
    let server = server().await;
    let file = folder().join("conversation.json");
    let call = json!({"id": "a", "type": "function", "function": {"name": "\u{1b}[2Jlook", "arguments": "{}"}});
    let messages =
        json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]);
    std::fs::write(&file, json!({"thunder_chat": 1, "messages": messages}).to_string()).unwrap();
    let session = move || {
        let mut terminal = Terminal::start(server, &["--restore", file.to_str().unwrap()]);
        terminal.wait(0, "␛[2Jlook> ");
        terminal.press("\x04");
        assert_eq!(terminal.wait_for_end(), Some(0));
        assert!(!terminal.shown.lock().unwrap().contains("\x1b[2J"));
    };
    tokio::task::spawn_blocking(session).await.unwrap();
}

#[tokio::test]
async fn retracted_text_is_erased_from_the_terminal() {
    let server = server().await;
    let session = move || {
        let mut terminal =
            Terminal::start(server, &["--mod", "replace_start", "-n", "12", "--seed", "2", "--no-attention"]);
        let at = terminal.wait(0, "/help lists");
        let at = terminal.wait(at, "> ");
        terminal.press("Hello!\r");
        let at = terminal.wait(at, "\x1b[J");
        let at = terminal.wait(at, "tokens, ");
        terminal.wait(at, "> ");
        terminal.press("\x04");
        assert_eq!(terminal.wait_for_end(), Some(0));
    };
    tokio::task::spawn_blocking(session).await.unwrap();
}

#[tokio::test]
async fn chat_continues_after_its_server_was_killed() {
    let server = Server::start(&["--api-key", "secret"]);
    server.wait_ready().await;
    let pid = server.pid().to_string();
    let base = server.base.clone();
    let address = base.trim_start_matches("http://").to_owned();
    let session = move || {
        let mut terminal = Terminal::start_at(&base, &["--no-attention", "--api-key", "secret"]);
        let at = terminal.wait(0, "/help lists");
        let at = terminal.wait(at, "> ");
        terminal.press("/params ignore_eos true\r");
        let at = terminal.wait(at, "> ");
        terminal.press(&format!("{}\r", forced_answer("Bread.")));
        let at = terminal.wait(at, "}");
        let at = terminal.wait(at, "> ");
        terminal.press("Hello!\r");
        let at = terminal.wait(at, "Bread.");
        assert!(Command::new("kill").args(["-s", "KILL", &pid]).status().unwrap().success());
        let at = terminal.wait(at, "lost during the answer");
        let at = terminal.wait(at, "> ");
        terminal.press("/replay\r");
        let at = terminal.wait(at, "/runs/");
        let at = terminal.wait(at, "> ");
        terminal.press("Hello again!\r");
        let at = terminal.wait(at, &format!("{address} does not answer: Connection "));
        let at = terminal.wait(at, "> ");
        terminal.press("/save kept.json\r");
        let at = terminal.wait(at, "kept.json: 2 messages");
        terminal.wait(at, "> ");
        terminal.press("\x04");
        assert_eq!(terminal.wait_for_end(), Some(0));
    };
    tokio::task::spawn_blocking(session).await.unwrap();
}

#[tokio::test]
async fn missing_key_error_names_flag() {
    let server = Server::start(&["--api-key", "secret"]);
    server.wait_ready().await;
    let none = piped(&server, &[], "Hello!\n").await;
    assert!(!none.status.success() && text(&none.stderr).contains("set it with --api-key"), "{}", text(&none.stderr));
    let wrong = piped(&server, &["--api-key", "other"], "Hello!\n").await;
    assert!(text(&wrong.stderr).contains("unknown API key"), "{}", text(&wrong.stderr));
    let right = piped(&server, &["--api-key", "secret", "-n", "3"], "Hello!\n").await;
    assert!(right.status.success(), "{}", text(&right.stderr));
}
