//! Values that are declared by macros: words, as enums with their spelling in one place, and what may have one of several forms.

/// An enum of words that the recipe uses, with its spelling in one place, and behind a `|` what other programs call a word.
macro_rules! words {
    ($(#[$meta:meta])* $vis:vis enum $name:ident {
        $($(#[$doc:meta])* $variant:ident = $word:literal $(| $other:literal)*),+ $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
        $vis enum $name {
            $($(#[$doc])* #[serde(rename = $word)] $variant),+
        }

        impl $name {
            $vis const ALL: &'static [Self] = &[$(Self::$variant),+];

            $vis fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $word),+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl super::value::RecipeValue for $name {
            const WORDS: super::value::Spellings = &[$(($word, &[$($other),*])),+];

            fn takes(_: Option<&str>) -> String {
                super::diagnose::one_of(Self::ALL.iter().map(|word| word.name()))
            }
        }
    };
}

pub(super) use words;

/// Reads a type whose values have one of several forms, of which an error says what they are: words, whole numbers from 0 on, lists and tables.
/// Only those that are named are read.
macro_rules! forms {
    (
        $type:ty: $expected:expr;
        $(word<$error:ident> |$word:ident| $of_word:expr;)?
        $(whole |$number:ident| $of_number:expr;)?
        $(list |$list:ident: $items:ty| $of_list:expr;)?
        $(table |$table:ident: $entries:ty| $of_table:expr;)?
    ) => {
        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Forms;

                impl<'de> serde::de::Visitor<'de> for Forms {
                    type Value = $type;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str($expected)
                    }

                    $(fn visit_str<$error: serde::de::Error>(self, $word: &str) -> Result<$type, $error> {
                        $of_word
                    })?

                    $(fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<$type, E> {
                        let found = serde::de::Unexpected::Signed(number);
                        let $number = usize::try_from(number).map_err(|_| E::invalid_type(found, &self))?;
                        Ok($of_number)
                    })?

                    $(fn visit_seq<A: serde::de::SeqAccess<'de>>(self, items: A) -> Result<$type, A::Error> {
                        let items = serde::de::value::SeqAccessDeserializer::new(items);
                        <$items as serde::Deserialize>::deserialize(items).map(|$list| $of_list)
                    })?

                    $(fn visit_map<A: serde::de::MapAccess<'de>>(self, entries: A) -> Result<$type, A::Error> {
                        let entries = serde::de::value::MapAccessDeserializer::new(entries);
                        <$entries as serde::Deserialize>::deserialize(entries).map(|$table| $of_table)
                    })?
                }

                deserializer.deserialize_any(Forms)
            }
        }
    };
}

pub(super) use forms;
