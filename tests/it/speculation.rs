//! Speculative decoding on the real server, with Python and built-in mods: text and events are those of a server without it.

use super::engine::speculation::describe;
use super::harness::{Server, folder, message_of, recorded_items, thunder};
use serde_json::{Value, json};
use thunder::events::{ActionType, EventType, TraceItem};

/// `counting` repeats three words and determines every token, so that no token depends on the size of a batch. `changing`
/// forces, replaces and removes tokens, at one step each.
const MODS: &str = r#"
from thunder_mods import Added, ForwardPass, Sampled, mod

@mod(events=[ForwardPass])
def counting(event, actions, tokenizer):
    """Counts to three again and again."""
    words = tokenizer.encode("one two three ")
    index = len(event.context_info.generated) % len(words)
    return actions.adjust_logits(set={words[index]: 1000.0})

@mod(events=[Sampled, Added])
def changing(event, actions, tokenizer):
    """Forces and removes tokens."""
    if isinstance(event, Added) and event.step == 20:
        return actions.force_tokens(tokenizer.encode(" and"))
    if isinstance(event, Sampled) and event.step == 40:
        return actions.backtrack(3, tokenizer.encode("so"))
    if isinstance(event, Added) and event.step == 60:
        return actions.backtrack(5)
"#;

fn count_actions(items: &[TraceItem], kind: ActionType) -> usize {
    items.iter().filter(|item| matches!(item, TraceItem::Action(action) if action.action_type == kind)).count()
}

fn descriptions(items: &[TraceItem]) -> Vec<String> {
    items.iter().map(|item| describe(item).0).collect()
}

/// Generates an answer; returns it with the recorded items.
async fn complete(server: &Server, mods: &Value) -> (Value, Vec<TraceItem>) {
    let body = json!({"prompt": "Count to three: one two three ", "n_predict": 120, "temperature": 0.0, "mods": mods,
        "ignore_eos": true});
    let answer = server.answer("/completion", &body).await;
    let items = recorded_items(server, answer["thunder"]["run_id"].as_str().unwrap()).await;
    (answer, items)
}

#[tokio::test]
async fn python_and_builtin_mods_have_the_same_effect_with_drafts() {
    let mods = folder();
    std::fs::write(mods.join("drafts.py"), MODS).unwrap();
    let start =
        |drafts: &[&str]| Server::start(&[&["--mods-dir", mods.to_str().unwrap(), "-np", "1"], drafts].concat());
    let (plain, drafting) = (start(&[]), start(&["--spec-type", "ngram-simple"]));
    plain.wait_ready().await;
    drafting.wait_ready().await;
    let replace = json!({"name": "replace-phrase", "config": {"replace": {"two three": "five"}}});
    let regex = json!({"name": "regex", "config": {"pattern": "(one two three ){9}"}});
    let cases = [
        (json!(["changing", "counting"]), ActionType::Backtrack, 2),
        (json!(["changing", "counting"]), ActionType::ForceTokens, 1),
        (json!([replace, "counting"]), ActionType::Backtrack, 3),
        (json!([regex]), ActionType::ForceTokens, 1),
    ];
    for (mods, kind, min) in cases {
        let (expected, trace) = complete(&plain, &mods).await;
        assert!(
            count_actions(&trace, kind) >= min,
            "{mods}: {} of {kind:?} in {}",
            count_actions(&trace, kind),
            expected["content"]
        );
        assert_eq!(expected["timings"]["draft_n"], Value::Null);
        // On a busy machine, a run may stop drafting because its first drafts take longer than they save.
        let mut accepted = 0;
        for _ in 0..60 {
            let (answer, found) = complete(&drafting, &mods).await;
            assert_eq!(answer["content"], expected["content"], "{mods}");
            assert_eq!(descriptions(&found), descriptions(&trace), "{mods}");
            accepted += answer["timings"]["draft_n_accepted"].as_u64().unwrap_or_default();
            if accepted > 0 {
                break;
            }
        }
        assert!(accepted > 0, "{mods}: no draft was accepted");
    }
}

