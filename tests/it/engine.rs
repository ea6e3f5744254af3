//! The engine on a real model: mods, KV state, text and trace agree. The model's weights are random; nothing here
//! depends on them.

use std::path::Path;
use std::sync::{Arc, Mutex};
use thunder::engine::{Engine, Limits, Options, Output, Request, Sampling};
use thunder::events::{EventType, FinishReason, Item, RunEnd, Signal, Surface, TokenId};
use thunder::model::Model;
use thunder::model::grammar::{Constraint, Source, Trigger};
use thunder::model::llama::{CacheType, ModelOptions};
use thunder::mods::{
    Action, Call, Chosen, Description, Done, EventSet, Factory, ModRef, Pending, Reply, RunView, Session,
};
use tokio::sync::mpsc;

pub const CONTEXT: u32 = 512;

pub fn model() -> Arc<Model> {
    static MODEL: Mutex<Option<Arc<Model>>> = Mutex::new(None);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny.gguf");
    let mut model = MODEL.lock().unwrap();
    Arc::clone(model.get_or_insert_with(|| Arc::new(Model::load(&path, &ModelOptions::default(), |_| true).unwrap())))
}

pub struct Bench {
    pub engine: Engine,
    signals: mpsc::Receiver<Signal>,
}

pub struct Told {
    pub text: String,
    pub end: Arc<RunEnd>,
    pub items: Vec<Item>,
}

pub async fn bench(parallel: u32, attention: bool) -> Bench {
    bench_with(parallel, attention, |_| {}).await
}

pub async fn bench_with(parallel: u32, attention: bool, change: impl FnOnce(&mut Options)) -> Bench {
    bench_of(model(), parallel, attention, change).await
}

pub async fn bench_of(model: Arc<Model>, parallel: u32, attention: bool, change: impl FnOnce(&mut Options)) -> Bench {
    let (recorder, signals) = mpsc::channel(100_000);
    let mut options = options(parallel, attention);
    change(&mut options);
    Bench { engine: Engine::start(model, options, recorder).await.unwrap(), signals }
}

