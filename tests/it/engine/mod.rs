//! The engine with a real model: mods, KV state, text and trace agree. The weights of the model are random; no test
//! depends on them.

mod attention;
mod constraints;
mod draft_model;
mod encoder;
pub mod exact_model;
mod forced_tokens;
mod forks;
mod mods;
mod recording;
mod retractions;
mod runs;
mod slow_clients;
pub mod speculation;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use thunder::engine::{
    Engine, EngineOptions, Limits, MAX_UNREAD_TIME, Output, Request, SamplingParams, SpeculationOptions,
};
use thunder::events::{EventType, RunEnd, Surface, TokenId, TraceItem, system};
use thunder::model::Model;
use thunder::model::llama::{AttentionCapture, CacheType, ModelOptions};
use thunder::mods::{
    Action, Call, EventSet, ModDescription, ModFactory, ModInstance, ModRef, Reply, ReplySender, RunView, SelectedMod,
};
use thunder::recording::Signal;
use tokio::sync::mpsc;

/// Tokens that a slot of a test engine holds.
pub const CONTEXT: u32 = 512;

/// Returns the tiny model, which all tests share.
pub fn model() -> Arc<Model> {
    static MODEL: Mutex<Option<Arc<Model>>> = Mutex::new(None);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny.gguf");
    let mut model = MODEL.lock().unwrap();
    Arc::clone(model.get_or_insert_with(|| Arc::new(Model::load(&path, &ModelOptions::default(), |_| true).unwrap())))
}

/// An engine and the channel of its recorder.
pub struct TestEngine {
    pub engine: Engine,
    signals: mpsc::Receiver<Signal>,
}

/// The output and the recorded items of a run.
pub struct CompletedRun {
    pub text: String,
    pub end: Arc<RunEnd>,
    pub items: Vec<TraceItem>,
}

/// Starts an engine with the tiny model.
pub async fn test_engine(parallel: u32, attention: bool) -> TestEngine {
    test_engine_with(parallel, attention, |_| {}).await
}

/// Starts an engine with the tiny model and changed options.
pub async fn test_engine_with(parallel: u32, attention: bool, change: impl FnOnce(&mut EngineOptions)) -> TestEngine {
    test_engine_of(model(), parallel, attention, change).await
}

/// Starts an engine with this model and changed options.
pub async fn test_engine_of(
    model: Arc<Model>,
    parallel: u32,
    attention: bool,
    change: impl FnOnce(&mut EngineOptions),
) -> TestEngine {
    let (recorder, signals) = mpsc::channel(100_000);
    let mut options = options(parallel, attention);
    change(&mut options);
    TestEngine { engine: Engine::start(model, options, recorder).await.unwrap(), signals }
}

