//! Tests of GPU flags that need no GPU.

use super::harness::{Server, folder, model, output_of, server, text, thunder};
use serde_json::Value;
use std::process::Output;

async fn output(arguments: &[&str]) -> Output {
    let mut command = thunder();
    command.args(arguments);
    output_of(command).await
}

fn devices_of_type<'a>(props: &'a Value, kind: &str) -> Vec<&'a Value> {
    props["devices"].as_array().unwrap().iter().filter(|device| device["type"] == kind).collect()
}

#[tokio::test]
async fn props_list_devices() {
    let (status, props) = server().await.get("/props").await;
    assert_eq!(status, 200, "{props}");
    let processors = devices_of_type(&props, "cpu");
    assert!(!processors.is_empty() && processors.iter().all(|device| device["used"] == true), "{props}");
    let cpu = processors.iter().find(|device| device["name"] == "CPU").unwrap();
    assert!(cpu["description"].as_str().is_some_and(|name| !name.is_empty()), "{cpu}");
    assert!(cpu["memory_total"].as_u64() >= cpu["memory_free"].as_u64() && cpu["memory_total"] != 0, "{cpu}");
    // The model has four layers and the output layer.
    assert_eq!(props["n_layers"], 5);
    let gpus = devices_of_type(&props, "gpu");
    let layers = if gpus.iter().any(|gpu| gpu["used"] == true) { 5 } else { 0 };
    assert_eq!(props["n_gpu_layers"], layers, "{props}");
}

#[tokio::test]
async fn gpu_flags_without_gpu_are_reported_and_ignored() {
    let flags = ["--device", "none", "--gpu-layers", "all", "--split-mode", "none", "--tensor-split", "3,1"];
    let server = Server::start(&[&flags[..], &["--main-gpu", "1"]].concat());
    let (_, props) = server.wait_ready().await.get("/props").await;
    assert_eq!((&props["n_gpu_layers"], &props["n_layers"]), (&0.into(), &5.into()), "{props}");
    assert!(devices_of_type(&props, "gpu").iter().all(|gpu| gpu["used"] == false), "{props}");
    server.wait_for_log("ready, dashboard").await;
    let log = server.log();
    let warning = "--gpu-layers all, --tensor-split 3,1 and --main-gpu 1 have no effect: --device none";
    assert!(log.contains(warning), "{log}");
    let line = log.lines().find(|line| line.contains("computing on ")).unwrap();
    assert!(!line.contains("layers"), "{line}");
    let body = serde_json::json!({"prompt": "Once", "max_tokens": 4, "temperature": 0});
    let answer = server.answer("/v1/completions", &body).await;
    assert_eq!(answer["usage"]["completion_tokens"], 4, "{answer}");
}

#[tokio::test]
async fn unknown_gpu_ends_start_with_list_of_gpus() {
    let (dir, model) = (folder(), model());
    let (dir, model) = (dir.to_str().unwrap(), model.to_str().unwrap());
    let serve = ["serve", "--listen", "127.0.0.1:0", "--data-dir", dir, "--model", model, "--device", "CUDA99"];
    let rejected = output(&serve).await;
    let errors = text(&rejected.stderr);
    assert_eq!(rejected.status.code(), Some(1), "{errors}");
    assert!(errors.contains("--device names 'CUDA99', but ") && errors.contains("--device none"), "{errors}");

    let listed = output(&["serve", "--list-devices"]).await;
    let (list, errors) = (text(&listed.stdout), text(&listed.stderr));
    assert!(listed.status.success() && list.starts_with("Available devices:\n  "), "{list}{errors}");
    if !cfg!(any(feature = "cuda", feature = "vulkan", feature = "metal")) {
        assert_eq!(list, "Available devices:\n  (none)\n");
        assert!(
            errors.contains("this build has no GPU support; build with cargo build --release --features cuda"),
            "{errors}"
        );
    }
}
