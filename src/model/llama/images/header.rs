//! Format and size of an image, read from its first bytes. Images are checked before llama.cpp decodes them, because a
//! small file can claim a size, or inflate to one, that exhausts the memory.

use super::error::ImageError;
use super::png;

/// Maximum bytes of an encoded image.
pub const MAX_BYTES: usize = 32 << 20;
/// Maximum width and height in pixels.
pub(super) const MAX_EDGE: u32 = 16_384;
/// Maximum pixels.
pub(super) const MAX_PIXELS: u64 = 1 << 25;

/// Format and size of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageHeader {
    /// Media type, e.g. `image/png`.
    pub media_type: &'static str,
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
}

/// Checks that an image has a format that llama.cpp decodes, and a permitted size.
///
/// # Errors
/// [`ImageError`] for every other file.
pub(super) fn check(image: &[u8]) -> Result<ImageHeader, ImageError> {
    if image.len() > MAX_BYTES {
        return Err(ImageError::TooManyBytes { bytes: image.len() });
    }
    let (format, media_type, size) = match image {
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => ("PNG", "image/png", png::size(image)),
        [0xff, 0xd8, 0xff, ..] => ("JPEG", "image/jpeg", jpeg(image)),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => ("GIF", "image/gif", gif(image)),
        [b'B', b'M', ..] => ("BMP", "image/bmp", bmp(image)),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => return Err(ImageError::WebP),
        _ => return Err(ImageError::Format),
    };
    match size {
        None | Some((0, _) | (_, 0)) => Err(ImageError::Damaged { format }),
        Some((width, height))
            if width > MAX_EDGE || height > MAX_EDGE || u64::from(width) * u64::from(height) > MAX_PIXELS =>
        {
            Err(ImageError::TooLarge { width, height })
        }
        Some((width, height)) if format == "PNG" && !png::inflates_to(image, width, height) => {
            Err(ImageError::Damaged { format })
        }
        Some((width, height)) => Ok(ImageHeader { media_type, width, height }),
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// Reads the size in the first frame header.
fn jpeg(image: &[u8]) -> Option<(u32, u32)> {
    let short = |at| array(image, at).map(u16::from_be_bytes);
    let mut at = 2;
    loop {
        if *image.get(at)? != 0xff {
            // llama.cpp's decoder skips bytes between segments, too.
            at += 1;
            continue;
        }
        match *image.get(at + 1)? {
            // Fill bytes, and markers without a length.
            0xff => at += 1,
            0x00 | 0x01 | 0xd0..=0xd8 => at += 2,
            // End of the image or start of the pixels.
            0xd9 | 0xda => return None,
            0xc0..=0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf => {
                return Some((short(at + 7)?.into(), short(at + 5)?.into()));
            }
            _ => at += 2 + usize::from(short(at + 2)?.max(2)),
        }
    }
}

/// Reads the size of the canvas.
fn gif(image: &[u8]) -> Option<(u32, u32)> {
    let at = |at| array(image, at).map(u16::from_le_bytes);
    Some((at(6)?.into(), at(8)?.into()))
}

/// Reads the size in the header, whose length identifies its version. A negative height means another order of rows.
fn bmp(image: &[u8]) -> Option<(u32, u32)> {
    if u32::from_le_bytes(array(image, 14)?) == 12 {
        let at = |at| array(image, at).map(u16::from_le_bytes);
        return Some((at(18)?.into(), at(20)?.into()));
    }
    let at = |at| array(image, at).map(i32::from_le_bytes);
    Some((u32::try_from(at(18)?).ok()?, at(22)?.unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn size_of(image: &[u8]) -> Result<(u32, u32), ImageError> {
        check(image).map(|header| (header.width, header.height))
    }

    fn png_of(width: u32, height: u32) -> Vec<u8> {
        let mut image = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
        image.extend(width.to_be_bytes());
        image.extend(height.to_be_bytes());
        image
    }

    fn jpeg_of(width: u16, height: u16) -> Vec<u8> {
        let mut image = vec![0xff, 0xd8, 0xff, 0xe0, 0, 4, 1, 2, 0xff, 0xff, 0xc2, 0, 11, 8];
        image.extend(height.to_be_bytes());
        image.extend(width.to_be_bytes());
        image
    }

    fn gif_of(width: u16, height: u16) -> Vec<u8> {
        let mut image = b"GIF89a".to_vec();
        image.extend(width.to_le_bytes());
        image.extend(height.to_le_bytes());
        image
    }

    fn bmp_of(width: i32, height: i32) -> Vec<u8> {
        let mut image = b"BM".to_vec();
        image.extend([0; 12]);
        image.extend(40u32.to_le_bytes());
        image.extend(width.to_le_bytes());
        image.extend(height.to_le_bytes());
        image
    }

    #[test]
    fn size_is_read_from_each_format() {
        for image in [png_of(640, 48), jpeg_of(640, 48), gif_of(640, 48), bmp_of(640, 48), bmp_of(640, -48)] {
            assert_eq!(size_of(&image), Ok((640, 48)));
        }
    }

    #[test]
    fn decompression_bombs_are_rejected() {
        for image in [png_of(60_000, 60_000), jpeg_of(65_535, 65_535), gif_of(65_535, 65_535), bmp_of(20_000, -20_000)]
        {
            assert!(matches!(check(&image), Err(ImageError::TooLarge { .. })), "{image:?}");
        }
        assert_eq!(size_of(&png_of(8192, 4096)), Ok((8192, 4096)));
        assert!(matches!(check(&png_of(8192, 4097)), Err(ImageError::TooLarge { .. })));
        assert!(matches!(check(&png_of(16_385, 1)), Err(ImageError::TooLarge { .. })));
        assert!(matches!(check(&vec![0; MAX_BYTES + 1]), Err(ImageError::TooManyBytes { .. })));
    }

    #[test]
    fn other_files_are_rejected() {
        assert_eq!(check(b"RIFF\0\0\0\0WEBPVP8 "), Err(ImageError::WebP));
        assert_eq!(check(b"hello"), Err(ImageError::Format));
        assert_eq!(check(b""), Err(ImageError::Format));
        assert_eq!(check(&png_of(0, 5)), Err(ImageError::Damaged { format: "PNG" }));
        assert_eq!(check(&[0xff, 0xd8, 0xff, 0xd9]), Err(ImageError::Damaged { format: "JPEG" }));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_exceed_the_limits(
            start in prop::sample::select(vec![
                &b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"[..], b"\xff\xd8\xff", b"GIF87a", b"BM", b"RIFF\0\0\0\0WEBP", b"",
            ]),
            rest in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            if let Ok((width, height)) = size_of(&[start, &rest].concat()) {
                prop_assert!((1..=MAX_EDGE).contains(&width) && (1..=MAX_EDGE).contains(&height));
                prop_assert!(u64::from(width) * u64::from(height) <= MAX_PIXELS);
            }
        }
    }
}
