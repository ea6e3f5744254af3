//! The WebSocket's part of the `AsyncAPI` document.

use super::request::KoboldStreamRequest;
use crate::api::shared::asyncapi::{MessageDescription, SocketDescription};
use crate::api::shared::attention::error::AttentionErrorMessage;
use crate::api::shared::attention::event::{AttentionDoneEvent, BareTokenEvent};

/// Returns the WebSocket and its messages. `done` and `error` are those of the attention API.
pub(crate) fn describe() -> SocketDescription {
    SocketDescription {
        name: "kobold",
        address: "/api/extra/generate/stream/ws",
        title: "Tokens with attention, in the format of KoboldCPP's fork for Halo Weave",
        description: "Requests are answered in order. Each token is a text frame; if attention is requested, a binary \
            frame with its row follows: only little-endian numbers, len(input_ids) + k of them for the k-th new token, \
            and with \"per_layer\" that many for each head of each layer. If a token has no row, its binary frame is \
            empty. The connection is closed with 1008 after an error; a disconnect ends the run.",
        client: vec![MessageDescription::untyped::<KoboldStreamRequest>("request", "Starts a generation.")],
        server: vec![
            MessageDescription::typed::<BareTokenEvent<'_>>("token", "A generated token."),
            MessageDescription::binary("numbers", "Attention row of the preceding token."),
            MessageDescription::typed::<AttentionDoneEvent<'_>>("done", "The generation has ended."),
            MessageDescription::typed::<AttentionErrorMessage>("error", "The request failed."),
        ],
    }
}
