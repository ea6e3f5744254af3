//! Requests to the encoder of a model.

use super::model;
use std::time::Duration;
use thunder::engine::encoder::{Encoder, EncoderSettings};
use thunder::model::llama::{EncoderOptions, EncoderOutput, Pooling};
use tokio::time::timeout;

#[tokio::test]
async fn request_without_inputs_gets_no_outputs() {
    let settings = EncoderSettings {
        embeddings: true,
        reranking: false,
        pooling: None,
        head_activation: None,
        context: EncoderOptions { max_input_tokens: 64, ubatch_size: 64, max_output_bytes: 64 << 20, threads: 1 },
    };
    let encoder = Encoder::start(model(), &settings).await.unwrap();
    let output = EncoderOutput::Embedding(Pooling::Mean);
    let answered = |inputs| timeout(Duration::from_mins(1), encoder.encode(inputs, output));
    assert_eq!(answered(Vec::new()).await.expect("the request is answered"), Ok(Vec::new()));
    assert_eq!(answered(vec![vec![5, 6]]).await.unwrap().unwrap().len(), 1);
    encoder.stop().await;
}
