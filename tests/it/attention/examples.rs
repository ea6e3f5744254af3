//! The example clients in Python and JavaScript.

use crate::harness::server;
use std::process::Command;

#[tokio::test]
async fn example_clients_run() {
    let server = server().await;
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/examples");
    let python = Command::new("python3").arg(format!("{root}/attention.py")).arg(&server.base).output().unwrap();
    let printed = String::from_utf8_lossy(&python.stdout);
    assert!(python.status.success(), "{}", String::from_utf8_lossy(&python.stderr));
    assert!(printed.contains("attends most to") && printed.contains("finish_reason: "), "{printed}");
    let Ok(node) = Command::new("node")
        .args(["--experimental-websocket", &format!("{root}/attention.mjs"), &server.base])
        .output()
    else {
        eprintln!("node is not installed: the JavaScript example is not run");
        return;
    };
    let printed = String::from_utf8_lossy(&node.stdout);
    assert!(node.status.success(), "{}", String::from_utf8_lossy(&node.stderr));
    assert!(printed.contains("attends most to") && printed.contains("finish_reason: "), "{printed}");
}
