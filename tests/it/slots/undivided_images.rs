//! Images whose tokens share a position (M-RoPE) or attend to each other: runs equal llama.cpp's own evaluation, and
//! continued runs equal fresh ones, token for token.

mod prompt;
mod reference;

use super::{in_slot, max_difference, rows, with_attention};
use crate::engine::{CompletedRun, TestEngine, added_at, follow, test_engine_of, with_mod};
use prompt::Part::{Image as Picture, Text};
use prompt::{ALL, END, Files, HYBRID, MROPE, NON_CAUSAL, Prompt, QUESTION, TALL, WIDE, load};
use reference::reference;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use thunder::engine::{Overflow, Request, SlotError, SubmitError};
use thunder::events::{FinishReason, Scope, TokenId};
use thunder::model::Model;
use thunder::mods::Action;

async fn engine(files: Files, parallel: u32) -> (Arc<Model>, TestEngine) {
    let model = load(files);
    (Arc::clone(&model), test_engine_of(model, parallel, false, |_| {}).await)
}

/// Returns the tokens of an answer that is generated in slot 1 without cached state.
async fn generate_uncached(test_engine: &mut TestEngine, prompt: &Prompt, count: u32) -> Vec<TokenId> {
    let request = Request { cache_prompt: false, ..in_slot(prompt.request(count), 1) };
    test_engine.run(request).await.generated()
}

/// Continues a prompt in slot 0 and compares it with a fresh run. Returns the number of reused tokens.
async fn assert_equals_fresh_run(test_engine: &mut TestEngine, prompt: &Prompt) -> usize {
    let result = test_engine.run(in_slot(prompt.request(10), 0)).await;
    assert_eq!(result.generated(), generate_uncached(test_engine, prompt, 10).await);
    result.end.finish.usage.cached_tokens as usize
}

#[tokio::test]
async fn answers_equal_those_of_llama_cpp() {
    for files in ALL {
        let (model, mut test_engine) = engine(files, 2).await;
        let mut answers = Vec::new();
        for parts in [
            &[QUESTION, WIDE, END][..],
            &[QUESTION, TALL, END],
            &[QUESTION, WIDE, Text("And this?"), TALL, END],
            &[TALL, WIDE, QUESTION, Picture(280, 280, 2), END],
        ] {
            let prompt = Prompt::new(&model, parts);
            let answer = test_engine.run(prompt.request(24)).await.generated();
            assert_eq!(answer, reference(files, &prompt, 24), "{}: {}", files.0, prompt.text);
            answers.push(answer);
        }
        answers.dedup();
        assert_eq!(answers.len(), 4, "{}: the answers do not depend on the images", files.0);
    }
}

#[tokio::test]
async fn continued_state_equals_a_fresh_run() {
    for files in ALL {
        let name = files.0;
        let model = load(files);
        let mut test_engine = test_engine_of(Arc::clone(&model), 2, false, |options| options.cache_ram_bytes = 0).await;
        let prompt = Prompt::new(&model, &[QUESTION, WIDE, END]);
        let (len, start) = (prompt.tokens.len(), prompt.image_start());
        let first = test_engine.run(in_slot(prompt.request(12), 0)).await.generated();
        assert_eq!(first, generate_uncached(&mut test_engine, &prompt, 12).await, "{name}");
        let continued = prompt.then(len, &[&first[..11], &[77, 78]].concat());
        assert_eq!(assert_equals_fresh_run(&mut test_engine, &continued).await, len + 11, "{name}");
        // A recurrent state cannot be truncated without checkpoints.
        let reusable = |cut: usize| if files == HYBRID { 0 } else { cut };
        for cut in [len - 1, len - 4] {
            let changed = prompt.then(cut, &[81, 82, 83]);
            assert_eq!(assert_equals_fresh_run(&mut test_engine, &changed).await, reusable(cut), "{name} at {cut}");
        }
        for (image, next) in [(TALL, 91), (WIDE, 92), (Picture(140, 84, 7), 93)] {
            let other = Prompt::new(&model, &[QUESTION, image, END]);
            test_engine.engine.erase_slot(&Scope::All, 1).await.unwrap();
            let reused = assert_equals_fresh_run(&mut test_engine, &other).await;
            assert_eq!(reused, reusable(start), "{name}: tokens before another image");
            assert_equals_fresh_run(&mut test_engine, &other.then(other.tokens.len(), &[next])).await;
        }
        // The last token of a prompt is always decoded, and the whole image with it.
        let prompt = Prompt::new(&model, &[QUESTION, WIDE]).until_image_end();
        test_engine.engine.erase_slot(&Scope::All, 0).await.unwrap();
        for reused in [0, reusable(start)] {
            test_engine.engine.erase_slot(&Scope::All, 1).await.unwrap();
            let found = assert_equals_fresh_run(&mut test_engine, &prompt).await;
            assert_eq!(found, reused, "{name}: tokens before an image at the end");
        }
    }
}

