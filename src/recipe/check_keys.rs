//! The keys of a recipe one by one: that each exists, that its value is of its type and keeps its rule, that none is missing.

use toml::Table;

use super::plan::{TABLES, TableKeys};
use super::refusals::Refusals;
use super::table::{RecipeKey, RecipeTable, dotted};
use super::tree::{Document, Node, Spot};
use super::value::RecipeReader;

/// Refuses keys that do not exist, and values that are wrong by themselves; these are taken out.
pub(super) fn check_keys(document: &mut Document, refusals: &mut Refusals) {
    for TableKeys { name: table, keys } in TABLES.iter() {
        if !table.is_empty()
            && let Err(error) = RecipeReader::new(document).parse::<Table>(table)
        {
            refusals.add(&[table], error);
            document.root.take(table);
            continue;
        }
        for key in keys {
            check_value(document, table, key, refusals);
        }
        let inner = if table.is_empty() { Some(&document.root) } else { document.root.entry(table).map(|entry| &entry.node) };
        let beside = TABLES.iter().map(|other| other.name).filter(|name| table.is_empty() && !name.is_empty());
        let known: Vec<&str> = beside.chain(keys.iter().map(|key| key.text.name.as_str())).collect();
        for entry in inner.into_iter().flat_map(Node::entries).filter(|entry| !known.contains(&entry.key.as_str())) {
            refusals.unknown(table, document.source.unknown_key(entry.spot, table, &entry.key, &known));
            if refusals.are_many() {
                return;
            }
        }
    }
}

/// Refuses what is wrong with a value: all of it, where its parts can be looked at alone.
fn check_value(document: &mut Document, table: &str, key: &RecipeKey, refusals: &mut Refusals) {
    let name = dotted(table, &key.text.name);
    let mut is_first = document.root.entry(&name).is_some();
    while let Err(error) = (key.check)(&RecipeReader::new(document), &name, &key.text) {
        let goes_on = error.culprit.zip(document.root.get_mut(&name)).is_some_and(|(spot, value)| value.remove_at(spot));
        if is_first || goes_on {
            refusals.add(&[table], error);
        }
        if !goes_on || refusals.are_many() {
            document.root.take(&name);
            return;
        }
        is_first = false;
    }
}

/// Refuses a table without the key that it must have, and puts something in its place.
pub(super) fn require<T: RecipeTable>(document: &mut Document, key: &str, refusals: &mut Refusals) {
    if let Err(error) = T::read(&RecipeReader::new(document)) {
        refusals.weigh(&[T::NAME], Err::<T, _>(error));
        document.root.put(&dotted(T::NAME, key), Spot::Code, Node::from(toml::Value::from(".")));
    }
}
