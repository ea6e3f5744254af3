//! Tables in the output of commands.

use super::printer::escape_control_characters;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Returns rows of the same length as lines with aligned columns: the last `numeric` ones right, all others left.
pub fn format_table<R: AsRef<[String]>>(rows: &[R], numeric: usize) -> String {
    let columns = rows.first().map_or(0, |row| row.as_ref().len());
    let width = |column: usize| rows.iter().map(|row| row.as_ref()[column].width()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.as_ref().iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            let padding = " ".repeat(width - cell.width());
            if column + numeric < columns { format!("{cell}{padding}") } else { format!("{padding}{cell}") }
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Shortens a text to one line of at most `max` columns.
pub fn shorten(text: &str, max: usize) -> String {
    let line = escape_control_characters(text).replace(['\n', '\t'], " ");
    let line = line.trim();
    if line.width() <= max {
        return line.to_owned();
    }
    let mut columns = 0;
    let fits = |c: &char| {
        columns += c.width().unwrap_or(0);
        columns < max
    };
    let mut short: String = line.chars().take_while(fits).collect();
    short.push('…');
    short
}

/// Returns the columns of the terminal that shows standard output; `None` for a file or a pipe.
pub fn terminal_columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|&columns| columns > 0)
}

#[cfg(test)]
mod tests {
    use super::{format_table, shorten};

    #[test]
    fn long_texts_are_shortened() {
        assert_eq!(shorten(&"x".repeat(36), 36), "x".repeat(36));
        assert_eq!(shorten(&"é".repeat(99), 36), format!("{}…", "é".repeat(35)));
    }

    #[test]
    fn columns_are_aligned_by_their_width_on_a_terminal() {
        let rows =
            [["NAME", "NOTE", "SIZE"], ["日本", "", "5"], ["a", "b", "1234567"]].map(|row| row.map(str::to_owned));
        assert_eq!(format_table(&rows, 1), "NAME  NOTE     SIZE\n日本              5\na     b     1234567\n");
        assert_eq!(format_table(&[["a".to_owned(), String::new()]], 0), "a\n");
    }
}
