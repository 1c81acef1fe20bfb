//! The recipe as a tree whose every key and value remembers where it was written.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use super::diagnose::Checked;
pub(super) use super::diagnose::{RecipeSource, Spot};
use crate::units::{abridged, shell_word};

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) value: NodeValue,
    pub(super) spot: Spot,
}

#[derive(Clone, Debug)]
pub(super) enum NodeValue {
    String(String),
    Integer(i64),
    Float(f64),
    Boolean(bool),
    Array(Vec<Node>),
    Table(Vec<KeyValue>),
}

#[derive(Clone, Debug)]
pub(super) struct KeyValue {
    pub(super) key: String,
    pub(super) spot: Spot,
    pub(super) node: Node,
}

#[derive(Clone, Debug)]
pub(super) struct Document {
    pub(super) source: Arc<RecipeSource>,
    pub(super) root: Node,
}

/// How the TOML parser's error begins of brackets within more brackets than it follows.
const RECURSION: &str = "cannot recurse further";

impl Document {
    /// Reads the recipe's text; overrides and aliases come later.
    pub(super) fn parse(source: RecipeSource) -> Checked<Self> {
        let source = Arc::new(source);
        let spot_of = |span: Range<usize>| Spot::Text(span.start, span.end);
        let parsed = DeTable::parse(&source.text).map_err(|e| {
            if let Some(hint) = yaml(&source.path, &source.text) {
                return source.reject(Spot::Code, "this is YAML, and kvtune reads TOML".to_owned(), hint);
            }
            let spot = e.span().map_or(Spot::Code, spot_of);
            if e.message().starts_with(RECURSION) {
                let message = "arrays and inline tables are nested too deeply here, which no recipe needs".to_owned();
                return source.reject(spot, message, "close the brackets before, or name a recipe");
            }
            let hint = "strings stand in quotes, tables begin with `[name]`, and each key stands once, on a line of its own";
            source.reject(spot, format!("this is not valid TOML: {}", abridged(e.message())), hint)
        })?;
        let (span, table) = (parsed.span(), parsed.into_inner());
        let root = convert(&Spanned::new(span, DeValue::Table(table)), &source, &spot_of)?;
        Ok(Self { source, root })
    }
}

/// The way out of a text that is YAML, told from the file's name or from the first line that says something.
fn yaml(path: &Path, text: &str) -> Option<String> {
    let first = text.lines().map(str::trim_end).find(|line| !line.is_empty() && !line.starts_with('#')).unwrap_or_default();
    let (key, rest) = first.split_once(':').unwrap_or(("", first));
    let is_key = !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-'));
    let is_named = path.extension().is_some_and(|ending| ending == "yaml" || ending == "yml");
    let is_yaml = is_named || first == "---" || is_key && (rest.is_empty() || rest.starts_with(' '));
    is_yaml.then(|| format!("`kvtune init --from {}` writes a recipe in TOML", abridged(shell_word(path.display()))))
}

/// The first part of a dotted key, and the others.
fn split(key: &str) -> (&str, Option<&str>) {
    key.split_once('.').map_or((key, None), |(first, rest)| (first, Some(rest)))
}

impl Node {
    pub(super) fn table() -> Self {
        Self { value: NodeValue::Table(Vec::new()), spot: Spot::Code }
    }

    pub(super) fn string(text: &str, spot: Spot) -> Self {
        Self { value: NodeValue::String(text.to_owned()), spot }
    }

    pub(super) fn entries(&self) -> &[KeyValue] {
        match &self.value {
            NodeValue::Table(entries) => entries,
            _ => &[],
        }
    }

    pub(super) fn entries_mut(&mut self) -> Option<&mut Vec<KeyValue>> {
        match &mut self.value {
            NodeValue::Table(entries) => Some(entries),
            _ => None,
        }
    }

    pub(super) fn as_str(&self) -> Option<&str> {
        match &self.value {
            NodeValue::String(text) => Some(text),
            _ => None,
        }
    }

    /// A word, number or truth value as text; empty for anything else.
    pub(super) fn word(&self) -> String {
        match &self.value {
            NodeValue::String(text) => text.clone(),
            NodeValue::Integer(number) => number.to_string(),
            NodeValue::Boolean(value) => value.to_string(),
            _ => String::new(),
        }
    }

    pub(super) fn entry(&self, key: &str) -> Option<&KeyValue> {
        let (first, rest) = split(key);
        let entry = self.entries().iter().find(|entry| entry.key == first)?;
        rest.map_or(Some(entry), |rest| entry.node.entry(rest))
    }

    pub(super) fn get_mut(&mut self, key: &str) -> Option<&mut Node> {
        let (first, rest) = split(key);
        let node = &mut self.entries_mut()?.iter_mut().find(|entry| entry.key == first)?.node;
        match rest {
            Some(rest) => node.get_mut(rest),
            None => Some(node),
        }
    }

    /// Where `key` (dotted) was written, or the innermost table of it that was.
    pub(super) fn spot_near(&self, key: &str) -> Spot {
        let outer = || key.rsplit_once('.').map_or(Spot::Code, |(outer, _)| self.spot_near(outer));
        self.entry(key).map_or_else(outer, |entry| entry.spot)
    }

    /// Removes the entry at a dotted key; a table that this leaves empty goes too.
    pub(super) fn take(&mut self, key: &str) -> Option<KeyValue> {
        let (first, rest) = split(key);
        let entries = self.entries_mut()?;
        let at = entries.iter().position(|entry| entry.key == first)?;
        let Some(rest) = rest else { return Some(entries.remove(at)) };
        let taken = entries[at].node.take(rest)?;
        if entries[at].node.entries().is_empty() {
            entries.remove(at);
        }
        Some(taken)
    }

