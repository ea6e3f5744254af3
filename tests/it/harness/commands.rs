//! Commands that end by themselves.

use super::{Server, thunder};
use std::process::{Command, Output};

/// Returns a command that connects to the server.
pub fn client_command(server: &Server, arguments: &[&str]) -> Command {
    let mut command = thunder();
    command.args(arguments).args(["--server", &server.base]);
    command
}

/// Runs a command without blocking the runtime of the test.
pub async fn output_of(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

/// Returns the text that a command has written.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}
