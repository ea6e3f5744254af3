//! Speculative decoding compared with none, on the same model, threads and seed. The answers are fixed: a mod prefers
//! the tokens of a given text, so that drafts are right exactly where that text repeats.
//!
//! - copy: the answer repeats the prompt
//! - edit: the same with a change in every 20th token
//! - text: prompt and answer are consecutive parts of a handbook
//! - random: no n-gram of the answer occurs earlier
//!
//! With a draft model, its drafts are compared with none on the model's own answers to a text, most probable tokens
//! (own) and sampled ones (sampled), and on the random answer, where the draft model is never right. `deepen.py` makes a
//! slow model whose answers are those of a small one.
//!
//! `cargo bench --bench speculation -- [MODEL.gguf] [--draft-model FILE] [--threads N] [--tokens N] [--rounds N]`

#[path = "shared/engine.rs"]
mod engine;
#[path = "shared/median.rs"]
mod median;

use median::median;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thunder::engine::{
    AttentionCapture, DrafterKind, Engine, Limits, Output, RecordPolicy, Request, SamplingParams, SpeculationOptions,
};
use thunder::events::{DraftUsage, EventType, Surface, TokenId};
use thunder::mods::{
    Action, Call, EventSet, LogitEdit, ModDescription, ModFactory, ModInstance, ModOrigin, ModRef, Reply, ReplySender,
    RunView, SelectedMod,
};
use tokio::sync::mpsc;

const TEXT: &str = include_str!("../../templates/docs/security.md");

struct Setup {
    model: PathBuf,
    threads: i32,
    tokens: usize,
    rounds: usize,
    draft_model: Option<PathBuf>,
}

fn setup() -> Setup {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models");
    let mut setup = Setup { model: root.join("demo.gguf"), threads: 1, tokens: 256, rounds: 9, draft_model: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|value| value.parse().ok()).expect("a number");
        match argument.as_str() {
            "--bench" => {}
            "--draft-model" => setup.draft_model = Some(arguments.next().expect("a file").into()),
            "--threads" => setup.threads = number() as i32,
            "--tokens" => setup.tokens = number(),
            "--rounds" => setup.rounds = number(),
            path => setup.model = PathBuf::from(path),
        }
    }
    setup
}

/// Prefers the tokens of a text.
struct FixedAnswer(Arc<Vec<TokenId>>);

impl ModFactory for FixedAnswer {
    fn describe(&self) -> ModDescription {
        ModDescription {
            name: "fixed-answer".into(),
            description: String::new(),
            language: "rust".into(),
            version: "1".into(),
            origin: ModOrigin::Builtin,
            ..ModDescription::default()
        }
    }
    fn start(&self, _: &serde_json::Value, _: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        Ok(Box::new(Self(Arc::clone(&self.0))))
    }
}

impl ModInstance for FixedAnswer {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::ForwardPass])
    }
    fn call(&mut self, call: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        let next = self.0.get(call.generated_in_context().len());
        Some(Reply::from(next.map_or(Action::Noop, |&next| Action::AdjustedLogits {
            edit: LogitEdit::Add(vec![(next, 1000.0)]),
            temperature: None,
        })))
    }
}

/// A prompt and its answer.
struct Task {
    name: &'static str,
    prompt: Vec<TokenId>,
    /// The tokens of the answer; `None` for the model's own.
    answer: Option<Vec<TokenId>>,
    temperature: f32,
}

/// Returns the tasks for drafts from the text, or for those of a draft model.
fn tasks(engine: &Engine, tokens: usize, has_draft_model: bool) -> Vec<Task> {
    let mut random = StdRng::seed_from_u64(7);
    let text = engine.model().vocabulary().encode_markup(TEXT);
    let (first, second) = (text[..tokens].to_vec(), text[tokens..2 * tokens].to_vec());
    let mut edited = first.clone();
    let mut anything = || random.random_range(10..500);
    edited.iter_mut().skip(11).step_by(20).for_each(|token| *token = anything());
    let random = (0..tokens).map(|_| anything()).collect();
    let task = |name, answer, temperature| Task { name, prompt: first.clone(), answer, temperature };
    if has_draft_model {
        return vec![task("own", None, 0.0), task("sampled", None, 0.8), task("random", Some(random), 0.0)];
    }
    vec![
        task("copy", Some(first.clone()), 0.0),
        task("edit", Some(edited), 0.0),
        task("text", Some(second), 0.0),
        task("random", Some(random), 0.0),
    ]
}

