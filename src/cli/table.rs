//! Tables in the output of commands.

use unicode_width::UnicodeWidthStr;

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

#[cfg(test)]
mod tests {
    use super::format_table;

    #[test]
    fn columns_are_aligned_by_their_width_on_a_terminal() {
        let rows =
            [["NAME", "NOTE", "SIZE"], ["日本", "", "5"], ["a", "b", "1234567"]].map(|row| row.map(str::to_owned));
        assert_eq!(format_table(&rows, 1), "NAME  NOTE     SIZE\n日本              5\na     b     1234567\n");
        assert_eq!(format_table(&[["a".to_owned(), String::new()]], 0), "a\n");
    }
}
