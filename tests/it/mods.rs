//! Built-in and Python mods in runs of the real engine. The model's weights are random; nothing here depends on them.

use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use thunder::engine::{Engine, Limits, Options, Output, Request, Sampling};
use thunder::events::{ActionType, FinishReason, Item, RunEnd, Signal, Surface};
use thunder::model::Model;
use thunder::model::llama::ModelOptions;
use thunder::mods::python::PythonMods;
use thunder::mods::{ModRef, Registry};
use tokio::sync::mpsc;

struct Lab {
    engine: Engine,
    signals: mpsc::Receiver<Signal>,
    registry: Registry,
}

struct Told {
    text: String,
    end: Arc<RunEnd>,
    items: Vec<Item>,
}

impl Lab {
    async fn new() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let model =
            Arc::new(Model::load(&root.join("fixtures/models/tiny.gguf"), &ModelOptions::default(), |_| true).unwrap());
        let (recorder, signals) = mpsc::channel(100_000);
        let options = Options {
            ctx_size: 512,
            parallel: 2,
            threads: 1,
            threads_batch: 1,
            batch_size: 256,
            ubatch_size: 64,
            attention: false,
            attention_coder: |_, _, _, _| None,
            clock: chrono::Utc::now,
        };
        let registry = Registry::with_builtin();
        let loaded = PythonMods::load_dir(root.join("fixtures/mods")).unwrap();
        assert!(loaded.failed.is_empty(), "{:?}", loaded.failed);
        loaded.mods.into_iter().for_each(|found| assert!(!registry.insert(found), "a name is taken twice"));
        Self { engine: Engine::start(model, options, recorder).await.unwrap(), signals, registry }
    }

    async fn tell(&mut self, mods: &[(&str, Value)]) -> Told {
        let refs = mods.iter().map(|(name, config)| ModRef { name: (*name).into(), config: config.clone() }).collect();
        let vocabulary = self.engine.model().vocabulary();
        // The one that ends answers with an end-of-generation token needs it heeded.
        let ignore_eos = mods.iter().all(|(name, _)| *name != "stop-on-repetition");
        let request = Request {
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            limits: Limits { max_steps: 500, ignore_eos, ..Limits::new(24) },
            mods: self.registry.choose(refs).unwrap(),
            alternatives: 0,
            ..Request::new(vocabulary.encode("Once upon a time", false, true), Surface::Cli)
        };
        let mut generation = self.engine.submit(request).await.unwrap();
        let mut text: Vec<char> = Vec::new();
        let end = loop {
            match generation.output.recv().await.unwrap() {
                Output::Text(delta) => text.extend(delta.text.chars()),
                Output::Retract { chars } => text.truncate(text.len() - chars),
                Output::Prompt(_) | Output::Progress(_) => {}
                Output::Ended(end) => break end,
            }
        };
        let mut items = Vec::new();
        loop {
            match self.signals.recv().await.unwrap() {
                Signal::Items(id, more) if id == generation.run_id => items.extend(more.iter().cloned()),
                Signal::Ended(id, _) if id == generation.run_id => break,
                _ => {}
            }
        }
        Told { text: text.into_iter().collect(), end, items }
    }
}

impl Told {
    fn actions(&self, kind: ActionType) -> usize {
        self.items.iter().filter(|item| matches!(item, Item::Action(action) if action.action_type == kind)).count()
    }

    fn exceptions(&self) -> Vec<&str> {
        let calls = self.items.iter().filter_map(|item| match item {
            Item::ModCall(call) => call.exception_message.as_deref(),
            _ => None,
        });
        calls.collect()
    }

    fn logs(&self) -> usize {
        self.items.iter().filter(|item| matches!(item, Item::ModLog(_))).count()
    }
}

#[tokio::test]
async fn a_banned_phrase_is_not_in_the_answer_whoever_bans_it() {
    let mut lab = Lab::new().await;
    let plain = lab.tell(&[]).await.text;
    let phrase: String = plain.chars().skip(3).take(6).collect();
    assert!(!phrase.contains('\u{fffd}'), "the random model writes text: {plain:?}");
    let built_in = lab.tell(&[("ban-phrases", json!({"phrases": [phrase], "case_sensitive": true}))]).await;
    assert!(!built_in.text.contains(&phrase), "{:?} in {:?}", phrase, built_in.text);
    assert!(built_in.actions(ActionType::Backtrack) > 0);
    let python = lab.tell(&[("ban_phrase", json!({"phrase": phrase}))]).await;
    assert_eq!(python.exceptions(), Vec::<&str>::new());
    assert_eq!(python.text, built_in.text);
    assert_eq!(python.actions(ActionType::Backtrack), built_in.actions(ActionType::Backtrack));
    assert_eq!(python.logs(), python.actions(ActionType::Backtrack), "it says so each time");
}

#[tokio::test]
async fn mods_of_both_kinds_work_together() {
    let mut lab = Lab::new().await;
    let told = lab
        .tell(&[
            ("json_prefix", json!({"prefix": "{\""})),
            ("temperature_by_entropy_py", Value::Null),
            ("log_top5", Value::Null),
            ("log-top", Value::Null),
        ])
        .await;
    assert_eq!(told.exceptions(), Vec::<&str>::new());
    assert!(told.text.starts_with("{\""), "{}", told.text);
    assert_eq!(told.actions(ActionType::ForceTokens), 1);
    assert!(told.actions(ActionType::AdjustedLogits) > 10);
    assert!(told.logs() > 6 * 10, "six lines a step");
    assert_eq!(told.end.finish.reason, FinishReason::Length);
}

#[tokio::test]
async fn a_loop_of_the_model_is_ended() {
    let mut lab = Lab::new().await;
    let bias = json!({"bias": {"65": 100.0}});
    let told = lab.tell(&[("bias-tokens", bias), ("stop-on-repetition", json!({"ngram": 2, "times": 3}))]).await;
    assert_eq!(told.actions(ActionType::ForceTokens), 1);
    assert_eq!(told.end.finish.usage.completion_tokens, 6);
}
