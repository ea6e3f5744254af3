//! Cost of the decode loop: Thunder with recording is compared with plain `llama_decode` and llama.cpp's sampler chain
//! through llama-cpp-2, on the same model, threads and seed; and attention capture with none. The sides alternate, so
//! that other load on the machine affects both; the table shows medians and their ratio.
//!
//! `cargo bench --bench decode -- [MODEL.gguf] [--threads N] [--tokens N] [--rounds N]`

#[path = "shared/engine.rs"]
mod engine;
#[path = "shared/median.rs"]
mod median;

use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::sampling::LlamaSampler;
use llama_cpp_2::token::LlamaToken;
use median::median;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Instant;
use thunder::engine::{
    AttentionCapture, Engine, Limits, Output, RecordPolicy, Request, SamplingParams, SpeculationOptions,
};
use thunder::events::{Surface, TokenId};
use thunder::recording::RecorderHandle;
use thunder::store::{Database, Store};

const PROMPT: &str = "Once upon a time there was a small house by the sea, and in it lived";

struct Setup {
    model: PathBuf,
    threads: i32,
    tokens: u32,
    rounds: usize,
}

fn setup() -> Setup {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models");
    let demo = root.join("demo.gguf");
    let mut setup =
        Setup { model: if demo.exists() { demo } else { root.join("tiny.gguf") }, threads: 1, tokens: 256, rounds: 9 };
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|value| value.parse().ok()).expect("a number follows the flag");
        match arg.as_str() {
            "--threads" => setup.threads = number(),
            "--tokens" => setup.tokens = number() as u32,
            "--rounds" => setup.rounds = number() as usize,
            path => setup.model = PathBuf::from(path),
        }
    }
    setup
}

fn context_size(setup: &Setup) -> u32 {
    (setup.tokens + 64).next_multiple_of(256)
}

/// Measures plain llama.cpp: `streams` sequences, one token of each per decode, and the sampler chain on each. Returns
/// seconds.
fn bare(backend: &LlamaBackend, model: &LlamaModel, setup: &Setup, streams: i32, flash: bool) -> f64 {
    let params = LlamaContextParams::default()
        .with_n_ctx(NonZeroU32::new(context_size(setup) * streams as u32))
        .with_n_batch(2048)
        .with_n_seq_max(streams as u32)
        .with_n_threads(setup.threads)
        .with_n_threads_batch(setup.threads)
        .with_flash_attention_policy(if flash {
            llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_AUTO
        } else {
            llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_DISABLED
        })
        .with_no_perf(true);
    let mut context = model.new_context(backend, params).expect("a context");
    let prompt = model.vocab().tokenize(PROMPT.as_bytes(), false, true);
    let eog: Vec<_> = (0..model.n_vocab())
        .map(LlamaToken::new)
        .filter(|&token| model.vocab().is_eog(token))
        .map(|token| llama_cpp_2::token::logit_bias::LlamaLogitBias::new(token, f32::NEG_INFINITY))
        .collect();
    let mut samplers: Vec<LlamaSampler> = (0..streams)
        .map(|_| {
            LlamaSampler::chain_simple([
                LlamaSampler::logit_bias(model.n_vocab(), &eog),
                LlamaSampler::top_k(40),
                LlamaSampler::top_p(0.95, 1),
                LlamaSampler::min_p(0.05, 1),
                LlamaSampler::temp(0.8),
                LlamaSampler::dist(7),
            ])
        })
        .collect();
    let mut batch = LlamaBatch::new(2048, 1);
    for stream in 0..streams {
        for (position, &token) in prompt.iter().enumerate() {
            batch.add(token, position as i32, &[stream], position + 1 == prompt.len()).expect("room");
        }
    }
    context.decode(&mut batch).expect("prompt");
    let mut outputs: Vec<i32> = (1..=streams).map(|stream| stream * prompt.len() as i32 - 1).collect();
    let begun = Instant::now();
    for step in 0..setup.tokens {
        batch.clear();
        for stream in 0..streams {
            let sampler = &mut samplers[stream as usize];
            let token = sampler.sample(&context, outputs[stream as usize]);
            batch.add(token, (prompt.len() as u32 + step) as i32, &[stream], true).expect("room");
        }
        outputs = (0..streams).collect();
        if step + 1 < setup.tokens {
            context.decode(&mut batch).expect("decode");
        }
    }
    begun.elapsed().as_secs_f64()
}

async fn engine(
    setup: &Setup,
    streams: u32,
    attention: AttentionCapture,
    recorder: impl Into<RecorderHandle>,
) -> Engine {
    engine::engine(
        &setup.model,
        (streams, context_size(setup)),
        setup.threads,
        attention,
        (SpeculationOptions::default(), None),
        recorder,
    )
    .await
}

fn request(engine: &Engine, setup: &Setup, attention: bool, record: RecordPolicy) -> Request {
    let prompt: Vec<TokenId> = engine.model().vocabulary().encode_markup(PROMPT);
    Request {
        prompt_preview: PROMPT.into(),
        sampling: SamplingParams { seed: 7, ..SamplingParams::default() },
        limits: Limits { max_steps: setup.tokens * 2, ignore_eos: true, ..Limits::new(setup.tokens) },
        attention,
        record,
        ..Request::new(prompt, Surface::Cli)
    }
}

