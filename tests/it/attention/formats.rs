//! Attention rows in every format, and messages in JSON and `MessagePack`.

use super::{
    HEADS, LAYERS, PATH, WAIT_TIMEOUT, base64_floats, connect, floats, generate_request, send, tokens_of, until_done,
};
use crate::harness::server;
use futures::{SinkExt, StreamExt};
use half::f16;
use reqwest::Method;
use serde_json::{Value, json};
use yawc::{Frame, OpCode, Options};

#[tokio::test]
async fn row_is_equal_in_all_formats() {
    let server = server().await;
    let prompt = tokens_of(server, "One two three four").await;
    let mut socket = connect(server, PATH, Options::default()).await;
    let mut first_token = async |fields: Value| {
        send(&mut socket, &generate_request(&prompt, &fields)).await;
        until_done(&mut socket).await.remove(0)
    };
    let (full, _) = first_token(json!({})).await;
    let full = base64_floats(&full["attention"]);
    let length = prompt.len();
    let assert_near = |a: &[f32], b: &[f32], tolerance: f32| {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).for_each(|(a, b)| assert!((a - b).abs() <= tolerance, "{a} and {b}"));
    };
    let (header, bytes) = first_token(json!({"attention_encoding": "binary"})).await;
    assert_near(&floats(&bytes), &full, 1e-6);
    assert_eq!(header["attention"]["byte_length"], bytes.len());
    assert!(header["attention"].get("data").is_none());
    let (header, bytes) = first_token(json!({"attention_encoding": "binary", "attention_dtype": "float16"})).await;
    let halves: Vec<f32> = bytes.chunks_exact(2).map(|b| f16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect();
    assert_near(&halves, &full, 5e-4);
    assert_eq!(header["attention"]["dtype"], "float16");
    let (array, _) = first_token(json!({"attention_encoding": "array"})).await;
    assert_near(&serde_json::from_value::<Vec<f32>>(array["attention"]["data"].clone()).unwrap(), &full, 1e-6);
    let rows: Vec<&[f32]> = full.chunks_exact(length).collect();
    let mean = |rows: &[&[f32]]| -> Vec<f32> {
        (0..length).map(|at| rows.iter().map(|row| row[at]).sum::<f32>() / rows.len() as f32).collect()
    };
    let max: Vec<f32> = (0..length).map(|at| rows.iter().map(|row| row[at]).fold(0.0, f32::max)).collect();
    let last = mean(&rows[(LAYERS - 1) * HEADS..]);
    for (mode, expected) in [("mean", mean(&rows)), ("max", max), ("last_layer", last.clone())] {
        let (message, _) = first_token(json!({"attention_format": "aggregated", "aggregation_mode": mode})).await;
        assert_eq!(
            (&message["attention"]["shape"], &message["attention"]["aggregation_mode"]),
            (&json!([length]), &json!(mode))
        );
        assert_near(
            &serde_json::from_value::<Vec<f32>>(message["attention"]["data"].clone()).unwrap(),
            &expected,
            1e-5,
        );
    }
    let weights: Vec<f32> = (0..LAYERS).map(|layer| 0.5 + layer as f32 / LAYERS as f32).collect();
    let mean_of_layer = |layer: usize| mean(&rows[layer * HEADS..(layer + 1) * HEADS]);
    let expected: Vec<f32> = (0..length)
        .map(|at| {
            (0..LAYERS).map(|layer| weights[layer] * mean_of_layer(layer)[at]).sum::<f32>()
                / weights.iter().sum::<f32>()
        })
        .collect();
    let weighted = json!({"attention_format": "aggregated", "aggregation_mode": "weighted_layers", "attention_encoding": "base64"});
    assert_near(&base64_floats(&first_token(weighted).await.0["attention"]), &expected, 1e-6);
    let weighted = json!({"attention_format": "aggregated", "aggregation_mode": "weighted_layers", "layer_weights": [0, 0, 0, 2],
                          "attention_encoding": "base64"});
    assert_near(&base64_floats(&first_token(weighted).await.0["attention"]), &last, 1e-5);
    let (sparse, _) = first_token(json!({"attention_format": "sparse", "attention_top_k": 2})).await;
    let top = sparse["attention"]["data"].as_array().unwrap();
    assert_eq!((top.len(), &sparse["attention"]["top_k"]), (2, &json!(2)));
    let at = top[0]["position"].as_u64().unwrap() as usize;
    assert!(mean(&rows).iter().all(|&value| value <= mean(&rows)[at] + 1e-6));
    let layers: Vec<f32> = serde_json::from_value(top[0]["layers"].clone()).unwrap();
    assert_near(&layers, &(0..LAYERS).map(|layer| mean_of_layer(layer)[at]).collect::<Vec<_>>(), 1e-5);
    let (viz, _) = first_token(json!({"attention_format": "viz"})).await;
    let viz = &viz["attention"];
    assert_eq!((viz["format"].as_str(), viz["mean_by_layer"].as_array().unwrap().len()), (Some("viz"), LAYERS));
    assert!(viz["entropy"].as_f64().unwrap() > 0.0 && viz["max_by_layer"].as_array().unwrap().len() == LAYERS);
}

