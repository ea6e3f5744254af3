//! Dry runs of edited mods on recorded runs.

use super::harness::{Server, message_of};
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

async fn dry_run(server: &Server, source: &str, run: &str) -> Value {
    let body = json!({"mod": {"name": "stamp", "source": source}, "run": run});
    let (status, result) = server.send(MOD_KEY, Method::POST, ROUTE, Some(&body)).await;
    assert_eq!(status, 200, "{result}");
    result
}

#[tokio::test]
async fn edited_mod_is_compared_with_recorded_run() {
    let server = Server::start(&UPLOAD_FLAGS);
    server.wait_ready().await;
    let source = stamp("count == event.config[\"every\"]");
    let (status, saved) =
        server.send(MOD_KEY, Method::POST, "/v1/mods", Some(&json!({"name": "stamp", "source": source}))).await;
    assert!(status < 300, "{saved}");
    let body = json!({"prompt": "Hello", "max_tokens": 8, "seed": 1, "ignore_eos": true, "request_id": "dry",
        "mods": [{"name": "stamp", "config": {"every": 5}}]});
    let (status, answer) = server.send(MOD_KEY, Method::POST, "/v1/completions", Some(&body)).await;
    assert_eq!(status, 200, "{answer}");
    let path = "/api/v1/runs/dry";
    while server.request(Method::GET, path).bearer_auth(MOD_KEY).send().await.unwrap().status() != 200 {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }

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
