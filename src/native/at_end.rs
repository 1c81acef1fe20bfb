//! What is to be done however a scope ends.

/// Runs a closure when it is dropped, also while a panic is on its way up.
#[must_use = "what is not held acts at once"]
pub(super) struct AtEnd<F: FnMut()>(pub(super) F);

impl<F: FnMut()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
