//! A fork without a change repeats the recorded run from any of its steps, for any actions of its mods.

use super::exact_model::exact_engine;
use super::{CompletedRun, TestEngine, request_tokens, test_engine_with, with_mod};
use serde_json::{Value, json};
use std::sync::Arc;
use thunder::engine::{ForkPoint, Request, SamplingParams, SubmitError};
use thunder::events::{EventType, RunId, RunParent, TokenId, TraceItem};
use thunder::mods::{
    Action, Call, EventSet, LogitEdit, ModDescription, ModFactory, ModInstance, ModRef, Reply, ReplySender, RunView,
    SelectedMod,
};

/// Reproducible random numbers.
#[derive(Debug, Clone)]
struct RandomNumbers(u64);

impl RandomNumbers {
    fn below(&mut self, count: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % count
    }

    fn tokens(&mut self, max: u64) -> Vec<TokenId> {
        (0..=self.below(max)).map(|_| 40 + self.below(400) as TokenId).collect()
    }

    /// Makes the next numbers depend on the sequence and the limits of a call.
    fn mix(&mut self, call: &Call<'_>) {
        let numbers = [call.prompt_len as u64, call.evicted as u64, u64::from(call.max_tokens)];
        for number in call.sequence.iter().map(|&token| token as u64).chain(numbers) {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(number);
        }
    }
}

/// A mod that acts at random. It repeats its actions only if it receives every event again, with the same sequence.
struct RandomMod {
    name: &'static str,
    seed: u64,
}

struct RandomModInstance {
    numbers: RandomNumbers,
    asynchronous: bool,
}

impl ModFactory for RandomMod {
    fn describe(&self) -> ModDescription {
        ModDescription {
            name: self.name.into(),
            language: "test".into(),
            version: "1".into(),
            ..ModDescription::default()
        }
    }

    fn start(&self, _: &Value, _: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        Ok(Box::new(RandomModInstance { numbers: RandomNumbers(self.seed), asynchronous: self.seed.is_multiple_of(2) }))
    }
}

impl ModInstance for RandomModInstance {
    fn handles(&self) -> EventSet {
        EventSet::ALL
    }

    fn call(&mut self, call: &Call<'_>, new_sender: &dyn Fn() -> ReplySender) -> Option<Reply> {
        let numbers = &mut self.numbers;
        numbers.mix(call);
        let draw = numbers.below(100);
        let action = match (call.event_type(), draw) {
            (EventType::Prefilled, ..20) => Action::AdjustedPrefill {
                tokens: [call.sequence.to_vec(), numbers.tokens(3)].concat(),
                max_tokens: (draw < 10).then_some(20),
            },
            (EventType::ForwardPass, ..10) => Action::AdjustedLogits {
                edit: LogitEdit::Add(numbers.tokens(5).into_iter().map(|token| (token, 2.0)).collect()),
                temperature: (draw < 5).then_some(1.5),
            },
            (_, 20..26) => Action::Backtrack { n: 1 + numbers.below(4) as u32, tokens: Vec::new() },
            (_, 26..32) => Action::Backtrack { n: 1 + numbers.below(4) as u32, tokens: numbers.tokens(3) },
            (_, 32..38) => Action::ForceTokens(numbers.tokens(3)),
            (EventType::Added, 98..) => Action::ForceOutput(numbers.tokens(3)),
            (EventType::Added, 97) => Action::ToolCalls(json!({"function": {"name": "f", "arguments": "{}"}})),
            // The action is permitted only at Prefilled; at other events, the call fails.
            (_, 38..40) => Action::AdjustedPrefill { tokens: vec![50], max_tokens: None },
            // The call fails, because there is no token.
            (_, 40..42) => Action::ForceTokens(Vec::new()),
            _ => Action::Noop,
        };
        if self.asynchronous {
            let sender = new_sender();
            std::thread::spawn(move || sender.reply(Reply::from(action)));
            return None;
        }
        Some(Reply::from(action))
    }
}

fn random_mod(name: &'static str, seed: u64) -> SelectedMod {
    SelectedMod {
        mod_ref: ModRef { name: name.into(), config: Value::Null },
        factory: Arc::new(RandomMod { name, seed }),
    }
}