/// Returns the options of a test engine.
pub fn options(parallel: u32, attention: bool) -> EngineOptions {
    EngineOptions {
        ctx_size: CONTEXT,
        parallel,
        threads: 1,
        threads_batch: 1,
        batch_size: 256,
        ubatch_size: 64,
        attention: if attention { AttentionCapture::Flash } else { AttentionCapture::Off },
        cache_type_k: CacheType::F16,
        cache_type_v: CacheType::F16,
        slot_prompt_similarity: 0.1,
        cache_ram_bytes: 64 << 20,
        speculation: SpeculationOptions::default(),
        draft_model: None,
        max_unread_time: MAX_UNREAD_TIME,
        hash_cache: None,
        max_tokens: None,
        encode_heads: thunder::trace::attention::encode_heads,
        encode_attention: |values, _, _, _| Some((bytes(values), Vec::new())),
        clock: system::now,
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns a greedy request that ignores the end of generation.
pub fn request(prompt: &str, max_tokens: u32) -> Request {
    let prompt = model().vocabulary().encode_markup(prompt);
    request_tokens(prompt, max_tokens)
}

/// Returns a greedy request for these tokens that ignores the end of generation.
pub fn request_tokens(prompt: Vec<TokenId>, max_tokens: u32) -> Request {
    Request {
        sampling: SamplingParams { temperature: 0.0, seed: 7, ..SamplingParams::default() },
        limits: Limits { max_steps: 10 * max_tokens, ignore_eos: true, ..Limits::new(max_tokens) },
        alternatives: 5,
        ..Request::new(prompt, Surface::Cli)
    }
}

impl TestEngine {
    /// Runs a request to its end, and returns what was sent and recorded.
    pub async fn run(&mut self, request: Request) -> CompletedRun {
        let generation = self.engine.submit(request).await.unwrap();
        let (text, end) = follow(generation.output).await;
        let mut items = Vec::new();
        loop {
            match self.signals.recv().await.unwrap() {
                Signal::Items(id, more) if id == generation.run_id => items.extend(more.iter().cloned()),
                Signal::Ended(id, _) if id == generation.run_id => break,
                _ => {}
            }
        }
        CompletedRun { text, end, items }
    }
}

/// Returns the final text and the end of a run.
pub async fn follow(mut output: mpsc::Receiver<Output>) -> (String, Arc<RunEnd>) {
    let mut text = Vec::new();
    while let Some(output) = output.recv().await {
        match output {
            Output::Text(delta) => text.extend(delta.text.chars()),
            Output::Retract { chars, .. } => text.truncate(text.len() - chars),
            Output::PromptProbabilities(_) | Output::PromptProgress(_) => {}
            Output::Ended(end) => return (text.into_iter().collect(), end),
        }
    }
    panic!("the output ended before the run");
}

impl CompletedRun {
    /// Returns the generated tokens according to the trace.
    pub fn generated(&self) -> Vec<TokenId> {
        let mut generated: Vec<TokenId> = Vec::new();
        for item in &self.items {
            match item {
                TraceItem::Event(event) => generated.extend(event.added_tokens.iter().flatten()),
                TraceItem::Action(action) => {
                    let details: serde_json::Value = action
                        .details
                        .as_ref()
                        .map_or_else(Default::default, |d| serde_json::from_str(d.get()).unwrap());
                    if details["superseded"] == true {
                        continue;
                    }
                    if let Some(removed) = details["removed"].as_u64() {
                        generated.truncate(generated.len() - removed as usize);
                    }
                    if action.action_type == thunder::events::ActionType::ForceOutput {
                        generated.clear();
                    }
                }
                _ => {}
            }
        }
        generated
    }

    /// Returns type and step of each event.
    fn events(&self) -> Vec<(EventType, i32)> {
        self.items
            .iter()
            .filter_map(|item| match item {
                TraceItem::Event(event) => Some((event.event_type, event.step)),
                _ => None,
            })
            .collect()
    }
}

type Handler = dyn Fn(&Call<'_>) -> Action + Send + Sync;

struct TestMod {
    name: &'static str,
    asynchronous: bool,
    hidden_layers: &'static [u16],
    handler: Arc<Handler>,
}

struct TestModInstance {
    asynchronous: bool,
    hidden_layers: &'static [u16],
    handler: Arc<Handler>,
}

impl ModFactory for TestMod {
    fn describe(&self) -> ModDescription {
        ModDescription {
            name: self.name.into(),
            description: String::new(),
            language: "test".into(),
            version: "1".into(),
            origin: thunder::mods::ModOrigin::Builtin,
            ..ModDescription::default()
        }
    }
    fn start(&self, _: &serde_json::Value, _: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let Self { asynchronous, hidden_layers, handler, .. } = self;
        let (asynchronous, hidden_layers) = (*asynchronous, *hidden_layers);
        Ok(Box::new(TestModInstance { asynchronous, hidden_layers, handler: Arc::clone(handler) }))
    }
}

impl ModInstance for TestModInstance {
    fn handles(&self) -> EventSet {
        EventSet::ALL
    }
    fn hidden_layers(&self) -> &[u16] {
        self.hidden_layers
    }
    fn call(&mut self, call: &Call<'_>, new_sender: &dyn Fn() -> ReplySender) -> Option<Reply> {
        let reply = Reply::from((self.handler)(call));
        if self.asynchronous {
            let sender = new_sender();
            std::thread::spawn(move || sender.reply(reply));
            return None;
        }
        Some(reply)
    }
}

/// Adds a mod to a request. An asynchronous mod replies from another thread.
pub fn with_mod(
    request: Request,
    asynchronous: bool,
    handler: impl Fn(&Call<'_>) -> Action + Send + Sync + 'static,
) -> Request {
    with_test_mod(request, TestMod { name: "test", asynchronous, hidden_layers: &[], handler: Arc::new(handler) })
}

/// Returns the request with a mod that reads the hidden states after these layers.
pub fn with_reading_mod(
    request: Request,
    hidden_layers: &'static [u16],
    handler: impl Fn(&Call<'_>) -> Action + Send + Sync + 'static,
) -> Request {
    with_test_mod(request, TestMod { name: "test", asynchronous: false, hidden_layers, handler: Arc::new(handler) })
}

fn with_test_mod(mut request: Request, test_mod: TestMod) -> Request {
    let mod_ref = ModRef { name: test_mod.name.into(), config: serde_json::Value::Null };
    request.mods.push(SelectedMod { mod_ref, factory: Arc::new(test_mod) });
    request
}

/// Returns a mod's handler that returns the action at the first call that meets the condition, and does nothing at others.
pub fn act_once(
    condition: impl Fn(&Call<'_>) -> bool + Clone + Send + Sync + 'static,
    action: Action,
) -> impl Fn(&Call<'_>) -> Action + Clone + Send + Sync + 'static {
    let has_acted = Arc::new(AtomicBool::new(false));
    move |call| {
        if condition(call) && !has_acted.swap(true, Ordering::Relaxed) { action.clone() } else { Action::Noop }
    }
}

/// Returns true for this event if the answer has this number of tokens.
pub fn is_at(call: &Call<'_>, event: EventType, generated: usize) -> bool {
    call.event_type() == event && call.generated_in_context().len() == generated
}

/// Returns true for the `Added` event after which the answer has this number of tokens.
pub fn added_at(call: &Call<'_>, generated: usize) -> bool {
    is_at(call, EventType::Added, generated)
}
