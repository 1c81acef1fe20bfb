//! A table of the recipe is declared once, as a struct. `table!` makes of it the keys with all that there is to know of them, the
//! reading and the writing.

use toml::Value;

use super::diagnose::Checked;
use super::read::{AUTO, check_word};
use super::tree::Document;
use super::value::{KeyRule, RecipeValue, Spellings, shown};

/// The keys and values of a table, in their order; a key that is left out is not there.
pub(super) type TableEntries = Vec<(String, Value)>;

/// A table that [`table!`] declares.
pub(super) trait RecipeTable: Sized {
    /// Empty at the top of the file.
    const NAME: &'static str;

    fn keys() -> Vec<RecipeKey>;

    /// Reads what is written, and puts the default for what is not.
    fn read(document: &Document) -> Checked<Self>;

    fn entries(&self) -> TableEntries;
}

/// A field of a table: mostly one key; but a choice that [`either!`] declares, or a store, has several.
pub(super) trait RecipeField: Sized {
    /// Lists the keys of a field that is declared as `key`, with what its type says of them; `default` tells what holds where a key is not
    /// written.
    fn keys(key: RecipeKey, default: &dyn Fn(&str) -> String) -> Vec<RecipeKey>;

    /// What is written of it at `key` (dotted).
    fn find(document: &Document, key: &str) -> Checked<Option<Self>>;

    fn entries(&self, key: &str) -> TableEntries;
}

