//! Images of requests: read from base64 and data URLs, or fetched, and split into tokens.

mod remote;

use super::parameters;
use crate::config::{ImageConfig, ImageUrlConfig};
use crate::engine::Request;
use crate::events::{ImageFile, ImageRecord, Scope, TokenId, hex};
use crate::model::Vocabulary;
use crate::model::chat::RenderedPrompt;
use crate::model::llama::Image;
use crate::server::{ApiError, App, LoadedModel};
use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use remote::ImageFetcher;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Text that stands for an image in a prompt of llama-server's routes, as `/props` reports it.
pub(crate) const MEDIA_MARKER: &str = "<__media__>";

/// Maximum images of a request.
pub(crate) const MAX_IMAGES: usize = 64;
/// Maximum bytes of the recorded images of a run that is forked or repeated, unless `--record-images-size` is larger.
const MIN_RESTORED_BYTES: usize = 256 << 20;

/// Base64 with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Permits for requests whose images are decoded at the same time; a large image takes some 200 MB.
static READERS: Semaphore = Semaphore::const_new(4);

/// The images of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct RequestImages {
    /// The images in the order in which they were sent.
    pub(crate) images: Vec<Arc<Image>>,
    /// Files to record.
    files: Vec<ImageFile>,
}

impl RequestImages {
    /// Moves the images to an engine request.
    pub(crate) fn move_to(self, request: &mut Request) {
        request.images.extend(self.images);
        request.image_files.extend(self.files);
    }

    /// Tokenizes a text in which the images replace the markers, in order. Returns the tokens.
    ///
    /// # Errors
    /// The text does not have one marker for each image.
    pub(crate) fn insert_into(
        &self,
        text: &str,
        marker: &str,
        vocabulary: &Vocabulary,
    ) -> Result<Vec<TokenId>, ApiError> {
        let rendered = RenderedPrompt::from_text(text);
        let tokens: Vec<&[TokenId]> = self.images.iter().map(|image| image.tokens()).collect();
        Ok(parameters::run_in_place(text.len(), || rendered.tokenize(vocabulary, marker, &tokens))?.0)
    }
}

/// Adds the recorded images of a run that is forked or repeated. Those that are not recorded may still be in memory.
///
/// # Errors
/// The database failed.
pub(crate) async fn restore_images(
    app: &App,
    scope: &Scope,
    loaded: &LoadedModel,
    records: &[ImageRecord],
    request: &mut Request,
) -> Result<(), ApiError> {
    // A document is recorded without a database.
    let Ok(store) = app.store() else { return Ok(()) };
    if loaded.model().images().is_none() {
        return Ok(());
    }
    let config = app.config().engine.images.as_ref();
    let max_bytes = config.map_or(0, |config| config.record_bytes).max(MIN_RESTORED_BYTES);
    let mut reader = ImageReader::new(config, loaded);
    let hashes: BTreeSet<&str> = records.iter().map(|record| record.sha256.as_str()).collect();
    let mut bytes = 0;
    for hash in hashes.into_iter().take(MAX_IMAGES) {
        let Some(file) = store.image(scope, hash).await? else { continue };
        bytes += file.data.len();
        if bytes > max_bytes {
            let detail =
                format!("the recorded images of the prompt must have at most {} MiB in total", max_bytes >> 20);
            return Err(ApiError::invalid("prompt.images", detail));
        }
        let source = ImageSource::File(file.data.to_vec());
        reader.sent.push(SentImage { at: "prompt.images".to_owned(), source });
    }
    reader.read().await?.move_to(request);
    Ok(())
}

/// Permits for requests whose images are fetched or wait for the decoder.
static URL_REQUESTS: Semaphore = Semaphore::const_new(16);

/// Reader of the images that a client sent with one request.
pub(crate) struct ImageReader<'a> {
    loaded: &'a LoadedModel,
    config: Option<&'a ImageConfig>,
    sent: Vec<SentImage>,
}

/// An image as sent.
#[derive(Debug)]
struct SentImage {
    /// JSON path of its field.
    at: String,
    source: ImageSource,
}

#[derive(Debug)]
enum ImageSource {
    File(Vec<u8>),
    Url(reqwest::Url),
}

impl<'a> ImageReader<'a> {
    /// Creates a reader for a model.
    pub(crate) fn new(config: Option<&'a ImageConfig>, loaded: &'a LoadedModel) -> Self {
        Self { loaded, config, sent: Vec::new() }
    }

    /// Returns the number of images that were added.
    pub(crate) fn len(&self) -> usize {
        self.sent.len()
    }

    /// Adds an image in base64, which the client sent in the field `at`.
    ///
    /// # Errors
    /// The model sees no images, the data are not base64, or there are too many images.
    pub(crate) fn add_base64(&mut self, data: &str, at: &str) -> Result<(), ApiError> {
        self.check_room(at)?;
        let source = ImageSource::File(decode_base64(data, at)?);
        self.sent.push(SentImage { at: at.to_owned(), source });
        Ok(())
    }

    /// Adds an image by its URL, which the client sent in the field `at`.
    ///
    /// # Errors
    /// The model sees no images, the URL is neither a data URL nor one that the server fetches, or there are too many
    /// images.
    pub(crate) fn add_url(&mut self, url: &str, at: &str) -> Result<(), ApiError> {
        self.check_room(at)?;
        let source = match url.strip_prefix("data:") {
            Some(data) => ImageSource::File(decode_data_url(data, at)?),
            None => ImageSource::Url(remote::parse(url, at, self.config.and_then(|config| config.urls.as_ref()))?),
        };
        self.sent.push(SentImage { at: at.to_owned(), source });
        Ok(())
    }

