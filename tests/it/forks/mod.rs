//! `/api/v1/runs/{id}/forks` and `thunder fork` on the real server, with Python mods and the database.

mod family;

use super::harness::{ErrorTable, Server, folder, text, thunder, with_fields};
use reqwest::Method;
use serde_json::{Value, json};
use std::sync::LazyLock;

/// `acts_at_random` draws its actions from a random number generator, so it only repeats them if it receives every event again.
/// `acts_once` acts once per process.
const MODS: &str = r#"
import random
from thunder_mods import Added, ForwardPass, Sampled, mod

states = {}
acted = []

@mod
def acts_at_random(event, actions, tokenizer):
    """Acts at random."""
    state = states.setdefault(event.request_id, random.Random(7))
    draw = state.random()
    if isinstance(event, Added) and draw < 0.12:
        return actions.backtrack(1 + int(draw * 20))
    if isinstance(event, Added) and draw < 0.2:
        return actions.force_tokens(tokenizer.encode(" and"))
    if isinstance(event, Sampled) and draw < 0.1:
        return actions.backtrack(2, tokenizer.encode("so"))
    if isinstance(event, ForwardPass) and draw < 0.1:
        return actions.adjust_logits(event.logits, token_temp=1.5)

def finished(request_id):
    states.pop(request_id, None)

@mod(events=[Added])
def acts_once(event, actions, tokenizer):
    """Acts once."""
    if not acted:
        acted.append(True)
        return actions.force_tokens(tokenizer.encode("once"))
"#;

async fn server() -> &'static Server {
    static SERVER: LazyLock<Server> = LazyLock::new(|| {
        let mods = folder();
        std::fs::write(mods.join("forks.py"), MODS).unwrap();
        // Rounding to 16 bits would depend on the other runs of a decode.
        Server::start(&["--mods-dir", mods.to_str().unwrap(), "--parallel", "4", "-ctk", "f32", "-ctv", "f32"])
    });
    tokio::task::spawn_blocking(|| LazyLock::force(&SERVER)).await.unwrap().wait_ready().await
}

/// Generates a run; returns it as recorded.
async fn generate(server: &Server, fields: Value) -> Value {
    let body = json!({"prompt": "Once upon a time", "max_tokens": 24, "seed": 3, "ignore_eos": true});
    let answer = server.answer("/v1/completions", &with_fields(body, &fields)).await;
    server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await
}

fn id(run: &Value) -> &str {
    run["run"]["run_id"].as_str().unwrap()
}

/// Forks a run; returns the new runs as recorded.
async fn fork(server: &Server, run: &Value, body: Value) -> Vec<Value> {
    let (status, answer) = server.post(&format!("/api/v1/runs/{}/forks", id(run)), &body).await;
    assert_eq!(status, 201, "{answer}");
    assert_eq!(answer["parent"], run["run"]["run_id"]);
    let mut runs = Vec::new();
    for forked in answer["runs"].as_array().unwrap() {
        runs.push(server.finished(forked["run_id"].as_str().unwrap()).await);
    }
    runs
}

/// Returns the content of the events: type, step, sampled and added tokens.
fn events(run: &Value) -> Vec<Value> {
    let content = |event: &Value| {
        json!([event["event_type"], event["step"], event["sampled_token"], event["added_tokens"], event["forced"]])
    };
    run["events"].as_array().unwrap().iter().map(content).collect()
}

/// Returns the added tokens.
fn generated(run: &Value) -> Vec<Value> {
    let added = run["events"].as_array().unwrap().iter().filter_map(|event| event["added_tokens"].as_array());
    added.flatten().cloned().collect()
}

/// Returns the steps that can be forked.
fn steps(run: &Value) -> Vec<i64> {
    let passes = run["events"].as_array().unwrap().iter().filter(|event| event["event_type"] == "ForwardPass");
    passes.map(|event| event["step"].as_i64().unwrap()).collect()
}

