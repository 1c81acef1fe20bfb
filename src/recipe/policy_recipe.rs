//! A policy by name, whose parameters are read by the file that owns it: `policy = "h2o"` or `policy.h2o = { … }`.

use std::fmt;
use std::sync::{Arc, OnceLock};

use serde::de::DeserializeOwned;

use super::diagnose::{Checked, suggest};
use super::read::read;
use super::table::{RecipeField, RecipeKey, TableEntries};
use super::tree::{Document, KeyValue, Node, NodeValue, RecipeSource, Spot};
use crate::units::{Fault, quoted};

/// Refuses a policy that there is not, and parameters that it does not have.
static POLICY_CHECK: OnceLock<fn(&PolicyRecipe) -> Checked<()>> = OnceLock::new();

/// From now on the policy of a recipe is checked with its other keys, so that all errors are told at once.
pub fn check_policies_by(check: fn(&PolicyRecipe) -> Result<(), Fault>) {
    let _ = POLICY_CHECK.set(check);
}

pub(super) const DEFAULT_POLICY: &str = "h2o";

/// A name and its parameters, with the places where they were written.
#[derive(Clone, Debug)]
pub struct PolicyRecipe {
    /// The name in the recipe; whether it exists is for its owner to say.
    pub name: String,
    pub(super) params: Node,
    spot: Spot,
    key: String,
    source: Arc<RecipeSource>,
}

impl PolicyRecipe {
    pub fn named(name: &str) -> Self {
        Self::with_params(name, toml::Table::new())
    }

    /// The policy of a recipe that names none: of what was tried on prose, the least loss above the full cache's.
    pub fn by_default() -> Self {
        let params = [("normalize_scores".to_owned(), true.into()), ("grace_period".to_owned(), 0.375.into())];
        Self::with_params(DEFAULT_POLICY, params.into_iter().collect())
    }

    pub fn with_params(name: &str, params: toml::Table) -> Self {
        let params = Node::from(toml::Value::Table(params));
        Self { name: name.to_owned(), params, spot: Spot::Code, key: "kv_cache.policy".to_owned(), source: Arc::default() }
    }

    /// Whether it is the policy that evicts nothing.
    pub fn is_dense(&self) -> bool {
        self.name == "dense"
    }

    fn fill(&mut self, entry: &KeyValue, default: &str) -> Checked<()> {
        let key = &self.key;
        let refuse = |spot, found: String| {
            self.source.reject(
                spot,
                format!("`{key}` must be a name, or a table with exactly one, found {found}"),
                format!("write `{key} = \"{default}\"` or `{key}.{default} = {{ … }}`"),
            )
        };
        match &entry.node.value {
            NodeValue::String(name) => {
                (self.name, self.spot, self.params) = (name.clone(), entry.node.spot, Node::table());
            }
            NodeValue::Table(entries) => match entries.as_slice() {
                [only] if matches!(only.node.value, NodeValue::Table(_)) => {
                    (self.name, self.spot, self.params) = (only.key.clone(), only.spot, only.node.clone());
                }
                [only] => return Err(refuse(only.spot, format!("`{}` without a table of parameters", only.key))),
                [] => return Err(refuse(entry.spot, "an empty table".to_owned())),
                [first, second, ..] => return Err(refuse(second.spot, format!("`{}` and `{}`", first.key, second.key))),
            },
            _ => return Err(refuse(entry.node.spot, format!("`{}`", entry.node.to_value()))),
        }
        Ok(())
    }

    /// The parameters. What `P` does not know is refused where it stands in the recipe, if `P` denies unknown fields.
    pub fn params<P: DeserializeOwned>(&self) -> Result<P, Fault> {
        read(&self.params, &format!("{}.{}", self.key, self.name), &self.source)
    }

    /// A policy within the parameters of this one: a name, or a table with one.
    pub fn inner(&self, key: &'static str, default: &str) -> Result<Self, Fault> {
        let mut inner = Self { key: key.to_owned(), source: self.source.clone(), ..Self::named(default) };
        let Some(entry) = self.params.entry(key) else { return Ok(inner) };
        inner.fill(entry, default)?;
        Ok(inner)
    }

    /// The value in a recipe: the name alone, or a table with the parameters under it.
    pub fn to_value(&self) -> toml::Value {
        match self.params.entries() {
            [] => toml::Value::String(self.name.clone()),
            _ => toml::Value::Table([(self.name.clone(), self.params.to_value())].into_iter().collect()),
        }
    }

    /// The error for a name that is not among the known ones.
    pub fn unknown(&self, known: &[&str]) -> Fault {
        let message = format!("unknown value `{}` for `{}`", quoted(&self.name), self.key);
        self.source.reject(self.spot, message, suggest(&self.name, known))
    }

    /// The error for a parameter (or for the policy as a whole) that its owner refuses.
    pub fn reject(&self, key: Option<&str>, message: String, hint: String) -> Fault {
        let entry = key.and_then(|key| self.params.entry(key));
        self.source.reject(entry.map_or(self.spot, |entry| entry.spot), message, hint)
    }
}

/// Which policies there are is known elsewhere. The name is checked here only once [`check_policies_by`] has registered a check. A recipe that
/// names none still lends its source to the errors about the default.
impl RecipeField for PolicyRecipe {
    fn keys(key: RecipeKey, default: &dyn Fn(&str) -> String) -> Vec<RecipeKey> {
        let check = |document: &Document, name: &str, _: &RecipeKey| {
            let policy = Self::find(document, name)?;
            policy.iter().zip(POLICY_CHECK.get()).try_for_each(|(policy, check)| check(policy))
        };
        vec![RecipeKey { takes: "name, or a table with one name".to_owned(), default: default(&key.name), check, ..key }]
    }

    fn find(document: &Document, key: &str) -> Checked<Option<Self>> {
        let mut policy = Self { key: key.to_owned(), source: document.source.clone(), ..Self::by_default() };
        if let Some(entry) = document.root.entry(key) {
            policy.fill(entry, DEFAULT_POLICY)?;
        }
        Ok(Some(policy))
    }

    fn entries(&self, key: &str) -> TableEntries {
        vec![(key.to_owned(), self.to_value())]
    }
}

/// `h2o`, or `h2o { grace_period = 0.375 }` where parameters are written.
impl fmt::Display for PolicyRecipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.params.entries().is_empty() { Ok(()) } else { write!(f, " {}", quoted(self.params.to_value())) }
    }
}

/// Where a policy was written does not matter.
impl PartialEq for PolicyRecipe {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.params.to_value() == other.params.to_value()
    }
}
