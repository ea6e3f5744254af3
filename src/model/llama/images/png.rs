//! Size of the data of a PNG file. llama.cpp's decoder (`stb_image`) inflates all data of a file into memory, whatever
//! the size of the image, so that a small file could fill the memory.

use flate2::read::DeflateDecoder;
use std::io::Read;

/// Length of the signature, of a chunk's length and type, and of its checksum.
const SIGNATURE: usize = 8;
const CHUNK_HEAD: usize = 8;
const CHECKSUM: usize = 4;
/// Start of the depth and the type of color, in the first chunk.
const DEPTH_AT: usize = 24;
/// Length of the header of compressed data.
const ZLIB_HEADER: usize = 2;

/// Returns the size that a file states in its first chunk, which must be `IHDR`.
pub(super) fn size(image: &[u8]) -> Option<(u32, u32)> {
    let at = |at: usize| image.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
    (image.get(12..16)? == b"IHDR").then_some((at(16)?, at(20)?))
}

/// Returns true if the data of the file inflate to at most [`max_bytes`]. Checksums are ignored, as in llama.cpp's
/// decoder.
pub(super) fn inflates_to(image: &[u8], width: u32, height: u32) -> bool {
    let Some(data) = image_data(image) else { return false };
    // llama.cpp's decoder rejects a file without data.
    let Some(deflated) = data.get(ZLIB_HEADER..) else { return true };
    let Some(max) = max_bytes(image, width, height) else { return false };
    let inflated = std::io::copy(&mut DeflateDecoder::new(deflated).take(max + 1), &mut std::io::sink());
    inflated.is_ok_and(|bytes| bytes <= max)
}

/// Returns the maximum bytes of an image's data: twice the rows, each with a byte for its filter, because an interlaced
/// image has almost twice as many, and 1 MiB more, because some encoders append zeros, which llama.cpp's decoder
/// ignores. `None` for an unknown depth or type of color.
fn max_bytes(image: &[u8], width: u32, height: u32) -> Option<u64> {
    let (depth, color) = (*image.get(DEPTH_AT)?, *image.get(DEPTH_AT + 1)?);
    let channels = match color {
        0 | 3 => 1,
        4 => 2,
        2 => 3,
        6 => 4,
        _ => return None,
    };
    let is_known = matches!(depth, 1 | 2 | 4 | 8 | 16);
    let row_bytes = (u64::from(width) * channels * u64::from(depth)).div_ceil(8);
    is_known.then(|| 2 * u64::from(height) * (row_bytes + 1) + (1 << 20))
}

/// Returns the joined data of all `IDAT` chunks; `None` for Apple's variant, whose data have no header.
fn image_data(image: &[u8]) -> Option<Vec<u8>> {
    let (mut data, mut rest) = (Vec::new(), image.get(SIGNATURE..)?);
    while let Some((length, kind)) = rest.get(..CHUNK_HEAD).map(|head| head.split_at(CHUNK_HEAD / 2)) {
        let length = u32::from_be_bytes(length.try_into().ok()?) as usize;
        let content = &rest[CHUNK_HEAD..];
        match kind {
            b"IDAT" => data.extend_from_slice(&content[..length.min(content.len())]),
            b"CgBI" => return None,
            b"IEND" => break,
            _ => {}
        }
        rest = content.get(length.saturating_add(CHECKSUM)..).unwrap_or_default();
    }
    Some(data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::ZlibEncoder;
    use std::io::Write;

    fn chunk(kind: [u8; 4], content: &[u8]) -> Vec<u8> {
        [&(content.len() as u32).to_be_bytes()[..], &kind, content, &[0; CHECKSUM]].concat()
    }

    /// Returns a gray image of one byte per pixel whose data inflate to `bytes` bytes, in chunks of `chunk_len`.
    fn file(width: u32, height: u32, bytes: usize, chunk_len: usize) -> Vec<u8> {
        file_of([8, 0, 0, 0, 0], width, height, bytes, chunk_len)
    }

    /// Like [`file`], with this depth, type of color, compression, filter and interlacing.
    fn file_of(format: [u8; 5], width: u32, height: u32, bytes: usize, chunk_len: usize) -> Vec<u8> {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(&vec![0; bytes]).unwrap();
        let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &format].concat();
        let mut file = [b"\x89PNG\r\n\x1a\n".to_vec(), chunk(*b"IHDR", &header)].concat();
        for part in encoder.finish().unwrap().chunks(chunk_len) {
            file.extend(chunk(*b"IDAT", part));
        }
        file.extend(chunk(*b"IEND", &[]));
        file
    }

    #[test]
    fn data_larger_than_the_image_are_found() {
        for chunk_len in [5, 1 << 20] {
            assert_eq!(size(&file(30, 20, 31 * 20, chunk_len)), Some((30, 20)));
            assert!(inflates_to(&file(30, 20, 31 * 20, chunk_len), 30, 20));
            assert!(!inflates_to(&file(1, 1, 16 << 20, chunk_len), 1, 1));
        }
    }

    #[test]
    fn formats_and_appended_zeros_are_accepted() {
        // Adam7 has rows of 4, 4, 8, 8, 15, 15 and 30 pixels: 3, 3, 2, 5, 5, 10 and 10 of them.
        let adam7 = 3 * 5 + 3 * 5 + 2 * 9 + 5 * 9 + 5 * 16 + 10 * 16 + 10 * 31;
        for (format, bytes) in [
            ([4, 3, 0, 0, 0], (15 + 1) * 20),
            ([1, 3, 0, 0, 0], (4 + 1) * 20),
            ([16, 6, 0, 0, 0], (30 * 8 + 1) * 20),
            ([8, 0, 0, 0, 1], adam7),
        ] {
            assert!(inflates_to(&file_of(format, 30, 20, bytes, 9), 30, 20), "{format:?}");
            assert!(inflates_to(&file_of(format, 30, 20, bytes + 4000, 9), 30, 20), "{format:?} with zeros");
            assert!(!inflates_to(&file_of(format, 30, 20, 16 << 20, 1 << 20), 30, 20), "{format:?}");
        }
        for unknown in [[3, 0, 0, 0, 0], [8, 5, 0, 0, 0]] {
            assert!(!inflates_to(&file_of(unknown, 30, 20, 31 * 20, 9), 30, 20), "{unknown:?}");
        }
    }

    #[test]
    fn damaged_data_are_found() {
        let whole = file(30, 20, 31 * 20, 7);
        let at = whole.windows(4).position(|kind| kind == b"IDAT").unwrap();
        let mut damaged = whole.clone();
        damaged[at + 4 + ZLIB_HEADER] = 0xff;
        assert!(!inflates_to(&damaged, 30, 20));
        let apple = [&whole[..at - 4], &chunk(*b"CgBI", &[0; 4]), &whole[at - 4..]].concat();
        assert!(!inflates_to(&apple, 30, 20));
    }
}
