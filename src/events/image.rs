//! Images of a prompt: their description in the trace, and their files for the recorder.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::sync::Arc;
use utoipa::ToSchema;

/// An image of the prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ImageRecord {
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
    /// Media type of the file, e.g. `image/png`.
    pub media_type: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// True if the file is recorded with the run.
    pub recorded: bool,
    /// The tiles into which the projector splits the image; most projectors use one.
    pub tiles: Vec<ImageTile>,
}

/// A tile of an image: consecutive placeholders of the prompt, row by row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ImageTile {
    /// First token.
    pub start: u32,
    /// Columns of the grid of patches.
    pub columns: u32,
    /// Rows of the grid of patches.
    pub rows: u32,
}

/// The file of an image, for the recorder.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
    /// Media type of the file.
    pub media_type: String,
    /// The file.
    #[serde(serialize_with = "to_base64", deserialize_with = "from_base64")]
    pub data: Arc<[u8]>,
}

impl fmt::Debug for ImageFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImageFile({}, {} bytes)", self.sha256, self.data.len())
    }
}

fn to_base64<S: Serializer>(data: &Arc<[u8]>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&STANDARD.encode(data))
}

fn from_base64<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<[u8]>, D::Error> {
    let text = String::deserialize(deserializer)?;
    STANDARD.decode(text).map(Into::into).map_err(serde::de::Error::custom)
}

/// Returns bytes in hexadecimal.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_round_trips_through_json() {
        let file = ImageFile { sha256: hex(&[0, 0xab]), media_type: "image/png".into(), data: vec![1, 2, 255].into() };
        let json = serde_json::to_string(&file).unwrap();
        assert_eq!(json, r#"{"sha256":"00ab","media_type":"image/png","data":"AQL/"}"#);
        assert_eq!(serde_json::from_str::<ImageFile>(&json).unwrap(), file);
        assert_eq!(format!("{file:?}"), "ImageFile(00ab, 3 bytes)");
    }
}
