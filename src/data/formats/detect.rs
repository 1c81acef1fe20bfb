//! Which format files have, by the fields of their first rows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{FORMATS, columns};
use crate::data::faults::{self, RowFault};
use crate::data::rows::{self, DataRow};
use crate::recipe::DataRecipe;
use crate::units::Fault;

const LOOKED_AT: usize = 10;

/// The format of files, and what it was told from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::data) struct Detected {
    pub(in crate::data) format: &'static str,
    pub(in crate::data) words: String,
    pub(in crate::data) columns: BTreeMap<String, String>,
}

/// Looks at the first sound rows of the first files; fails where none has the fields of a format, or they do not agree.
pub(in crate::data) fn detect(files: &[PathBuf], recipe: &DataRecipe) -> Result<Detected, Fault> {
    let mut detected: Option<Detected> = None;
    let (mut bad, mut doubt) = (None, None);
    let mut looked_at = 0;
    let walked = files.iter().try_for_each(|file| {
        rows::each(file, recipe, &mut |row| {
            match row {
                Ok(row) => {
                    match (of_row(&row, recipe.columns.is_empty()), &detected) {
                        (Ok(of_row), Some(before)) if (before.format, &before.columns) != (of_row.format, &of_row.columns) => {
                            let found = format!("{}, but {}", of_row.words, before.words);
                            return Err(Some(RowFault::unknown_format(row.place(), &found)));
                        }
                        (Ok(_), Some(_)) => {}
                        (Ok(of_row), None) => detected = Some(of_row),
                        (Err((error, true)), _) => doubt = doubt.take().or(Some(error)),
                        // A bad row of the format that others tell.
                        (Err((error, false)), _) => bad = bad.take().or(Some(error)),
                    }
                }
                Err(error) => bad = bad.take().or(Some(error)),
            }
            looked_at += 1;
            if looked_at < LOOKED_AT { Ok(()) } else { Err(rows::ENOUGH) }
        })
    });
    if let Err(Some(error)) = walked {
        return Err(error);
    }
    match (detected, doubt, bad) {
        (Some(detected), None, _) => Ok(detected),
        (Some(detected), Some(_), _) if detected.columns.is_empty() => Ok(detected),
        (_, Some(error), _) | (None, None, Some(error)) => Err(error),
        (None, None, None) => Err(faults::empty(files.first().map_or(Path::new(""), PathBuf::as_path))),
    }
}

/// An error says, too, whether there is a doubt: the columns might be those of a format, and others say more.
fn of_row(row: &DataRow, may_rename: bool) -> Result<Detected, (Fault, bool)> {
    let by_fields = FORMATS.iter().flat_map(|format| format.known_by.iter().map(move |&fields| (format, fields)));
    let known = by_fields.filter(|(_, fields)| fields.iter().all(|&field| row.fields().contains_key(field)));
    let listed = |fields: &mut dyn Iterator<Item = &str>| fields.map(|field| format!("`{field}`")).collect::<Vec<_>>().join(", ");
    if let Some((format, fields)) = known.min_by_key(|(format, _)| format.rank) {
        let format = format.facts.name;
        let words = format!("`{format}` by the fields {} of {}", listed(&mut fields.iter().copied()), row.place());
        return Ok(Detected { format, words, columns: BTreeMap::new() });
    }
    let by_others = columns::known_by_others(row).filter(|_| may_rename);
    let is_doubt = by_others.as_ref().is_some_and(|(.., has_more)| *has_more);
    let Some((format, columns, false)) = by_others else {
        let found = format!("the fields {}", listed(&mut row.fields().keys().map(String::as_str)));
        let error = RowFault::unknown_format(row.place(), &found);
        let Some(table) = columns::proposal(row).filter(|_| may_rename) else { return Err((error, is_doubt)) };
        let hint = format!("if these columns hold all that is trained, write\n{table}\nor name others in it");
        return Err((error.with_hint(hint), is_doubt));
    };
    let is_other = |name: &&str| !columns.values().any(|column| column == name);
    let others = listed(&mut row.fields().keys().map(String::as_str).filter(is_other));
    let others = if others.is_empty() { others } else { format!("; not read: {others}") };
    let pairs: Vec<String> = columns.iter().map(|(field, column)| format!("`{column}` as `{field}`")).collect();
    let words = format!("`{format}` by the columns {} of {}{others}", pairs.join(", "), row.place());
    Ok(Detected { format, words, columns })
}
