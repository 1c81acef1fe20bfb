//! An error as whoever started the process meets it: what is wrong, the way out, the cause and the exit code.

use std::error::Error;
use std::fmt;

use super::{Exit, Failure};

/// An error of which no code asks more than what it tells. It is made where it happens, or of an error that has a type of its own.
#[derive(Debug)]
pub struct Fault(Box<FaultSource>);

#[derive(Debug)]
enum FaultSource {
    Told(ToldFault),
    Typed(Box<dyn TypedFault>),
}

#[derive(Debug)]
struct ToldFault {
    exit: Exit,
    message: String,
    hint: Option<String>,
    cause: Option<Box<dyn Error>>,
}

trait TypedFault: Error + Failure + 'static {}

impl<E: Error + Failure + 'static> TypedFault for E {}

impl Fault {
    /// A message without a hint: lower case, no full stop.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self(Box::new(FaultSource::Told(ToldFault { exit, message: message.into(), hint: None, cause: None })))
    }

    /// The arguments or the recipe are wrong, and the hint says what would be right.
    pub fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message).with_hint(hint)
    }

    /// Data, weights or a checkpoint are wrong or missing, and the hint says what to do.
    pub fn data(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(Exit::Data, message).with_hint(hint)
    }

    /// What the user can do: one sentence without a full stop, in lower case.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        if let FaultSource::Told(told) = &mut *self.0 {
            told.hint = Some(hint.into());
        }
        self
    }

    #[must_use]
    pub fn caused_by(mut self, cause: impl Error + 'static) -> Self {
        if let FaultSource::Told(told) = &mut *self.0 {
            told.cause = Some(Box::new(cause));
        }
        self
    }

    /// The error that it was made of, if that is of this type.
    pub fn of_type<E: Error + 'static>(&self) -> Option<&E> {
        match &*self.0 {
            FaultSource::Told(_) => None,
            FaultSource::Typed(error) => (&**error as &(dyn Error + 'static)).downcast_ref(),
        }
    }

    /// What it means, for errors that pass it on.
    pub fn meaning(&self) -> &dyn Failure {
        match &*self.0 {
            FaultSource::Told(told) => told,
            FaultSource::Typed(error) => &**error,
        }
    }

    pub fn hint(&self) -> Option<String> {
        self.meaning().hint()
    }

    pub fn exit(&self) -> Exit {
        self.meaning().exit()
    }

    /// Errors that were found beside this one, each with its hint.
    pub fn further(&self) -> Vec<(&dyn Error, Option<String>)> {
        self.meaning().further()
    }
}

/// What ends a process with a code of its own.
pub trait Exits {
    fn exit_code(&self) -> Exit;
}

impl<E: Failure> Exits for E {
    fn exit_code(&self) -> Exit {
        self.exit()
    }
}

impl Exits for Fault {
    fn exit_code(&self) -> Exit {
        self.exit()
    }
}

impl Failure for ToldFault {
    fn hint(&self) -> Option<String> {
        self.hint.clone()
    }

    fn exit(&self) -> Exit {
        self.exit
    }
}

impl<E: Error + Failure + 'static> From<E> for Fault {
    fn from(error: E) -> Self {
        Self(Box::new(FaultSource::Typed(Box::new(error))))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            FaultSource::Told(told) => f.write_str(&told.message),
            FaultSource::Typed(error) => error.fmt(f),
        }
    }
}

impl Error for Fault {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &*self.0 {
            FaultSource::Told(told) => told.cause.as_deref(),
            FaultSource::Typed(error) => error.source(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("typed")]
    struct Typed(#[source] std::io::Error);

    impl Failure for Typed {
        fn exit(&self) -> Exit {
            Exit::Memory
        }
    }

    #[test]
    fn it_tells_what_it_was_made_of() {
        let io = || std::io::Error::other("the disk");
        let told = Fault::data("a", "b").caused_by(io());
        assert_eq!((told.to_string(), told.hint(), told.exit()), ("a".to_owned(), Some("b".to_owned()), Exit::Data));
        assert_eq!(told.source().unwrap().to_string(), "the disk");
        let typed = Fault::from(Typed(io()));
        assert_eq!((typed.to_string(), typed.hint(), typed.exit()), ("typed".to_owned(), None, Exit::Memory));
        assert_eq!(typed.source().unwrap().to_string(), "the disk");
        assert!(typed.of_type::<Typed>().is_some() && told.of_type::<Typed>().is_none() && told.further().is_empty());
    }
}
