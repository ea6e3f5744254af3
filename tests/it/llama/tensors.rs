//! Placement of single tensors. Without a GPU all tensors are on the CPU, and only the log of llama.cpp has the requested
//! placement.

use crate::harness::{ErrorTable, Server, folder, model, server, text, thunder};
use serde_json::{Value, json};

async fn greedy_tokens(server: &Server) -> Value {
    let body = json!({"prompt": "Once there was", "temperature": 0, "n_predict": 6, "return_tokens": true, "ignore_eos": true});
    server.answer("/completion", &body).await["tokens"].clone()
}

#[tokio::test]
async fn tensor_placement_is_passed_to_llama_cpp() {
    let server_with_rules = Server::start(&[
        "-ot",
        r"blk\.1\.attn_(q|k)=cpu,output_norm=CPU",
        "--n-cpu-ffn",
        "1",
        "--cpu-moe",
        "-ncmoe",
        "99",
        "--log",
        "info,llama-cpp-2=debug",
    ]);
    server_with_rules.wait_ready().await;
    assert_eq!(greedy_tokens(&server_with_rules).await, greedy_tokens(server().await).await);
    let log = server_with_rules.log();
    let overrides: Vec<&str> = log.lines().filter(|line| line.contains("buffer type overridden to CPU")).collect();
    let is_overridden = |name: &str| overrides.iter().any(|line| line.contains(&format!("tensor {name} ")));
    for name in [
        "blk.1.attn_q.weight",
        "blk.1.attn_k.weight",
        "output_norm.weight",
        "blk.0.ffn_up.weight",
        "blk.0.ffn_down.weight",
    ] {
        assert!(is_overridden(name), "{name}: {overrides:#?}");
    }
    for name in ["blk.0.attn_q.weight", "blk.1.attn_v.weight", "blk.1.ffn_up.weight"] {
        assert!(!is_overridden(name), "{name}: {overrides:#?}");
    }
}

#[test]
fn invalid_placement_is_rejected_with_reason() {
    let mut errors = ErrorTable::default();
    for rule in ["ffn=CUDA7", "(ffn=CPU"] {
        let mut command = thunder();
        command.args(["serve", "--port", "0", "--data-dir"]).arg(folder()).arg("--model").arg(model());
        let output = command.args(["--override-tensor", rule]).output().unwrap();
        assert!(!output.status.success(), "{rule}");
        errors.add_text(rule, text(&output.stderr).lines().last().unwrap());
    }
    insta::assert_snapshot!("placement_errors", errors);
}