#[tokio::test]
async fn cached_states_and_checkpoints_equal_a_fresh_run() {
    for files in ALL {
        let (model, mut test_engine) = engine(files, 2).await;
        let prompts = [
            &[QUESTION, Picture(280, 280, 2), QUESTION, END][..],
            &[END, QUESTION, TALL, QUESTION, WIDE, END],
            &[QUESTION, Picture(280, 280, 2), QUESTION, TALL],
        ];
        let mut reused = Vec::new();
        for round in 0..3 {
            for parts in prompts {
                let prompt = Prompt::new(&model, parts);
                let prompt = prompt.then(prompt.tokens.len() - 1, &[90 + round]);
                reused.push(assert_equals_fresh_run(&mut test_engine, &prompt).await);
            }
        }
        // A cached state lacks the tokens before the window.
        let is_reused = |&reused: &usize| reused > 100 || files == NON_CAUSAL;
        assert!(reused[3..].iter().all(is_reused), "{}: {reused:?}", files.0);
    }
}

/// Runs a prompt with a mod that replaces the last `count` of ten generated tokens by two others.
async fn run_with_backtrack(test_engine: &mut TestEngine, prompt: &Prompt, count: u32) -> CompletedRun {
    let has_backtracked = AtomicBool::new(false);
    let request = in_slot(prompt.request(20), 0);
    test_engine
        .run(with_mod(request, false, move |call| {
            if added_at(call, 10) && !has_backtracked.swap(true, Ordering::Relaxed) {
                return Action::Backtrack { n: count, tokens: vec![60, 61] };
            }
            Action::Noop
        }))
        .await
}

#[tokio::test]
async fn backtrack_after_an_image_equals_a_fresh_run() {
    for files in ALL {
        let (model, mut test_engine) = engine(files, 2).await;
        let prompt = Prompt::new(&model, &[QUESTION, WIDE, TALL, END]);
        for prompt in [prompt.until_image_end(), prompt] {
            for removed in [4, 10] {
                let answer = run_with_backtrack(&mut test_engine, &prompt, removed).await.generated();
                let kept = 12 - removed as usize;
                assert_eq!((answer.len(), &answer[kept - 2..kept]), (20, &[60, 61][..]));
                let continued = prompt.then(prompt.tokens.len(), &answer[..kept]);
                let expected = generate_uncached(&mut test_engine, &continued, 20 - kept as u32).await;
                assert_eq!(answer[kept..], expected, "{}: {removed} removed", files.0);
            }
        }
    }
}

