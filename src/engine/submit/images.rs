//! Images of a request: looked up and encoded before the run reaches the decode thread.

use crate::engine::error::SubmitError;
use crate::engine::request::Request;
use crate::engine::{Engine, Inner};
use crate::model::llama::{Image, first_unknown_image};
use std::sync::Arc;

impl Engine {
    /// Adds the images of earlier requests whose placeholders are in the prompt, e.g. in the prompt of a recorded
    /// run.
    pub(super) fn complete_images(&self, request: &mut Request) -> Result<(), SubmitError> {
        if first_unknown_image(&request.images, &request.prompt).is_none() {
            return Ok(());
        }
        let images = self.inner.model.images().ok_or(SubmitError::MissingImage)?;
        if images.complete(&mut request.images, &request.prompt) { Ok(()) } else { Err(SubmitError::MissingImage) }
    }

    /// Checks that images whose tokens must be decoded together fit into a physical batch.
    pub(super) fn validate_images(&self, request: &Request) -> Result<(), SubmitError> {
        let options = &self.inner.options;
        let max = options.ubatch_size.min(options.batch_size) as usize;
        let largest = request.images.iter().map(|image| image.undivided_tokens()).max();
        match largest.filter(|&tokens| tokens > max) {
            Some(tokens) => Err(SubmitError::UndividedImage { tokens, max }),
            None => Ok(()),
        }
    }

    /// Encodes the images that were not encoded before, one at a time, on a blocking thread.
    pub(super) async fn encode_images(&self, request_images: &[Arc<Image>]) -> Result<(), SubmitError> {
        let Inner { model, image_encoding, .. } = &*self.inner;
        let Some(images) = model.images() else { return Ok(()) };
        for image in request_images.iter().filter(|image| !image.is_encoded()) {
            let turn = Arc::clone(image_encoding).lock_owned().await;
            let (images, image) = (Arc::clone(images), Arc::clone(image));
            let encode = move || {
                // Held even if the client disconnects meanwhile.
                let _turn = turn;
                images.encode(&image)
            };
            tokio::task::spawn_blocking(encode).await.map_err(|_| SubmitError::Stopped)??;
        }
        Ok(())
    }
}
