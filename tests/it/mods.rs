//! Built-in and Python mods in runs of the real engine. The weights of the model are random; no test depends on them.

use super::engine::{model, options};
use super::harness::folder;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use thunder::engine::{Engine, EngineOptions, Limits, Output, Request, SamplingParams};
use thunder::events::{ActionType, FinishReason, RunEnd, Surface, TraceItem};
use thunder::mods::python::PythonMods;
use thunder::mods::{ModFolder, ModRef, ModRegistry};
use thunder::recording::Signal;
use thunder::trace::fold::Fold;
use tokio::sync::mpsc;

/// An engine with built-in and Python mods, and the channel of its recorder.
struct ModEngine {
    engine: Engine,
    signals: mpsc::Receiver<Signal>,
    registry: ModRegistry,
}

struct ModRun {
    text: String,
    /// Number of characters that were sent and later retracted.
    retracted: usize,
    end: Arc<RunEnd>,
    items: Vec<TraceItem>,
}

impl ModEngine {
    async fn new() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let (recorder, signals) = mpsc::channel(100_000);
        let options = EngineOptions { cache_ram_bytes: 0, ..options(2, false) };
        let registry = ModRegistry::with_builtin();
        let mut python = PythonMods::default();
        python.limits.call = Duration::from_secs(30);
        for folder in ["fixtures/mods", "tests/it/mods"] {
            ModFolder::new(root.join(folder), python.clone()).sync(&registry).unwrap();
            assert!(registry.problems().is_empty(), "{:?}", registry.problems());
        }
        Self { engine: Engine::start(model(), options, recorder).await.unwrap(), signals, registry }
    }

    async fn run(&mut self, mods: &[(&str, Value)]) -> ModRun {
        self.sample(mods, SamplingParams { temperature: 0.0, ..SamplingParams::default() }, 24).await
    }

    async fn sample(&mut self, mods: &[(&str, Value)], sampling: SamplingParams, max_tokens: u32) -> ModRun {
        // `stop-on-repetition` forces an end-of-generation token, which must not be ignored.
        let ignore_eos = mods.iter().all(|(name, _)| *name != "stop-on-repetition");
        self.generate(mods, sampling, Limits { max_steps: 500, ignore_eos, ..Limits::new(max_tokens) }).await
    }

    async fn generate(&mut self, mods: &[(&str, Value)], sampling: SamplingParams, limits: Limits) -> ModRun {
        let refs = mods.iter().map(|(name, config)| ModRef { name: (*name).into(), config: config.clone() }).collect();
        let vocabulary = self.engine.model().vocabulary();
        let request = Request {
            sampling,
            limits,
            mods: self.registry.select(refs).unwrap(),
            alternatives: 0,
            ..Request::new(vocabulary.encode_markup("Once upon a time"), Surface::Cli)
        };
        let mut generation = self.engine.submit(request).await.unwrap();
        let mut text: Vec<char> = Vec::new();
        let mut retracted = 0;
        let end = loop {
            match generation.output.recv().await.unwrap() {
                Output::Text(delta) => text.extend(delta.text.chars()),
                Output::Retract { chars, .. } => {
                    retracted += chars;
                    text.truncate(text.len() - chars);
                }
                Output::PromptProbabilities(_) | Output::PromptProgress(_) => {}
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
        ModRun { text: text.into_iter().collect(), retracted, end, items }
    }
}

impl ModRun {
    fn actions(&self, kind: ActionType) -> usize {
        self.items.iter().filter(|item| matches!(item, TraceItem::Action(action) if action.action_type == kind)).count()
    }

    fn exceptions(&self) -> Vec<&str> {
        let calls = self.items.iter().filter_map(|item| match item {
            TraceItem::ModCall(call) => call.exception_message.as_deref(),
            _ => None,
        });
        calls.collect()
    }

    fn log_lines(&self) -> Vec<&str> {
        let logs = self.items.iter().filter_map(|item| match item {
            TraceItem::ModLog(log) => Some(log.log_message.as_str()),
            _ => None,
        });
        logs.collect()
    }
}

#[tokio::test]
async fn banned_phrase_is_absent_with_builtin_and_python_mods() {
    let mut engine = ModEngine::new().await;
    let plain = engine.run(&[]).await.text;
    let phrase: String = plain.chars().skip(3).take(6).collect();
    assert!(!phrase.contains('\u{fffd}'), "the random model wrote a part of a character: {plain:?}");
    let built_in = engine.run(&[("ban-phrases", json!({"phrases": [phrase], "case_sensitive": true}))]).await;
    assert!(!built_in.text.contains(&phrase), "{:?} in {:?}", phrase, built_in.text);
    assert!(built_in.actions(ActionType::Backtrack) > 0);
    let python = engine.run(&[("ban_phrase", json!({"phrase": phrase}))]).await;
    assert_eq!(python.exceptions(), Vec::<&str>::new());
    assert_eq!(python.text, built_in.text);
    assert_eq!(python.actions(ActionType::Backtrack), built_in.actions(ActionType::Backtrack));
    assert_eq!(python.log_lines().len(), python.actions(ActionType::Backtrack), "one log line per backtrack");
}

#[tokio::test]
async fn builtin_and_python_mods_work_together() {
    let mut engine = ModEngine::new().await;
    let result = engine
        .run(&[
            ("json_prefix", json!({"prefix": "{\""})),
            ("temperature_by_entropy_py", Value::Null),
            ("log_top5", Value::Null),
            ("log-top", Value::Null),
        ])
        .await;
    assert_eq!(result.exceptions(), Vec::<&str>::new());
    assert!(result.text.starts_with("{\""), "{}", result.text);
    assert_eq!(result.actions(ActionType::ForceTokens), 1);
    assert!(result.actions(ActionType::AdjustedLogits) > 10);
    assert!(result.log_lines().len() > 6 * 10, "six lines per step");
    assert_eq!(result.end.finish.reason, FinishReason::Length);
}

#[tokio::test]
async fn repetition_loop_ends_the_run() {
    let mut engine = ModEngine::new().await;
    let bias = json!({"bias": {"65": 100.0}});
    let result = engine.run(&[("bias-tokens", bias), ("stop-on-repetition", json!({"ngram": 2, "times": 3}))]).await;
    assert_eq!(result.actions(ActionType::ForceTokens), 1);
    assert_eq!(result.end.finish.usage.completion_tokens, 6);
}

/// Returns parameters with which the random model writes any token.
fn high_temperature(seed: u32) -> SamplingParams {
    SamplingParams { temperature: 1.5, top_k: 0, top_p: 1.0, min_p: 0.0, seed, ..SamplingParams::default() }
}

const SEEDS: u32 = 5;

type Check<'a> = &'a dyn Fn(&str) -> bool;

#[tokio::test]
async fn strategy_of_a_mod_constrains_its_answer() {
    let mut engine = ModEngine::new().await;
    let letters = |text: &str| !text.is_empty() && text.chars().all(char::is_alphabetic);
    let digits = |text: &str| text.len() == 4 && text.chars().all(|c| c.is_ascii_digit());
    let list = |text: &str| {
        let items: Vec<String> = serde_json::from_str(text).unwrap();
        (1..=3).contains(&items.len()) && items.iter().all(|item| item.chars().count() <= 5)
    };
    let checks: [(&str, Check<'_>); 6] = [
        ("choices", &|text| ["yes", "no", "not yet"].contains(&text)),
        ("until", &|text| text.starts_with("<q>") && text[3..].find(|c| ".!?eaio".contains(c)) == Some(text.len() - 4)),
        ("digits", &digits),
        ("letters", &|text| text.strip_suffix(';').is_some_and(|word| letters(word) && word.chars().count() <= 12)),
        ("float", &|text| text.strip_suffix('\n').is_some_and(|number| number.parse::<f64>().is_ok())),
        ("list", &list),
    ];
    for (strategy, check) in checks {
        let mut answers = std::collections::HashSet::new();
        for seed in 0..SEEDS {
            let result =
                engine.sample(&[("constrained", json!({"strategy": strategy}))], high_temperature(seed), 120).await;
            assert_eq!(result.exceptions(), Vec::<&str>::new());
            let (answer, rest) =
                result.text.split_once("|||").unwrap_or_else(|| panic!("{strategy}: {:?}", result.text));
            assert!(check(answer), "{strategy} with seed {seed}: {answer:?}");
            assert!(!rest.is_empty(), "the model continues the answer");
            answers.insert(answer.to_owned());
        }
        assert!(answers.len() > 1, "{strategy}: every seed has the same answer: {answers:?}");
    }
}

#[tokio::test]
async fn erased_question_is_visible_only_to_its_mod() {
    let mut engine = ModEngine::new().await;
    for seed in 0..SEEDS {
        let plain = engine.sample(&[], high_temperature(seed), 60).await;
        let result = engine.sample(&[("hidden", Value::Null)], high_temperature(seed), 60).await;
        assert_eq!(result.exceptions(), Vec::<&str>::new());
        assert!(["answer yes", "answer no"].contains(&result.log_lines()[0]), "{:?}", result.log_lines());
        assert_eq!(result.log_lines().len(), 1);
        assert_eq!(result.retracted, 0, "the question must not be sent to the client");
        assert_eq!(result.text, result.end.finish.text);
        assert!(!result.text.contains("story?"), "{}", result.text);
        assert_eq!(result.end.finish.usage.completion_tokens, plain.end.finish.usage.completion_tokens);
        let kept = engine.sample(&[("prompt_hidden", Value::Null)], high_temperature(seed), 60).await;
        assert!(kept.text.starts_with("yes") || kept.text.starts_with("no"), "{}", kept.text);
        assert_eq!((kept.retracted, kept.exceptions().len()), (0, 0));
    }
    let short = engine.sample(&[("hidden", Value::Null)], high_temperature(1), 5).await;
    assert_eq!(short.log_lines(), ["answer None"], "the question does not fit into five tokens");
    assert!(!short.text.contains("story") && !short.text.contains("Is this"), "{}", short.text);

    let limits = Limits { stop: vec!["story".into()], max_steps: 500, ignore_eos: true, ..Limits::new(60) };
    let stopped = engine.generate(&[("hidden", Value::Null)], high_temperature(1), limits).await;
    assert!(
        ["answer yes", "answer no"].contains(&stopped.log_lines()[0]),
        "a stop string in the question ends the run"
    );
    let stopped_by = stopped.items.iter().filter(|item| {
        let TraceItem::Event(event) = item else { return false };
        event.measured.as_ref().is_some_and(|measured| measured.stopped_by.is_some())
    });
    assert!(stopped_by.count() <= 1, "only the first event of the question, after which the mod discards it");
    let limits = Limits { max_steps: 2, ..Limits::new(60) };
    let ended = engine.generate(&[("hidden", Value::Null)], high_temperature(1), limits).await;
    assert_eq!((ended.text.as_str(), ended.end.finish.text.as_str(), ended.retracted), ("", "", 0));
}

#[tokio::test]
async fn tokens_that_a_mod_discards_are_not_sent() {
    let mut engine = ModEngine::new().await;
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let expected = engine.sample(&[], sampling, 2).await.text;
    let result = engine.run(&[("discard_from_third", Value::Null)]).await;
    assert_eq!(result.exceptions(), Vec::<&str>::new());
    assert_eq!((&result.text, &result.end.finish.text, result.retracted), (&expected, &expected, 0));
    let mut fold = Fold::new();
    result.items.iter().for_each(|item| fold.apply(item));
    assert_eq!((fold.answer_text(), fold.rows().last().unwrap().removed_at), (expected, fold.event_count()));
}

#[tokio::test]
async fn answer_after_erased_question_is_kept() {
    let mut engine = ModEngine::new().await;
    let limits = Limits { max_steps: 500, ignore_eos: true, ..Limits::new(60) };
    let result = engine.generate(&[("guarded", Value::Null)], high_temperature(1), limits.clone()).await;
    assert_eq!(result.exceptions(), Vec::<&str>::new());
    assert_eq!((&result.text, result.retracted), (&result.end.finish.text, 0));
    assert!(!result.text.contains("yes or no"), "{}", result.text);
    let stop = result.text.chars().find(char::is_ascii_alphanumeric).expect("a letter or digit in the answer");
    let limits = Limits { stop: vec![stop.into()], ..limits };
    let stopped = engine.generate(&[("guarded", Value::Null)], high_temperature(1), limits).await;
    let expected = result.text.split_once(stop).map(|(before, _)| before);
    assert_eq!((Some(stopped.text.as_str()), stopped.end.finish.reason), (expected, FinishReason::Stop));
}

#[tokio::test]
async fn flow_branches_on_the_answers() {
    let mut engine = ModEngine::new().await;
    let mut branches = std::collections::HashMap::new();
    for seed in 0..40 {
        let result = engine.sample(&[("branches", Value::Null)], high_temperature(seed), 80).await;
        assert_eq!(result.exceptions(), Vec::<&str>::new());
        assert!(!result.text.contains('[') || result.end.finish.reason == FinishReason::Length, "{}", result.text);
        assert_eq!((result.retracted, &result.text), (0, &result.end.finish.text));
        let branch = match result.end.finish.reason {
            FinishReason::ToolCalls => {
                let calls = result.end.finish.tool_calls.as_ref().unwrap();
                assert_eq!(calls[0]["function"]["arguments"], r#"{"kind": "call"}"#);
                assert_eq!(result.text, "");
                "call"
            }
            FinishReason::Stop if result.text == "right." => "right",
            FinishReason::Stop => {
                let name = result.text.strip_prefix("left ").unwrap_or_else(|| panic!("{}", result.text));
                assert!((2..=6).contains(&name.chars().count()) && name.chars().all(char::is_alphabetic), "{name}");
                "left"
            }
            reason => {
                assert_eq!(reason, FinishReason::Length);
                "unfinished"
            }
        };
        *branches.entry(branch).or_insert(0) += 1;
    }
    assert!(branches.len() >= 3, "different seeds take several branches: {branches:?}");
}

#[tokio::test]
async fn mod_that_moves_to_another_file_of_the_folder_stays_registered() {
    let source = |names: &[&str]| {
        let define = |name: &&str| format!("\n\n@mod(events=[Added])\ndef {name}(event, actions):\n    pass\n");
        let mods: Vec<String> = names.iter().map(define).collect();
        format!("from thunder_mods import Added, mod\n{}", mods.concat())
    };
    let (path, registry) = (folder(), ModRegistry::default());
    let write = |file: &str, names: &[&str]| std::fs::write(path.join(file), source(names)).unwrap();
    write("a.py", &["first"]);
    write("b.py", &["calm", "second"]);
    let mut mods = ModFolder::new(path.clone(), PythonMods::default());
    mods.sync(&registry).unwrap();
    assert!(registry.problems().is_empty(), "{:?}", registry.problems());
    registry.set_enabled("calm", false);
    let moves: [[&[&str]; 2]; 3] =
        [[&["first", "calm"], &["second"]], [&["first"], &["second", "calm"]], [&["second"], &["first"]]];
    for [a, b] in moves {
        write("a.py", a);
        write("b.py", b);
        mods.sync(&registry).unwrap();
        assert!(registry.problems().is_empty(), "{:?}", registry.problems());
        let mut found = Vec::new();
        for shown in registry.list_info(None) {
            found.push((shown.current.registered_by.unwrap(), shown.description.name.clone()));
            assert_eq!(shown.enabled, shown.description.name != "calm");
        }
        let mut expected = Vec::new();
        for (file, names) in [("a.py", a), ("b.py", b)] {
            expected.extend(names.iter().map(|name| (file.to_owned(), (*name).to_owned())));
        }
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
    }
}