#[tokio::test]
async fn draft_model_drafts_on_the_real_server() {
    let fixture = |name: &str| format!("{}/fixtures/models/{name}", env!("CARGO_MANIFEST_DIR"));
    let (tiny, demo) = (fixture("tiny.gguf"), fixture("demo.gguf"));
    let drafting = Server::start(&["-np", "1", "-md", &tiny, "--draft-p-min", "0.01", "-td", "1", "-ctkd", "bf16"]);
    drafting.wait_ready().await;
    let body = json!({"prompt": "the old fox", "n_predict": 120, "temperature": 0.0, "ignore_eos": true});
    let (mut drafted, mut accepted) = (0, 0);
    // A run drafts little, because this draft model takes as long as the main model.
    for _ in 0..60 {
        let answer = drafting.answer("/completion", &body).await;
        assert_eq!(answer["tokens_predicted"], 120);
        let settings = &answer["generation_settings"];
        assert_eq!(
            (&settings["speculative.types"], &settings["speculative.n_max"]),
            (&json!("draft-simple"), &json!(16))
        );
        drafted += answer["timings"]["draft_n"].as_u64().unwrap_or_default();
        accepted += answer["timings"]["draft_n_accepted"].as_u64().unwrap_or_default();
        if accepted > 0 {
            break;
        }
    }
    assert!(accepted > 0 && drafted >= accepted, "{accepted} of {drafted}");
    let mut without = body.clone();
    without["speculative.n_max"] = json!(0);
    assert_eq!(drafting.answer("/completion", &without).await["timings"]["draft_n"], Value::Null);
    let (status, rejected) = drafting.post("/completion", &json!({"prompt": "a", "speculative.p_min": "x"})).await;
    assert_eq!(
        (status, message_of(&rejected)),
        (400, "`speculative.p_min` must be a number between 0 and 1, got \"x\"")
    );
    assert_eq!(drafting.get("/slots").await.1[0]["speculative"], true);

    let output = thunder()
        .args(["serve", "--port", "0", "--data-dir"])
        .arg(folder())
        .args(["--model", &tiny, "-md", &demo])
        .output();
    let error = String::from_utf8(output.unwrap().stderr).unwrap();
    assert!(
        error.contains(&format!("cannot use {demo} as the draft model: its vocabulary has 2048 tokens")),
        "{error}"
    );
}

#[tokio::test]
async fn forks_of_drafted_runs_repeat_them() {
    let mods = folder();
    std::fs::write(mods.join("drafts.py"), MODS).unwrap();
    let drafting = Server::start(&["--mods-dir", mods.to_str().unwrap(), "-np", "2", "--spec-type", "ngram-simple"]);
    drafting.wait_ready().await;
    let (answer, items) = complete(&drafting, &json!(["changing", "counting"])).await;
    let drafted_token = |item: &TraceItem| match item {
        TraceItem::Event(event) if event.event_type == EventType::Sampled => {
            event.measured.as_ref().and_then(|measured| measured.drafted)
        }
        _ => None,
    };
    assert!(items.iter().any(|item| drafted_token(item).is_some()), "{}", answer["timings"]);
    let run = answer["thunder"]["run_id"].as_str().unwrap();
    // On a busy machine, runs may stop drafting, so several rounds may be needed.
    let mut drafted = 0;
    for _ in 0..60 {
        // Before, between and after the steps at which the mod changes the answer.
        for step in [2, 30, 50, 90] {
            let (status, forked) =
                drafting.post(&format!("/api/v1/runs/{run}/forks"), &json!({"at": {"step": step}})).await;
            assert_eq!(status, 201, "{forked}");
            let id = forked["runs"][0]["run_id"].as_str().unwrap();
            let fork = recorded_items(&drafting, id).await;
            assert_eq!(descriptions(&fork), descriptions(&items), "step {step}");
            let new_events = fork.iter().filter(|item| matches!(item, TraceItem::Event(event) if event.step > step));
            drafted += new_events.filter_map(drafted_token).count();
        }
        if drafted > 0 {
            return;
        }
    }
    panic!("no fork drafted a token");
}