/// Runs a task in every slot and returns the longest time from the first token to the last, and the drafts of all.
async fn run(engine: &Engine, task: &Task, tokens: usize) -> (f64, DraftUsage) {
    let mut generations = Vec::new();
    let answer = task.answer.clone().map(Arc::new);
    for seed in 0..engine.slots() {
        let fixed_answer = answer.iter().map(|answer| SelectedMod {
            mod_ref: ModRef { name: "fixed-answer".into(), config: serde_json::Value::Null },
            factory: Arc::new(FixedAnswer(Arc::clone(answer))),
        });
        let request = Request {
            sampling: SamplingParams { temperature: task.temperature, seed, ..SamplingParams::default() },
            limits: Limits { ignore_eos: true, ..Limits::new(tokens as u32) },
            mods: fixed_answer.collect(),
            record: RecordPolicy::BestEffort,
            ..Request::new(task.prompt.clone(), Surface::Cli)
        };
        generations.push(engine.submit(request).await.expect("accepted"));
    }
    let (mut longest, mut drafts) = (0, DraftUsage::default());
    for mut generation in generations {
        let end = loop {
            if let Output::Ended(end) = generation.output.recv().await.expect("an output") {
                break end;
            }
        };
        assert_eq!(end.finish.usage.completion_tokens as usize, tokens, "{:?}", end.finish.message);
        longest = longest.max(end.finish.generation_us);
        drafts.drafts += end.finish.drafts.drafts;
        drafts.drafted += end.finish.drafts.drafted;
        drafts.accepted += end.finish.drafts.accepted;
    }
    (longest as f64 / 1e6, drafts)
}

fn main() {
    let setup = setup();
    let Setup { model, threads, tokens, rounds, draft_model } = &setup;
    println!("model {}, {threads} thread(s), {tokens} tokens, median of {rounds} rounds", model.display());
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (recorder, mut signals) = mpsc::channel(100_000);
        tokio::spawn(async move { while signals.recv().await.is_some() {} });
        for streams in [1, 4] {
            let sizes = (streams, 2 * *tokens as u32 + 16);
            let start = |drafter| {
                let speculation = SpeculationOptions { drafter, ..SpeculationOptions::default() };
                let draft = draft_model.as_deref().filter(|_| speculation.drafter.uses_model());
                engine::engine(model, sizes, *threads, AttentionCapture::Off, (speculation, draft), recorder.clone())
            };
            let drafter = if draft_model.is_some() { DrafterKind::Model } else { DrafterKind::Ngram };
            let (plain, drafting) = (start(DrafterKind::None).await, start(drafter).await);
            for task in tasks(&plain, *tokens, draft_model.is_some()) {
                let (mut ratios, mut rates, mut drafts) = (Vec::new(), Vec::new(), DraftUsage::default());
                for _ in 0..*rounds {
                    let (without, _) = run(&plain, &task, *tokens).await;
                    let (with, used) = run(&drafting, &task, *tokens).await;
                    ratios.push(without / with);
                    rates.push((tokens - 1) as f64 * f64::from(streams) / without);
                    drafts = used;
                }
                println!(
                    "{streams} stream(s)  {:<7} {:>8.1} tokens/s without drafts, ratio {:.3}; accepted {} of {} in {} drafts",
                    task.name,
                    median(rates),
                    median(ratios),
                    drafts.accepted,
                    drafts.drafted,
                    drafts.drafts
                );
            }
            plain.stop().await;
            drafting.stop().await;
        }
    });
}
