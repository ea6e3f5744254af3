//! Inputs of an encoder that are longer than a decode: their outputs equal those of one decode and the reference.

use super::recurrent::mamba;
use super::reference::Reference;
use super::tokens;
use super::variant::{Kind, LAYERS, Variant, WIDTH};
use std::path::Path;
use std::sync::Arc;
use thunder::engine::encoder::{EncodeError, Encoder, EncoderSettings};
use thunder::events::TokenId;
use thunder::model::Model;
use thunder::model::llama::{EncoderContext, EncoderOptions, EncoderOutput, ModelOptions, Pooling};

const INPUT_LEN: usize = 150;
const PIECE_LEN: u32 = 32;
/// Maximum deviation of a value per largest value, between decodes of different lengths.
const TOLERANCE: f64 = 1e-2;
/// Maximum deviation from the reference, which does not round keys and values to 16 bits.
const REFERENCE_TOLERANCE: f64 = 2e-2;

fn options(ubatch_size: u32) -> EncoderOptions {
    EncoderOptions { max_input_tokens: 256, ubatch_size, max_output_bytes: usize::MAX, threads: 1 }
}

fn encode(context: &mut EncoderContext<'_>, input: &[TokenId], output: EncoderOutput) -> Vec<f32> {
    let [vector]: [_; 1] = context.encode(&[(input, output)]).unwrap().try_into().unwrap();
    vector.unwrap()
}

fn assert_near(found: &[f32], expected: impl ExactSizeIterator<Item = f64> + Clone, tolerance: f64, subject: &str) {
    assert_eq!(found.len(), expected.len(), "{subject}");
    let largest = expected.clone().fold(0.0, |largest: f64, value| largest.max(value.abs()));
    for (index, (&found, expected)) in found.iter().zip(expected).enumerate() {
        let deviation = (f64::from(found) - expected).abs();
        assert!(deviation <= tolerance * largest, "{subject}: value {index} is {found} instead of {expected}");
    }
}

fn embeddings() -> [EncoderOutput; 4] {
    [Pooling::Mean, Pooling::Cls, Pooling::Last, Pooling::None].map(EncoderOutput::Embedding)
}

/// Compares the outputs of a long input with those of one decode. Short inputs before and after it have no effect.
fn compare_with_one_decode(model: &Model, outputs: &[EncoderOutput], subject: &str) {
    let (input, short) = (tokens(3, INPUT_LEN), tokens(4, 9));
    let mut in_pieces = model.encoder(&options(PIECE_LEN), None).unwrap();
    let mut at_once = model.encoder(&options(256), None).unwrap();
    assert_eq!((in_pieces.max_decode_tokens(), at_once.max_decode_tokens()), (PIECE_LEN as usize, 256));
    for &output in outputs {
        for input in [&short, &input, &short] {
            let found = encode(&mut in_pieces, input, output);
            let expected = encode(&mut at_once, input, output);
            let subject = format!("{subject}, {output:?} of {} tokens", input.len());
            assert_near(&found, expected.into_iter().map(f64::from), TOLERANCE, &subject);
        }
    }
}

#[test]
fn long_input_is_encoded_in_pieces() {
    let layers = [0, LAYERS as u16 - 1];
    let hidden_states = EncoderOutput::HiddenStates(layers.into_iter().collect());
    for kind in Kind::ALL {
        let variant = Variant::new(kind);
        let model = variant.model();
        compare_with_one_decode(&model, &[&embeddings()[..], &[hidden_states]].concat(), &format!("{kind:?}"));

        let input = tokens(3, INPUT_LEN);
        let mut in_pieces = model.encoder(&options(PIECE_LEN), None).unwrap();
        let found = encode(&mut in_pieces, &input, hidden_states);
        assert_eq!(found.len(), INPUT_LEN * layers.len() * WIDTH, "{kind:?}");
        let mut reference = Reference::new(&variant);
        // The last token of the first piece, the first one of the second, and the last one of all.
        for token in [PIECE_LEN as usize - 1, PIECE_LEN as usize, INPUT_LEN - 1] {
            reference.row(&input[..=token]);
            for (index, &layer) in layers.iter().enumerate() {
                let state = &found[(token * layers.len() + index) * WIDTH..][..WIDTH];
                let expected = reference.state(usize::from(layer)).iter().copied();
                let subject = format!("{kind:?}, token {token}, layer {layer}");
                assert_near(state, expected, REFERENCE_TOLERANCE, &subject);
            }
        }
    }
}

/// The state of a recurrent model can only be removed as a whole.
#[test]
fn recurrent_model_encodes_several_long_inputs() {
    let model = Model::load(&mamba(), &ModelOptions::default(), |_| true).unwrap();
    compare_with_one_decode(&model, &embeddings(), "mamba");
}

#[test]
fn shared_decodes_are_not_larger_than_pieces() {
    let model = Variant::new(Kind::Llama).model();
    let mut context = model.encoder(&options(PIECE_LEN), None).unwrap();
    assert_eq!(context.count_fitting([20, 12, 1].into_iter()), 2);
    assert_eq!(context.count_fitting([100, 1].into_iter()), 1);
    let (a, b) = (tokens(1, 20), tokens(2, 12));
    let output = EncoderOutput::Embedding(Pooling::Mean);
    let together = context.encode(&[(&a[..], output), (&b[..], output)]).unwrap();
    for (found, input) in together.iter().zip([&a, &b]) {
        let alone = encode(&mut context, input, output).into_iter().map(f64::from);
        assert_near(found.as_ref().unwrap(), alone, TOLERANCE, "shared decode");
    }
}

#[test]
fn output_bytes_limit_the_tokens_of_a_decode() {
    let model = Variant::new(Kind::Llama).model();
    let max_output_bytes = 20 * (model.vocabulary().len() + WIDTH) * size_of::<f32>();
    let context = model.encoder(&EncoderOptions { max_output_bytes, ..options(PIECE_LEN) }, None).unwrap();
    assert_eq!(context.max_decode_tokens(), 20);
    assert_eq!(model.max_whole_input(max_output_bytes), None, "a causal model continues its input");
}

/// An encoder processes its input as a whole.
#[tokio::test]
async fn output_bytes_limit_the_inputs_of_an_encoder() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/classifier.gguf");
    let model = Arc::new(Model::load(&path, &ModelOptions::default(), |_| true).unwrap());
    let max_output_bytes = 20 * (model.vocabulary().len() + model.width()) * size_of::<f32>();
    let settings = EncoderSettings {
        embeddings: true,
        reranking: false,
        pooling: None,
        head_activation: None,
        context: EncoderOptions { max_output_bytes, ..options(512) },
    };
    let encoder = Encoder::start(model, &settings).await.unwrap();
    assert_eq!(encoder.max_input_tokens(), 20);
    let output = EncoderOutput::Embedding(encoder.embeddings().unwrap());
    let inputs = vec![vec![5; 20]; 3];
    assert_eq!(encoder.encode(inputs, output).await.unwrap().len(), 3);
    let error = encoder.encode(vec![vec![5; 21]], output).await.unwrap_err();
    assert_eq!(error, EncodeError::TooLong { index: 0, tokens: 21, max: 20 });
    encoder.stop().await;
}
