//! Snapshots of the error messages of many requests.

use super::commands::text;
use super::redaction::redact_text;
use serde_json::Value;
use std::fmt::{self, Display, Write};
use std::process::Output;

/// Maximum number of characters of a request in the table.
const MAX_REQUEST: usize = 140;

/// A table of rejected requests with the statuses and messages of their responses.
#[derive(Default)]
pub struct ErrorTable(String);

impl ErrorTable {
    /// Adds a request with the status and message of its response.
    pub fn add(&mut self, request: impl Display, (status, answer): &(u16, Value)) {
        self.row(&request, &format!("{status}: {}", message_of(answer)));
    }

    /// Adds a request with the message of the error that a WebSocket received.
    pub fn add_message(&mut self, request: impl Display, answer: &Value) {
        self.row(&request, message_of(answer));
    }

    /// Adds a request, such as the flags of a command, with its error as text.
    pub fn add_text(&mut self, request: impl Display, error: &str) {
        self.row(&request, &error.trim_end().replace('\n', "\n    "));
    }

    /// Adds the arguments of a command with its exit code and its output.
    pub fn add_output(&mut self, arguments: &[&str], output: &Output) {
        let code = output.status.code().unwrap();
        self.add_text(
            arguments.join(" "),
            &format!("exit code {code}\n{}{}", text(&output.stdout), text(&output.stderr)),
        );
    }

    fn row(&mut self, request: &dyn Display, answer: &str) {
        let request = redact_text(&request.to_string());
        let shown: String = request.chars().take(MAX_REQUEST).collect();
        let rest = request.chars().count() - shown.chars().count();
        let rest = if rest == 0 { String::new() } else { format!("… ({rest} more characters)") };
        // Writing to a String cannot fail.
        let _ = writeln!(self.0, "{shown}{rest}\n    {}", redact_text(answer));
    }
}

impl Display for ErrorTable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Returns the message of an error in any protocol's format.
pub fn message_of(answer: &Value) -> &str {
    ["/error/message", "/message", "/detail/msg", "/detail", "/error"]
        .iter()
        .find_map(|pointer| answer.pointer(pointer)?.as_str())
        .unwrap_or_else(|| panic!("no error message: {answer}"))
}
