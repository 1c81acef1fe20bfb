//! A panic ends as an error: what a guard caught is the guard's to report, any other is a defect, and none is printed raw.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::sync::Mutex;

use crate::engine::error_of_panic;
use crate::native::locked;
use crate::units::{Fault, FaultKind};

/// Where the latest panic of any thread happened; printed only if no guard catches it.
static LATEST: Mutex<Option<String>> = Mutex::new(None);

/// Keeps panics off the terminal. A message is not lost: guards and [`caught`] make errors of it.
pub(super) fn silence() {
    set_hook(Box::new(|info| {
        let mut place = info.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
        let backtrace = Backtrace::capture();
        if backtrace.status() == BacktraceStatus::Captured {
            place = format!("{place}\n{backtrace}");
        }
        *locked(&LATEST) = Some(place);
    }));
}

/// Runs a verb; a panic that no guard caught becomes an error, with its place.
pub(super) fn caught<T>(verb: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    catch_unwind(AssertUnwindSafe(verb)).unwrap_or_else(|panic| {
        let place = locked(&LATEST).take().unwrap_or_default();
        let error = error_of_panic(&*panic);
        Err(if error.kind() == FaultKind::Torch {
            let hint = "please report it with the command and these lines; saved checkpoints are intact";
            error
                .map_message(|said| format!("kvtune has a defect: {}\n  --> {place}", said.trim_start_matches("libtorch: ")))
                .with_hint(hint)
        } else {
            error
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Exit;

    #[test]
    fn a_panic_is_an_error_that_says_what_it_is() {
        let defect = caught::<()>(|| panic!("index 3 of 2")).unwrap_err();
        assert!(defect.to_string().starts_with("kvtune has a defect: index 3 of 2\n  --> "), "{defect}");
        assert_eq!(defect.exit(), Exit::Failed);
        let memory = caught::<()>(|| panic!("CUDA out of memory. Tried to allocate 2 GiB")).unwrap_err();
        assert_eq!(memory.exit(), Exit::Memory, "{memory}");
        assert!(matches!(caught(|| Ok(5)), Ok(5)));
    }
}
