//! An error as whoever started the process meets it: what is wrong, the way out, the cause and the exit code.

use std::error::Error;
use std::{fmt, io};

use super::Exit;

type FaultCause = Box<dyn Error + Send + Sync>;

/// What every fallible function returns: it is made where the error happens, and passed on as it is.
#[derive(Debug)]
pub struct Fault(Box<FaultParts>);

#[derive(Debug)]
struct FaultParts {
    exit: Exit,
    kind: FaultKind,
    message: String,
    hint: Option<String>,
    cause: Option<FaultCause>,
    /// The error of a type of its own that it was made of.
    typed: Option<FaultCause>,
    further: Vec<Fault>,
}

/// What code asks of an error that it does not merely pass on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Nobody asks more than what it tells.
    Other,
    OutOfMemory,
    /// Work was given up as it was asked for, here or on another rank.
    Interrupted,
    /// A loss, a gradient or an update is not what a run can go on with.
    NotFinite {
        /// The step, counted from 1.
        step: u64,
    },
    /// An operation of libtorch has failed, and memory is not why.
    Torch,
    /// This libtorch can't capture CUDA graphs.
    NoGraphs,
    /// A file is not as it was written.
    Damaged,
    NoWeights,
    NotRegular,
    /// A link leads out of a model's directory.
    ForeignLink,
    /// Another process works in the directory.
    Locked,
    /// A value that a recipe or an adapter asks for can't be had.
    BadSetting,
    /// A prompt that no model can read.
    BadPrompt,
    /// Prompt and answer are longer than the model's positions.
    ContextLength,
    /// No token can come next.
    NothingLikely,
}

impl Fault {
    /// A message without a hint: lower case, no full stop.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        let parts = FaultParts {
            exit,
            kind: FaultKind::Other,
            message: message.into(),
            hint: None,
            cause: None,
            typed: None,
            further: Vec::new(),
        };
        Self(Box::new(parts))
    }

    /// Something failed that is neither the user's nor the data's fault.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(Exit::Failed, message)
    }

    pub fn defect(message: impl Into<String>) -> Self {
        Self::failed(message).with_hint("this is a defect of kvtune: please report it")
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
        self.0.hint = Some(hint.into());
        self
    }

    #[must_use]
    pub fn of_kind(mut self, kind: FaultKind) -> Self {
        self.0.kind = kind;
        self
    }

    #[must_use]
    pub fn caused_by(mut self, cause: impl Error + Send + Sync + 'static) -> Self {
        self.0.cause = Some(Box::new(cause));
        self
    }

    pub fn kind(&self) -> FaultKind {
        self.0.kind
    }

    pub fn hint(&self) -> Option<String> {
        self.0.hint.clone()
    }

    pub fn exit(&self) -> Exit {
        self.0.exit
    }

    pub fn further(&self) -> &[Fault] {
        &self.0.further
    }

    /// What the operating system said, where that is the cause.
    pub fn io(&self) -> Option<&io::Error> {
        self.source()?.downcast_ref()
    }

    pub fn of_type<E: Error + 'static>(&self) -> Option<&E> {
        self.0.typed.as_ref()?.downcast_ref()
    }
}

/// What an error means for whoever started the process.
pub trait Failure {
    /// What the user can do: one sentence without a full stop, in lower case, or `None` where there is nothing to do. Every error that
    /// a user can cause has a hint.
    fn hint(&self) -> Option<String> {
        self.origin().and_then(Failure::hint)
    }

    fn exit(&self) -> Exit {
        self.origin().map_or(Exit::Failed, Failure::exit)
    }

    fn kind(&self) -> FaultKind {
        self.origin().map_or(FaultKind::Other, Failure::kind)
    }

    /// Errors that were found beside this one, each with its hint.
    fn further(&self) -> Vec<(&dyn Error, Option<String>)> {
        self.origin().map_or_else(Vec::new, Failure::further)
    }

    /// The error of another room that this one passes on.
    fn origin(&self) -> Option<&dyn Failure> {
        None
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

impl<E: Error + Failure + Send + Sync + 'static> From<E> for Fault {
    fn from(error: E) -> Self {
        let mut fault = Self::new(error.exit(), error.to_string());
        fault.0.hint = error.hint();
        fault.0.kind = error.kind();
        let beside = |(error, hint): (&dyn Error, Option<String>)| {
            let mut beside = Self::new(fault.exit(), error.to_string());
            beside.0.hint = hint;
            beside
        };
        fault.0.further = error.further().into_iter().map(beside).collect();
        fault.0.typed = Some(Box::new(error));
        fault
    }
}

/// A fault that an error of another room passes on.
#[derive(Debug)]
pub struct PassedFault(pub Fault);

impl Failure for PassedFault {
    fn hint(&self) -> Option<String> {
        self.0.hint()
    }

    fn exit(&self) -> Exit {
        self.0.exit()
    }

    fn kind(&self) -> FaultKind {
        self.0.kind()
    }
}

impl fmt::Display for PassedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for PassedFault {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl Error for Fault {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match (&self.0.cause, &self.0.typed) {
            (Some(cause), _) => Some(&**cause),
            (None, typed) => typed.as_ref()?.source(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("typed")]
    struct Typed(#[source] io::Error);

    impl Failure for Typed {
        fn exit(&self) -> Exit {
            Exit::Memory
        }
    }

    #[test]
    fn it_tells_what_it_was_made_of() {
        let io = || io::Error::other("the disk");
        let told = Fault::data("a", "b").caused_by(io());
        assert_eq!((told.to_string(), told.hint(), told.exit()), ("a".to_owned(), Some("b".to_owned()), Exit::Data));
        assert_eq!(told.io().unwrap().to_string(), "the disk");
        let typed = Fault::from(Typed(io()));
        assert_eq!((typed.to_string(), typed.hint(), typed.exit()), ("typed".to_owned(), None, Exit::Memory));
        assert_eq!(typed.source().unwrap().to_string(), "the disk");
        assert!(typed.of_type::<Typed>().is_some() && told.of_type::<Typed>().is_none() && told.further().is_empty());
    }
}