#[tokio::test]
async fn runs_with_images_are_independent() {
    for files in ALL {
        let (model, mut test_engine) = engine(files, 3).await;
        let images = [WIDE, TALL, Picture(280, 280, 2), WIDE, Picture(140, 140, 9)];
        let mut prompts: Vec<Prompt> =
            images.into_iter().map(|image| Prompt::new(&model, &[QUESTION, image, END])).collect();
        prompts.push(Prompt::new(&model, &[QUESTION, END]));
        let mut alone = Vec::new();
        for prompt in &prompts {
            alone.push(test_engine.run(in_slot(prompt.request(20), 1)).await.text);
            test_engine.engine.erase_slot(&Scope::All, 1).await.unwrap();
        }
        let mut together = Vec::new();
        for prompt in &prompts {
            together.push(test_engine.engine.submit(prompt.request(20)).await.unwrap());
        }
        for (generation, expected) in together.into_iter().zip(&alone) {
            assert_eq!(&follow(generation.output).await.0, expected, "{}", files.0);
        }
    }
}

#[tokio::test]
async fn runs_copy_the_state_of_a_common_image() {
    for files in ALL {
        let (model, mut test_engine) = engine(files, 3).await;
        let prompt = Prompt::new(&model, &[QUESTION, Picture(280, 280, 2), QUESTION, TALL, QUESTION, END]);
        let expected = generate_uncached(&mut test_engine, &prompt, 16).await;
        test_engine.engine.erase_slot(&Scope::All, 1).await.unwrap();
        let mut together = Vec::new();
        for last in [70, 71, 70] {
            let request = prompt.then(prompt.tokens.len(), &[last]).request(16);
            together.push(test_engine.engine.submit(request).await.unwrap());
        }
        let mut answers = Vec::new();
        for generation in together {
            let (text, end) = follow(generation.output).await;
            answers.push((text, end.finish.usage.cached_tokens));
        }
        assert_eq!(answers[0].0, answers[2].0, "{}", files.0);
        if files != HYBRID {
            assert!(answers[1].1 > 0 && answers[2].1 > 0, "{}: {answers:?}", files.0);
        }
        let again = test_engine.run(prompt.request(16)).await.generated();
        assert_eq!(again, expected, "{}", files.0);
    }
}

#[tokio::test]
async fn restored_snapshot_equals_the_saved_state() {
    for files in ALL {
        let name = files.0;
        let (model, mut test_engine) = engine(files, 3).await;
        let prompt = Prompt::new(&model, &[QUESTION, WIDE, Text("And this?"), TALL, END]);
        let (len, start) = (prompt.tokens.len(), prompt.image_start());
        let answer = test_engine.run(in_slot(prompt.request(8), 0)).await.generated();
        let block = test_engine.engine.save_slot(&Scope::All, 0).await.unwrap().block;
        let restore = async |test_engine: &TestEngine| {
            test_engine.engine.restore_slot(None, 2, block.clone()).await.unwrap();
        };
        let continued = prompt.then(len, &[&answer[..7], &[77]].concat());
        let other = Prompt::new(&model, &[QUESTION, Picture(84, 84, 4), END]);
        for (prompt, reused) in [(continued, len + 7), (other, if files == MROPE { start } else { 0 })] {
            restore(&test_engine).await;
            let result = test_engine.run(in_slot(prompt.request(10), 2)).await;
            assert_eq!(result.end.finish.usage.cached_tokens as usize, reused, "{name}");
            assert_eq!(result.generated(), generate_uncached(&mut test_engine, &prompt, 10).await, "{name}");
        }
    }
}

