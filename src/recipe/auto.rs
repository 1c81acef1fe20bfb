//! A value that a recipe may leave open: the word `"auto"`, or what its key takes otherwise.

use std::fmt;
use std::marker::PhantomData;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer};

/// How an open value is written.
pub(super) const AUTO: &str = "auto";

/// The name by which [`Auto`] asks the reader for the word. So the errors are those of `T`, with the word added, which a visitor that
/// tried one after the other would lose.
pub(super) const OR_AUTO: &str = "a value or the word auto";

/// A value that may be left open.
#[derive(Clone, Copy)]
pub(super) enum Auto<T> {
    Open,
    Given(T),
}

impl<T> Auto<T> {
    pub(super) fn given(self) -> Option<T> {
        match self {
            Self::Open => None,
            Self::Given(value) => Some(value),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Auto<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WordOr<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for WordOr<T> {
            type Value = Auto<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "`{AUTO}` or a value")
            }

            fn visit_unit<E>(self) -> Result<Auto<T>, E> {
                Ok(Auto::Open)
            }

            fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<Auto<T>, D::Error> {
                T::deserialize(deserializer).map(Auto::Given)
            }
        }

        deserializer.deserialize_newtype_struct(OR_AUTO, WordOr(PhantomData))
    }
}
