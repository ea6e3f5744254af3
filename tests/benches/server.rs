//! Thunder's server with recording is compared with llama-server: the same model, flags and requests, over HTTP. The
//! two alternate, so that other load on the machine affects both; the table shows medians and their ratio (above 1:
//! Thunder is better).
//!
//! `cargo bench --bench server -- --rival PATH/llama-server [MODEL.gguf] [--threads N] [--tokens N] [--prompt N] [--rounds N]
//! [--flags "…"]`; `--flags` apply to both. Without `--rival` nothing is measured.

#[path = "shared/median.rs"]
mod median;

use futures::StreamExt;
use median::median;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use thunder::events::TokenId;
use thunder::model::Model;
use thunder::model::llama::ModelOptions;

/// Maximum time for a server to load its model.
const LOAD_TIMEOUT: Duration = Duration::from_mins(3);
const STREAMS: [usize; 3] = [1, 4, 8];

struct Setup {
    rival: Option<PathBuf>,
    model: PathBuf,
    threads: usize,
    tokens: usize,
    prompt: usize,
    rounds: usize,
    flags: Vec<String>,
}

fn setup() -> Setup {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models");
    let mut setup = Setup {
        rival: None,
        model: root.join("demo.gguf"),
        threads: 1,
        tokens: 128,
        prompt: 135,
        rounds: 7,
        flags: Vec::new(),
    };
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    while let Some(arg) = args.next() {
        let mut next = || args.next().expect("a value follows the flag");
        let number = |text: String| text.parse().expect("a number follows the flag");
        match arg.as_str() {
            "--rival" => setup.rival = Some(next().into()),
            "--threads" => setup.threads = number(next()),
            "--tokens" => setup.tokens = number(next()),
            "--prompt" => setup.prompt = number(next()),
            "--rounds" => setup.rounds = number(next()),
            "--flags" => setup.flags = next().split_whitespace().map(str::to_owned).collect(),
            path => setup.model = path.into(),
        }
    }
    setup
}

/// A measured server; dropping it ends it.
struct Server {
    name: &'static str,
    base: String,
    child: Child,
    folder: Option<PathBuf>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // A graceful stop, so that an embedded database stops with it.
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

impl Server {
    async fn start(name: &'static str, program: &Path, setup: &Setup) -> Self {
        let port =
            std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
        let slots = STREAMS[STREAMS.len() - 1];
        let context = (4 * setup.prompt + setup.tokens + 64).next_multiple_of(256) * slots;
        let mut command = Command::new(program);
        let thunder = name == "thunder";
        let folder = thunder.then(|| std::env::temp_dir().join(format!("thunder-bench-{}", std::process::id())));
        if let Some(folder) = &folder {
            command.arg("serve").arg("--data-dir").arg(folder).args(["--attention", "off"]);
        }
        command.arg("--model").arg(&setup.model).args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["--ctx-size", &context.to_string(), "--parallel", &slots.to_string()]);
        command.args(["--threads", &setup.threads.to_string()]).args(&setup.flags);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let server =
            Self { name, base: format!("http://127.0.0.1:{port}"), child: child.expect("the server starts"), folder };
        // An error means that a provider is already installed.
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        let begun = Instant::now();
        while !reqwest::get(format!("{}/health", server.base)).await.is_ok_and(|answer| answer.status().is_success()) {
            assert!(begun.elapsed() < LOAD_TIMEOUT, "{name} is not ready after {LOAD_TIMEOUT:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        server
    }

    /// Streams one completion. Returns the times of its pieces of text and its number of tokens.
    async fn complete(&self, client: &reqwest::Client, prompt: &[TokenId], tokens: usize, seed: u64) -> Answer {
        let body = json!({
            "prompt": prompt, "max_tokens": tokens, "stream": true, "ignore_eos": true, "cache_prompt": false,
            "temperature": 0.8, "seed": seed, "stream_options": { "include_usage": true },
        });
        let sent = Instant::now();
        let answer = client.post(format!("{}/v1/completions", self.base)).json(&body).send().await;
        let answer = answer.unwrap_or_else(|error| panic!("{}: {error}", self.name));
        assert!(answer.status().is_success(), "{}: {}", self.name, answer.text().await.unwrap_or_default());
        let (mut came, mut count) = (Vec::with_capacity(tokens), 0);
        let (mut stream, mut unread) = (answer.bytes_stream(), String::new());
        while let Some(bytes) = stream.next().await {
            unread.push_str(&String::from_utf8_lossy(&bytes.expect("the stream continues")));
            while let Some(end) = unread.find('\n') {
                let line: String = unread.drain(..=end).collect();
                let Some(data) = line.trim().strip_prefix("data: ").filter(|data| *data != "[DONE]") else { continue };
                let chunk: Value = serde_json::from_str(data).expect("a chunk of JSON");
                if let Some(used) = chunk["usage"]["completion_tokens"].as_u64() {
                    count = used as usize;
                }
                if chunk["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
                    came.push(Instant::now());
                }
            }
        }
        if came.is_empty() {
            came.push(Instant::now());
        }
        Answer { sent, came, count }
    }
}

struct Answer {
    sent: Instant,
    /// Times at which pieces of text arrived.
    came: Vec<Instant>,
    /// Generated tokens.
    count: usize,
}

impl Answer {
    fn first(&self) -> Instant {
        self.came[0]
    }