    fn check_room(&self, at: &str) -> Result<(), ApiError> {
        if self.loaded.model().images().is_none() {
            return Err(no_projector(at, self.loaded));
        }
        if self.sent.len() == MAX_IMAGES {
            return Err(ApiError::invalid(at, format!("a request may have up to {MAX_IMAGES} images; send fewer")));
        }
        Ok(())
    }

    /// Fetches the images that were sent by URL, decodes all of them and splits them into tokens, on a blocking thread.
    ///
    /// # Errors
    /// An image cannot be fetched or decoded; the error names its field.
    pub(crate) async fn read(self) -> Result<RequestImages, ApiError> {
        let Some(images) = self.loaded.model().images().cloned() else { return Ok(RequestImages::default()) };
        if self.sent.is_empty() {
            return Ok(RequestImages::default());
        }
        let urls = self.config.and_then(|config| config.urls.as_ref());
        let has_urls = self.sent.iter().any(|image| matches!(image.source, ImageSource::Url(_)));
        // Held until the images are decoded, because fetched files are large and the request is small.
        let Ok(_fetching) = has_urls.then(|| URL_REQUESTS.try_acquire()).transpose() else {
            let detail = "too many requests with image URLs are in progress; send the request again later";
            return Err(ApiError::unavailable(detail).retry_after(1));
        };
        let sent = fetch_all(self.sent, urls).await?;
        let max_recorded = self.config.map_or(0, |config| config.record_bytes);
        let permit = READERS.acquire().await.map_err(|_| ApiError::internal("the decoder of images has stopped"))?;
        // Dropped when the client disconnects.
        let client = Arc::new(());
        let connection = Arc::downgrade(&client);
        let read = move || {
            // Held even if the client disconnects meanwhile.
            let _permit = permit;
            let mut read = RequestImages::default();
            let mut room = max_recorded;
            for (at, file) in sent {
                if connection.strong_count() == 0 {
                    break;
                }
                let image = images.tokenize(&file);
                let image = image.map_err(|error| ApiError::invalid(at.as_str(), format!("`{at}`: {error}")))?;
                let sha256 = hex(image.sha256());
                let is_new = read.files.iter().all(|other| other.sha256 != sha256);
                if is_new && file.len() <= room {
                    room -= file.len();
                    read.files.push(ImageFile { sha256, media_type: image.media_type().to_owned(), data: file.into() });
                }
                read.images.push(image);
            }
            Ok(read)
        };
        tokio::task::spawn_blocking(read).await.map_err(|_| ApiError::internal("the decoder of images panicked"))?
    }
}

/// Returns the files of the images, each with its field.
async fn fetch_all(sent: Vec<SentImage>, urls: Option<&ImageUrlConfig>) -> Result<Vec<(String, Vec<u8>)>, ApiError> {
    let mut fetcher = None;
    let mut files = Vec::with_capacity(sent.len());
    for SentImage { at, source } in sent {
        let file = match (source, urls) {
            (ImageSource::File(file), _) => file,
            (ImageSource::Url(url), Some(config)) => {
                fetcher.get_or_insert_with(|| ImageFetcher::new(config)).fetch(url, &at).await?
            }
            (ImageSource::Url(url), None) => return Err(remote::not_allowed(url.as_str(), &at)),
        };
        files.push((at, file));
    }
    Ok(files)
}

/// Returns the error for images without a projector.
fn no_projector(at: &str, loaded: &LoadedModel) -> ApiError {
    let name = loaded.name();
    let message = format!(
        "`{at}`: the model '{name}' was loaded without a projector and cannot see images; start the server with --mmproj, \
         or send text only"
    );
    ApiError::invalid(at, message)
}

/// Decodes the part of a data URL after `data:`.
fn decode_data_url(data: &str, at: &str) -> Result<Vec<u8>, ApiError> {
    let data = data.split_once(',').filter(|(head, _)| head.ends_with(";base64")).map(|(_, data)| data);
    let invalid = || ApiError::invalid(at, format!("{at}: the data URL of an image must be data:TYPE;base64,DATA"));
    decode_base64(data.ok_or_else(invalid)?, at)
}

fn decode_base64(data: &str, at: &str) -> Result<Vec<u8>, ApiError> {
    // Some clients break lines.
    let data: std::borrow::Cow<'_, str> = if data.contains(|c: char| c.is_ascii_whitespace()) {
        data.split_ascii_whitespace().collect::<String>().into()
    } else {
        data.into()
    };
    BASE64
        .decode(data.as_bytes())
        .map_err(|error| ApiError::invalid(at, format!("{at}: the data of the image is not base64: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_urls_are_decoded() {
        let file = |data: &str| decode_data_url(data, "p").map_err(|error| error.problem().detail);
        assert_eq!(file("image/png;base64,aGk=").unwrap(), b"hi");
        assert_eq!(file(";base64,aG\nk").unwrap(), b"hi");
        for (data, expected) in
            [("image/png,hi", "must be data:TYPE;base64,DATA"), ("image/png;base64,a*", "is not base64")]
        {
            let error = file(data).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
