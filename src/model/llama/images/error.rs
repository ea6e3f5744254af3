//! The reasons why an image cannot be used.

use super::header;

/// The reason why an image cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// Not an image, or an image in a format that is not supported.
    #[error("the data is not an image in a supported format; send a PNG, JPEG, GIF or BMP image")]
    Format,
    /// llama.cpp decodes images with `stb_image`, which does not know `WebP`.
    #[error(
        "WebP images are not supported, because llama.cpp's decoder (stb_image) does not read them; convert the image to PNG or JPEG"
    )]
    WebP,
    /// The header has no valid size, or the data are not those of an image of this size.
    #[error("the {format} image is damaged; send a complete image")]
    Damaged {
        /// Name of the format.
        format: &'static str,
    },
    /// Too many pixels.
    #[error(
        "the image has {width} × {height} pixels; an image may have up to {max} pixels on each edge and {all} pixels in all: send a smaller one",
        max = header::MAX_EDGE, all = header::MAX_PIXELS
    )]
    TooLarge {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
    },
    /// Too many bytes.
    #[error("the image has {bytes} bytes; an image may have up to {} bytes: send a smaller one", header::MAX_BYTES)]
    TooManyBytes {
        /// Size of the file.
        bytes: usize,
    },
    /// llama.cpp cannot decode it.
    #[error("the image cannot be decoded; it is damaged or of an unusual kind: send a complete PNG or JPEG image")]
    Decode,
    /// The projector surrounds images with tokens that the model lacks.
    #[error(
        "the projector (--mmproj) needs tokens that the model lacks; start the server with the model's own projector"
    )]
    Vocabulary,
    /// The tokens of the image have unknown positions.
    #[error("the projector (--mmproj) gives the tokens of the image positions that are not supported")]
    Positions,
    /// llama.cpp cannot encode it.
    #[error("llama.cpp cannot encode the image; see llama.cpp's log")]
    Encode,
}
