//! The cells of a KV cache: the position of each token. With M-RoPE, several tokens of an image have the same position.

use super::reader::{Reader, check_equal};
use super::{Cache, StateError};
use crate::events::{TokenId, is_image_token};
use crate::model::llama::image_spans::{ImageLayout, ImageSpan, ImageSpans};

/// Token of a cell that was computed from an embedding.
const NO_TOKEN: TokenId = -1;

/// A cell of an untrusted state.
#[derive(Debug, Clone, Copy)]
struct Cell {
    position: i32,
    /// Column, row and token in a cache with M-RoPE data.
    extension: Option<(i32, i32, TokenId)>,
}

/// Reads the cells of a cache and compares them with the tokens. `images` are those of another cache of the state; if
/// there are none yet, they are set to those that follow from the cells. Returns the number of cells.
pub(super) fn read_cells(
    reader: &mut Reader<'_>,
    cache: &Cache,
    tokens: &[TokenId],
    images: &mut Option<ImageSpans>,
) -> Result<usize, StateError> {
    let count = reader.u32()? as usize;
    // Cells outside the attention window are left out.
    if count > tokens.len() || (cache.window.is_none() && count < tokens.len()) {
        return Err(StateError::Cells { cells: count, tokens: tokens.len() });
    }
    let first = tokens.len() - count;
    let mut cells = Vec::with_capacity(count);
    for (index, &token) in tokens[first..].iter().enumerate() {
        let position = reader.i32()?;
        check_equal("the number of sequences of a cell", reader.u32()?, 1)?;
        let extension = if cache.has_mrope { Some((reader.i32()?, reader.i32()?, reader.i32()?)) } else { None };
        let expected = if is_image_token(token) { NO_TOKEN } else { token };
        if extension.is_some_and(|(.., token)| token != expected) {
            return Err(StateError::Token(index));
        }
        reader.take(4)?;
        cells.push(Cell { position, extension });
    }
    let images = match images {
        Some(images) => &*images,
        None if first == 0 => images.insert(find_images(&cells, tokens)?),
        None => images.insert(ImageSpans::from_placeholders(tokens)),
    };
    let positions = images.positions(tokens.len());
    for (index, (cell, &expected)) in cells.iter().zip(&positions[first..]).enumerate() {
        if u32::try_from(cell.position) != Ok(expected) {
            return Err(StateError::Position { cell: index, position: cell.position });
        }
    }
    let first_required = positions.last().map_or(0, |&last| cache.window.first_attended(last));
    let required = positions.iter().rev().take_while(|&&position| position >= first_required).count();
    if count < required {
        return Err(StateError::Cells { cells: count, tokens: tokens.len() });
    }
    Ok(count)
}

/// Finds the images of a sequence by the positions of its cells: tokens of an image that have the same position form
/// a grid, and others have a position each.
fn find_images(cells: &[Cell], tokens: &[TokenId]) -> Result<ImageSpans, StateError> {
    let mut images = ImageSpans::default();
    let mut at = 0;
    while at < cells.len() {
        let Cell { position, .. } = cells[at];
        let is_same = |&(cell, &token): &(&Cell, &TokenId)| is_image_token(token) && cell.position == position;
        let count = cells.iter().zip(tokens).skip(at).take_while(is_same).count();
        if count > 1 {
            let layout = find_grid(&cells[at..at + count]).ok_or(StateError::Image(at))?;
            images.record(ImageSpan { start: at as u32, tokens: count as u32, layout });
        } else if count == 1 {
            images.extend_line(at as u32);
        }
        at += count.max(1);
    }
    Ok(images)
}

/// Returns the layout of an image whose tokens have the same position.
fn find_grid(cells: &[Cell]) -> Option<ImageLayout> {
    let base = u32::try_from(cells.first()?.position).ok()?;
    let is_first_row = |cell: &&Cell| cell.extension.is_some_and(|(_, row, _)| i64::from(row) == i64::from(base));
    let columns = cells.iter().take_while(is_first_row).count() as u32;
    let layout = ImageLayout::Grid { columns: columns.max(1) };
    let is_at_place = |(index, cell): (u32, &Cell)| {
        let [_, row, column, _] = layout.sections(base, index);
        cell.extension.is_some_and(|(x, y, _)| (i64::from(x), i64::from(y)) == (i64::from(column), i64::from(row)))
    };
    (0..).zip(cells).all(is_at_place).then_some(layout)
}
