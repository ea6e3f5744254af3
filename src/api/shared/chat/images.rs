//! Images of a conversation: decoded from data URLs, and replaced by a marker in the text of their message.

use crate::api::shared::fields::invalid_value;
use crate::model::llama::Image;
use crate::server::{ApiError, Loaded};
use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Maximum images of a request.
const MAX_IMAGES: usize = 64;

/// Base64 with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Requests whose images are decoded at the same time; a large image takes some 200 MB.
static READERS: Semaphore = Semaphore::const_new(4);

/// An image as sent.
struct SentImage {
    /// JSON path of its part.
    at: String,
    file: Vec<u8>,
}

/// Images of a conversation, in order, and the text that stands for each in a rendered prompt.
#[derive(Debug, Default)]
pub(super) struct ConversationImages {
    pub(super) marker: String,
    pub(super) images: Vec<Arc<Image>>,
}

/// Key of the path of the field from which a part was converted, for errors.
const SENT_AS: &str = "thunder_sent_as";

/// Returns a part of a chat completion's message with an image, which the client sent in the field `at`.
pub(crate) fn image_part(url: &str, at: &str) -> Value {
    json!({ "type": "image_url", "image_url": { "url": url }, SENT_AS: at })
}

/// Returns a part of a chat completion's message with an image in base64, which the client sent in the field `at`.
pub(crate) fn base64_part(data: &str, at: &str) -> Value {
    image_part(&format!("data:;base64,{data}"), at)
}

/// Takes the images out of `messages`, in which the hash of its file replaces each image. Returns the messages for the
/// template, with a marker in place of each image, if there are any.
///
/// # Errors
/// The model sees no images, or an image is invalid.
pub(super) async fn take_images(
    messages: &mut Value,
    loaded: &Loaded,
) -> Result<(Option<Value>, ConversationImages), ApiError> {
    let Some(list) = messages.as_array_mut().filter(|list| list.iter().any(has_image)) else {
        return Ok((None, ConversationImages::default()));
    };
    let mut sent = Vec::new();
    for (index, message) in list.iter_mut().enumerate() {
        let parts = message["content"].as_array_mut().into_iter().flatten().enumerate();
        for (part_index, part) in parts.filter(|(_, part)| is_image(part)) {
            let at = match part[SENT_AS].as_str() {
                Some(at) => at.to_owned(),
                None => format!("messages[{index}].content[{part_index}].image_url"),
            };
            if loaded.model().images().is_none() {
                return Err(no_projector(&at, loaded));
            }
            if sent.len() == MAX_IMAGES {
                let message = format!("a request may have up to {MAX_IMAGES} images; send fewer");
                return Err(ApiError::invalid(at, message));
            }
            let image = SentImage { file: decode(part, &at)?, at };
            let hash = Sha256::digest(&image.file);
            let hash = hash.iter().fold(String::new(), |hash, byte| format!("{hash}{byte:02x}"));
            *part = json!({ "type": "image_url", "image_url": { "url": format!("sha256:{hash}") } });
            sent.push(image);
        }
    }
    let marker = free_marker(messages);
    let mut marked = messages.clone();
    for message in marked.as_array_mut().into_iter().flatten() {
        let Some(parts) = message["content"].as_array().filter(|parts| parts.iter().any(is_image)) else { continue };
        if let Some(text) = join(parts, &marker) {
            message["content"] = text.into();
        } else if let Some(parts) = message["content"].as_array_mut() {
            // The template's parser names the part that is neither text nor an image.
            parts.retain(|part| !is_image(part));
        }
    }
    Ok((Some(marked), ConversationImages { images: read(sent, loaded).await?, marker }))
}

/// Returns the error for images without a projector.
fn no_projector(at: &str, loaded: &Loaded) -> ApiError {
    let name = loaded.name();
    let message = format!(
        "`{at}`: the model '{name}' was loaded without a projector and cannot see images; start the server with --mmproj, \
         or send text only"
    );
    ApiError::invalid(at, message)
}

/// Decodes the files and splits them into tokens, on a blocking thread.
async fn read(sent: Vec<SentImage>, loaded: &Loaded) -> Result<Vec<Arc<Image>>, ApiError> {
    let Some(images) = loaded.model().images().cloned() else { return Ok(Vec::new()) };
    let permit = READERS.acquire().await.map_err(|_| ApiError::internal("the decoder of images has stopped"))?;
    let read = move || {
        // Held even if the client disconnects meanwhile.
        let _permit = permit;
        let read = |SentImage { at, file }: SentImage| {
            images.read(&file).map_err(|error| ApiError::invalid(at.as_str(), format!("`{at}`: {error}")))
        };
        sent.into_iter().map(read).collect()
    };
    tokio::task::spawn_blocking(read).await.map_err(|_| ApiError::internal("the decoder of images panicked"))?
}

