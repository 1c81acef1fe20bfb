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
use kvtune::recipe::{Recipe, RecipeError, Resolved, know_formats};

/// Where the caret of an error stands in the recipe, counted from 1.
trait Caret {
    fn place(&self) -> Option<(usize, usize)>;

    fn line(&self) -> Option<usize> {
        self.place().map(|(line, _)| line)
    }

    fn column(&self) -> Option<usize> {
        self.place().map(|(_, column)| column)
    }
}

impl Caret for RecipeError {
    fn place(&self) -> Option<(usize, usize)> {
        let shown = self.to_string();
        let (_, place) = shown.strip_prefix(&self.message)?.split_once("--> ")?;
        let mut numbers = place.lines().next()?.rsplit(':');
        let column = numbers.next()?.parse().ok()?;
        Some((numbers.next()?.parse().ok()?, column))
    }
}

/// A recipe of the fewest keys.
const SMALL: &str = "[model]\npath = \"model\"\n[data]\nformat = \"tokens\"\ntrain = \"t.jsonl\"\n";

fn parse(text: &str) -> Result<Resolved, RecipeError> {
    parse_with(text, &[])
}

fn parse_with(text: &str, overrides: &[&str]) -> Result<Resolved, RecipeError> {
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

fn refused(text: &str) -> RecipeError {
    let error = parse(text).map(|r| r.recipe).expect_err(text);
    assert!(error.hint.clone().is_some(), "no hint: {error}");
    error
}
