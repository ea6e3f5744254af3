//! The protocol's part of the `AsyncAPI` document.

use super::request::{AuthMessage, ConfigMessage, ControlMessage, FeedbackMessage, PingMessage, ResumeMessage};
use super::response::{BacktrackMessage, CompletionMessage, InitMessage, RunErrorMessage, StatusMessage, TokenMessage};
use crate::api::shared::asyncapi::{MessageDescription, SocketDescription};

/// Returns the WebSocket and its messages.
pub(crate) fn describe() -> SocketDescription {
    let client = vec![
        MessageDescription::typed::<ConfigMessage>(
            "config",
            "Starts a run. The first message of a connection must be config, resume or feedback.",
        ),
        MessageDescription::typed::<ControlMessage>(
            "control",
            "Controls an active run: the run with request_id, or without it the newest run of this connection.",
        ),
        MessageDescription::typed::<FeedbackMessage>(
            "feedback",
            "Rates a run. The rating is stored with the run and shown in the dashboard.",
        ),
        MessageDescription::typed::<ResumeMessage>(
            "resume",
            "Requests the messages of a run after index `after`, on any connection. While the run is in memory, no \
             message is missing or repeated; later, the stored run is sent as init and completion. A config with a \
             request_id and without a prompt does the same.",
        ),
        MessageDescription::typed::<AuthMessage>(
            "auth",
            "Sends the API key if it was not sent as a header; any other first message may contain it as api_key \
             instead.",
        ),
        MessageDescription::typed::<PingMessage>("ping", "Requests a status with operation ping."),
    ];
    let server = vec![
        MessageDescription::typed::<InitMessage<'_>>(
            "init",
            "The run has started. `replaces` names the run that regenerate replaced. With `resumed` the \
             messages after `index` of an earlier run follow; `generated_text` is the text up to there.",
        ),
        MessageDescription::typed::<TokenMessage<'_>>(
            "token",
            "A token. The text is the concatenation of all `token`s; a `token` may be empty while a character is incomplete.",
        ),
        MessageDescription::typed::<BacktrackMessage<'_>>(
            "backtrack",
            "A mod removed the last tokens from the answer.",
        ),
        MessageDescription::typed::<CompletionMessage<'_>>("completion", "The run has ended."),
        MessageDescription::typed::<RunErrorMessage<'_>>(
            "error",
            "An error. With a request_id and generated_text the run has ended; generated_text is its text so far.",
        ),
        MessageDescription::typed::<StatusMessage<'_>>(
            "status",
            "Progress, or confirmation of a control message or feedback.",
        ),
    ];
    SocketDescription {
        name: "generate",
        address: "/generate",
        title: "Streaming generation",
        description: "Any number of consecutive runs and up to 16 concurrent runs, identified by request_id.",
        client,
        server,
    }
}