pub fn options(parallel: u32, attention: bool) -> Options {
    Options {
        ctx_size: CONTEXT,
        parallel,
        threads: 1,
        threads_batch: 1,
        batch_size: 256,
        ubatch_size: 64,
        attention,
        cache_type_k: CacheType::F16,
        cache_type_v: CacheType::F16,
        slot_prompt_similarity: 0.1,
        cache_ram_bytes: 64 << 20,
        session_memory_bytes: 64 << 20,
        attention_coder: |values, _, _, _| Some((bytes(values), Vec::new())),
        clock: chrono::Utc::now,
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub fn request(prompt: &str, max_tokens: u32) -> Request {
    let prompt = model().vocabulary().encode(prompt, false, true);
    request_tokens(prompt, max_tokens)
}

pub fn request_tokens(prompt: Vec<TokenId>, max_tokens: u32) -> Request {
    Request {
        sampling: Sampling { temperature: 0.0, seed: 7, ..Sampling::default() },
        limits: Limits { max_steps: 10 * max_tokens, ignore_eos: true, ..Limits::new(max_tokens) },
        alternatives: 5,
        ..Request::new(prompt, Surface::Cli)
    }
}

impl Bench {
    pub async fn tell(&mut self, request: Request) -> Told {
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
        Told { text, end, items }
    }
}

pub async fn follow(mut output: mpsc::Receiver<Output>) -> (String, Arc<RunEnd>) {
    let mut text = Vec::new();
    while let Some(output) = output.recv().await {
        match output {
            Output::Text(delta) => text.extend(delta.text.chars()),
            Output::Retract { chars } => text.truncate(text.len() - chars),
            Output::Prompt(_) | Output::Progress(_) => {}
            Output::Ended(end) => return (text.into_iter().collect(), end),
        }
    }
    panic!("the stream ended without an end");
}

impl Told {
    /// What the trace says the sequence of generated tokens is.
    pub fn generated(&self) -> Vec<TokenId> {
        let mut generated: Vec<TokenId> = Vec::new();
        for item in &self.items {
            match item {
                Item::Event(event) => generated.extend(event.added_tokens.iter().flatten()),
                Item::Action(action) => {
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

    fn events(&self) -> Vec<(EventType, i32)> {
        self.items
            .iter()
            .filter_map(|item| match item {
                Item::Event(event) => Some((event.event_type, event.step)),
                _ => None,
            })
            .collect()
    }
}

type Handler = dyn Fn(&Call<'_>) -> Action + Send + Sync;

struct TestMod {
    name: &'static str,
    late: bool,
    handler: Arc<Handler>,
}

struct TestSession {
    late: bool,
    handler: Arc<Handler>,
}

impl Factory for TestMod {
    fn describe(&self) -> Description {
        Description {
            name: self.name.into(),
            description: String::new(),
            language: "test".into(),
            version: "1".into(),
            origin: thunder::mods::Origin::Builtin,
            ..Description::default()
        }
    }
    fn start(&self, _: &serde_json::Value, _: &Arc<RunView>) -> Result<Box<dyn Session>, String> {
        Ok(Box::new(TestSession { late: self.late, handler: Arc::clone(&self.handler) }))
    }
}

impl Session for TestSession {
    fn handles(&self) -> EventSet {
        EventSet::ALL
    }
    fn call(&mut self, call: &Call<'_>, done: Done) -> Result<Reply, Pending> {
        let reply = Reply::from((self.handler)(call));
        if self.late {
            std::thread::spawn(move || done.reply(reply));
            return Err(Pending);
        }
        done.disarm();
        Ok(reply)
    }
}

pub fn with_mod(
    mut request: Request,
    late: bool,
    handler: impl Fn(&Call<'_>) -> Action + Send + Sync + 'static,
) -> Request {
    let factory = Arc::new(TestMod { name: "test", late, handler: Arc::new(handler) });
    request.mods.push(Chosen { mod_ref: ModRef { name: "test".into(), config: serde_json::Value::Null }, factory });
    request
}

pub fn added_at(call: &Call<'_>, generated: usize) -> bool {
    call.event_type() == EventType::Added && call.generated().len() == generated
}

#[tokio::test]
async fn a_plain_run_is_numbered_without_holes_and_repeats() {
    let mut bench = bench(1, false).await;
    let first = bench.tell(request("The sky is", 12)).await;
    let orders: Vec<i32> = first
        .items
        .iter()
        .filter_map(|item| match item {
            Item::Event(event) => Some(event.sequence_order),
            _ => None,
        })
        .collect();
    assert_eq!(orders, (0..orders.len() as i32).collect::<Vec<_>>());
    assert_eq!(
        first.events()[..4],
        [(EventType::Prefilled, 0), (EventType::ForwardPass, 1), (EventType::Sampled, 1), (EventType::Added, 1)]
    );
    assert_eq!(first.end.finish.reason, FinishReason::Length);
    assert_eq!(first.end.finish.usage.completion_tokens, 12);
    assert_eq!(first.text, first.end.finish.text);
    let again = bench.tell(request("The sky is", 12)).await;
    assert_eq!(first.generated(), again.generated());
    assert!(again.end.finish.usage.cached_tokens > 0, "the second run begins with the state of the first");
}

/// Whatever a mod did to the sequence, the model goes on exactly as after a prompt of the same tokens.
async fn goes_on_as_if_nothing_had_been(
    handler: impl Fn(&Call<'_>) -> Action + Send + Sync + Clone + 'static,
    late: bool,
) {
    let mut bench = bench(1, false).await;
    let told = bench.tell(with_mod(request("The sky is", 16), late, handler)).await;
    let generated = told.generated();
    assert_eq!(generated.len(), 16, "{:?}", told.end);
    assert_eq!(told.end.finish.usage.completion_tokens, 16);
    assert_eq!(told.text, told.end.finish.text);
    assert_eq!(told.text, model().vocabulary().decode(&generated));
    let mut prompt = model().vocabulary().encode("The sky is", false, true);
    prompt.extend_from_slice(&generated[..10]);
    let fresh = bench.tell(request_tokens(prompt, 6)).await;
    assert_eq!(fresh.generated(), generated[10..]);
}

#[tokio::test]
async fn backtrack_at_added_replaces_tokens() {
    let once = Arc::new(Mutex::new(false));
    for late in [false, true] {
        *once.lock().unwrap() = false;
        let once = Arc::clone(&once);
        goes_on_as_if_nothing_had_been(
            move |call| {
                if added_at(call, 6) && !std::mem::replace(&mut *once.lock().unwrap(), true) {
                    return Action::Backtrack { n: 3, tokens: vec![40, 41] };
                }
                Action::Noop
            },
            late,
        )
        .await;
    }
}

#[tokio::test]
async fn backtrack_without_tokens_draws_from_the_shortened_sequence() {
    let once = Arc::new(Mutex::new(false));
    goes_on_as_if_nothing_had_been(
        move |call| {
            if call.event_type() == EventType::ForwardPass
                && call.generated().len() == 5
                && !std::mem::replace(&mut *once.lock().unwrap(), true)
            {
                return Action::Backtrack { n: 2, tokens: vec![] };
            }
            Action::Noop
        },
        false,
    )
    .await;
}

#[tokio::test]
async fn forced_tokens_take_one_decode_and_are_measured() {
    for event in [EventType::ForwardPass, EventType::Sampled, EventType::Added] {
        let once = Arc::new(Mutex::new(false));
        let inner = Arc::clone(&once);
        goes_on_as_if_nothing_had_been(
            move |call| {
                if call.event_type() == event
                    && call.generated().len() == 4
                    && !std::mem::replace(&mut *inner.lock().unwrap(), true)
                {
                    return Action::ForceTokens(vec![50, 51, 52]);
                }
                Action::Noop
            },
            true,
        )
        .await;
        *once.lock().unwrap() = false;
        let mut bench = bench(1, false).await;
        let once2 = Arc::clone(&once);
        let told = bench
            .tell(with_mod(request("The sky is", 16), false, move |call| {
                if call.event_type() == event
                    && call.generated().len() == 4
                    && !std::mem::replace(&mut *once2.lock().unwrap(), true)
                {
                    return Action::ForceTokens(vec![50, 51, 52]);
                }
                Action::Noop
            }))
            .await;
        let forced: Vec<_> = told
            .items
            .iter()
            .filter_map(|item| match item {
                Item::Event(e) if e.forced == Some(true) => Some(e),
                _ => None,
            })
            .collect();
        assert_eq!(forced.len(), 1);
        assert_eq!(forced[0].added_tokens.as_deref(), Some(&[50, 51, 52][..]));
        let tokens = &forced[0].measured.as_ref().unwrap().tokens;
        assert!(
            tokens.iter().all(|token| token.logprob.is_some() && token.rank.is_some_and(|rank| rank >= 1)),
            "{tokens:?}"
        );
    }
}

#[tokio::test]
async fn sampled_backtrack_of_one_draws_again_without_a_gap() {
    let mut bench = bench(1, false).await;
    let once = Arc::new(Mutex::new(false));
    let mut asked = request("The sky is", 8);
    asked.sampling.temperature = 1.5;
    let told = bench
        .tell(with_mod(asked, false, move |call| {
            if call.event_type() == EventType::Sampled
                && call.generated().len() == 3
                && !std::mem::replace(&mut *once.lock().unwrap(), true)
            {
                return Action::Backtrack { n: 1, tokens: vec![] };
            }
            Action::Noop
        }))
        .await;
    assert_eq!(told.generated().len(), 8);
    let steps: Vec<i32> =
        told.events().iter().filter(|(kind, _)| *kind == EventType::ForwardPass).map(|&(_, step)| step).collect();
    assert_eq!(steps, (1..=9).collect::<Vec<_>>(), "one step more than tokens: the dropped draw has its own");
}

#[tokio::test]
async fn force_output_replaces_everything_and_ends() {
    let mut bench = bench(1, false).await;
    let told = bench
        .tell(with_mod(request("The sky is", 16), true, |call| {
            if added_at(call, 5) { Action::ForceOutput(vec![60, 61]) } else { Action::Noop }
        }))
        .await;
    assert_eq!(told.generated(), [60, 61]);
    assert_eq!(told.text, model().vocabulary().decode(&[60, 61]));
    assert_eq!(told.end.finish.reason, FinishReason::Stop);
}

#[tokio::test]
async fn a_control_token_is_text_where_the_request_says_so() {
    let mut bench = bench(1, false).await;
    let vocabulary = Arc::clone(model().vocabulary());
    let tokens = vocabulary.encode("a<|im_start|>b", false, true);
    let marker = *tokens.iter().find(|&&token| vocabulary.is_control(token)).unwrap();
    for (visible, text) in [(vec![], "ab"), (vec![marker], "a<|im_start|>b")] {
        let tokens = tokens.clone();
        let told = bench
            .tell(with_mod(Request { visible, ..request("The sky is", 8) }, true, move |call| {
                if added_at(call, 1) { Action::ForceOutput(tokens.clone()) } else { Action::Noop }
            }))
            .await;
        assert_eq!(told.end.finish.text, text);
    }
}

#[tokio::test]
async fn an_action_that_its_event_does_not_permit_is_the_mods_error() {
    let mut bench = bench(1, false).await;
    let told = bench
        .tell(with_mod(request("The sky is", 4), false, |call| {
            if call.event_type() == EventType::Prefilled { Action::ForceTokens(vec![1]) } else { Action::Noop }
        }))
        .await;
    let call = told
        .items
        .iter()
        .find_map(|item| match item {
            Item::ModCall(call) => Some(call),
            _ => None,
        })
        .unwrap();
    assert!(call.exception_occurred);
    assert_eq!(call.exception_message.as_deref(), Some("ForceTokens is not permitted on Prefilled"));
    assert_eq!(told.generated().len(), 4);
}

#[tokio::test]
async fn the_first_mod_that_changes_control_wins() {
    let mut bench = bench(1, false).await;
    let mut asked = with_mod(request("The sky is", 8), false, |call| {
        if added_at(call, 2) { Action::ForceTokens(vec![70]) } else { Action::Noop }
    });
    asked = with_mod(asked, true, |call| if added_at(call, 2) { Action::EmitError("no".into()) } else { Action::Noop });
    let told = bench.tell(asked).await;
    assert_eq!(told.end.finish.reason, FinishReason::Length);
    assert_eq!(told.generated()[2], 70);
    let superseded = told.items.iter().any(|item| matches!(item, Item::Action(action)
        if action.error_message.is_some() && action.details.as_ref().is_some_and(|d| d.get().contains("\"superseded\":true"))));
    assert!(superseded);
}

#[tokio::test]
async fn edited_logits_decide_and_the_edit_is_recorded() {
    let mut bench = bench(1, false).await;
    let told = bench
        .tell(with_mod(request("The sky is", 3), true, |call| match call.event_type() {
            EventType::ForwardPass => Action::AdjustedLogits {
                edit: thunder::mods::LogitEdit::Set(vec![(99, 1000.0)]),
                temperature: Some(1.0),
            },
            _ => Action::Noop,
        }))
        .await;
    assert_eq!(told.generated(), [99, 99, 99]);
    let moved = told
        .items
        .iter()
        .any(|item| matches!(item, Item::Action(a) if a.details.as_ref().unwrap().get().contains("\"token\":99")));
    assert!(moved);
}

#[tokio::test]
async fn a_mod_that_backtracks_for_ever_is_stopped() {
    let mut bench = bench(1, false).await;
    let mut asked = with_mod(request("The sky is", 8), false, |call| {
        if call.event_type() == EventType::Added { Action::Backtrack { n: 1, tokens: vec![] } } else { Action::Noop }
    });
    asked.limits.max_steps = 20;
    let told = bench.tell(asked).await;
    assert_eq!(told.end.finish.reason, FinishReason::Length);
    assert!(told.end.finish.message.as_ref().unwrap().contains("20 steps"), "{:?}", told.end.finish.message);
    assert_eq!(told.text, "");
}

#[tokio::test]
async fn tool_calls_and_errors_end_the_run() {
    let mut bench = bench(1, false).await;
    let told = bench
        .tell(with_mod(request("The sky is", 8), false, |call| {
            if added_at(call, 2) {
                Action::ToolCalls(serde_json::json!({"function": {"name": "f", "arguments": "{}"}}))
            } else {
                Action::Noop
            }
        }))
        .await;
    assert_eq!(told.end.finish.reason, FinishReason::ToolCalls);
    assert_eq!(told.end.finish.tool_calls.as_ref().unwrap()[0]["function"]["name"], "f");
    let told = bench.tell(with_mod(request("The sky is", 8), false, |_| Action::EmitError("refused".into()))).await;
    assert_eq!((told.end.finish.reason, told.end.finish.message.as_deref()), (FinishReason::Error, Some("refused")));
}

#[tokio::test]
async fn streams_decode_together_and_agree_with_a_run_alone() {
    let mut alone = bench(1, false).await;
    let prompts = ["The sky is", "Once upon a time there was a small house", "1 2 3", "{\"a\":"];
    let mut expected = Vec::new();
    for prompt in prompts {
        expected.push(alone.tell(request(prompt, 20)).await.text);
    }
    let together = bench(4, false).await;
    let runs = prompts.map(|prompt| {
        let engine = together.engine.clone();
        tokio::spawn(async move { follow(engine.submit(request(prompt, 20)).await.unwrap().output).await.0 })
    });
    for (run, expected) in runs.into_iter().zip(expected) {
        assert_eq!(run.await.unwrap(), expected);
    }
}

#[tokio::test]
async fn attention_rows_are_distributions_over_the_positions_before() {
    for parallel in [1, 3] {
        let mut bench = bench(parallel, true).await;
        let mut asked = request("The sky is", 6);
        asked.attention = true;
        let prompt_len = asked.prompt.len() as u32;
        let told = bench.tell(asked).await;
        let steps: Vec<_> = told
            .items
            .iter()
            .filter_map(|item| match item {
                Item::Attention(step) => Some(step),
                _ => None,
            })
            .collect();
        assert_eq!(
            steps.iter().map(|step| step.row_len).collect::<Vec<_>>(),
            (prompt_len..prompt_len + 6).collect::<Vec<_>>()
        );
        for step in steps {
            assert_eq!(step.layer_ids.as_ref(), [0, 1, 2, 3]);
            let values: Vec<f32> = step.t0.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            for row in values.chunks_exact(step.row_len as usize) {
                let sum: f32 = row.iter().sum();
                assert!((sum - 1.0).abs() < 1e-3, "a row sums to {sum}");
            }
        }
    }
}

/// The same attention whether a run is alone, shares batches with others, or has backtracked to where it is.
#[tokio::test]
async fn attention_belongs_to_its_own_run() {
    let rows = |told: &Told| -> Vec<Vec<f32>> {
        told.items
            .iter()
            .filter_map(|item| match item {
                Item::Attention(step) => {
                    Some(step.t0.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
                }
                _ => None,
            })
            .collect()
    };
    let asked = |prompt: &str| {
        let mut r = request(prompt, 8);
        r.attention = true;
        r
    };
    let mut alone = bench(1, true).await;
    let expected = rows(&alone.tell(asked("The sky is blue")).await);
    let mut shared = bench(4, true).await;
    let mut others = Vec::new();
    for prompt in [
        "One",
        "Two of them and some more text to make the prompt longer than a physical batch of tokens can be, so that it is cut",
        "Three",
    ] {
        others.push(shared.engine.submit(request(prompt, 60)).await.unwrap());
    }
    let told = shared.tell(asked("The sky is blue")).await;
    for (a, b) in expected.iter().zip(rows(&told)) {
        let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(worst < 2e-3, "rows differ by {worst}");
    }
    drop(others);
    let once = Mutex::new(false);
    let told = alone
        .tell(with_mod(asked("The sky is blue"), false, move |call| {
            if added_at(call, 4) && !std::mem::replace(&mut *once.lock().unwrap(), true) {
                Action::Backtrack { n: 3, tokens: vec![] }
            } else {
                Action::Noop
            }
        }))
        .await;
    let after: Vec<Vec<f32>> = rows(&told).split_off(4);
    for (a, b) in expected[1..].iter().zip(&after) {
        assert_eq!(a.len(), b.len());
        let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(worst < 2e-3, "rows differ by {worst}");
    }
}

#[tokio::test]
async fn a_client_that_goes_ends_its_run_and_frees_the_slot() {
    let mut bench = bench(1, false).await;
    let mut endless = request("The sky is", 400);
    endless.limits.max_steps = 4000;
    let generation = bench.engine.submit(endless).await.unwrap();
    drop(generation.output);
    let told =
        tokio::time::timeout(std::time::Duration::from_secs(20), bench.tell(request("The sky is", 3))).await.unwrap();
    assert_eq!(told.generated().len(), 3);
}

#[tokio::test]
async fn a_client_that_does_not_read_pauses_only_itself() {
    let mut bench = bench(2, false).await;
    let mut slow = request("The sky is", 450);
    slow.limits.max_steps = 4000;
    let slow = bench.engine.submit(slow).await.unwrap();
    let told = bench.tell(request("Quick", 20)).await;
    assert_eq!(told.generated().len(), 20);
    let (_, end) = follow(slow.output).await;
    assert_eq!(end.finish.usage.completion_tokens, 450);
}

#[tokio::test]
async fn stop_strings_and_limits_end_where_they_should() {
    let mut bench = bench(1, false).await;
    let plain = bench.tell(request("The sky is", 20)).await;
    let chars: Vec<char> = plain.text.chars().collect();
    let stop: String = chars[chars.len() / 2..chars.len() / 2 + 2].iter().collect();
    let mut asked = request("The sky is", 20);
    asked.limits.stop = vec![stop.clone()];
    let told = bench.tell(asked).await;
    assert_eq!(told.end.finish.reason, FinishReason::Stop);
    assert_eq!(told.end.finish.stop_string.as_deref(), Some(stop.as_str()));
    assert_eq!(told.text, plain.text[..plain.text.find(&stop).unwrap()]);
    let mut asked = request("The sky is", 20);
    asked.limits.stop_tokens = vec![plain.generated()[3]];
    let told = bench.tell(asked).await;
    assert_eq!(told.end.finish.reason, FinishReason::Stop);
    let mut long = request("The sky is", 100_000);
    long.limits.max_steps = 1_000_000;
    let told = bench.tell(long).await;
    assert!(told.end.finish.message.as_ref().unwrap().contains("512"), "{:?}", told.end.finish);
}

#[tokio::test]
async fn a_lazy_constraint_begins_behind_its_trigger_and_ends_the_run() {
    let letter = model().vocabulary().encode("a", false, false)[0];
    let request = |constraint| Request {
        constraint: Some(constraint),
        sampling: Sampling { logit_bias: vec![(letter, 100.0)], ..request("Hello", 1).sampling },
        ..request("Hello", 12)
    };
    let constraint = Constraint::new("test", Source::Regex("xyz".into()));
    let mut bench = bench(1, false).await;
    let triggered = bench.tell(request(constraint.clone().lazy(Trigger::text("aaa")))).await;
    assert_eq!(triggered.text, "aaaxyz");
    assert_eq!(triggered.end.finish.reason, FinishReason::Stop);
    let by_token = bench.tell(request(constraint.clone().lazy(Trigger::token(letter)))).await;
    assert_eq!(by_token.text, "axyz");
    let never = bench.tell(request(constraint.clone().lazy(Trigger::text("b")))).await;
    assert_eq!(never.text, "a".repeat(12));
    let at_once = bench.tell(request(constraint)).await;
    assert_eq!(at_once.text, "xyz");
}

#[tokio::test]
async fn a_grammar_gone_wrong_ends_its_run_and_no_other() {
    let mut bench = bench(2, false).await;
    // Its text never comes to an end: the limit ends it.
    let endless = Constraint::new("test", Source::Lark("start: \"a\" endless\nendless: \"b\" endless".into()));
    let failed = bench.tell(Request { constraint: Some(endless), ..request("Hello", 200) }).await;
    assert!(failed.text.starts_with("ab"), "{}", failed.text);
    assert_eq!(failed.end.finish.reason, FinishReason::Length);
    let banned = model().vocabulary().encode("x", false, false)[0];
    let refused = Request {
        constraint: Some(Constraint::new("test", Source::Regex("x".into()))),
        sampling: Sampling { logit_bias: vec![(banned, f32::NEG_INFINITY)], ..Sampling::default() },
        ..request("Hello", 12)
    };
    let refused = bench.tell(refused).await;
    assert_eq!(refused.end.finish.reason, FinishReason::Error);
    assert!(refused.end.finish.message.as_deref().unwrap().contains("none that the constraint allows"));
    assert_eq!(bench.tell(request("Hello", 3)).await.end.finish.reason, FinishReason::Length);
}
