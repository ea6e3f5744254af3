//! Tensors that do not go where their layers go. Without a GPU all of them stay where they are, and llama.cpp tells what it was told.

use super::super::harness::{Server, folder, model, server, thunder};
use serde_json::{Value, json};

async fn answer(server: &Server) -> Value {
    let body = json!({"prompt": "Once there was", "temperature": 0, "n_predict": 6, "return_tokens": true, "ignore_eos": true});
    server.answer("/completion", &body).await["tokens"].clone()
}

#[tokio::test]
async fn llama_cpp_is_told_where_tensors_go() {
    let moved = Server::start(&[
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
    moved.wait_ready().await;
    assert_eq!(answer(&moved).await, answer(server().await).await);
    let log = moved.log();
    let told: Vec<&str> = log.lines().filter(|line| line.contains("buffer type overridden to CPU")).collect();
    let is_told = |name: &str| told.iter().any(|line| line.contains(&format!("tensor {name} ")));
    for name in [
        "blk.1.attn_q.weight",
        "blk.1.attn_k.weight",
        "output_norm.weight",
        "blk.0.ffn_up.weight",
        "blk.0.ffn_down.weight",
    ] {
        assert!(is_told(name), "{name}: {told:#?}");
    }
    for name in ["blk.0.attn_q.weight", "blk.1.attn_v.weight", "blk.1.ffn_up.weight"] {
        assert!(!is_told(name), "{name}: {told:#?}");
    }
}

#[test]
fn what_cannot_be_done_ends_the_start() {
    for (rule, words) in [
        ("ffn=CUDA7", ["'CUDA7'", "the buffers are CPU"]),
        ("(ffn=CPU", ["--override-tensor", "invalid regular expression"]),
    ] {
        let mut command = thunder();
        command.args(["serve", "--port", "0", "--data-dir"]).arg(folder()).arg("--model").arg(model());
        let output = command.args(["--override-tensor", rule]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{rule}");
        assert!(words.iter().all(|word| said.contains(word)), "{rule}: {said}");
    }
}