/// Measures Thunder: `streams` concurrent runs. Returns the seconds from the first generated token of all to the last.
async fn thunder(engine: &Engine, setup: &Setup, streams: u32, attention: bool, record: RecordPolicy) -> f64 {
    let runs: Vec<_> = (0..streams)
        .map(|_| {
            let (engine, request) = (engine.clone(), request(engine, setup, attention, record));
            tokio::spawn(async move {
                let mut generation = engine.submit(request).await.expect("accepted");
                let mut first = None;
                while let Some(output) = generation.output.recv().await {
                    first.get_or_insert_with(Instant::now);
                    if let Output::Ended(end) = output {
                        return (first.expect("an output"), Instant::now(), end.finish.usage.completion_tokens);
                    }
                }
                panic!("no end");
            })
        })
        .collect();
    let mut begun = None::<Instant>;
    let mut ended = None::<Instant>;
    for run in runs {
        let (first, last, tokens) = run.await.expect("the run");
        assert_eq!(tokens, setup.tokens);
        begun = Some(begun.map_or(first, |begun| begun.max(first)));
        ended = Some(ended.map_or(last, |ended| ended.max(last)));
    }
    (ended.expect("runs") - begun.expect("runs")).as_secs_f64()
}

fn main() {
    let setup = setup();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let folder = std::env::temp_dir().join(format!("thunder-bench-{}", std::process::id()));
    println!(
        "model {}, {} thread(s), {} tokens, median of {} rounds",
        setup.model.display(),
        setup.threads,
        setup.tokens,
        setup.rounds
    );
    runtime.block_on(async {
        let store =
            Store::open(Database::Embedded { data_dir: folder.clone() }, |_| {}).await.expect("the store opens");
        store.start_recorder();
        let recorder = store.recorder();
        for streams in [1, 8] {
            let plain = engine(&setup, streams, AttentionCapture::Off, recorder.clone()).await;
            let auto = engine(&setup, streams, AttentionCapture::Auto, recorder.clone()).await;
            let capturing = engine(&setup, streams, AttentionCapture::On, recorder.clone()).await;
            let baseline = Baseline::load(&setup);
            let mut times: [Vec<f64>; 10] = Default::default();
            for _ in 0..setup.rounds {
                times[0].push(baseline.run(&setup, streams as i32, true));
                times[5].push(baseline.run(&setup, streams as i32, false));
                times[6].push(thunder(&plain, &setup, streams, false, RecordPolicy::Off).await);
                times[1].push(thunder(&plain, &setup, streams, false, RecordPolicy::BestEffort).await);
                times[7].push(thunder(&auto, &setup, streams, false, RecordPolicy::BestEffort).await);
                times[8].push(thunder(&auto, &setup, streams, true, RecordPolicy::Off).await);
                times[9].push(thunder(&auto, &setup, streams, true, RecordPolicy::BestEffort).await);
                times[2].push(thunder(&capturing, &setup, streams, false, RecordPolicy::BestEffort).await);
                times[3].push(thunder(&capturing, &setup, streams, true, RecordPolicy::Off).await);
                times[4].push(thunder(&capturing, &setup, streams, true, RecordPolicy::BestEffort).await);
            }
            let medians: Vec<f64> = times.iter_mut().map(median).collect();
            let rate = |seconds: f64| f64::from(setup.tokens * streams) / seconds;
            let ratios = |name: &str, side: usize, base: usize| {
                println!(
                    "{streams} stream(s)  {name:<46} {:>9.1} tokens/s   ratio {:.3}",
                    rate(medians[side]),
                    medians[base] / medians[side]
                );
            };
            ratios("bare llama_decode and sampling, --attention off", 0, 0);
            ratios("thunder, not recorded, --attention off", 6, 0);
            ratios("thunder, recorded, --attention off", 1, 0);
            ratios("thunder, recorded, --attention auto", 7, 1);
            ratios("  with attention captured, not recorded", 8, 7);
            ratios("  with attention captured and recorded (T0, T1)", 9, 7);
            ratios("bare, flash attention disabled", 5, 5);
            ratios("thunder, recorded, --attention on", 2, 5);
            ratios("  with attention captured, not recorded", 3, 2);
            ratios("  with attention captured and recorded (T0, T1)", 4, 2);
            plain.stop().await;
            auto.stop().await;
            capturing.stop().await;
        }
        drop(recorder);
        store.close().await;
    });
    // Fails only if the database server is still shutting down.
    let _ = std::fs::remove_dir_all(folder);
}

/// Model and backend of plain llama.cpp.
struct Baseline {
    backend: &'static LlamaBackend,
    model: LlamaModel,
}

impl Baseline {
    fn load(setup: &Setup) -> Self {
        let backend = thunder::model::llama::backend().expect("the backend");
        let model =
            LlamaModel::load_from_file(backend, &setup.model, &LlamaModelParams::default()).expect("the model loads");
        Self { backend, model }
    }

    fn run(&self, setup: &Setup, streams: i32, flash: bool) -> f64 {
        bare(self.backend, &self.model, setup, streams, flash)
    }
}
