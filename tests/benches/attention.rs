//! Cost of attention in responses: the same server with requests for every layer and head as binary frames and as
//! base64 in JSON is compared with requests without attention, at two context lengths; and the server's memory is
//! measured before and after a long answer. Each request with attention follows one without, so that other load on the
//! machine affects both; a cost is the median of such pairs.
//!
//! `cargo bench --bench attention -- MODEL.gguf [--threads N] [--tokens N] [--rounds N] [--long N] [--record]`; a model of 100
//! million parameters is made by
//! `fixtures/models/make_tiny.py --output MODEL.gguf --vocabulary 1000 --layers 12 --width 768 --heads 12 --kv-heads 12 --hidden 2560`.

#[path = "shared/median.rs"]
mod median;

use futures::{SinkExt, StreamExt};
use median::median;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use yawc::{Frame, OpCode, Options, TcpWebSocket, WebSocket};

/// Maximum time for the server to load its model.
const LOAD_TIMEOUT: Duration = Duration::from_mins(3);
const CONTEXTS: [usize; 2] = [512, 4096];

struct Setup {
    model: PathBuf,
    threads: usize,
    tokens: usize,
    rounds: usize,
    long: usize,
    record: bool,
}

fn setup() -> Setup {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny.gguf");
    let mut setup = Setup { model: tiny, threads: 2, tokens: 64, rounds: 7, long: 1000, record: false };
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|value| value.parse().ok()).expect("a number follows the flag");
        match arg.as_str() {
            "--threads" => setup.threads = number(),
            "--tokens" => setup.tokens = number(),
            "--rounds" => setup.rounds = number(),
            "--long" => setup.long = number(),
            "--record" => setup.record = true,
            path => setup.model = path.into(),
        }
    }
    setup
}

/// The measured server; dropping it ends it.
struct Server {
    address: String,
    child: Child,
    folder: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        // A graceful stop, so that its database stops with it.
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Server {
    async fn start(setup: &Setup) -> Self {
        let port =
            std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
        let folder = std::env::temp_dir().join(format!("thunder-bench-{}", std::process::id()));
        let address = format!("127.0.0.1:{port}");
        let context = (CONTEXTS[1] + 64).next_multiple_of(256);
        let child = Command::new(env!("CARGO_BIN_EXE_thunder"))
            .args(["serve", "--listen", &address, "--attention", "on", "--parallel", "1"])
            .args(["--ctx-size", &context.to_string(), "--threads", &setup.threads.to_string()])
            .arg("--model")
            .arg(&setup.model)
            .arg("--data-dir")
            .arg(&folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the server starts");
        let server = Self { address, child, folder };
        // An error means that a provider is already installed.
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        let begun = Instant::now();
        while !reqwest::get(format!("http://{}/health", server.address))
            .await
            .is_ok_and(|answer| answer.status().is_success())
        {
            assert!(begun.elapsed() < LOAD_TIMEOUT, "the server is not ready");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        server
    }

    async fn connect(&self) -> TcpWebSocket {
        let url = format!("ws://{}/api/v1/generate/stream?compression=off", self.address).parse().expect("an address");
        let options = Options::default().with_max_payload_read(256 << 20);
        WebSocket::connect(url).with_options(options).await.expect("a connection")
    }

    /// Returns the server's memory in bytes.
    fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) << 10
    }
}

/// Returns the seconds from the first token to the last, and the bytes of a message.
async fn answer(socket: &mut TcpWebSocket, setup: &Setup, prompt: usize, tokens: usize, side: &Value) -> (f64, usize) {
    let ids: Vec<usize> = (0..prompt).map(|index| 100 + (index * index * 7 + 13 * index) % 300).collect();
    let mut message = json!({
        "type": "generate", "input_ids": ids, "max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": true,
        "record": setup.record,
    });
    message.as_object_mut().expect("an object").extend(side.as_object().expect("an object").clone());
    socket.send(Frame::text(message.to_string())).await.expect("sent");
    let (mut first, mut last, mut count, mut bytes) = (None, None, 0, 0);
    loop {
        let frame = socket.next().await.expect("a frame");
        let now = Instant::now();
        match frame.opcode() {
            OpCode::Text | OpCode::Binary => {}
            _ => continue,
        }
        let payload = frame.into_payload();
        // Only the beginning and the end of an answer are parsed, to keep the cost of the client low.
        let head = &payload[..payload.len().min(64)];
        let contains = |word: &str| head.windows(word.len()).any(|window| window == word.as_bytes());
        if contains("\"done\"") {
            let (first, last): (Instant, Instant) = (first.expect("a token"), last.expect("a token"));
            assert_eq!(count, tokens);
            return ((last - first).as_secs_f64(), bytes);
        }
        assert!(!contains("\"error\""), "{}", String::from_utf8_lossy(&payload));
        count += 1;
        bytes = payload.len();
        first.get_or_insert(now);
        last = Some(now);
    }
}

fn main() {
    let setup = setup();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    println!(
        "model {}, {} thread(s), {} tokens, median of {} rounds, {}",
        setup.model.display(),
        setup.threads,
        setup.tokens,
        setup.rounds,
        if setup.record { "recorded" } else { "not recorded" }
    );
    runtime.block_on(async {
        let server = Server::start(&setup).await;
        let mut socket = server.connect().await;
        let sides = [
            ("every layer and head, binary frames", json!({"return_attention": true, "attention_encoding": "binary"})),
            (
                "the same in float16",
                json!({"return_attention": true, "attention_encoding": "binary", "attention_dtype": "float16"}),
            ),
            ("every layer and head, base64 in JSON", json!({"return_attention": true})),
            ("mean of all, base64", json!({"return_attention": true, "attention_format": "aggregated", "attention_encoding": "base64"})),
        ];
        for context in CONTEXTS {
            let prompt = context - setup.tokens;
            let mut plain = Vec::new();
            let mut others: Vec<Vec<f64>> = vec![Vec::new(); sides.len()];
            let mut costs = others.clone();
            let mut sizes = vec![0; sides.len()];
            for round in 0..=setup.rounds {
                for (index, (_, side)) in sides.iter().enumerate() {
                    let (without, _) = answer(&mut socket, &setup, prompt, setup.tokens, &json!({})).await;
                    let (with, bytes) = answer(&mut socket, &setup, prompt, setup.tokens, side).await;
                    // The first round loads the prompt into the cache and brings the memory to its final size.
                    if round > 0 {
                        plain.push(without);
                        others[index].push(with);
                        costs[index].push(1.0 - without / with);
                        sizes[index] = bytes;
                    }
                }
            }
            let rate = |seconds: &mut [f64]| (setup.tokens - 1) as f64 / median(seconds);
            println!("{context:>5} tokens of context  {:<40} {:>8.1} tokens/s", "no capture", rate(&mut plain));
            for (index, (name, _)) in sides.iter().enumerate() {
                println!(
                    "{context:>5} tokens of context  {name:<40} {:>8.1} tokens/s   costs {:>5.1}%   {:>9} bytes a token",
                    rate(&mut others[index]),
                    median(&mut costs[index]) * 100.0,
                    sizes[index],
                );
            }
        }
        // The state of the long prompt is moved to the host cache first.
        answer(&mut socket, &setup, 512, setup.tokens, &sides[0].1).await;
        let before = server.resident();
        answer(&mut socket, &setup, 512, setup.long, &sides[0].1).await;
        let after = server.resident();
        println!(
            "memory of the server: {} MiB before, {} MiB after {} tokens with attention",
            before >> 20,
            after >> 20,
            setup.long
        );
    });
}
