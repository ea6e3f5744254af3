//! Dry runs of edited mods on recorded runs.

use super::harness::{Server, message_of, with_fields};
use super::registry::{MOD_KEY, UPLOAD_FLAGS};
use reqwest::Method;
use serde_json::{Value, json};

const ROUTE: &str = "/api/v1/mods/dry-runs";

/// Returns a mod that forces tokens at the forward pass that fulfills a condition.
fn stamp(condition: &str) -> String {
    format!(
        "from thunder_mods import Added, ForwardPass, mod\n\n\n@mod(events=[ForwardPass, Added], config={{\"every\": 3}})\n\
         def stamp(event, actions, tokenizer):\n    count = len(event.context_info.generated)\n    \
         if isinstance(event, ForwardPass) and {condition}:\n        print(\"forced\")\n        \
         return actions.force_tokens(tokenizer.encode(\"stop\"))\n"
    )
}

/// Two mods of this source act at random, depending on the event and the sequence.
const RANDOM: &str = r#"
import random
from thunder_mods import Added, Prefilled, mod


@mod
def NAME(event, actions, tokenizer):
    tokens = list(event.context_info.tokens)
    kind = type(event).__name__
    draw = random.Random(f"NAME {kind} {event.step} {event.context_info.prompt_len} {tokens}").random()
    if isinstance(event, Prefilled):
        return actions.adjust_prefill(tokens + tokenizer.encode(" and"))
    if draw < 0.05:
        return actions.force_tokens([])
    if draw < 0.12:
        return actions.force_tokens(tokenizer.encode(" then"))
    if draw < 0.2:
        return actions.backtrack(2, tokenizer.encode(" so"))
    if draw < 0.25:
        return actions.backtrack(3)
    if draw > 0.97 and isinstance(event, Added):
        return actions.force_output(tokenizer.encode("The end"))
"#;

async fn register(server: &Server, name: &str, source: &str) {
    let body = json!({"name": name, "source": source});
    let (status, saved) = server.send(MOD_KEY, Method::POST, "/v1/mods", Some(&body)).await;
    assert!(status < 300, "{saved}");
}

