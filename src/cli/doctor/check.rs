//! One thing that was looked at: how it came out, what was found, and what to do about it.

use serde_json::{Value, json};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Ok,
    /// Not there, and not promised here.
    Missing,
    /// Promised, and it does not work.
    Failed,
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Missing => "missing",
            Self::Failed => "FAILED",
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct DoctorCheck {
    pub(super) name: String,
    pub(super) state: State,
    pub(super) found: String,
    pub(super) hint: Option<&'static str>,
}

impl DoctorCheck {
    pub(super) fn ok(name: &str, found: impl Into<String>) -> Self {
        Self { name: name.to_owned(), state: State::Ok, found: found.into(), hint: None }
    }

    pub(super) fn failed(name: &str, found: impl Into<String>, hint: &'static str) -> Self {
        Self { state: State::Failed, hint: Some(hint), ..Self::ok(name, found) }
    }

    /// What is not there, and not promised.
    pub(super) fn missing(name: &str, found: impl Into<String>) -> Self {
        Self { state: State::Missing, ..Self::ok(name, found) }
    }

    /// What CUDA needs; or why it is not there, which is a failure where CUDA is promised, and what to do.
    pub(super) fn needed(name: &str, found: Result<String, (String, &'static str)>, is_promised: bool) -> Self {
        match found {
            Ok(found) => Self::ok(name, found),
            Err((why, hint)) if is_promised => Self::failed(name, why, hint),
            Err((why, _)) => Self::missing(name, why),
        }
    }

    pub(super) fn judged(name: &str, found: String, is_right: bool, hint: &'static str) -> Self {
        if is_right { Self::ok(name, found) } else { Self::failed(name, found, hint) }
    }

    pub(super) fn to_json(&self) -> Value {
        let state = self.state.name().to_lowercase();
        json!({ "kind": "check", "name": self.name, "state": state, "found": self.found, "hint": self.hint })
    }
}
