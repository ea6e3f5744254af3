//! `KoboldCPP`'s dialect as its clients speak it, the newest Halo Weave among them.

use crate::harness::{Server, server};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::Method;
use serde_json::{Value, json};

/// The data of each event, with the event's name where it has one.
async fn events(server: &Server, body: &Value) -> Vec<(String, Value)> {
    // A page sends JSON as text, which spares it a preflight.
    let request = server.request(Method::POST, "/api/extra/generate/stream").header("content-type", "text/plain");
    let response = request.body(body.to_string()).send().await.unwrap();
    let status = response.status();
    let text = response.text().await.unwrap();
    assert!(status.is_success(), "{status}: {text}");
    let event = |event: &str| {
        let mut name = String::new();
        let mut data = None;
        for line in event.lines() {
            match line.split_once(": ") {
                Some(("event", word)) => word.clone_into(&mut name),
                Some(("data", json)) => {
                    assert!(data.replace(serde_json::from_str(json).unwrap()).is_none(), "one line");
                }
                _ => {}
            }
        }
        data.map(|data| (name, data))
    };
    text.split("\n\n").filter_map(event).collect()
}

#[tokio::test]
async fn the_newest_halo_weave_finds_what_it_asks_for() {
    let server = server().await;
    let (_, model) = server.get("/api/v1/model").await;
    assert_eq!((&model["result"], &model["model_name"]), (&json!("thunder/tiny"), &json!("tiny")));
    assert!(model["max_context_length"].as_u64().unwrap() > 0);
    let tokens = server.answer("/api/v1/tokenize", &json!({"text": "The sky is"})).await;
    let prompt: Vec<i64> = serde_json::from_value(tokens["token_ids"].clone()).unwrap();
    let body = json!({"input_ids": prompt, "max_length": 5, "temperature": 0, "top_p": 0.9, "top_k": 40, "rep_pen": 1.1,
                      "sampler_seed": -1, "stop_sequence": [], "output_attentions": true, "request_id": null, "ignore_eos": true});
    let told = events(server, &body).await;
    assert_eq!(told.len(), 6, "{told:?}");
    for (index, (name, event)) in told[..5].iter().enumerate() {
        assert_eq!((name.as_str(), &event["type"]), ("", &json!("token")));
        assert_eq!(event["attention"]["shape"], json!([4, 4, prompt.len() + index]));
        let data = STANDARD.decode(event["attention"]["data"].as_str().unwrap()).unwrap();
        assert_eq!(data.len(), 4 * 4 * 4 * (prompt.len() + index));
    }
    assert_eq!((&told[5].1["type"], &told[5].1["finish_reason"]), (&json!("done"), &json!("length")));
    let mut aggregated = body.clone();
    aggregated["attention_format"] = json!("aggregated");
    let told = events(server, &aggregated).await;
    let attention = &told[0].1["attention"];
    assert_eq!(attention["context_length"], prompt.len());
    assert_eq!(
        STANDARD.decode(attention["data"].as_str().unwrap()).unwrap().len(),
        4 * prompt.len(),
        "floats, as bytes"
    );
    // The stop string stays in the stream.
    let mut stops = body.clone();
    let texts: Vec<&str> = told[..5].iter().map(|(_, event)| event["token"]["text"].as_str().unwrap()).collect();
    let (at, stop) = texts.iter().enumerate().find(|(_, text)| !text.is_empty()).unwrap();
    stops["stop_sequence"] = json!([stop]);
    let told = events(server, &stops).await;
    assert_eq!((told.len(), &told[at].1["token"]["text"]), (at + 2, &json!(stop)));
    assert_eq!(told.last().unwrap().1["finish_reason"], "stop_string");
    // An error that is known before the first token is an HTTP error.
    let (status, error) = server.post("/api/extra/generate/stream", &json!({"input_ids": [100_000]})).await;
    assert_eq!(status, 400);
    assert!(error["detail"]["msg"].as_str().unwrap().contains("not in vocabulary"), "{error}");
}

