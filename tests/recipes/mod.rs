//! The room `recipe`: what loads, what is refused and where the caret stands, and that nothing is lost on the way to disk.

mod aliases;
mod all_errors;
mod contradictions;
mod data_sets;
mod generated;
mod import;
mod loads;
mod overrides;
mod policies;
mod reference;
mod round_trip;
mod typos;

use std::path::Path;

use kvtune::data::formats;
use kvtune::recipe::{Recipe, Resolved, know_formats};
use kvtune::units::Fault;

/// The parts of an error's text.
trait Told {
    /// What is wrong, without the place.
    fn message(&self) -> String;

    /// Line and column of the caret in the recipe, counted from 1.
    fn place(&self) -> Option<(usize, usize)>;

    fn line(&self) -> Option<usize> {
        self.place().map(|(line, _)| line)
    }

    fn column(&self) -> Option<usize> {
        self.place().map(|(_, column)| column)
    }
}

impl Told for Fault {
    fn message(&self) -> String {
        self.to_string().lines().next().unwrap_or_default().to_owned()
    }

    fn place(&self) -> Option<(usize, usize)> {
        let text = self.to_string();
        let mut numbers = text.lines().nth(1)?.rsplit(':');
        let column = numbers.next()?.parse().ok()?;
        Some((numbers.next()?.parse().ok()?, column))
    }
}

/// A recipe of the fewest keys.
const SMALL: &str = "[model]\npath = \"model\"\n[data]\nformat = \"tokens\"\ntrain = \"t.jsonl\"\n";

fn parse(text: &str) -> Result<Resolved, Fault> {
    parse_with(text, &[])
}

fn parse_with(text: &str, overrides: &[&str]) -> Result<Resolved, Fault> {
    know_formats(formats());
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    Recipe::parse(text.to_owned(), Path::new("/nowhere/a.toml"), &overrides)
}

/// The small recipe with lines appended, or put into a table that it has.
fn with(lines: &str) -> String {
    for table in ["[model]\n", "[data]\n"] {
        if let Some(rest) = lines.strip_prefix(table) {
            return SMALL.replace(table, &format!("{table}{rest}\n"));
        }
    }
    if lines.starts_with('[') { format!("{SMALL}{lines}\n") } else { format!("{lines}\n{SMALL}") }
}

fn refused(text: &str) -> Fault {
    let error = parse(text).map(|r| r.recipe).expect_err(text);
    assert!(error.hint().is_some(), "no hint: {error}");
    error
}
