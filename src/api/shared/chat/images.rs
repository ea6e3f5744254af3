//! Images of a conversation, which a marker replaces in the text of their message.

use crate::api::shared::fields::invalid_value;
use crate::api::shared::images::{ImageReader, RequestImages};
use crate::config::ImageConfig;
use crate::events::hex;
use crate::model::chat::RenderOptions;
use crate::server::{ApiError, LoadedModel};
use serde_json::{Value, json};
use std::collections::HashSet;

/// Images of a conversation, in order, and the text that stands for each in a rendered prompt.
#[derive(Debug, Default)]
pub(super) struct ConversationImages {
    pub(super) marker: String,
    pub(super) images: RequestImages,
}

/// Key under which a converted part names the field that the client sent, for errors.
const SENT_AS: &str = "thunder_sent_as";

/// Returns a part of a chat completion's message with an image, which the client sent in the field `at`.
pub(crate) fn image_part(url: &str, at: &str) -> Value {
    json!({ "type": "image_url", "image_url": { "url": url }, SENT_AS: at })
}

/// Returns a part of a chat completion's message with an image in base64, which the client sent in the field `at`.
pub(crate) fn base64_part(data: &str, at: &str) -> Value {
    image_part(&format!("data:;base64,{data}"), at)
}

/// Takes the images out of `messages` and replaces each with the hash of its file. Returns the images, and the messages
/// for the template, with a marker in place of each image; `None` without images. `options` have the other texts of the
/// prompt.
///
/// # Errors
/// The model sees no images, or an image is invalid.
pub(super) async fn take_images(
    messages: &mut Value,
    options: &RenderOptions,
    config: Option<&ImageConfig>,
    loaded: &LoadedModel,
) -> Result<(Option<Value>, ConversationImages), ApiError> {
    if !messages.as_array().is_some_and(|list| list.iter().any(has_image)) {
        return Ok((None, ConversationImages::default()));
    }
    let images = read_images(messages, config, loaded).await.map_err(ApiError::with_client_name)?;
    let mut hashes = images.images.iter().map(|image| hex(image.sha256()));
    for_each_image(messages, |part, _| {
        let url = format!("sha256:{}", hashes.next().unwrap_or_default());
        *part = json!({ "type": "image_url", "image_url": { "url": url } });
        Ok(())
    })?;
    let marker = free_marker(&texts_of(messages, options));
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
    Ok((Some(marked), ConversationImages { marker, images }))
}

async fn read_images(
    messages: &mut Value,
    config: Option<&ImageConfig>,
    loaded: &LoadedModel,
) -> Result<RequestImages, ApiError> {
    let mut reader = ImageReader::new(config, loaded);
    for_each_image(messages, |part, at| reader.add_url(url_of(part, at)?, at))?;
    reader.read().await
}

/// Calls a function with every image part and the client's name of its field.
fn for_each_image(
    messages: &mut Value,
    mut call: impl FnMut(&mut Value, &str) -> Result<(), ApiError>,
) -> Result<(), ApiError> {
    for (index, message) in messages.as_array_mut().into_iter().flatten().enumerate() {
        let parts = message.get_mut("content").and_then(Value::as_array_mut);
        let parts = parts.into_iter().flatten().enumerate();
        for (part_index, part) in parts.filter(|(_, part)| is_image(part)) {
            let at = match part[SENT_AS].as_str() {
                Some(at) => at.to_owned(),
                None => format!("messages[{index}].content[{part_index}].image_url"),
            };
            call(part, &at)?;
        }
    }
    Ok(())
}

fn is_image(part: &Value) -> bool {
    part["type"] == "image_url"
}

fn has_image(message: &Value) -> bool {
    message["content"].as_array().is_some_and(|parts| parts.iter().any(is_image))
}

/// Returns the URL of an image part.
fn url_of<'a>(part: &'a Value, at: &str) -> Result<&'a str, ApiError> {
    let url = part["image_url"].as_str().or_else(|| part["image_url"]["url"].as_str());
    url.ok_or_else(|| invalid_value(at, "a data URL, e.g. data:image/png;base64,…", &part["image_url"]))
}

/// Returns all values that a template can write into a prompt, as JSON.
fn texts_of(messages: &Value, options: &RenderOptions) -> String {
    let tools = options.tools.as_ref().map(Value::to_string).unwrap_or_default();
    let variables = options.variables.values().map(Value::to_string);
    [messages.to_string(), tools].into_iter().chain(variables).collect()
}

/// Returns a marker that the texts do not contain.
fn free_marker(text: &str) -> String {
    if !text.contains("<__media__>") {
        return "<__media__>".into();
    }
    let used = text.split("<__media_").skip(1).filter_map(|rest| rest.split_once("__>")?.0.parse().ok());
    let used: HashSet<u64> = used.collect();
    let free = (1..=used.len() as u64 + 1).find(|number| !used.contains(number)).unwrap_or_default();
    format!("<__media_{free}__>")
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
    use crate::events::system;

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
        assert_eq!(free_marker("a"), "<__media__>");
        assert_eq!(free_marker("<__media__> <__media_1__>"), "<__media_2__>");
        let other = "<__media__><__media_<__media_1__><__media_x__><__media_99999999999999999999__><__media_3__>";
        assert_eq!(free_marker(other), "<__media_2__>");
    }

    #[test]
    fn marker_is_not_part_of_tools_or_variables() {
        let options = RenderOptions {
            tools: Some(json!([{"function": {"description": "<__media__>"}}])),
            add_generation_prompt: true,
            continue_final: false,
            variables: json!({"note": "<__media_1__>"}).as_object().unwrap().clone(),
            now: system::now(),
        };
        assert_eq!(free_marker(&texts_of(&json!([{"content": "<__media_2__>"}]), &options)), "<__media_3__>");
    }

    #[test]
    fn marker_is_found_in_a_text_of_many_markers() {
        let markers: Vec<String> = (1..200_000).map(|number| format!("<__media_{number}__>")).collect();
        let text = format!("<__media__>{}", markers.concat());
        let begun = std::time::Instant::now();
        assert_eq!(free_marker(&text), "<__media_200000__>");
        assert!(begun.elapsed().as_secs() < 10, "the time is quadratic: {:?}", begun.elapsed());
    }

    #[test]
    fn url_is_a_string_or_an_object() {
        assert_eq!(
            url_of(&json!({"type": "image_url", "image_url": "data:;base64,aGk"}), "p").unwrap(),
            "data:;base64,aGk"
        );
        assert_eq!(url_of(&image_part("x", "p"), "p").unwrap(), "x");
        assert!(url_of(&json!({"type": "image_url"}), "p").is_err());
    }
}