    fn last(&self) -> Instant {
        self.came[self.came.len() - 1]
    }

    /// Returns the number of tokens from `begin` to `end`. A piece of text is one token, or slightly more after
    /// incomplete characters.
    fn tokens_between(&self, begin: Instant, end: Instant) -> f64 {
        let pieces = self.came.iter().filter(|&&at| begin < at && at <= end).count();
        pieces as f64 * self.count as f64 / self.came.len() as f64
    }
}

/// Measures one round of one server; higher is better in all values: tokens per second while all streams generate,
/// generated tokens per second from the first request to the last answer, prompt tokens per second, and the inverse of
/// the median and of the longest time to the first token.
async fn round(server: &Server, setup: &Setup, ids: &[TokenId], streams: usize, seed: u64) -> [f64; 5] {
    let mut random = StdRng::seed_from_u64(seed);
    let mut prompt =
        |length: usize| -> Vec<TokenId> { (0..length).map(|_| ids[random.random_range(0..ids.len())]).collect() };
    // llama-server sometimes closes a kept-alive connection just as it is reused.
    let client = reqwest::Client::builder().pool_max_idle_per_host(0).build().expect("a client");
    let prompts: Vec<_> = (0..streams).map(|_| prompt(setup.prompt)).collect();
    let answers =
        futures::future::join_all(prompts.iter().map(|prompt| server.complete(&client, prompt, setup.tokens, seed)))
            .await;
    for answer in &answers {
        assert_eq!(answer.count, setup.tokens, "{} ended early", server.name);
    }
    let all_begun = answers.iter().map(Answer::first).max().expect("streams");
    let one_ended = answers.iter().map(Answer::last).min().expect("streams");
    let together: f64 = answers.iter().map(|answer| answer.tokens_between(all_begun, one_ended)).sum();
    let generated = together / (one_ended - all_begun).as_secs_f64();
    let sent = answers.iter().map(|answer| answer.sent).min().expect("streams");
    let all_ended = answers.iter().map(Answer::last).max().expect("streams");
    let whole = (streams * setup.tokens) as f64 / (all_ended - sent).as_secs_f64();
    let mut waits: Vec<f64> = answers.iter().map(|answer| (answer.first() - answer.sent).as_secs_f64()).collect();
    let wait = median(&mut waits);
    let longest_wait = waits[waits.len() - 1];

    let long: Vec<_> = (0..streams).map(|_| prompt(4 * setup.prompt)).collect();
    let begun = Instant::now();
    futures::future::join_all(long.iter().map(|prompt| server.complete(&client, prompt, 1, seed))).await;
    let read = (streams * 4 * setup.prompt) as f64 / begun.elapsed().as_secs_f64();
    [generated, whole, read, 1.0 / wait, 1.0 / longest_wait]
}

fn main() {
    let setup = setup();
    let Some(rival) = &setup.rival else {
        println!(
            "nothing to compare with: give --rival PATH/llama-server (its sources come with PyPI's llama-cpp-python)"
        );
        return;
    };
    let ids: Vec<TokenId> = {
        let model = Model::load(&setup.model, &ModelOptions::default(), |_| true).expect("the model loads");
        let vocabulary = model.vocabulary();
        (0..vocabulary.len() as TokenId)
            .filter(|&id| !vocabulary.is_control(id) && !vocabulary.piece(id).is_empty())
            .collect()
    };
    println!(
        "{}, {} thread(s), prompts of {} and {} tokens, {} generated, median of {} rounds",
        setup.model.display(),
        setup.threads,
        setup.prompt,
        4 * setup.prompt,
        setup.tokens,
        setup.rounds
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let servers = [
            Server::start("thunder", Path::new(env!("CARGO_BIN_EXE_thunder")), &setup).await,
            Server::start("llama-server", rival, &setup).await,
        ];
        for streams in STREAMS {
            let mut seen: [[Vec<f64>; 5]; 2] = Default::default();
            for turn in 0..=setup.rounds {
                for (side, server) in servers.iter().enumerate() {
                    let values = round(server, &setup, &ids, streams, (turn * 16 + streams) as u64).await;
                    // The first round warms both up.
                    if turn > 0 {
                        seen[side].iter_mut().zip(values).for_each(|(list, value)| list.push(value));
                    }
                }
            }
            let [ours, theirs] = seen.map(|side| side.map(|mut values| median(&mut values)));
            let line = |name: &str, ours: f64, theirs: f64, unit: &str, ratio: f64| {
                println!("{streams} stream(s)  {name:<22} thunder {ours:>9.1}  llama-server {theirs:>9.1} {unit:<9} ratio {ratio:.3}");
            };
            let rate = |name, at: usize| line(name, ours[at], theirs[at], "tokens/s", ours[at] / theirs[at]);
            let wait = |name, at: usize| line(name, 1e3 / ours[at], 1e3 / theirs[at], "ms", ours[at] / theirs[at]);
            rate("generation, all clients", 0);
            rate("requests, whole", 1);
            rate("prompts", 2);
            wait("first token, median", 3);
            wait("first token, last", 4);
        }
    });
}
