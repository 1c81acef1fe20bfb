//! All that is wrong with a recipe, found in one reading; what may only follow from something found before is not told.

use super::diagnose::{Checked, spot_of};
use super::plan::{Recipe, TABLES};
use super::tree::Spot;
use crate::units::{Exit, Fault};

const MAX_ERRORS: usize = 20;

/// The errors of a recipe, and the tables of which something is refused.
#[derive(Default)]
pub(super) struct Refusals {
    found: Vec<Fault>,
    doubtful: Vec<String>,
    is_all_doubtful: bool,
}

impl Refusals {
    pub(super) fn are_many(&self) -> bool {
        self.found.len() > MAX_ERRORS
    }

    /// Keeps an error. What else seems wrong with these tables may come from it.
    pub(super) fn add(&mut self, tables: &[&str], error: Fault) {
        self.doubtful.extend(tables.iter().map(|table| (*table).to_owned()));
        self.found.push(error);
    }

    /// Keeps the error of a check, if there is one; see [`Self::add`].
    pub(super) fn catch<T>(&mut self, tables: &[&str], checked: Checked<T>) -> Option<T> {
        checked.map_err(|error| self.add(tables, error)).ok()
    }

    /// Keeps the error of a key that does not exist: the tables that its hint names are in doubt, too; all where it names none.
    pub(super) fn unknown(&mut self, table: &str, error: Fault) {
        let hint = error.hint().unwrap_or_default();
        let names = |table: &str| {
            ["`", "."].iter().any(|end| hint.contains(&format!("`{table}{end}"))) || hint.contains(&format!("[{table}]"))
        };
        let meant: Vec<&str> = TABLES.iter().map(|(table, _)| *table).filter(|name| !name.is_empty() && names(name)).collect();
        self.is_all_doubtful |= table.is_empty() && meant.is_empty();
        self.add(&[&meant[..], &[table]].concat(), error);
    }

    /// Looks at what values of these tables come to together, unless one of them is in doubt.
    pub(super) fn weigh<T>(&mut self, tables: &[&str], checked: Checked<T>) -> Option<T> {
        let is_doubtful = self.is_all_doubtful || tables.iter().any(|table| self.doubtful.iter().any(|other| other == table));
        if is_doubtful { checked.ok() } else { self.catch(&[], checked) }
    }

    pub(super) fn doubt(&mut self, table: &str) {
        self.doubtful.push(table.to_owned());
    }

    pub(super) fn into_first(self) -> Option<Fault> {
        self.found.into_iter().next()
    }

    /// The recipe, if nothing is wrong with it; else the errors in the order in which a reader meets them.
    pub(super) fn or_recipe(mut self, resolved: Checked<Recipe>) -> Checked<Recipe> {
        // Where something was found, what does not resolve comes from that.
        if self.found.is_empty() {
            return resolved;
        }
        self.found.sort_by_key(|error| match spot_of(error) {
            Spot::Text(start, _) => (0, start),
            Spot::Code => (1, 0),
            Spot::Override(index) => (2, index),
        });
        if self.are_many() {
            self.found.truncate(MAX_ERRORS);
            self.found.push(Fault::new(Exit::Usage, format!("only the first {MAX_ERRORS} errors are shown")));
        }
        let first = self.found.remove(0);
        Err(first.with_further(self.found))
    }
}