    /// Removes what was written at `spot` of the recipe's text within this value; false where it is not there.
    pub(super) fn remove_at(&mut self, spot: Spot) -> bool {
        // All values of an override share one spot, so none can be told apart.
        if !matches!(spot, Spot::Text(..)) {
            return false;
        }
        match &mut self.value {
            NodeValue::Table(entries) => {
                let at = entries.iter().position(|entry| entry.spot == spot || entry.node.spot == spot);
                at.map(|at| entries.remove(at)).is_some() || entries.iter_mut().any(|entry| entry.node.remove_at(spot))
            }
            NodeValue::Array(items) => {
                let at = items.iter().position(|item| item.spot == spot);
                at.map(|at| items.remove(at)).is_some() || items.iter_mut().any(|item| item.remove_at(spot))
            }
            _ => false,
        }
    }

    /// Puts a value at a dotted key, whose last part becomes the entry's key; what stood there goes. False where something
    /// on the way is not a table.
    pub(super) fn put(&mut self, key: &str, spot: Spot, node: Node) -> bool {
        let Some(entries) = self.entries_mut() else { return false };
        let (first, rest) = split(key);
        let at = entries.iter().position(|entry| entry.key == first).unwrap_or_else(|| {
            entries.push(KeyValue { key: first.to_owned(), spot, node: Self::table() });
            entries.len() - 1
        });
        if let Some(rest) = rest {
            return entries[at].node.put(rest, spot, node);
        }
        entries[at] = KeyValue { key: first.to_owned(), spot, node };
        true
    }

    pub(super) fn to_value(&self) -> toml::Value {
        match &self.value {
            NodeValue::String(v) => toml::Value::String(v.clone()),
            NodeValue::Integer(v) => toml::Value::Integer(*v),
            NodeValue::Float(v) => toml::Value::Float(*v),
            NodeValue::Boolean(v) => toml::Value::Boolean(*v),
            NodeValue::Array(items) => toml::Value::Array(items.iter().map(Node::to_value).collect()),
            NodeValue::Table(entries) => {
                toml::Value::Table(entries.iter().map(|entry| (entry.key.clone(), entry.node.to_value())).collect())
            }
        }
    }
}

impl From<toml::Value> for Node {
    fn from(value: toml::Value) -> Self {
        let value = match value {
            toml::Value::String(v) => NodeValue::String(v),
            toml::Value::Integer(v) => NodeValue::Integer(v),
            toml::Value::Float(v) => NodeValue::Float(v),
            toml::Value::Boolean(v) => NodeValue::Boolean(v),
            toml::Value::Datetime(v) => NodeValue::String(v.to_string()),
            toml::Value::Array(items) => NodeValue::Array(items.into_iter().map(Node::from).collect()),
            toml::Value::Table(table) => NodeValue::Table(
                table.into_iter().map(|(key, value)| KeyValue { key, spot: Spot::Code, node: Node::from(value) }).collect(),
            ),
        };
        Self { value, spot: Spot::Code }
    }
}

/// Takes over what the TOML parser read; `spot_of` says what its spans mean.
pub(super) fn convert(
    from: &Spanned<DeValue<'_>>,
    source: &RecipeSource,
    spot_of: &dyn Fn(Range<usize>) -> Spot,
) -> Checked<Node> {
    let spot = spot_of(from.span());
    let too_large = |number| source.reject(spot, format!("the {number} does not fit in 64 bits"), "choose a smaller number");
    let value = match from.get_ref() {
        DeValue::String(text) => NodeValue::String(text.to_string()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map(NodeValue::Integer)
            .map_err(|_| too_large(format!("integer {number}")))?,
        DeValue::Float(number) => match number.as_str().parse::<f64>() {
            Ok(value) if value.is_finite() || !number.as_str().contains(|c: char| c.is_ascii_digit()) => NodeValue::Float(value),
            _ => return Err(too_large(format!("number {number}"))),
        },
        DeValue::Boolean(value) => NodeValue::Boolean(*value),
        // A date is kept as text; the key that takes one parses it.
        DeValue::Datetime(value) => NodeValue::String(value.to_string()),
        DeValue::Array(items) => {
            NodeValue::Array(items.iter().map(|item| convert(item, source, spot_of)).collect::<Checked<_>>()?)
        }
        DeValue::Table(table) => {
            let entry = |(key, value): (&Spanned<DeString<'_>>, _)| {
                let node = convert(value, source, spot_of)?;
                Ok(KeyValue { key: key.get_ref().to_string(), spot: spot_of(key.span()), node })
            };
            let mut entries = table.iter().map(entry).collect::<Checked<Vec<_>>>()?;
            // The parser sorts by name; a reader meets the first mistake first.
            entries.sort_by_key(|entry| entry.spot);
            NodeValue::Table(entries)
        }
    };
    Ok(Node { value, spot })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yaml_is_told_by_its_name_or_its_first_line() {
        let is_yaml = |path: &str, text: &str| yaml(Path::new(path), text).is_some();
        assert!(
            is_yaml("a.yml", "") && is_yaml("a", "# x\n\nbase_model: m\n") && is_yaml("a", "---\n") && is_yaml("a", "lora:\n")
        );
        assert!(!is_yaml("a.toml", "[model]\npath = \"a: b\"\n") && !is_yaml("a", "a = 'x: y'\nb: 1") && !is_yaml("a", ""));
    }
}