/// Returns the request for a fork of a run at a step, with the recorded items before it.
fn fork_of(run: &CompletedRun, request: &Request, step: i32) -> Request {
    let prompt = run.items.iter().find_map(|item| match item {
        TraceItem::Event(event) => event.measured.as_ref()?.prompt.clone(),
        _ => None,
    });
    let is_step = |item: &TraceItem| matches!(item, TraceItem::Event(event) if event.event_type == EventType::ForwardPass && event.step == step);
    let earlier_items = run.items.split(is_step).next().unwrap();
    Request {
        prompt: prompt.unwrap().tokens,
        fork: Some(Box::new(ForkPoint {
            items: earlier_items.to_vec().into(),
            step: step as u32,
            sampling: vec![(0, request.sampling.clone())],
            mods_repeat_from: vec![Some(0); request.mods.len()],
            tokens: Vec::new(),
            earlier_parameters: Value::Null,
            parent: RunParent {
                run_id: RunId::now(),
                sequence_order: earlier_items.len() as i32,
                step,
                change: Value::Null,
            },
        })),
        ..request.clone()
    }
}

/// Type, step, sampled token and added tokens of an event.
type EventContent = (EventType, i32, Option<TokenId>, Option<Vec<TokenId>>);

/// Returns the content of a run's events.
fn events(run: &CompletedRun) -> Vec<EventContent> {
    let content = |item: &TraceItem| match item {
        TraceItem::Event(event) => {
            Some((event.event_type, event.step, event.sampled_token, event.added_tokens.clone()))
        }
        _ => None,
    };
    run.items.iter().filter_map(content).collect()
}

/// Returns the steps with a forward pass.
fn steps(run: &CompletedRun) -> Vec<i32> {
    events(run).into_iter().filter(|event| event.0 == EventType::ForwardPass).map(|event| event.1).collect()
}

async fn submit_error(test_engine: &TestEngine, request: Request) -> SubmitError {
    test_engine.engine.submit(request).await.expect_err("the fork must be rejected")
}

#[tokio::test]
async fn unchanged_forks_repeat_random_runs_with_mods() {
    let mut test_engine = exact_engine(2, |_| {}).await;
    let (mut forks, mut backtracks) = (0, 0);
    for case in 0..80 {
        let mut numbers = RandomNumbers(case);
        let mut request = request_tokens((0..12).map(|_| 40 + numbers.below(400) as TokenId).collect(), 24);
        request.sampling = match case % 5 {
            0 => SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            1 => SamplingParams { xtc_probability: 0.5, ..SamplingParams::default() },
            2 => SamplingParams { mirostat: 2, ..SamplingParams::default() },
            3 => SamplingParams { repeat_penalty: 1.3, presence_penalty: 0.5, ..SamplingParams::default() },
            _ => SamplingParams { temperature: 1.5, top_k: 0, top_p: 1.0, min_p: 0.0, ..SamplingParams::default() },
        };
        request.sampling.seed = case as u32;
        request.limits.stop = vec!["never".into()];
        match case % 4 {
            0 => {}
            1 | 2 => request.mods = vec![random_mod("one", case)],
            _ => request.mods = vec![random_mod("one", case), random_mod("two", case + 1)],
        }
        let run = test_engine.run(request.clone()).await;
        let steps = steps(&run);
        let Some(&step) = steps.get(numbers.below(steps.len().max(1) as u64) as usize) else { continue };
        let fork = test_engine.run(fork_of(&run, &request, step)).await;
        assert_eq!(events(&fork), events(&run), "case {case}, step {step}");
        assert_eq!(
            (&fork.text, fork.end.finish.reason),
            (&run.text, run.end.finish.reason),
            "case {case}, step {step}"
        );
        assert_eq!(fork.generated(), run.generated(), "case {case}, step {step}");
        // A fork can be forked, too.
        let nested_fork = test_engine.run(fork_of(&fork, &request, step)).await;
        assert_eq!(events(&nested_fork), events(&run), "case {case}, step {step}");
        forks += 1;
        let is_backtrack = |item: &&TraceItem| matches!(item, TraceItem::Action(action) if action.action_type == thunder::events::ActionType::Backtrack);
        backtracks += run.items.iter().filter(is_backtrack).count();
    }
    assert!(forks > 70 && backtracks > 40, "{forks} forks, {backtracks} backtracks");
}

#[tokio::test]
async fn fork_with_a_token_keeps_the_earlier_tokens() {
    let mut test_engine = test_engine_with(1, false, |_| {}).await;
    let mut request = request_tokens((60..80).collect(), 16);
    request.sampling = SamplingParams { seed: 5, ..SamplingParams::default() };
    let run = test_engine.run(request.clone()).await;
    let mut changed = fork_of(&run, &request, 7);
    changed.fork.as_mut().unwrap().tokens = vec![99];
    let fork = test_engine.run(changed).await;
    assert_eq!(fork.generated()[..6], run.generated()[..6]);
    assert_eq!((fork.generated()[6], fork.generated().len()), (99, 16), "the token of the change counts");
    assert_eq!(fork.end.finish.usage.cached_tokens, 20, "the state of the recorded run is used");
}

