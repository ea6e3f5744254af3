//! The encoder thread: decodes the inputs of waiting requests in turn.

use super::EncodeError;
use super::queue::QueueReservation;
use crate::engine::status::EngineStatus;
use crate::events::TokenId;
use crate::model::llama::{EncoderContext, EncoderOptions, EncoderOutput, Head, LlamaUse};
use crate::model::{Model, ModelError};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::sync::oneshot;

/// Command to the encoder thread.
pub(super) enum EncoderCommand {
    Encode(EncodeRequest),
    Stop,
}

/// A request in progress.
pub(super) struct EncodeRequest {
    inputs: Vec<Vec<TokenId>>,
    output: EncoderOutput,
    /// Outputs of the first inputs, which are encoded.
    encoded: Vec<Vec<f32>>,
    client: oneshot::Sender<Result<Vec<Vec<f32>>, EncodeError>>,
    reservation: QueueReservation,
}

impl EncodeRequest {
    pub(super) fn new(
        inputs: Vec<Vec<TokenId>>,
        output: EncoderOutput,
        client: oneshot::Sender<Result<Vec<Vec<f32>>, EncodeError>>,
        reservation: QueueReservation,
    ) -> Self {
        Self { encoded: Vec::with_capacity(inputs.len()), inputs, output, client, reservation }
    }

    /// Adds the output of the next input.
    fn push_output(&mut self, output: Vec<f32>) {
        self.encoded.push(output);
        self.reservation.release_input();
    }
}

/// Starts the thread, which creates the encoding context.
///
/// # Errors
/// llama.cpp could not create the context, or the thread could not be started.
pub(super) async fn spawn(
    model: Arc<Model>,
    options: EncoderOptions,
    head: Option<Head>,
    status: Arc<EngineStatus>,
) -> Result<(Sender<EncoderCommand>, JoinHandle<()>), ModelError> {
    let (commands, inbox) = channel();
    let (ready, started) = oneshot::channel();
    let starting = LlamaUse::begin();
    let thread = move || {
        let starting = starting;
        match model.encoder(&options, head) {
            Ok(context) => {
                if ready.send(Ok(())).is_ok() {
                    drop(starting);
                    run(context, &inbox, &status);
                }
            }
            // The receiver is dropped only if the start was cancelled.
            Err(error) => drop(ready.send(Err(error))),
        }
    };
    let thread = std::thread::Builder::new()
        .name("thunder-encode".into())
        .spawn(thread)
        .map_err(|error| ModelError::Decode(error.to_string()))?;
    started.await.map_err(|_| ModelError::Decode("the encoder thread panicked during start-up".into()))??;
    Ok((commands, thread))
}

fn run(mut context: EncoderContext<'_>, inbox: &Receiver<EncoderCommand>, status: &EngineStatus) {
    let mut requests = VecDeque::new();
    loop {
        if requests.is_empty() {
            match inbox.recv() {
                Ok(EncoderCommand::Encode(request)) => requests.push_back(request),
                Ok(EncoderCommand::Stop) | Err(_) => return,
            }
        }
        while let Ok(command) = inbox.try_recv() {
            match command {
                EncoderCommand::Encode(request) => requests.push_back(request),
                EncoderCommand::Stop => return,
            }
        }
        requests.retain(|request| !request.client.is_closed());
        encode_next(&mut context, &mut requests, status);
    }
}

/// Runs one decode with as many of the next inputs as fit, one input of each request in turn.
fn encode_next(context: &mut EncoderContext<'_>, requests: &mut VecDeque<EncodeRequest>, status: &EngineStatus) {
    let rounds = requests.iter().map(|request| request.inputs.len() - request.encoded.len()).max().unwrap_or(0);
    let round_robin = (0..rounds).flat_map(|round| {
        requests
            .iter()
            .enumerate()
            .filter_map(move |(index, request)| Some((index, request.inputs.get(request.encoded.len() + round)?)))
    });
    let count_fitting = context.count_fitting(round_robin.clone().map(|(_, input)| input.len()));
    let chosen: Vec<(usize, &[TokenId], EncoderOutput)> = round_robin
        .take(count_fitting)
        .map(|(index, input)| (index, input.as_slice(), requests[index].output))
        .collect();
    let inputs: Vec<(&[TokenId], EncoderOutput)> = chosen.iter().map(|&(_, input, output)| (input, output)).collect();
    let owners: Vec<usize> = chosen.iter().map(|&(index, ..)| index).collect();
    if inputs.is_empty() {
        return;
    }
    let mut served = vec![false; requests.len()];
    owners.iter().for_each(|&owner| served[owner] = true);
    let start = Instant::now();
    let encoded = context.encode(&inputs);
    let lengths = || inputs.iter().map(|(input, _)| input.len());
    let elapsed_us = start.elapsed().as_micros() as u64;
    status.count_encode(inputs.len(), lengths().sum(), lengths().max().unwrap_or(0), elapsed_us);
    let (vectors, failed) = match encoded {
        Ok(vectors) => (vectors, None),
        Err(error) => {
            tracing::error!(%error, "encoding failed");
            (Vec::new(), Some(EncodeError::Failed(error.to_string())))
        }
    };
    let mut unsupported = vec![None; requests.len()];
    for (&owner, output) in owners.iter().zip(vectors) {
        match output {
            Ok(vector) => requests[owner].push_output(vector),
            Err(reason) => unsupported[owner] = Some(EncodeError::HiddenStates(reason)),
        }
    }
    let (mut first, mut last) = (VecDeque::new(), VecDeque::new());
    for ((request, is_served), unsupported) in requests.drain(..).zip(served).zip(unsupported) {
        // The client may have disconnected.
        if let (true, Some(error)) = (is_served, unsupported.as_ref().or(failed.as_ref())) {
            let _ = request.client.send(Err(error.clone()));
        } else if request.encoded.len() == request.inputs.len() {
            let _ = request.client.send(Ok(request.encoded));
        } else if is_served {
            last.push_back(request);
        } else {
            first.push_back(request);
        }
    }
    requests.append(&mut first);
    requests.append(&mut last);
}
