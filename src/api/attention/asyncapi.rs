//! The protocol's part of the `AsyncAPI` document.

use super::request::{AttentionPing, CancelAttention, GenerateAttention};
use crate::api::shared::asyncapi::{MessageDescription, SocketDescription};
use crate::api::shared::attention::error::AttentionErrorMessage;
use crate::api::shared::attention::event::{
    AttentionDoneEvent, AttentionRetractEvent, AttentionTokenEvent, PongMessage, PruningSuggestionEvent,
};

/// Returns the WebSocket and its messages.
pub(crate) fn describe() -> SocketDescription {
    SocketDescription {
        name: "attention",
        address: "/api/v1/generate/stream",
        title: "Tokens with their attention",
        description: "Up to 64 concurrent requests, identified by request_id, which must be unique among the active \
            requests of the connection. Messages are JSON in text frames. A binary message from the client is \
            MessagePack and is answered in MessagePack, where attention.data is bytes; message_format overrides this. \
            With attention_encoding \"binary\" in JSON a token is a binary frame: little-endian u32 length of the \
            header; the header, which is the token message without data, padded with spaces so that the values start \
            at a multiple of 8 bytes; the little-endian values. Index i of a row is token i of the sequence: \
            input_ids, then the answer. The row of the k-th new token, from k = 0, has len(input_ids) + k values, \
            unless a mod changes the prompt or tokens are removed from a full context. The values of each head sum to \
            1 (less in models with attention sinks). ?compression=off in the URL disables compression for clients \
            that always offer permessage-deflate. A client that stops reading pauses its own runs; a disconnect ends \
            them.",
        client: vec![
            MessageDescription::typed::<GenerateAttention>("generate", "Starts a request."),
            MessageDescription::typed::<CancelAttention>("cancel", "Ends a request."),
            MessageDescription::typed::<AttentionPing>("ping", "Requests a pong."),
        ],
        server: vec![
            MessageDescription::typed::<AttentionTokenEvent<'_>>("token", "A token with its attention."),
            MessageDescription::typed::<AttentionRetractEvent<'_>>(
                "retract",
                "A mod removed the last tokens from the answer.",
            ),
            MessageDescription::typed::<PruningSuggestionEvent<'_>>(
                "pruning_suggestion",
                "Sentences of the context with little attention; sent before done.",
            ),
            MessageDescription::typed::<AttentionDoneEvent<'_>>("done", "A request or one of its samples has ended."),
            MessageDescription::typed::<AttentionErrorMessage>(
                "error",
                "A message is invalid or a request failed; the connection stays open.",
            ),
            MessageDescription::typed::<PongMessage>("pong", "The answer to ping."),
        ],
    }
}