#[tokio::test]
async fn a_prompt_is_answered_whole_and_streamed() {
    let server = server().await;
    let body = json!({"prompt": "The sky is", "max_length": 8, "temperature": 0, "max_context_length": 512, "rep_pen": 1.0, "n": 1,
                      "quiet": true, "bypass_eos": true, "top_k": 0, "typical": 1, "sampler_order": [6, 0, 1, 3, 4, 2, 5]});
    let answer = server.answer("/api/v1/generate", &body).await;
    let result = &answer["results"][0];
    assert_eq!((&result["finish_reason"], &result["completion_tokens"]), (&json!("length"), &json!(8)), "{answer}");
    let text = result["text"].as_str().unwrap().to_owned();
    let told = events(server, &body).await;
    assert!(told.iter().all(|(name, _)| name == "message"));
    assert_eq!(told.iter().map(|(_, event)| event["token"].as_str().unwrap()).collect::<String>(), text);
    assert_eq!(told.last().unwrap().1["finish_reason"], "length");
    assert!(told[..told.len() - 1].iter().all(|(_, event)| event["finish_reason"].is_null()));
    let stop: String = text.chars().skip(2).take(2).collect();
    for (trim, expected) in [(true, text[..text.find(&stop).unwrap()].to_owned()), (false, stop.clone())] {
        let mut stopped = body.clone();
        stopped
            .as_object_mut()
            .unwrap()
            .extend(json!({"stop_sequence": [stop], "trim_stop": trim}).as_object().unwrap().clone());
        let answer = server.answer("/api/v1/generate", &stopped).await;
        let said = answer["results"][0]["text"].as_str().unwrap();
        assert!(if trim { said == expected } else { said.contains(&expected) }, "{said:?} {expected:?}");
        assert_eq!(answer["results"][0]["finish_reason"], "stop");
    }
    // What is too long loses its beginning, memory stays.
    let long =
        json!({"prompt": "word ".repeat(20_000), "memory": "Remember.", "max_length": 2, "max_context_length": 100});
    let answer = server.answer("/api/v1/generate", &long).await;
    assert!(answer["results"][0]["prompt_tokens"].as_u64().unwrap() <= 98, "{answer}");
    for wrong in [json!({"prompt": 5}), json!({"prompt": ""}), json!({"prompt": "x", "temperature": "hot"})] {
        let (status, error) = server.post("/api/v1/generate", &wrong).await;
        assert_eq!((status, &error["detail"]["type"]), (400, &json!("bad_input")), "{wrong}: {error}");
    }
}

#[tokio::test]
async fn a_generation_can_be_looked_at_and_aborted() {
    let server = server().await;
    let key = format!("KCPP{}", std::process::id());
    let body = json!({"prompt": "The sky is", "max_length": 3000, "genkey": key, "bypass_eos": true});
    let generating = async { server.answer("/api/v1/generate", &body).await };
    let watching = async {
        loop {
            let check = server.answer("/api/extra/generate/check", &json!({"genkey": key})).await;
            if check["results"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        let aborted = server.answer("/api/extra/abort", &json!({"genkey": key})).await;
        assert_eq!(aborted, json!({"success": "true", "done": "true"}));
    };
    let (answer, ()) = tokio::join!(generating, watching);
    assert_eq!(answer["results"][0]["finish_reason"], "abort");
    assert!(!answer["results"][0]["text"].as_str().unwrap().is_empty());
    let gone = server.answer("/api/extra/abort", &json!({"genkey": key})).await;
    assert_eq!(gone["success"], "false");
}

#[tokio::test]
async fn small_questions_have_small_answers() {
    let server = server().await;
    let (_, version) = server.get("/api/extra/version").await;
    assert_eq!((&version["result"], &version["protected"]), (&json!("KoboldCpp"), &json!(false)));
    for path in ["/api/v1/config/max_context_length", "/api/extra/true_max_context_length", "/api/v1/config/max_length"]
    {
        let (status, answer) = server.get(path).await;
        assert!(status == 200 && answer["value"].as_u64().unwrap() > 0, "{path}: {answer}");
    }
    assert_eq!(server.get("/api/v1/info/version").await.1["result"], "1.2.5");
    assert_eq!(server.get("/api/latest/model").await.1["result"], "thunder/tiny");
    assert!(server.get("/api/extra/perf").await.1["queue"].is_u64());
    let count = server.answer("/api/extra/tokencount", &json!({"prompt": "The sky is"})).await;
    assert_eq!(count["value"], count["ids"].as_array().unwrap().len());
    let text = server.answer("/api/extra/detokenize", &json!({"ids": count["ids"]})).await;
    assert_eq!(text, json!({"result": "The sky is", "success": true}));
    let (status, error) = server.post("/api/extra/tokencount", &json!({})).await;
    assert_eq!((status, &error["detail"]["type"]), (400, &json!("bad_input")));
    let (status, error) = server.get("/api/extra/nothing").await;
    assert_eq!((status, &error["detail"]["type"]), (404, &json!("not_found")));
}

/// What a page of another origin needs, at both addresses that its clients have built in.
#[tokio::test]
async fn pages_may_call_where_they_are_let() {
    let port = crate::harness::free_port();
    let second = format!("127.0.0.1:{port}");
    let server = Server::start(&["--listen", &second, "--cors-origin", "localhost"]);
    server.wait_ready().await;
    let http = reqwest::Client::new();
    for base in [server.base.clone(), format!("http://localhost:{port}")] {
        let origin = "http://localhost:3000";
        let preflight =
            http.request(Method::OPTIONS, format!("{base}/api/extra/generate/stream")).header("origin", origin);
        let preflight = preflight
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "content-type");
        let answer = preflight.send().await.unwrap();
        assert_eq!(answer.headers()["access-control-allow-origin"], origin);
        assert_eq!(answer.headers()["access-control-allow-headers"], "content-type");
        for body in [json!({"input_ids": [40], "max_length": 1}), json!({"input_ids": [-4]})] {
            let answer = http
                .post(format!("{base}/api/extra/generate/stream"))
                .header("origin", origin)
                .json(&body)
                .send()
                .await;
            assert_eq!(answer.unwrap().headers()["access-control-allow-origin"], origin, "{body}");
        }
    }
}
