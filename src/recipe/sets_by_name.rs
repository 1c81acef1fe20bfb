//! `[[data.sets]]` as tables by their names, so that each key of a set has a place of its own in a document.

use super::alias;
use super::data_sets::SETS;
use super::diagnose::Checked;
use super::overrides;
use super::refusals::Refusals;
use super::tree::{Document, KeyValue, Node, NodeValue};

/// What a set calls `train`, as there is `validation` beside it.
const PATH: &str = "path";

/// Brings the sets of a document to tables by their names, with kvtune's own spellings, and lists their files as `data.train`. Returns the
/// notes on spellings.
pub(super) fn apply(document: &mut Document, refusals: &mut Refusals) -> Vec<String> {
    let notes = by_name(document, refusals);
    refusals.catch(&["data"], notes).unwrap_or_default()
}

fn by_name(document: &mut Document, refusals: &mut Refusals) -> Checked<Vec<String>> {
    overrides::prefer_override(document, "data.train", SETS, "each set names its own files as `path`")?;
    overrides::prefer_override(document, "data.validation", SETS, "each set names its own `validation`")?;
    let Some(sets) = document.root.take(SETS) else { return Ok(Vec::new()) };
    let items: Vec<(Option<String>, Node)> = match sets.node.value {
        NodeValue::Array(items) => items.into_iter().map(|node| (None, node)).collect(),
        NodeValue::Table(entries) => entries.into_iter().map(|entry| (Some(entry.key), entry.node)).collect(),
        _ => Vec::new(),
    };
    let (mut named, mut notes, mut files) = (Vec::<KeyValue>::new(), Vec::new(), Vec::new());
    for (name, mut node) in items {
        let spot = node.spot;
        let refuse = |message: &str, hint: &str| Err(document.source.reject(spot, message.to_owned(), hint));
        let Some(path) = node.take(PATH).or_else(|| node.take("train")) else {
            return refuse(
                "a data set lacks `path`",
                "write `[[data.sets]]`, and below it `path = …`: a file, a folder, or an array",
            );
        };
        let paths = if let NodeValue::Array(paths) = &path.node.value { paths } else { std::slice::from_ref(&path.node) };
        files.extend(paths.to_vec());
        let written = node.take("name").and_then(|entry| entry.node.as_str().map(str::to_owned));
        let name = name.or(written).unwrap_or_else(|| name_of(paths));
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c)) {
            return refuse(
                &format!("`{name}` is no name of a data set"),
                "give the set a `name` of letters, digits, `-` and `_`",
            );
        }
        if named.iter().any(|other| other.key == name) {
            return refuse(&format!("two data sets are called `{name}`"), "give each a `name` of its own");
        }
        node.put("train", path.spot, path.node);
        let mut alone = Document { source: document.source.clone(), root: Node::table() };
        alone.root.put("data", spot, node);
        notes.extend(alias::apply(&mut alone, refusals));
        for (one, other, why) in overrides::EXCLUSIVE {
            overrides::prefer_override(&mut alone, one, other, why)?;
        }
        named.extend(alone.root.take("data").map(|set| KeyValue { key: name, ..set }));
    }
    if named.is_empty() {
        let (message, hint) = ("`data.sets` lists no data set".to_owned(), "write `[[data.sets]]` with a `path`");
        return Err(document.source.reject(sets.spot, message, hint));
    }
    document.root.put("data.train", sets.spot, Node { value: NodeValue::Array(files), spot: sets.spot });
    document.root.put(SETS, sets.spot, Node { value: NodeValue::Table(named), spot: sets.spot });
    Ok(notes)
}

/// The name of the first file, as far as it is fit for a key.
fn name_of(paths: &[Node]) -> String {
    let file = std::path::Path::new(paths.first().and_then(Node::as_str).unwrap_or_default()).file_name();
    let stem = file.and_then(|name| name.to_str()?.split('.').next()).unwrap_or_default();
    stem.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect()
}