/// Returns status and detail of a fork that is rejected.
async fn rejection(server: &Server, run: &str, body: Value) -> (u16, String) {
    let (status, problem) = server.post(&format!("/api/v1/runs/{run}/forks"), &body).await;
    (status, problem["detail"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn unchanged_fork_repeats_runs_with_python_mods() {
    let server = server().await;
    for seed in 0..6 {
        let run = generate(server, json!({"mods": ["acts_at_random"], "seed": seed, "temperature": 0.9})).await;
        assert!(run["run"]["backtracked"].as_i64() > Some(0), "{}", run["run"]);
        let steps = steps(&run);
        for step in [steps[0], steps[steps.len() / 2], steps[steps.len() - 1]] {
            let forked = fork(server, &run, json!({"at": {"step": step}})).await.remove(0);
            assert_eq!(events(&forked), events(&run), "seed {seed}, step {step}");
            assert_eq!(forked["run"]["output_preview"], run["run"]["output_preview"]);
            assert_eq!(forked["run"]["prompt_preview"], run["run"]["prompt_preview"]);
            let parent = &forked["run"]["parent"];
            assert_eq!((&parent["run_id"], &parent["step"]), (&run["run"]["run_id"], &json!(step)));
            assert_eq!(parent["change"], json!({}));
        }
    }
}

#[tokio::test]
async fn changes_apply_from_the_forked_step() {
    let server = server().await;
    let run = generate(server, json!({"temperature": 0.8})).await;
    let tokens = generated(&run);
    let order = run["events"]
        .as_array()
        .unwrap()
        .iter()
        .position(|event| event["event_type"] == "Sampled" && event["step"] == 5)
        .unwrap();
    let by_event = fork(server, &run, json!({"at": {"event": order}, "token": 99})).await.remove(0);
    assert_eq!((&generated(&by_event)[..4], &generated(&by_event)[4]), (&tokens[..4], &json!(99)));
    assert_eq!(generated(&by_event).len(), 24, "the limit of the run applies");
    assert_eq!(by_event["run"]["parent"]["change"]["token"], 99);
    let with_text = fork(server, &run, json!({"at": {"step": 5}, "text": "hello"})).await.remove(0);
    assert!(with_text["run"]["output_preview"].as_str().unwrap().contains("hello"), "{}", with_text["run"]);
    let greedy = fork(server, &run, json!({"at": {"step": 5}, "sampling": {"temperature": 0.0}})).await.remove(0);
    let greedy_with_seed =
        fork(server, &run, json!({"at": {"step": 5}, "sampling": {"temperature": 0.0}, "seed": 8})).await.remove(0);
    assert_eq!((&generated(&greedy)[..4], generated(&greedy)), (&tokens[..4], generated(&greedy_with_seed)));
    assert_ne!(generated(&greedy), tokens);
    // A fork of a fork repeats it, too, with its parameters.
    let again = fork(server, &greedy, json!({"at": {"step": 9}})).await.remove(0);
    assert_eq!(events(&again), events(&greedy));
    let rejected = rejection(server, id(&greedy), json!({"at": {"step": 3}})).await;
    let reason = "step 3 belongs to the run that this one was forked from at step 5; fork that run instead";
    assert_eq!(rejected, (409, reason.to_owned()));
    let several = fork(server, &run, json!({"at": {"step": 5}, "n": 3})).await;
    assert_eq!(several.len(), 3);
    let answers: std::collections::BTreeSet<String> =
        several.iter().map(|run| json!(generated(run)).to_string()).collect();
    assert_eq!(answers.len(), 3, "every fork has another seed");
    for run in &several {
        assert_eq!(generated(run)[..4], tokens[..4]);
    }
    let seeded = fork(server, &run, json!({"at": {"step": 1}, "n": 2, "seed": 3})).await;
    assert_eq!(seeded[1]["run"]["seed"], 4);
    let found = server.get(&format!("/api/v1/runs?q=parent:{}&limit=50", id(&run))).await.1;
    assert_eq!(found["runs"].as_array().unwrap().len(), 9, "{found}");
    assert!(found["runs"].as_array().unwrap().iter().all(|fork| fork["parent"]["run_id"] == run["run"]["run_id"]));
    let page = server.request(Method::GET, &format!("/runs/{}", id(&run))).send().await.unwrap().text().await.unwrap();
    assert!(page.contains("data-fork") && page.contains("step 5: “hello”"), "{page}");
    let page =
        server.request(Method::GET, &format!("/runs/{}", id(&greedy))).send().await.unwrap().text().await.unwrap();
    assert!(
        page.contains(&format!("/runs/{}\" data-parent", id(&run))) && page.contains("step 5: temperature 0.0"),
        "{page}"
    );
}

#[tokio::test]
async fn fork_of_forks_at_the_same_step_repeats_the_last_one() {
    let server = server().await;
    let mut run = generate(server, json!({"temperature": 0.9})).await;
    for seed in [11, 12, 13] {
        run = fork(server, &run, json!({"at": {"step": 5}, "seed": seed})).await.remove(0);
    }
    let again = fork(server, &run, json!({"at": {"step": 7}})).await.remove(0);
    assert_eq!(events(&again), events(&run));
}

#[tokio::test]
async fn logit_bias_of_a_fork_replaces_the_recorded_one() {
    let server = server().await;
    let run = generate(server, json!({"temperature": 0.8, "logit_bias": {"99": -5}})).await;
    let bias = |run: &Value| run["events"][0]["details"]["prompt"]["parameters"]["sampling"]["logit_bias"].clone();
    // `ignore_eos` bans 0 and 2.
    assert_eq!(bias(&run), json!([[99, -5.0], [0, null], [2, null]]));
    for (changed, recorded) in [
        (json!({"77": 1000, "99": false}), json!([[77, 1000.0], [99, null], [0, null], [2, null]])),
        (json!([[77, 500], [77, 500]]), json!([[77, 1000.0], [0, null], [2, null]])),
    ] {
        let body = json!({"at": {"step": 2}, "sampling": {"logit_bias": changed}});
        let forked = fork(server, &run, body).await.remove(0);
        assert_eq!(bias(&forked), recorded);
        assert_eq!(generated(&forked)[..1], generated(&run)[..1]);
        assert!(generated(&forked)[1..].iter().all(|token| token == 77), "{:?}", generated(&forked));
        let again = fork(server, &forked, json!({"at": {"step": 3}})).await.remove(0);
        assert_eq!(events(&again), events(&forked));
    }
    let none = fork(server, &run, json!({"at": {"step": 2}, "sampling": {"logit_bias": null}})).await.remove(0);
    assert_eq!(bias(&none), json!([[0, null], [2, null]]));
}

#[tokio::test]
async fn mods_of_a_fork_can_change() {
    let server = server().await;
    let run = generate(server, json!({"mods": ["acts_at_random"]})).await;
    let last = *steps(&run).last().unwrap();
    let plain = fork(server, &run, json!({"at": {"step": last}, "mods": []})).await.remove(0);
    assert_eq!(plain["run"]["mods"], json!([]));
    let kept: Vec<Value> = events(&run).into_iter().take_while(|event| event[1].as_i64() < Some(last)).collect();
    assert_eq!(events(&plain)[..kept.len()], kept);
    let run = generate(server, json!({"mods": ["acts_once"]})).await;
    assert!(run["run"]["forced"].as_i64() > Some(0), "{}", run["run"]);
    let (status, reason) = rejection(server, id(&run), json!({"at": {"step": steps(&run).last().unwrap()}})).await;
    assert_eq!(
        (status, &*reason),
        (
            409,
            "the mod 'acts_once' does not repeat its recorded actions: at step 1 (Added) it returned ForceTokens [87, 86, 356] in the recorded run and returns Noop now; it may depend on the time, on its own randomness or on more logits than are recorded; fork before that step, or with other `mods`"
        )
    );
}

#[tokio::test]
async fn impossible_fork_reports_reason() {
    let server = server().await;
    let run = generate(server, json!({"max_tokens": 4})).await;
    let id = id(&run);
    let sample = include_str!("../../../fixtures/sample_payload.json").replace("req_abc123", "foreign");
    assert_eq!(server.request(Method::POST, "/ingest").body(sample).send().await.unwrap().status(), 201);
    let mut problems = Vec::new();
    for (run, body) in [
        (id, json!({"at": {}})),
        (id, json!({"at": {"step": 9}})),
        (id, json!({"at": {"step": 0}})),
        (id, json!({"at": {"event": 99}})),
        (id, json!({"at": {"step": 1}, "n": 65})),
        (id, json!({"at": {"step": 1}, "n": 2, "seed": "continue"})),
        (id, json!({"at": {"step": 1}, "token": 1, "text": "a"})),
        (id, json!({"at": {"step": 1}, "token": 1_000_000})),
        (id, json!({"at": {"step": 1}, "text": ""})),
        (id, json!({"at": {"step": 1}, "sampling": {"temprature": 1}})),
        (id, json!({"at": {"step": 1}, "sampling": {"logit_bias": [[5]]}})),
        (id, json!({"at": {"step": 1}, "sampling": {"logit_bias": "5"}})),
        (id, json!({"at": {"step": 1}, "mods": ["nobody"]})),
        ("foreign", json!({"at": {"step": 1}})),
        ("nobody", json!({"at": {"step": 1}})),
    ] {
        let (status, reason) = rejection(server, run, body.clone()).await;
        problems.push(format!("{body}: {status} {}", reason.replace(id, "ID").split("; known").next().unwrap()));
    }
    insta::assert_snapshot!(problems.join("\n"), @r#"
    {"at":{}}: 400 `at` must have either `step` or `event`
    {"at":{"step":9}}: 400 step 9 is not recorded; the run can be forked at steps 1 to 4
    {"at":{"step":0}}: 400 step 0 has no forward pass; the run can be forked at steps 1 to 4
    {"at":{"event":99}}: 400 `at.event` must be an event of the run, 0 to 12, got 99
    {"at":{"step":1},"n":65}: 400 `n` must be an integer between 1 and 64, got 65
    {"at":{"step":1},"n":2,"seed":"continue"}: 400 `seed` must not be "continue" for several runs, because they would be identical; omit it or send a number
    {"at":{"step":1},"token":1,"text":"a"}: 400 `token` and `text` must not both be present; omit one of them
    {"at":{"step":1},"token":1000000}: 400 `token` must be a token id between 0 and 639, got 1000000
    {"at":{"step":1},"text":""}: 400 `text` must not be empty; omit it to let the model continue
    {"at":{"step":1},"sampling":{"temprature":1}}: 400 `sampling`: unknown field 'temprature'
    {"at":{"step":1},"sampling":{"logit_bias":[[5]]}}: 400 `logit_bias` must be an object that maps tokens to a bias, or a list of [token, bias] (false bans the token), got [[5]]
    {"at":{"step":1},"sampling":{"logit_bias":"5"}}: 400 `logit_bias` must be an object that maps tokens to a bias, or a list of [token, bias] (false bans the token), got "5"
    {"at":{"step":1},"mods":["nobody"]}: 400 unknown mod 'nobody'
    {"at":{"step":1}}: 409 the run cannot be forked: the token ids of its prompt are not recorded, because it comes from another engine
    {"at":{"step":1}}: 404 no run 'nobody' exists
    "#);
    let prompt =
        fork(server, &run, json!({"at": {"step": 2}})).await.remove(0)["events"][0]["details"]["prompt"].clone();
    let (status, problem) = server.post("/api/v1/reruns", &json!({"prompt": prompt})).await;
    assert_eq!(status, 409, "{problem}");
}

#[tokio::test]
async fn command_forks_a_run() {
    let server = server().await;
    let run = generate(server, json!({})).await;
    let run_fork = |arguments: &[&str]| {
        let mut command = thunder();
        command.args(["fork", id(&run), "--server", &server.base]).args(arguments);
        let output = command.output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, out, errors) = run_fork(&["--at", "3"]);
    assert_eq!(code, Some(0), "{errors}");
    assert!(out.contains(run["run"]["output_preview"].as_str().unwrap().trim()), "{out}");
    assert!(errors.contains("replay: "), "{errors}");
    let (code, out, errors) =
        run_fork(&["--at", "3", "--text", "hello", "--set", "temperature=0", "-n", "2", "--json"]);
    assert_eq!(code, Some(0), "{errors}");
    let shown: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((shown["step"].as_i64(), shown["runs"].as_array().unwrap().len()), (Some(3), 2));
    assert_eq!(shown["runs"][1]["run"]["parent"]["change"]["sampling"], json!({"temperature": 0}));
    let (code, out, errors) = run_fork(&["--at", "3", "--text", "\u{1b}[31mred"]);
    assert_eq!(code, Some(0), "{errors}");
    assert!(out.contains("␛[31mred") && !out.contains('\u{1b}'), "{out:?}");
    let (code, _, errors) = run_fork(&["--at", "300"]);
    assert_eq!(code, Some(1), "{errors}");
    assert!(errors.contains("step 300 is not recorded; the run can be forked at steps 1 to 24"), "{errors}");
}

#[tokio::test]
async fn recorded_tokens_must_be_those_of_the_model() {
    let server = server().await;
    let run = generate(server, json!({})).await;
    let mut errors = ErrorTable::default();
    for (index, token) in [1_000_000, -7, i32::MAX].into_iter().enumerate() {
        let mut foreign = run.clone();
        foreign["request"]["request_id"] = format!("foreign-tokens-{index}").into();
        for event in foreign["events"].as_array_mut().unwrap() {
            if let Some(added) = event["added_tokens"].as_array_mut() {
                added.fill(token.into());
            }
        }
        let (status, stored) = server.post("/ingest", &foreign).await;
        assert_eq!(status, 201, "{stored}");
        let forks = format!("/api/v1/runs/foreign-tokens-{index}/forks");
        errors.add(token, &server.post(&forks, &json!({"at": {"step": 8}})).await);
    }
    let body = json!({"at": {"step": 3}, "seed": "stop"});
    errors.add(&body, &server.post(&format!("/api/v1/runs/{}/forks", id(&run)), &body).await);
    insta::assert_snapshot!("fork_errors", errors);
}