/// Generates a run; returns it as recorded.
async fn generate(server: &Server, fields: &Value) -> Value {
    let body = json!({"prompt": "Once upon a time", "max_tokens": 8, "seed": 1, "ignore_eos": true});
    let body = with_fields(body, fields);
    let (status, answer) = server.send(MOD_KEY, Method::POST, "/v1/completions", Some(&body)).await;
    assert_eq!(status, 200, "{answer}");
    let path = format!("/api/v1/runs/{}", answer["thunder"]["run_id"].as_str().unwrap());
    for _ in 0..9000 {
        let (status, run) = server.send(MOD_KEY, Method::GET, &path, None).await;
        if status == 200 && run["run"]["status"] != "running" {
            return run;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    panic!("the run is not recorded: {answer}");
}

async fn dry_run(server: &Server, source: &str, run: &str) -> Value {
    dry_run_mod(server, "stamp", source, run).await
}

async fn dry_run_mod(server: &Server, name: &str, source: &str, run: &str) -> Value {
    let body = json!({"mod": {"name": name, "source": source}, "run": run});
    let (status, result) = server.send(MOD_KEY, Method::POST, ROUTE, Some(&body)).await;
    assert_eq!(status, 200, "{result}");
    result
}

#[tokio::test]
async fn edited_mod_is_compared_with_recorded_run() {
    let server = Server::start(&UPLOAD_FLAGS);
    server.wait_ready().await;
    let source = stamp("count == event.config[\"every\"]");
    register(&server, "stamp", &source).await;
    generate(&server, &json!({"request_id": "dry", "mods": [{"name": "stamp", "config": {"every": 5}}]})).await;

    // The configuration is the recorded one.
    let unchanged = dry_run(&server, &source, "dry").await;
    let report = &unchanged["report"];
    assert_eq!((&unchanged["problems"], &report["difference"]), (&json!([]), &Value::Null), "{unchanged}");
    assert_eq!((&report["recorded"], &report["complete"]), (&json!(true), &json!(true)));
    let events = report["events"].as_array().unwrap();
    assert_eq!(events.len(), 1, "{unchanged}");
    let tokens = &events[0]["action"]["tokens"];
    let text = format!("ForceTokens {tokens} \"stop\"").replace(',', ", ");
    assert_eq!(
        events[0],
        json!({"sequence_order": events[0]["sequence_order"], "step": 6, "event": "ForwardPass",
            "action": {"action": "ForceTokens", "tokens": tokens}, "exception": null, "line": null,
            "logs": ["INFO: forced"], "recorded": text, "now": text, "differs": false})
    );

    let earlier = dry_run(&server, &stamp("count + 1 == event.config[\"every\"]"), "dry").await;
    let difference = &earlier["report"]["difference"];
    assert_eq!(
        difference,
        &json!({"sequence_order": difference["sequence_order"], "step": 5, "event": "ForwardPass",
            "recorded": "Noop", "now": text})
    );
    let steps: Vec<&Value> =
        earlier["report"]["events"].as_array().unwrap().iter().map(|reply| &reply["step"]).collect();
    assert_eq!(steps, [5, 6], "actions of the recorded run are listed even if the mod returns none now");

    let failing = dry_run(&server, &stamp("1 / (count - 2)"), "dry").await;
    let events = failing["report"]["events"].as_array().unwrap();
    let error = events.iter().find(|reply| !reply["exception"].is_null()).unwrap();
    assert_eq!((&error["line"], &error["step"]), (&json!(7), &json!(3)), "{failing}");
    assert_eq!(error["now"], "failed: ZeroDivisionError: division by zero");

    let broken =
        dry_run(&server, "from thunder_mods import mod\n\n@mod\ndef stamp(event, actions)\n    pass\n", "dry").await;
    assert_eq!((&broken["report"], &broken["problems"][0]["line"]), (&Value::Null, &json!(4)), "{broken}");

    let helper = "def check(count):\n    return 1 / (count - 2)\n";
    let files = json!({"stamp.py": format!("from helpers.check import check\n{}", stamp("check(count)")), "helpers/check.py": helper});
    let body = json!({"mod": {"name": "stamp", "module": "stamp", "source": files}, "run": "dry"});
    let (status, package) = server.send(MOD_KEY, Method::POST, ROUTE, Some(&body)).await;
    assert_eq!(status, 200, "{package}");
    let events = package["report"]["events"].as_array().unwrap();
    let error = events.iter().find(|reply| !reply["exception"].is_null()).unwrap();
    assert_eq!((&error["file"], &error["line"], &error["step"]), (&json!("helpers/check.py"), &json!(2), &json!(3)));

    // Nothing was registered or recorded.
    let (_, list) = server.send(MOD_KEY, Method::GET, "/api/v1/runs", None).await;
    assert_eq!(list["runs"].as_array().unwrap().len(), 1, "{list}");

    let body = |run: &str| json!({"mod": {"name": "stamp", "source": source}, "run": run});
    let (status, problem) = server.send(MOD_KEY, Method::POST, ROUTE, Some(&body("unknown"))).await;
    assert_eq!(status, 404, "{problem}");
    let (status, problem) = server.send("user-key", Method::POST, ROUTE, Some(&body("dry"))).await;
    assert_eq!(status, 403, "{problem}");
    let document = json!({"request": {"request_id": "elsewhere", "model": "other"}, "events": [
        {"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 1}],
        "mod_calls": [], "mod_logs": [], "actions": []});
    assert_eq!(server.send(MOD_KEY, Method::POST, "/ingest", Some(&document)).await.0, 201);
    let (status, problem) = server.send(MOD_KEY, Method::POST, ROUTE, Some(&body("elsewhere"))).await;
    assert_eq!(
        (status, message_of(&problem)),
        (400, "the run cannot be replayed: its prompt is not recorded, because it comes from another engine")
    );
    server.stop("TERM").await;
}

#[tokio::test]
async fn failing_mod_gets_the_errors_of_a_run_and_is_disabled() {
    let server = Server::start(&UPLOAD_FLAGS);
    server.wait_ready().await;
    let shorten = "from thunder_mods import Prefilled, mod\n\n\n@mod(events=[Prefilled])\ndef shorten(event, actions):\n    \
                   return actions.adjust_prefill(event.prompt_tokens[:2])\n";
    let source = "from thunder_mods import ForwardPass, Prefilled, mod\n\n\n@mod(events=[Prefilled, ForwardPass])\n\
                  def stamp(event, actions):\n    if isinstance(event, ForwardPass):\n        \
                  return actions.force_tokens([])\n    print(event.prompt_length)\n";
    register(&server, "shorten", shorten).await;
    register(&server, "stamp", source).await;
    generate(&server, &json!({"request_id": "errors", "mods": ["shorten", "stamp"]})).await;

    let result = dry_run(&server, source, "errors").await;
    let report = &result["report"];
    assert_eq!((&report["difference"], &report["calls"]), (&Value::Null, &json!(6)), "{result}");
    let events = report["events"].as_array().unwrap();
    assert_eq!((events.len(), &events[0]["logs"]), (6, &json!(["INFO: 2"])), "{result}");
    let error = "InvalidActionError at ForwardPass: ForceTokens needs at least one token";
    for (step, event) in events.iter().enumerate().skip(1) {
        let failed = json!(format!("failed: {error}"));
        assert_eq!((&event["step"], &event["recorded"], &event["now"]), (&json!(step), &failed, &failed), "{result}");
    }
    let disabled = format!(
        "ERROR: the mod 'stamp' was disabled at step 5 for the rest of this run: 5 consecutive calls for ForwardPass failed; last failure: {error}"
    );
    assert_eq!((&events[4]["logs"], &events[5]["logs"]), (&json!([]), &json!([disabled])));

    // The recorded actions also differ at events that the mod no longer handles.
    let narrowed = dry_run(&server, &source.replace("[Prefilled, ForwardPass]", "[Prefilled]"), "errors").await;
    let difference = &narrowed["report"]["difference"];
    assert_eq!((&difference["step"], &difference["now"]), (&json!(1), &json!("Noop")), "{narrowed}");
    assert_eq!(narrowed["report"]["calls"], 1);

    // The mod keeps its place before the other mod at an event that it did not handle.
    register(&server, "stamp", &source.replace("[Prefilled, ForwardPass]", "[ForwardPass]")).await;
    let run = generate(&server, &json!({"request_id": "order", "mods": ["stamp", "shorten"]})).await;
    let widened = dry_run(&server, source, "order").await;
    let logs = json!([format!("INFO: {}", run["events"][0]["prompt_length"])]);
    assert_eq!(widened["report"]["events"][0]["logs"], logs, "{widened}");
    server.stop("TERM").await;
}

#[tokio::test]
async fn unchanged_mods_repeat_their_random_actions() {
    let server = Server::start(&UPLOAD_FLAGS);
    server.wait_ready().await;
    let mods = ["first", "second"].map(|name| (name, RANDOM.replace("NAME", name)));
    for (name, source) in &mods {
        register(&server, name, source).await;
    }
    for seed in 0..3 {
        let fields = json!({"mods": ["first", "second"], "seed": seed, "temperature": 0.9, "max_tokens": 24});
        let run = generate(&server, &fields).await;
        for (name, source) in &mods {
            let result = dry_run_mod(&server, name, source, run["run"]["run_id"].as_str().unwrap()).await;
            let report = &result["report"];
            assert_eq!((&result["problems"], &report["difference"]), (&json!([]), &Value::Null), "seed {seed}, {name}");
            let calls = run["mod_calls"].as_array().unwrap().iter().filter(|call| call["mod_name"] == *name).count();
            assert_eq!(report["calls"], calls, "seed {seed}, {name}");
        }
    }
    server.stop("TERM").await;
}
