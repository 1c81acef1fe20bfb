//! An error as whoever started the process meets it: what is wrong, the way out, the cause and the exit code.

use std::any::Any;
use std::error::Error;
use std::{fmt, io};

use super::Exit;

/// What every fallible function returns: it is made where the error happens, and passed on as it is.
#[derive(Debug)]
pub struct Fault {
    exit: Exit,
    kind: FaultKind,
    message: String,
    hint: Option<String>,
    cause: Option<Box<dyn Error + Send + Sync>>,
    /// What code asks for that catches it, beside the kind.
    payload: Option<Box<dyn Any + Send + Sync>>,
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
    /// A checkpoint of another version.
    OtherVersion,
    /// A run that has saved nothing yet.
    NoCheckpoint,
    NoWeights,
    NotRegular,
    /// Another process works in a directory.
    Locked,
    /// A link leads out of a model's directory.
    ForeignLink,
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
        let (kind, message) = (FaultKind::Other, message.into());
        Self { exit, kind, message, hint: None, cause: None, payload: None, further: Vec::new() }
    }

    /// Something failed that is neither the user's nor the data's fault.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(Exit::Failed, message)
    }

    /// Work was given up as it was asked for.
    pub fn interrupted() -> Self {
        Self::failed("interrupted").with_hint("begin it again").of_kind(FaultKind::Interrupted)
    }

    /// What only an error in kvtune itself can cause.
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
        self.hint = Some(hint.into());
        self
    }

    #[must_use]
    pub fn with_exit(mut self, exit: Exit) -> Self {
        self.exit = exit;
        self
    }

    #[must_use]
    pub fn of_kind(mut self, kind: FaultKind) -> Self {
        self.kind = kind;
        self
    }

    #[must_use]
    pub fn caused_by(mut self, cause: impl Error + Send + Sync + 'static) -> Self {
        self.cause = Some(Box::new(cause));
        self
    }

    /// Gives whoever catches it more than a message.
    #[must_use]
    pub fn carrying(mut self, payload: impl Any + Send + Sync) -> Self {
        self.payload = Some(Box::new(payload));
        self
    }

    /// Adds errors that were found beside this one.
    #[must_use]
    pub fn with_further(mut self, further: Vec<Fault>) -> Self {
        self.further = further;
        self
    }

    /// Changes the message alone, as by the place where it happened.
    #[must_use]
    pub fn map_message(mut self, change: impl FnOnce(&str) -> String) -> Self {
        self.message = change(&self.message);
        self
    }

    pub fn kind(&self) -> FaultKind {
        self.kind
    }

    pub fn hint(&self) -> Option<String> {
        self.hint.clone()
    }

    pub fn exit(&self) -> Exit {
        self.exit
    }

    /// Errors that were found beside this one.
    pub fn further(&self) -> &[Fault] {
        &self.further
    }

    /// What the operating system said, where that is the cause.
    pub fn io(&self) -> Option<&io::Error> {
        self.source()?.downcast_ref()
    }

    /// What it carries, if that is of this type.
    pub fn payload<T: 'static>(&self) -> Option<&T> {
        self.payload.as_ref()?.downcast_ref()
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// For what may only fail as the system does; whoever catches the error asks for the fault by `downcast`.
impl From<Fault> for io::Error {
    fn from(fault: Fault) -> Self {
        Self::other(fault)
    }
}

impl Error for Fault {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.as_ref().map(|cause| &**cause as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_tells_what_it_was_made_of() {
        let told = Fault::data("a", "b").caused_by(io::Error::other("the disk")).carrying(7u8).of_kind(FaultKind::Damaged);
        assert_eq!((told.to_string(), told.hint(), told.exit()), ("a".to_owned(), Some("b".to_owned()), Exit::Data));
        assert_eq!(told.io().unwrap().to_string(), "the disk");
        assert_eq!((told.payload(), told.payload::<u16>(), told.kind()), (Some(&7u8), None, FaultKind::Damaged));
        assert_eq!(told.with_exit(Exit::Failed).map_message(|text| format!("in c: {text}")).to_string(), "in c: a");
    }
}
