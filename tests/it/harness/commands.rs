//! Commands that end by themselves.

use std::process::{Command, Output};

/// Runs a command without blocking the runtime of the test.
pub async fn output_of(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

/// Returns the text that a command has written.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}
