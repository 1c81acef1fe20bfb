//! Turns a panic inside a parser of foreign files into a message: a crafted file must not end the program.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `work`; an error or a panic in it becomes its message.
pub(super) fn guarded<T, E: std::fmt::Display>(work: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            Err(format!("its reader broke down ({text})"))
        }
    }
}
