//! Enums whose variants have names.

/// An enum with the name of each variant beside it: the name in tables, keys and messages. `ALL` has the variants in their order.
macro_rules! named {
    ($(#[$meta:meta])* $vis:vis enum $enum:ident { $($(#[$doc:meta])* $variant:ident = $name:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $enum {
            $($(#[$doc])* $variant),+
        }

        impl $enum {
            $vis const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            $vis fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),+
                }
            }
        }
    };
}

pub(crate) use named;