/// A key of a table, and all that there is to know of it.
pub struct RecipeKey {
    pub name: String,
    pub meaning: &'static str,
    /// What other programs call it: dotted, or without a dot at the top of the file.
    pub also: &'static [&'static str],
    /// Words of its value, and what other programs call them.
    pub words: Spellings,
    /// All words of its value, where another room tells them.
    pub all_words: fn() -> Vec<(&'static str, &'static [&'static str])>,
    pub(super) rule: Option<&'static KeyRule>,
    pub may_be_auto: bool,
    /// What its value may be, in words.
    pub takes: String,
    pub default: String,
    /// Refuses a value of another type, and one that breaks the rule; it is told the dotted name.
    pub(super) check: fn(&Document, &str, &RecipeKey) -> Checked<()>,
}

impl RecipeKey {
    /// With nothing declared but its name and its meaning, before its type has said more of it.
    pub(super) fn named(name: &str, meaning: &'static str) -> Self {
        let (name, takes, default, rule, may_be_auto) = (name.to_owned(), String::new(), String::new(), None, false);
        Self {
            name,
            meaning,
            also: &[],
            words: &[],
            all_words: Vec::new,
            rule,
            may_be_auto,
            takes,
            default,
            check: |_, _, _| Ok(()),
        }
    }
}

/// What the reference says of a key that is not written, where its field has these values then.
pub(super) fn default_of(entries: &TableEntries, key: &str) -> String {
    let value = entries.iter().find(|(name, _)| name == key).map(|(_, value)| format!("`{}`", shown(value)));
    value.unwrap_or_else(|| "none".to_owned())
}

impl<T: RecipeValue> RecipeField for T {
    fn keys(key: RecipeKey, default: &dyn Fn(&str) -> String) -> Vec<RecipeKey> {
        let check = |document: &Document, name: &str, key: &RecipeKey| {
            check_word(document, name, (key.all_words)().into_iter().map(|(word, _)| word).collect())?;
            let value = if key.may_be_auto { document.value_or_auto::<T>(name)? } else { document.value::<T>(name)? };
            let value = value.map(|value| value.checked(document, name)).transpose()?.as_ref().and_then(T::to_value);
            value.iter().zip(key.rule).try_for_each(|(value, rule)| rule.check(document, name, value))
        };
        let takes = T::takes(key.rule.map(|rule| rule.takes));
        let takes = if key.may_be_auto { format!("{takes}, or `{AUTO}`") } else { takes };
        vec![RecipeKey { takes, default: default(&key.name), words: T::WORDS, check, ..key }]
    }

    fn find(document: &Document, key: &str) -> Checked<Option<Self>> {
        document.value::<T>(key)?.map(|value| value.checked(document, key)).transpose()
    }

    fn entries(&self, key: &str) -> TableEntries {
        self.to_value().map(|value| (key.to_owned(), value)).into_iter().collect()
    }
}

/// The key of a field, which may be a word of Rust.
pub(super) fn key_name(field: &'static str) -> &'static str {
    field.trim_start_matches("r#")
}

/// `lora.r`, or `output_dir` at the top of the file.
pub(super) fn dotted(table: &str, key: &str) -> String {
    if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") }
}

/// The table of a dotted key; empty at the top of the file.
pub(super) fn table_of(key: &str) -> &str {
    key.split_once('.').map_or("", |(table, _)| table)
}

/// Declares a table as a struct. A field is a key: its comment is the text of the reference, and behind `=` is its default, which
/// may name the fields above it. The attributes, in this order, where there is something to say:
///
/// * `#[also("lora.rank", …)]`: what other programs call the key
/// * `#[all_words(DataFormat::words)]`: all words of its value, where another room tells them
/// * `#[rule(COUNT)]`: what its number must be
/// * `#[auto = true]`: that it may be left to the planner
/// * `#[default("all")]`: what the reference says of the default, where the value does not tell; `required` of a key that `resolve` asks for
macro_rules! table {
    (@rule) => { None };
    (@rule $rule:expr) => { Some(const { &$rule }) };

    (@default $type:ty, $key:ident, [$told:literal] $default:expr) => { |_: &str| $told.to_owned() };
    (@default $type:ty, $key:ident, [] $default:expr) => {{
        let entries = <$type as RecipeField>::entries(&$default, super::table::key_name(stringify!($key)));
        move |key: &str| super::table::default_of(&entries, key)
    }};

    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident in $table:literal {
            $(
                $(#[doc = $doc:literal])+
                $(#[also($($also:literal),+ $(,)?)])?
                $(#[all_words($all_words:expr)])?
                $(#[rule($rule:expr)])?
                $(#[auto = $auto:literal])?
                $(#[default($told:literal)])?
                $key_vis:vis $key:ident: $type:ty = $default:expr
            ),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        $vis struct $name {
            $(
                $(#[doc = $doc])+
                #[doc = concat!("\n\nDefault: `", stringify!($default), "`.")]
                $key_vis $key: $type,
            )+
        }

        /// The table without any key; one that is required is empty.
        impl Default for $name {
            fn default() -> Self {
                $(let $key: $type = $default;)+
                Self { $($key),+ }
            }
        }

        const _: () = {
            use super::diagnose::Checked;
            use super::table::{RecipeField, RecipeKey, RecipeTable, TableEntries};
            use super::tree::Document;

            impl RecipeTable for $name {
                const NAME: &'static str = $table;

                fn keys() -> Vec<RecipeKey> {
                    let mut keys = Vec::new();
                    $(
                        let key = RecipeKey {
                            also: &[$($($also),+)?],
                            $(all_words: $all_words,)?
                            rule: table!(@rule $($rule)?),
                            may_be_auto: [$($auto,)? false][0],
                            ..RecipeKey::named(super::table::key_name(stringify!($key)), concat!($($doc),+))
                        };
                        let default = table!(@default $type, $key, [$($told)?] $default);
                        keys.extend(<$type as RecipeField>::keys(key, &default));
                    )+
                    keys
                }

                fn read(document: &Document) -> Checked<Self> {
                    $(
                        let name = super::table::dotted($table, super::table::key_name(stringify!($key)));
                        let $key = <$type as RecipeField>::find(document, &name)?.unwrap_or_else(|| $default);
                    )+
                    Ok(Self { $($key),+ })
                }

                fn entries(&self) -> TableEntries {
                    [$(RecipeField::entries(&self.$key, super::table::key_name(stringify!($key)))),+].concat()
                }
            }
        };
    };
}

pub(super) use table;

/// Declares a field of a table that several keys exclude each other from: an enum with a variant for each. The attributes are those
/// of [`table!`]; `resolve` refuses two keys at once.
macro_rules! either {
    (
        $(#[$meta:meta])*
        $vis:vis enum $name:ident {
            $(
                $(#[doc = $doc:literal])+
                $(#[also($($also:literal),+ $(,)?)])?
                $(#[rule($rule:expr)])?
                $variant:ident($type:ty) in $key:literal
            ),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        $vis enum $name {
            $($(#[doc = $doc])+ $variant($type)),+
        }

        const _: () = {
            use super::diagnose::Checked;
            use super::table::{RecipeField, RecipeKey, TableEntries, dotted, table, table_of};
            use super::tree::Document;

            impl RecipeField for $name {
                fn keys(_: RecipeKey, default: &dyn Fn(&str) -> String) -> Vec<RecipeKey> {
                    let mut keys = Vec::new();
                    $(
                        let key = RecipeKey {
                            also: &[$($($also),+)?],
                            rule: table!(@rule $($rule)?),
                            ..RecipeKey::named($key, concat!($($doc),+))
                        };
                        keys.extend(<$type as RecipeField>::keys(key, default));
                    )+
                    keys
                }

                fn find(document: &Document, key: &str) -> Checked<Option<Self>> {
                    $(
                        if let Some(value) = <$type as RecipeField>::find(document, &dotted(table_of(key), $key))? {
                            return Ok(Some(Self::$variant(value)));
                        }
                    )+
                    Ok(None)
                }

                fn entries(&self, _: &str) -> TableEntries {
                    match self {
                        $(Self::$variant(value) => RecipeField::entries(value, $key)),+
                    }
                }
            }
        };
    };
}

pub(super) use either;
