//! Scorers in Python.

use super::command::command;
use super::{ROUTE, column, start, wait_for_state};
use crate::harness::{Server, folder};
use reqwest::Method;
use serde_json::{Value, json};

/// Returns 0.5. For some seeds it fails, hangs, or returns no number.
const SCORER: &str = "import time

def score(text, cell):
    print(cell['run_id'])
    if cell['seed'] == 2:
        raise ValueError('bad \x1b answer')
    if cell['seed'] == 3:
        time.sleep(60)
    if cell['seed'] == 4:
        return None
    if cell['seed'] == 5:
        return 'high'
    assert cell['prompt'] == 'Hello' and cell['mods'] == [] and cell['parameters']['max_tokens'] == 6
    assert cell['finish_reason'] == 'length' and cell['completion_tokens'] == 6 and text
    return 0.5
";

#[tokio::test]
async fn python_scores_answers_and_errors_are_kept_per_cell() {
    let process = Server::start(&["--mod-key", "boss", "--allow-mod-upload", "--mod-timeout", "10000"]);
    let server = Server::external(process.wait_ready().await.base.clone(), Some("boss"));
    let definition = json!({
        "name": "python", "prompts": ["Hello"], "seeds": [1, 2, 3, 4, 5, 6],
        "parameters": [{"max_tokens": 6, "ignore_eos": true}], "score": {"python": SCORER},
    });
    let id = start(&server, &definition).await;
    let done = wait_for_state(&server, &id, "done").await;
    assert_eq!(column(&done, "state"), [&json!("done"); 6], "the runs themselves are done");
    assert_eq!(column(&done, "error"), [&Value::Null; 6]);
    let half = json!(0.5);
    assert_eq!(column(&done, "score"), [&half, &Value::Null, &Value::Null, &Value::Null, &Value::Null, &half]);
    let errors: Vec<&str> =
        column(&done, "score_error").into_iter().map(|error| error.as_str().unwrap_or_default()).collect();
    assert_eq!((errors[0], errors[3], errors[5]), ("", "", ""), "{errors:?}");
    assert_eq!(errors[1], "ValueError: bad \u{1b} answer (line 6)");
    assert!(errors[2].starts_with("deadline of 10000 ms exceeded (line "), "{errors:?}");
    assert!(errors[4].contains("score must return a number from 0 to 1, a bool or None, got 'high'"), "{errors:?}");
    assert_eq!(done["summary"]["variants"][0]["mean_score"], json!(0.5));
    let page = server.request(Method::GET, &format!("/experiments/{id}")).send().await.unwrap().text().await.unwrap();
    assert!(page.contains("Not scored: ValueError: bad") && page.contains("score: python"), "{page}");

    // A score given by hand replaces the error.
    let path = format!("{ROUTE}/{id}/cells/1");
    let scored = server.request(Method::PUT, &path).json(&json!({"score": 1})).send().await.unwrap();
    assert_eq!(scored.status(), 204);
    let (_, changed) = server.get(&format!("{ROUTE}/{id}")).await;
    assert_eq!((&changed["grid"][1]["score"], &changed["grid"][1]["score_error"]), (&json!(1.0), &Value::Null));

    for (source, expected) in [
        ("def score(text):", "`score.python`: IndentationError: expected an indented block"),
        ("def rate(text): return 1", "has no function 'score'; define `def score(text):`"),
        ("def score(a, b, c): return 1", "score must take (text) or (text, cell), but it takes (a, b, c)"),
        ("1 / 0\ndef score(text): return 1", "ZeroDivisionError: division by zero (line 1)"),
    ] {
        let definition = json!({"name": "x", "prompts": ["a"], "seeds": [1], "score": {"python": source}});
        let (status, problem) = server.post(ROUTE, &definition).await;
        let detail = problem["detail"].as_str().unwrap();
        assert!(status == 400 && detail.contains(expected), "{source}: {problem}");
        assert_eq!(problem["pointer"], "score.python");
    }
    let (code, out, err) = command(
        &server,
        "command-python",
        "prompts = [\"Hello\"]\nseeds = [1, 2]\nparameters = [{ max_tokens = 2 }]\nscore.python = '''\ndef score(text, cell):\n    return 1 / (cell[\"seed\"] - 1)\n'''\n",
        &["--api-key", "boss"],
    )
    .await;
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(err.contains("thunder: cell 1 could not be scored: ZeroDivisionError: division by zero (line 2)"), "{err}");
    assert!(err.contains("2 cells: 2 done; mean score 1.00"), "{err}");
}

#[tokio::test]
async fn python_scorer_needs_the_right_to_upload_mods() {
    let keys = folder().join("keys.txt");
    std::fs::write(&keys, "ann-key name=ann\nmod-key name=ann mods\n").unwrap();
    let score = json!({"python": "score = len"});
    let definition =
        json!({"name": "x", "prompts": ["a"], "seeds": [1], "parameters": [{"max_tokens": 1}], "score": score});
    let with_keys = ["--api-key-file", keys.to_str().unwrap(), "--allow-mod-upload"];
    for (flags, key, status) in
        [(&with_keys[..], "ann-key", 403), (&with_keys, "mod-key", 201), (&with_keys[..2], "mod-key", 403)]
    {
        let process = Server::start(flags);
        let server = Server::external(process.wait_ready().await.base.clone(), Some(key));
        let (found, body) = server.post(ROUTE, &definition).await;
        let detail = body["detail"].as_str().unwrap_or_default();
        assert!(found == status && detail.is_empty() == (status == 201), "{flags:?} {key}: {body}");
        assert!(found == 201 || detail.starts_with("a Python scorer needs the right to upload mods: "), "{body}");
        let page = server.request(Method::GET, "/experiments/-new").send().await.unwrap().text().await.unwrap();
        assert_eq!(page.contains("value=\"python\" disabled"), status == 403, "{page}");
    }
}
