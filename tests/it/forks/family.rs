//! The family of a run: its ancestors and all their forks.

use super::{fork, generate, id, server};
use reqwest::Method;
use serde_json::{Value, json};

#[tokio::test]
async fn family_has_all_generations() {
    let server = server().await;
    let run = generate(server, json!({"temperature": 0.8})).await;
    let first = fork(server, &run, json!({"at": {"step": 5}, "text": "hello"})).await.remove(0);
    let second = fork(server, &run, json!({"at": {"step": 3}, "sampling": {"temperature": 0.0}})).await.remove(0);
    let nested = fork(server, &first, json!({"at": {"step": 9}})).await.remove(0);
    let mut families = Vec::new();
    for member in [&run, &second, &nested] {
        let (status, family) = server.get(&format!("/api/v1/runs/{}/family", id(member))).await;
        assert_eq!(status, 200, "{family}");
        families.push(family);
    }
    assert!(families.iter().all(|family| *family == families[0]), "every member has the same family");
    let path = format!("/api/v1/runs/{}/family?mean_of=", id(&run));
    for (named, expected) in [(String::new(), 0), (format!("{},{}", id(&first), id(&nested)), 2)] {
        let (_, found) = server.get(&format!("{path}{named}")).await;
        let members = found["runs"].as_array().unwrap();
        let measured: Vec<&Value> = members.iter().filter(|member| member["mean_logprob"].is_number()).collect();
        assert_eq!((members.len(), measured.len()), (4, expected), "{found}");
        assert!(measured.iter().all(|member| named.contains(member["run_id"].as_str().unwrap())), "{found}");
    }
    let (status, problem) = server.get(&format!("{path}none")).await;
    assert_eq!(status, 400);
    assert_eq!(problem["detail"], "`mean_of` must be run ids separated by commas, got \"none\"");
    let mut family = families.remove(0);
    let order: Vec<&Value> = family["runs"].as_array().unwrap().iter().map(|member| &member["run_id"]).collect();
    assert_eq!(order, [&run, &first, &second, &nested].map(|run| &run["run"]["run_id"]));
    for (index, run) in [&run, &first, &second, &nested].into_iter().enumerate() {
        let added: Vec<f64> = run["events"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|event| event["event_type"] == "Added")
            .filter_map(|event| event["details"]["tokens"][0]["logprob"].as_f64())
            .collect();
        let mean = added.iter().sum::<f64>() / added.len() as f64;
        let found = family["runs"][index]["mean_logprob"].as_f64().unwrap();
        assert!((found - mean).abs() < 1e-4, "{found} {mean}");
    }
    let names = [(&run, "ROOT"), (&first, "FIRST"), (&second, "SECOND"), (&nested, "NESTED")];
    for member in family["runs"].as_array_mut().unwrap() {
        member["created_at"] = "TIME".into();
        member["mean_logprob"] = "MEAN".into();
        member["output_preview"] = "TEXT".into();
    }
    let mut shown = serde_json::to_string_pretty(&family).unwrap();
    for (run, name) in names {
        shown = shown.replace(id(run), name);
    }
    insta::assert_snapshot!(shown, @r#"
    {
      "runs": [
        {
          "run_id": "ROOT",
          "created_at": "TIME",
          "status": "done",
          "finish_reason": "length",
          "mods": [],
          "seed": 3,
          "prompt_tokens": 11,
          "completion_tokens": 24,
          "mean_logprob": "MEAN",
          "output_preview": "TEXT",
          "has_attention": false
        },
        {
          "run_id": "FIRST",
          "created_at": "TIME",
          "status": "done",
          "finish_reason": "length",
          "mods": [],
          "seed": 3,
          "prompt_tokens": 11,
          "completion_tokens": 24,
          "mean_logprob": "MEAN",
          "output_preview": "TEXT",
          "has_attention": false,
          "parent": {
            "run_id": "ROOT",
            "sequence_order": 13,
            "step": 5,
            "change": {
              "text": "hello"
            }
          }
        },
        {
          "run_id": "SECOND",
          "created_at": "TIME",
          "status": "done",
          "finish_reason": "length",
          "mods": [],
          "seed": 3,
          "prompt_tokens": 11,
          "completion_tokens": 24,
          "mean_logprob": "MEAN",
          "output_preview": "TEXT",
          "has_attention": false,
          "parent": {
            "run_id": "ROOT",
            "sequence_order": 7,
            "step": 3,
            "change": {
              "sampling": {
                "temperature": 0.0
              }
            }
          }
        },
        {
          "run_id": "NESTED",
          "created_at": "TIME",
          "status": "done",
          "finish_reason": "length",
          "mods": [],
          "seed": 3,
          "prompt_tokens": 11,
          "completion_tokens": 24,
          "mean_logprob": "MEAN",
          "output_preview": "TEXT",
          "has_attention": false,
          "parent": {
            "run_id": "FIRST",
            "sequence_order": 23,
            "step": 9,
            "change": {}
          }
        }
      ],
      "truncated": false,
      "not_forkable": null
    }
    "#);
}

#[tokio::test]
async fn family_of_external_run_reports_why_it_cannot_fork() {
    let server = server().await;
    let sample = include_str!("../../../fixtures/sample_payload.json").replace("req_abc123", "foreign-family");
    assert_eq!(server.request(Method::POST, "/ingest").body(sample).send().await.unwrap().status(), 201);
    let (status, family) = server.get("/api/v1/runs/foreign-family/family").await;
    assert_eq!((status, family["runs"].as_array().unwrap().len()), (200, 1));
    let reason = "the token ids of its prompt are not recorded, because it comes from another engine";
    assert_eq!(family["not_forkable"], reason);
}
