//! Tables for people.

use std::fmt;

use comfy_table::{CellAlignment, ContentArrangement, presets};
use serde_json::{Number, Value};

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

    /// A table of numbers, whose rows all name the same columns.
    pub fn of_named(rows: impl IntoIterator<Item = Vec<(&'static str, String)>>) -> Self {
        let mut rows = rows.into_iter().peekable();
        let header: Vec<&str> = rows.peek().into_iter().flatten().map(|(name, _)| *name).collect();
        let mut table = Self::new(&header);
        rows.for_each(|row| table.row(&row.into_iter().map(|(_, cell)| cell).collect::<Vec<_>>()));
        table
    }

    pub fn row(&mut self, cells: &[impl AsRef<str>]) {
        self.0.add_row(cells.iter().map(AsRef::as_ref));
    }

    /// A row of a name and a value, where there is one.
    pub fn figure(&mut self, name: &str, value: Option<impl fmt::Display>) {
        if let Some(value) = value {
            self.row(&[name, &value.to_string()]);
        }
    }

    /// The text in so many columns, where they are known: cells that are too wide are wrapped.
    pub fn fitted(&self, width: Option<usize>) -> String {
        let mut table = self.0.clone();
        if let Some(width) = width {
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width.try_into().unwrap_or(u16::MAX));
        }
        table.to_string()
    }

    /// An object of names and values where there are two columns, else a list of objects by the header; numbers but in the first column.
    pub fn to_json(&self) -> Value {
        let cells = |row: &comfy_table::Row| row.cell_iter().map(comfy_table::Cell::content).collect::<Vec<String>>();
        let header = self.0.header().map(cells).unwrap_or_default();
        let value = |(column, cell): (usize, String)| match cell.parse::<Number>() {
            Ok(number) if column > 0 => Value::from(number),
            _ => Value::from(cell),
        };
        let rows = self.0.row_iter().map(|row| cells(row).into_iter().enumerate().map(value));
        if header.len() == 2 {
            let named = |mut row: Vec<Value>| Some((row.first()?.as_str()?.to_owned(), row.pop()?));
            return rows.filter_map(|row| named(row.collect())).collect();
        }
        rows.map(|row| header.iter().cloned().zip(row).collect::<Value>()).collect()
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

    #[test]
    fn a_table_fits_a_terminal_and_is_json_for_programs() {
        let mut table = Table::new(&["what", "value"]);
        table.row(&["longest sample", &"many words ".repeat(20)]);
        assert!(table.to_string().lines().all(|line| line.len() > 200));
        for width in [40, 80, 200] {
            let fitted = table.fitted(Some(width));
            assert!(fitted.lines().all(|line| line.chars().count() <= width), "{fitted}");
            assert_eq!(fitted.matches("many").count(), 20, "{fitted}");
        }
        assert_eq!(table.to_json()["longest sample"], "many words ".repeat(20));
        let mut table = Table::of_words(&["layer", "share", "stay"]);
        table.row(&["0", "0.5", "12 s"]);
        assert_eq!(table.to_json().to_string(), r#"[{"layer":"0","share":0.5,"stay":"12 s"}]"#);
        let mut table = Table::new(&["rows", "count"]);
        table.row(&["3", "4"]);
        assert_eq!(table.to_json().to_string(), r#"{"3":4}"#);
    }
}
