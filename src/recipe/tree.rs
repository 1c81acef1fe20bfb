//! The recipe as a tree whose every key and value remembers where it was written.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

pub(super) use super::diagnose::Spot;
use super::diagnose::{RecipeError, RecipeLocation, suggest};
use super::not_toml;
use crate::units::{abridged, quoted};

/// What the user wrote: the recipe's text, and the overrides.
#[derive(Debug)]
pub(super) struct RecipeSource {
    pub(super) path: PathBuf,
    pub(super) text: String,
    pub(super) overrides: Vec<String>,
    /// The way out of a key that does not exist, from its table (dotted), the key, and the keys of the table. It knows all tables,
    /// which who reads one of them does not.
    pub(super) suggest_key: fn(&str, &str, &[&str]) -> String,
}

/// The source of a value that a program made.
impl Default for RecipeSource {
    fn default() -> Self {
        let suggest_key = |_: &str, written: &str, known: &[&str]| suggest(written, known);
        Self { path: PathBuf::new(), text: String::new(), overrides: Vec::new(), suggest_key }
    }
}

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

impl RecipeSource {
    pub(super) fn place(&self, spot: Spot) -> RecipeLocation {
        match spot {
            Spot::Code if self.path.as_os_str().is_empty() => RecipeLocation::Code,
            Spot::Code => RecipeLocation::File(self.path.clone()),
            Spot::Override(index) => RecipeLocation::Override(self.overrides[index].clone()),
            Spot::Text(start, end) => {
                let before = &self.text[..start];
                let line_start = before.rfind('\n').map_or(0, |at| at + 1);
                let line = self.text[line_start..].lines().next().unwrap_or_default();
                let column = self.text[line_start..start].chars().count() + 1;
                let meant = self.text[start..end].lines().next().unwrap_or_default().chars().count();
                let text = line.to_owned();
                RecipeLocation::Text {
                    path: self.path.clone(),
                    line: before.matches('\n').count() + 1,
                    column,
                    text,
                    width: meant.max(1),
                }
            }
        }
    }

    pub(super) fn reject(&self, spot: Spot, message: String, hint: impl Into<String>) -> RecipeError {
        RecipeError {
            place: Box::new(self.place(spot)),
            hint: Some(hint.into()),
            culprit: Some(spot),
            ..RecipeError::plain(message)
        }
    }

    /// Refuses a key that `table` (dotted; empty at the top level) does not have.
    pub(super) fn unknown_key(&self, spot: Spot, table: &str, key: &str, known: &[&str]) -> RecipeError {
        let place = if table.is_empty() { "at the top level".to_owned() } else { format!("in `[{}]`", abridged(table)) };
        self.reject(spot, format!("unknown key `{}` {place}", quoted(key)), (self.suggest_key)(table, key, known))
    }
}

/// How the TOML parser's error begins of brackets within more brackets than it follows.
const RECURSION: &str = "cannot recurse further";

impl Document {
    /// Reads the recipe's text; overrides and aliases come later.
    pub(super) fn parse(source: RecipeSource) -> Result<Self, RecipeError> {
        let spot_of = |span: Range<usize>| Spot::Text(span.start, span.end);
        let parsed = DeTable::parse(&source.text).map_err(|e| {
            if let Some(hint) = not_toml::yaml(&source.path, &source.text) {
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
        let root = convert(&Spanned::new(span, DeValue::Table(table)), &spot_of)
            .map_err(|(spot, message)| source.reject(spot, message, "choose a smaller number"))?;
        Ok(Self { source: Arc::new(source), root })
    }

    /// Refuses what stands at `key` (dotted); the caret stands below it, or below the table that it is missing from.
    pub(super) fn reject(&self, key: &str, message: String, hint: impl Into<String>) -> RecipeError {
        self.source.reject(self.root.spot_near(key), message, hint)
    }
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
        let (first, rest) = key.split_once('.').map_or((key, None), |(first, rest)| (first, Some(rest)));
        let entry = self.entries().iter().find(|entry| entry.key == first)?;
        rest.map_or(Some(entry), |rest| entry.node.entry(rest))
    }

    pub(super) fn get_mut(&mut self, key: &str) -> Option<&mut Node> {
        let (first, rest) = key.split_once('.').map_or((key, None), |(first, rest)| (first, Some(rest)));
        let node = &mut self.entries_mut()?.iter_mut().find(|entry| entry.key == first)?.node;
        match rest {
            Some(rest) => node.get_mut(rest),
            None => Some(node),
        }
    }

    /// Where `key` (dotted) was written, or the innermost table of it that was.
    pub(super) fn spot_near(&self, key: &str) -> Spot {
        let mut key = key;
        loop {
            if let Some(entry) = self.entry(key) {
                return entry.spot;
            }
            let Some((outer, _)) = key.rsplit_once('.') else { return Spot::Code };
            key = outer;
        }
    }

    /// Removes the entry at a dotted key; a table that this leaves empty goes too.
    pub(super) fn take(&mut self, key: &str) -> Option<KeyValue> {
        let entries = self.entries_mut()?;
        let Some((first, rest)) = key.split_once('.') else {
            let at = entries.iter().position(|entry| entry.key == key)?;
            return Some(entries.remove(at));
        };
        let at = entries.iter().position(|entry| entry.key == first)?;
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
        let (first, rest) = key.split_once('.').map_or((key, None), |(first, rest)| (first, Some(rest)));
        let at = entries.iter().position(|entry| entry.key == first);
        match (rest, at) {
            (Some(rest), Some(at)) => return entries[at].node.put(rest, spot, node),
            (Some(rest), None) => {
                let mut table = Node::table();
                table.put(rest, spot, node);
                entries.push(KeyValue { key: first.to_owned(), spot, node: table });
            }
            (None, Some(at)) => entries[at] = KeyValue { key: first.to_owned(), spot, node },
            (None, None) => entries.push(KeyValue { key: first.to_owned(), spot, node }),
        }
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
pub(super) fn convert(from: &Spanned<DeValue<'_>>, spot_of: &dyn Fn(Range<usize>) -> Spot) -> Result<Node, (Spot, String)> {
    let spot = spot_of(from.span());
    let value = match from.get_ref() {
        DeValue::String(text) => NodeValue::String(text.to_string()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map(NodeValue::Integer)
            .map_err(|_| (spot, format!("the integer {number} does not fit in 64 bits")))?,
        DeValue::Float(number) => match number.as_str().parse::<f64>() {
            Ok(value) if value.is_finite() || !number.as_str().contains(|c: char| c.is_ascii_digit()) => NodeValue::Float(value),
            _ => return Err((spot, format!("the number {number} does not fit in 64 bits"))),
        },
        DeValue::Boolean(value) => NodeValue::Boolean(*value),
        // A date is kept as text; the key that takes one parses it.
        DeValue::Datetime(value) => NodeValue::String(value.to_string()),
        DeValue::Array(items) => NodeValue::Array(items.iter().map(|item| convert(item, spot_of)).collect::<Result<_, _>>()?),
        DeValue::Table(table) => {
            let mut entries = Vec::with_capacity(table.len());
            for (key, value) in table {
                entries.push(KeyValue {
                    key: key.get_ref().to_string(),
                    spot: spot_of(key.span()),
                    node: convert(value, spot_of)?,
                });
            }
            // The parser sorts by name; a reader meets the first mistake first.
            entries.sort_by_key(|entry| entry.spot);
            NodeValue::Table(entries)
        }
    };
    Ok(Node { value, spot })
}
