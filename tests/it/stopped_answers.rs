//! Signals and keys that stop an answer of `thunder chat` or `thunder run`, with a server that the tests control.

use super::harness::{text, thunder};
use super::terminal::{Terminal, WAIT_TIMEOUT};
use axum::body::Body;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::stream::{self, StreamExt};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::io::Read;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use thunder::events::RunId;
use tokio::sync::Semaphore;

/// The message whose answer never begins.
const UNANSWERED: &str = "Wait";
/// The message whose answer begins but does not end.
const UNFINISHED: &str = "Begin";

/// A server for one conversation.
#[derive(Clone)]
struct ChatServer {
    base: String,
    /// The messages of each request, and null for a request of the mods.
    requests: Arc<Mutex<Vec<Value>>>,
    /// A permit per list of mods that is sent.
    mod_lists: Arc<Semaphore>,
}

impl ChatServer {
    async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let server = Self { base, requests: Arc::default(), mod_lists: Arc::new(Semaphore::new(0)) };
        let (chat, mods) = (server.clone(), server.clone());
        let complete = move |Json(body): Json<Value>| async move {
            let messages = &body["messages"];
            chat.requests.lock().unwrap().push(messages.clone());
            let message = &messages.as_array().unwrap().last().unwrap()["content"];
            if message == UNANSWERED {
                std::future::pending::<()>().await;
            }
            if message == UNFINISHED {
                let chunk = json!({"choices": [{"delta": {"content": "Bread"}}]});
                let first = stream::iter([Ok::<_, std::io::Error>(format!("data: {chunk}\n\n"))]);
                let body = Body::from_stream(first.chain(stream::pending()));
                return ([(RunId::HEADER, "run-1")], body).into_response();
            }
            let usage = json!({"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5});
            let chunk = json!({"choices": [{"delta": {"content": "Bread."}, "finish_reason": "stop"}], "usage": usage});
            ([("content-type", "text/event-stream")], format!("data: {chunk}\n\ndata: [DONE]\n\n")).into_response()
        };
        let list_mods = move || async move {
            mods.requests.lock().unwrap().push(Value::Null);
            mods.mod_lists.acquire().await.unwrap().forget();
            Json(json!({"mods": []}))
        };
        let routes = Router::new()
            .route("/healthz", get(|| async { Json(json!({"server": "thunder", "status": "ok"})) }))
            .route("/v1/models", get(|| async { Json(json!({"data": [{"id": "m", "meta": {"n_ctx": 64}}]})) }))
            .route("/v1/chat/completions", post(complete))
            .route("/api/v1/mods", get(list_mods));
        tokio::spawn(async move { axum::serve(listener, routes).await });
        server
    }

    /// Waits until it has received that many requests.
    fn wait_for_requests(&self, count: usize) {
        let begun = Instant::now();
        while self.requests.lock().unwrap().len() < count {
            assert!(begun.elapsed() < WAIT_TIMEOUT, "{:?}", self.requests.lock().unwrap());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[tokio::test]
async fn answer_stopped_before_its_first_text_leaves_no_message() {
    let server = ChatServer::start().await;
    let session = move || {
        let mut terminal = Terminal::start_at(&server.base, &["--no-attention"]);
        let mut at = terminal.wait(0, "/help lists");
        for (count, key) in [(1, "\x1b"), (2, "\x03")] {
            at = terminal.wait(at, "> ");
            terminal.press(&format!("{UNANSWERED}\r"));
            server.wait_for_requests(count);
            terminal.press(key);
            at = terminal.wait(at, "the conversation is unchanged");
        }
        at = terminal.wait(at, "> ");
        terminal.press("Hello!\r");
        at = terminal.wait(at, "ended by stop");
        terminal.wait(at, "> ");
        terminal.press("\x04");
        assert_eq!(terminal.wait_for_end(), Some(0));
        let messages = |text: &str| json!([{"role": "user", "content": text}]);
        assert_eq!(*server.requests.lock().unwrap(), [messages(UNANSWERED), messages(UNANSWERED), messages("Hello!")]);
    };
    tokio::task::spawn_blocking(session).await.unwrap();
}

#[tokio::test]
async fn interrupt_before_a_request_does_not_stop_its_answer() {
    let server = ChatServer::start().await;
    let session = move || {
        let mut terminal = Terminal::start_at(&server.base, &["--no-attention"]);
        let at = terminal.wait(0, "/help lists");
        let at = terminal.wait(at, "> ");
        // While the command runs, the line editor does not receive the signal.
        terminal.press("/mods\r");
        server.wait_for_requests(1);
        terminal.press("\x03");
        let at = terminal.wait(at, "^C");
        server.mod_lists.add_permits(1);
        let at = terminal.wait(at, "> ");
        terminal.press("Hello!\r");
        let at = terminal.wait(at, "ended by stop");
        terminal.wait(at, "> ");
        terminal.press("\x04");
        assert_eq!(terminal.wait_for_end(), Some(0));
    };
    tokio::task::spawn_blocking(session).await.unwrap();
}

#[tokio::test]
async fn interrupted_run_ends_its_line_and_reports_its_replay() {
    let server = ChatServer::start().await;
    let session = move || {
        let replay = format!("{}/runs/run-1", server.base);
        let interrupt = |flags: &[&str], wait: &dyn Fn(&mut dyn Read)| {
            let mut command = thunder();
            command.args(["run", UNFINISHED, "--server", &server.base]).args(flags);
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            wait(child.stdout.as_mut().unwrap());
            kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).unwrap();
            let output = child.wait_with_output().unwrap();
            (output.status.code(), text(&output.stdout), text(&output.stderr))
        };
        let ended = interrupt(&[], &|printed| {
            let mut begin = [0; 5];
            printed.read_exact(&mut begin).unwrap();
            assert_eq!(&begin, b"Bread");
        });
        assert_eq!(ended, (Some(130), "\n".to_owned(), format!("replay: {replay}\n")));
        let (code, printed, errors) = interrupt(&["--json"], &|_| server.wait_for_requests(2));
        let printed: Value = serde_json::from_str(&printed).unwrap();
        let end = (&printed["finish_reason"], &printed["usage"]);
        assert_eq!((code, end, errors.as_str()), (Some(130), (&json!("cancelled"), &Value::Null), ""));
    };
    tokio::task::spawn_blocking(session).await.unwrap();
}
