//! Tables for people.

use std::fmt;

use comfy_table::{CellAlignment, ContentArrangement, presets};

/// A table with a header; behind the first column numbers stand on the right.
#[derive(Debug)]
pub struct Table(comfy_table::Table);

impl Table {
    /// An empty table of numbers.
    pub fn new(header: &[&str]) -> Self {
        let mut table = Self::of_words(header);
        for column in table.0.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }

    /// An empty table of words, which stand on the left.
    pub fn of_words(header: &[&str]) -> Self {
        let mut table = comfy_table::Table::new();
        table
            .load_style(presets::ASCII_MARKDOWN)
            .set_content_arrangement(ContentArrangement::Disabled)
            .set_header(header.to_vec());
        Self(table)
    }

    /// Adds a row.
    pub fn row(&mut self, cells: &[&str]) {
        self.0.add_row(cells.to_vec());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_markdown() {
        let mut table = Table::new(&["length", "loss"]);
        table.row(&["all", "1.25"]);
        assert_eq!(table.to_string(), "| length | loss |\n|--------|------|\n| all    | 1.25 |");
        let mut table = Table::new(&["a", "loss"]);
        table.row(&["b", "1"]);
        assert_eq!(table.to_string(), "| a | loss |\n|---|------|\n| b |    1 |");
        let mut table = Table::of_words(&["a", "found"]);
        table.row(&["b", "x"]);
        assert_eq!(table.to_string(), "| a | found |\n|---|-------|\n| b | x     |");
    }
}