#[tokio::test]
async fn messages_support_message_pack() {
    let server = server().await;
    let prompt = tokens_of(server, "One two three").await;
    let mut socket = connect(server, PATH, Options::default()).await;
    let packed = rmp_serde::to_vec_named(&generate_request(&prompt, &json!({}))).unwrap();
    socket.send(Frame::binary(packed)).await.unwrap();
    let mut kinds = Vec::new();
    while kinds.last().is_none_or(|kind| kind == "token") {
        let frame = tokio::time::timeout(WAIT_TIMEOUT, socket.next()).await.unwrap().unwrap();
        if frame.opcode() != OpCode::Binary {
            continue;
        }
        let message: message_pack::TokenMessage = message_pack::read(&frame.into_payload());
        if message.kind == "token" {
            assert_eq!(floats(&message.data).len(), LAYERS * HEADS * message.context_length);
        }
        kinds.push(message.kind);
    }
    assert_eq!(kinds, ["token", "token", "token", "token", "done"]);
    let request = server.request(Method::POST, "/api/v1/generate").header("accept", "application/msgpack");
    let response = request.json(&generate_request(&prompt, &json!({}))).send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "application/msgpack");
    let answer: message_pack::Answer = rmp_serde::from_slice(&response.bytes().await.unwrap()).unwrap();
    assert_eq!(answer.attention_data.len(), 4);
    assert_eq!(floats(&answer.attention_data[0].attention.data).len(), LAYERS * HEADS * prompt.len());
}

#[tokio::test]
async fn encoding_has_no_effect_on_formats_without_numbers() {
    let server = server().await;
    for (format, field) in [("sparse", "data"), ("viz", "mean_by_layer")] {
        let fields = json!({"attention_format": format, "attention_encoding": "binary", "request_id": null});
        let answer = server.answer("/api/v1/generate", &generate_request(&[40, 41], &fields)).await;
        let attention = &answer["attention_data"][0]["attention"];
        assert!(attention[field].is_array() && attention.get("encoding").is_none(), "{format}: {attention}");
    }
}

/// Messages in `MessagePack`, with attention values as bytes.
mod message_pack {
    use serde::Deserialize;

    #[derive(Default)]
    pub struct TokenMessage {
        pub kind: String,
        pub context_length: usize,
        pub data: Vec<u8>,
    }

    #[derive(Deserialize)]
    struct Message {
        r#type: String,
        attention: Option<Attention>,
    }

    #[derive(Deserialize)]
    pub struct Answer {
        pub attention_data: Vec<TokenAttention>,
    }

    #[derive(Deserialize)]
    pub struct TokenAttention {
        pub attention: Attention,
    }

    #[derive(Deserialize)]
    pub struct Attention {
        pub context_length: usize,
        #[serde(deserialize_with = "bytes")]
        pub data: Vec<u8>,
    }

    fn bytes<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Vec<u8>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
                Ok(bytes.to_vec())
            }
        }
        deserializer.deserialize_bytes(Visitor)
    }

    pub fn read(bytes: &[u8]) -> TokenMessage {
        let message: Message = rmp_serde::from_slice(bytes).unwrap();
        let attention = message.attention;
        let context_length = attention.as_ref().map_or(0, |attention| attention.context_length);
        TokenMessage {
            kind: message.r#type,
            context_length,
            data: attention.map(|attention| attention.data).unwrap_or_default(),
        }
    }
}
