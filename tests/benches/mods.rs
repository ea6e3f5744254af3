//! Cost of mods: the additional time per token of a run of the real engine with mods, recorded into a sink. Runs with
//! and without the mod alternate, so that other load on the machine affects both; the table shows medians.
//!
//! `cargo bench --bench mods -- [MODEL.gguf]… [--tokens N] [--rounds N]`; `make_tiny.py --vocabulary 32000 --output …`
//! makes a model with that many tokens. The numpy lines need `THUNDER_PYTHON` to name a Python that has numpy.

#[path = "shared/engine.rs"]
mod engine;
#[path = "shared/median.rs"]
mod median;

use median::median;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use thunder::engine::{
    AttentionCapture, Engine, Limits, Output, RecordPolicy, Request, SamplingParams, SpeculationOptions,
};
use thunder::events::{EventType, Surface, TokenId};
use thunder::mods::python::PythonMods;
use thunder::mods::{
    Call, EventSet, ModDescription, ModFactory, ModInstance, ModOrigin, ModRef, ModRegistry, Reply, ReplySender,
    RunView,
};
use tokio::sync::mpsc;

const PYTHON: &str = r"
import time
from thunder_mods import Added, ForwardPass, mod

@mod(events=[ForwardPass, Added])
def nothing(event, actions):
    return actions.noop()

@mod(events=[ForwardPass])
def reads(event, actions):
    event.logits.to_numpy().max()

@mod(events=[ForwardPass])
def edits(event, actions):
    logits = event.logits.to_numpy()
    logits *= 0.5
    return actions.adjust_logits(event.logits)

@mod(events=[ForwardPass, Added])
def sleeps(event, actions):
    time.sleep(0.2)
";

/// The cheapest mod in Rust.
struct NoopMod;

impl ModFactory for NoopMod {
    fn describe(&self) -> ModDescription {
        ModDescription {
            name: "built-in nothing".into(),
            language: "rust".into(),
            version: "1".into(),
            origin: ModOrigin::Builtin,
            ..ModDescription::default()
        }
    }

    fn start(&self, _: &serde_json::Value, _: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        Ok(Box::new(Self))
    }
}

impl ModInstance for NoopMod {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::ForwardPass, EventType::Added])
    }

    fn call(&mut self, _: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        Some(Reply::noop())
    }
}

struct Setup {
    models: Vec<PathBuf>,
    tokens: u32,
    rounds: usize,
}

fn setup() -> Setup {
    let mut setup = Setup { models: Vec::new(), tokens: 256, rounds: 15 };
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|value| value.parse().ok()).expect("a number follows the flag");
        match arg.as_str() {
            "--tokens" => setup.tokens = number() as u32,
            "--rounds" => setup.rounds = number(),
            path => setup.models.push(PathBuf::from(path)),
        }
    }
    if setup.models.is_empty() {
        setup.models.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny.gguf"));
    }
    setup
}

struct ModBench {
    engine: Engine,
    registry: ModRegistry,
    tokens: u32,
}

impl ModBench {
    async fn new(model: &Path, tokens: u32) -> Self {
        let (recorder, mut signals) = mpsc::channel(1000);
        tokio::spawn(async move { while signals.recv().await.is_some() {} });
        let registry = ModRegistry::default();
        registry.insert(Arc::new(NoopMod));
        for found in PythonMods::default().load_all("bench.py".into(), PYTHON.into()).expect("the mods load") {
            registry.insert(found);
        }
        Self {
            engine: engine::engine(
                model,
                (5, 5 * 1024),
                1,
                AttentionCapture::Off,
                (SpeculationOptions::default(), None),
                recorder,
            )
            .await,
            registry,
            tokens,
        }
    }

    /// Returns the seconds from the first generated token to the last.
    async fn run(&self, mods: &[&str], tokens: u32) -> f64 {
        let refs = mods.iter().map(|&name| ModRef { name: name.into(), config: serde_json::Value::Null }).collect();
        let prompt: Vec<TokenId> = self.engine.model().vocabulary().encode_markup("Once upon a time");
        let request = Request {
            sampling: SamplingParams { seed: 7, ..SamplingParams::default() },
            limits: Limits { max_steps: tokens * 2, ignore_eos: true, ..Limits::new(tokens) },
            mods: self.registry.select(refs).expect("known mods"),
            record: RecordPolicy::BestEffort,
            ..Request::new(prompt, Surface::Cli)
        };
        let mut generation = self.engine.submit(request).await.expect("accepted");
        let mut first = None;
        while let Some(output) = generation.output.recv().await {
            let first = *first.get_or_insert_with(Instant::now);
            if let Output::Ended(end) = output {
                // A disabled mod would have no cost.
                assert_eq!(end.finish.message, None);
                assert_eq!(end.finish.usage.completion_tokens, tokens);
                return first.elapsed().as_secs_f64();
            }
        }
        panic!("no end");
    }

    /// Returns the microseconds that a mod adds to each token.
    async fn cost(&self, name: &str, rounds: usize) -> f64 {
        let mut costs = Vec::new();
        for round in 0..=rounds {
            let without = self.run(&[], self.tokens).await;
            let with = self.run(&[name], self.tokens).await;
            // The first round starts the worker.
            if round > 0 {
                costs.push((with - without) * 1e6 / f64::from(self.tokens - 1));
            }
        }
        median(&mut costs)
    }

    /// Returns the rate of four streams while a fifth sleeps in its mod, relative to their rate without it.
    async fn throughput_beside_sleeper(&self, rounds: usize) -> f64 {
        let streams = || async {
            let begun = Instant::now();
            futures::future::join_all((0..4).map(|_| self.run(&[], 4 * self.tokens))).await;
            begun.elapsed().as_secs_f64()
        };
        let mut shares = Vec::new();
        for _ in 0..rounds {
            let alone = streams().await;
            let sleeper = self.run(&["sleeps"], 1000);
            let beside = tokio::select! {
                beside = streams() => beside,
                _ = sleeper => panic!("the sleeper ended first"),
            };
            shares.push(alone / beside);
        }
        median(&mut shares)
    }
}

fn main() {
    let setup = setup();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        for model in &setup.models {
            let bench = ModBench::new(model, setup.tokens).await;
            let vocabulary = bench.engine.model().vocabulary().len();
            let plain = bench.run(&[], setup.tokens).await * 1e6 / f64::from(setup.tokens - 1);
            println!("vocabulary of {vocabulary}: {plain:.1} µs a token without mods; a token costs more with");
            for (name, what) in [
                ("built-in nothing", "a mod in Rust on ForwardPass and Added that does nothing"),
                ("nothing", "a mod in Python on ForwardPass and Added that does nothing"),
                ("reads", "a mod in Python that reads all logits, on ForwardPass"),
                ("edits", "a mod in Python that edits all logits, on ForwardPass"),
            ] {
                println!("  {what:<62} {:>8.1} µs", bench.cost(name, setup.rounds).await);
            }
            let share = 100.0 * bench.throughput_beside_sleeper(setup.rounds / 3 + 1).await;
            println!("  beside a mod that sleeps 200 ms in each call, 4 other streams have {share:.1}% of their rate");
            bench.engine.stop().await;
        }
    });
}