#[tokio::test]
async fn fork_with_a_mod_that_acts_differently_is_rejected() {
    let mut test_engine = test_engine_with(1, false, |_| {}).await;
    let mut request = request_tokens((60..80).collect(), 16);
    request.mods = vec![random_mod("one", 3)];
    let run = test_engine.run(request.clone()).await;
    let last = *steps(&run).last().unwrap();
    let mut other = fork_of(&run, &request, last);
    other.mods = vec![random_mod("one", 5)];
    let error = submit_error(&test_engine, other.clone()).await;
    assert!(matches!(&error, SubmitError::ModDiffers { name, .. } if name == "one"), "{error}");
    other.fork.as_mut().unwrap().mods_repeat_from = vec![None];
    test_engine.run(other).await;
}

#[tokio::test]
async fn fork_of_unrecorded_state_is_rejected() {
    let mut test_engine = test_engine_with(1, false, |_| {}).await;
    let mut request = request_tokens((60..80).collect(), 8);
    request.sampling = SamplingParams { adaptive_target: 0.5, ..SamplingParams::default() };
    request.sampling.samplers.push(thunder::engine::SamplerStage::AdaptiveP);
    let run = test_engine.run(request.clone()).await;
    let error = submit_error(&test_engine, fork_of(&run, &request, 5)).await.to_string();
    assert_eq!(error, "the run cannot be forked at step 5: the state of its adaptive sampling is not recorded");
    // A fork at the first step needs no state of the sampler.
    assert_eq!(events(&test_engine.run(fork_of(&run, &request, 1)).await), events(&run));
}

#[tokio::test]
async fn fork_keeps_a_failing_mod_disabled() {
    let mut test_engine = exact_engine(1, |_| {}).await;
    let prompt: Vec<TokenId> = (60..80).collect();
    let request = with_mod(request_tokens(prompt.clone(), 12), false, |call| match call.event_type() {
        EventType::ForwardPass if call.step <= 5 => Action::ForceTokens(Vec::new()),
        EventType::ForwardPass => Action::ForceTokens(vec![99]),
        _ => Action::Noop,
    });
    let run = test_engine.run(request.clone()).await;
    let message = run.end.finish.message.as_deref().unwrap_or_default();
    assert!(message.starts_with("the mod 'test' was disabled at step 5"), "{message}");
    let fork = test_engine.run(fork_of(&run, &request, 8)).await;
    assert_eq!((events(&fork), &fork.end.finish.message), (events(&run), &run.end.finish.message));
    // Neither failures of another version count, nor those of a mod that only the fork uses.
    let corrected = with_mod(request_tokens(prompt, 12), false, |call| match call.event_type() {
        EventType::ForwardPass if call.step < 8 => Action::ForceTokens(Vec::new()),
        EventType::ForwardPass if call.generated_in_context().len() == 9 => Action::ForceTokens(vec![99]),
        _ => Action::Noop,
    });
    let mut fork = fork_of(&run, &corrected, 8);
    fork.fork.as_mut().unwrap().mods_repeat_from = vec![None];
    let fork = test_engine.run(fork).await;
    assert_eq!((fork.generated()[9], &fork.end.finish.message), (99, &None));
}

#[tokio::test]
async fn fork_repeats_a_limit_above_that_of_the_server() {
    let mut test_engine = exact_engine(1, |options| options.max_tokens = Some(12)).await;
    let request = with_mod(request_tokens((60..80).collect(), 12), false, |call| match call.event_type() {
        EventType::Prefilled => Action::AdjustedPrefill { tokens: call.sequence.to_vec(), max_tokens: Some(u32::MAX) },
        EventType::ForwardPass if call.step == 4 && call.max_tokens == 12 => Action::ForceTokens(vec![99]),
        _ => Action::Noop,
    });
    let run = test_engine.run(request.clone()).await;
    assert_eq!((run.generated().len(), run.generated()[3]), (12, 99));
    assert_eq!(events(&test_engine.run(fork_of(&run, &request, 8)).await), events(&run));
}

#[tokio::test]
async fn fork_repeats_a_backtrack_of_the_whole_answer() {
    let mut test_engine = exact_engine(1, |_| {}).await;
    let request = with_mod(request_tokens((60..80).collect(), 12), false, |call| {
        if call.step == 4 && call.event_type() == EventType::ForwardPass {
            Action::Backtrack { n: u32::MAX, tokens: vec![99] }
        } else {
            Action::Noop
        }
    });
    let run = test_engine.run(request.clone()).await;
    assert_eq!((run.generated().len(), run.generated()[0]), (12, 99));
    assert_eq!(events(&test_engine.run(fork_of(&run, &request, 8)).await), events(&run));
}