fn is_image(part: &Value) -> bool {
    part["type"] == "image_url"
}

fn has_image(message: &Value) -> bool {
    message["content"].as_array().is_some_and(|parts| parts.iter().any(is_image))
}

/// Returns the file in the data URL of a part.
fn decode(part: &Value, at: &str) -> Result<Vec<u8>, ApiError> {
    let url = part["image_url"].as_str().or_else(|| part["image_url"]["url"].as_str());
    let url = url.ok_or_else(|| invalid_value(at, "a data URL, e.g. data:image/png;base64,…", &part["image_url"]))?;
    let Some(data) = url.strip_prefix("data:") else {
        let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
        let message = format!(
            "{at}: the server does not fetch images{}; send the image itself as a data URL: data:image/png;base64,…",
            if scheme.is_empty() || scheme.len() > 8 { String::new() } else { format!(" from {scheme}: URLs") }
        );
        return Err(ApiError::invalid(at, message));
    };
    let data = data.split_once(',').filter(|(head, _)| head.ends_with(";base64")).map(|(_, data)| data);
    let invalid = || ApiError::invalid(at, format!("{at}: the data URL of an image must be data:TYPE;base64,DATA"));
    let data = data.ok_or_else(invalid)?;
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

/// Returns a marker that the messages do not contain.
fn free_marker(messages: &Value) -> String {
    let text = messages.to_string();
    let numbered = (1..).map(|number| format!("<__media_{number}__>"));
    let mut markers = std::iter::once("<__media__>".to_owned()).chain(numbered);
    markers.find(|marker| !text.contains(marker.as_str())).unwrap_or_default()
}

/// Joins the parts of a message like llama-server: texts with line breaks between them, and images without. Returns `None`
/// if a part is neither.
fn join(parts: &[Value], marker: &str) -> Option<String> {
    let mut joined = String::new();
    let mut was_image = false;
    for part in parts {
        if is_image(part) {
            joined.push_str(marker);
            was_image = true;
            continue;
        }
        let is_text = part.get("type").is_none_or(|kind| kind == "text");
        let text = part["text"].as_str().filter(|_| is_text)?;
        if !was_image && !joined.is_empty() {
            joined.push('\n');
        }
        joined.push_str(text);
        was_image = false;
    }
    Some(joined)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(parts: &Value) -> Option<String> {
        join(parts.as_array().unwrap(), "<M>")
    }

    #[test]
    fn images_are_joined_without_line_breaks() {
        let (image, text) = (image_part("x", "p"), |text: &str| json!({"type": "text", "text": text}));
        assert_eq!(text_of(&json!([text("a"), image, text("b"), text("c")])).unwrap(), "a<M>b\nc");
        assert_eq!(text_of(&json!([image, image, {"text": "b"}])).unwrap(), "<M><M>b");
        assert_eq!(text_of(&json!([image, {"type": "input_audio"}])), None);
    }

    #[test]
    fn marker_is_not_part_of_the_text() {
        assert_eq!(free_marker(&json!([{"content": "a"}])), "<__media__>");
        assert_eq!(free_marker(&json!([{"content": "<__media__>"}, {"content": "<__media_1__>"}])), "<__media_2__>");
    }

    #[test]
    fn data_urls_are_decoded() {
        let file = |url: &str| decode(&image_part(url, "p"), "p").map_err(|error| error.problem().detail);
        assert_eq!(file("data:image/png;base64,aGk=").unwrap(), b"hi");
        assert_eq!(file("data:;base64,aG\nk").unwrap(), b"hi");
        assert_eq!(decode(&json!({"type": "image_url", "image_url": "data:;base64,aGk"}), "p").unwrap(), b"hi");
        for (url, expected) in [
            (
                "https://example.org/a.png",
                "does not fetch images from https: URLs; send the image itself as a data URL",
            ),
            ("file:///etc/passwd", "does not fetch images from file: URLs"),
            ("aGk=", "does not fetch images; send"),
            ("data:image/png,hi", "must be data:TYPE;base64,DATA"),
            ("data:image/png;base64,a*", "is not base64"),
        ] {
            let error = file(url).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        assert!(decode(&json!({"type": "image_url"}), "p").is_err());
    }
}