#[tokio::test]
async fn full_context_drops_whole_images() {
    const CONTEXT: usize = crate::engine::CONTEXT as usize;
    for files in ALL {
        let (model, mut test_engine) = engine(files, 2).await;
        // The first range to drop ends within the first image, or before it.
        for discard in [40, 20] {
            let prompt = Prompt::new(&model, &[QUESTION, WIDE, QUESTION, TALL, END]);
            let mut request = in_slot(prompt.request(450), 0);
            request.overflow = Overflow::Shift { keep: Some(4), discard };
            let result = test_engine.run(request).await;
            let finish = &result.end.finish;
            assert_eq!((finish.reason, result.generated().len()), (FinishReason::Length, 450), "{}", files.0);
            if files == NON_CAUSAL {
                continue;
            }
            // The context is decoded again, because positions with rows and columns cannot be shifted.
            let sequence = [prompt.tokens.as_slice(), &result.generated()].concat();
            let is_image = |at: usize| sequence[at] < -1;
            let end = (4 + discard..CONTEXT).find(|&at| !(is_image(at - 1) && is_image(at))).unwrap();
            let remaining = Prompt { tokens: [&sequence[..4], &sequence[end..CONTEXT]].concat(), ..prompt };
            let count = (end - 4).min(sequence.len() - CONTEXT);
            let expected = generate_uncached(&mut test_engine, &remaining, count as u32).await;
            assert_eq!(sequence[CONTEXT..CONTEXT + count], expected, "{} after {discard}", files.0);
        }
    }
}

#[tokio::test]
async fn part_of_an_image_is_not_removed_from_a_slot() {
    let (model, mut test_engine) = engine(NON_CAUSAL, 1).await;
    let prompt = Prompt::new(&model, &[QUESTION, WIDE, END]);
    test_engine.run(prompt.request(1)).await;
    let start = prompt.image_start();
    for (keep, discard) in [(start + 3, 5), (3, start)] {
        let error = test_engine.engine.shift_slot(&Scope::All, 0, keep, discard).await.unwrap_err();
        assert!(matches!(error, SlotError::NotRemovable(reason) if reason.contains("image")), "{error}");
    }
}

#[tokio::test]
async fn image_is_divided_only_where_that_is_exact() {
    let small = |options: &mut thunder::engine::EngineOptions| (options.batch_size, options.ubatch_size) = (12, 8);
    for files in [MROPE, HYBRID] {
        let model = load(files);
        let mut test_engine = test_engine_of(Arc::clone(&model), 2, false, small).await;
        let prompt = Prompt::new(&model, &[QUESTION, WIDE, TALL, END]);
        let answer = test_engine.run(prompt.request(16)).await.generated();
        assert_eq!(answer, reference(files, &prompt, 16), "{}", files.0);
    }
    let model = load(NON_CAUSAL);
    assert_eq!(model.images().unwrap().max_undivided_tokens(), 36);
    let test_engine = test_engine_of(Arc::clone(&model), 1, false, small).await;
    let error = test_engine.engine.submit(Prompt::new(&model, &[QUESTION, WIDE, END]).request(1)).await.unwrap_err();
    assert!(matches!(error, SubmitError::UndividedImage { tokens: 36, max: 8 }), "{error}");
}

#[tokio::test]
async fn attention_rows_contain_images() {
    for files in [MROPE, NON_CAUSAL] {
        let model = load(files);
        let mut alone = test_engine_of(Arc::clone(&model), 1, true, |_| {}).await;
        let prompt = Prompt::new(&model, &[QUESTION, WIDE, TALL, END]);
        let expected = alone.run(with_attention(prompt.request(5))).await;
        let mut shared = test_engine_of(Arc::clone(&model), 3, true, |_| {}).await;
        let other = Prompt::new(&model, &[QUESTION, TALL, END]).request(40);
        let other = shared.engine.submit(with_attention(other)).await.unwrap();
        let result = shared.run(with_attention(prompt.request(5))).await;
        follow(other.output).await;
        assert_eq!(result.generated(), expected.generated(), "{}", files.0);
        let found = rows(&result);
        assert_eq!(found.len(), 5);
        for (index, ((len, row), (_, expected))) in found.iter().zip(rows(&expected)).enumerate() {
            assert_eq!(*len, prompt.tokens.len() + index);
            assert!(max_difference(row, &expected) < 1e-3, "{}", files.0);
            assert!(row.chunks_exact(*len).all(|one| (one.iter().sum::<f32>() - 1.0).abs() < 1e-3));
        }
    }
}
