//! Words that a recipe uses, as enums with their spelling in one place.

/// An enum of words that the recipe uses, with its spelling in one place.
macro_rules! words {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
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
            fn takes(_: Option<&str>) -> String {
                super::diagnose::listed(Self::ALL.iter().map(|word| word.name()))
            }

            fn to_value(&self) -> Option<toml::Value> {
                Some(toml::Value::from(self.name()))
            }
        }
    };
}

pub(super) use words;
