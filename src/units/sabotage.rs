//! Faults that tests switch on, to prove that the proof of exactness sees them; absent from every other build.

use std::cell::Cell;

/// One way of getting the method wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sabotage {
    /// Unwinding leaves the evicted entries out.
    UndoDropped,
    /// The gradient of an evicted slot is not reset.
    GradientNotZeroed,
    /// The parts of attention are added without their log-sum-exps.
    MergeMissing,
    /// A layer's operators are not chained.
    ChainRemoved,
    /// A move takes the value along but not the key.
    ValueMovedWithoutKey,
    /// A window shows each query one key more.
    WindowTooWide,
    /// The rolling buffer of a window is a slot short.
    WindowForgets,
    /// Rotations that depend on the length of a sequence take that of its batch.
    LengthOfTheBatch,
    /// The head's parameters keep no gradient.
    HeadGradientDropped,
    /// What has travelled through the lowest band does not reach the embedding.
    EmbeddingGradientDropped,
    /// An attention output that has waited comes back as another.
    KeptOutputChanged,
    /// Memory suffices for cells of two chunks and layers, multiplied.
    MemoryForTwo,
    /// Memory suffices for no cell.
    NoMemory,
}

thread_local! {
    static ACTIVE: Cell<Option<Sabotage>> = const { Cell::new(None) };
}

/// Whether this thread runs under `fault`.
pub(crate) fn is_active(fault: Sabotage) -> bool {
    ACTIVE.get() == Some(fault)
}

/// Runs `body` under `fault`. The CPU's backward runs on the calling thread, so a thread-local flag reaches all of it.
pub(crate) fn under<T>(fault: Sabotage, body: impl FnOnce() -> T) -> T {
    ACTIVE.set(Some(fault));
    let result = body();
    ACTIVE.set(None);
    result
}

/// Fails as libtorch does where memory does not suffice for a cell of so many chunks and layers, multiplied.
pub(crate) fn run_out_of_memory(size: usize) {
    let suffices = !is_active(Sabotage::NoMemory) && (size <= 2 || !is_active(Sabotage::MemoryForTwo));
    assert!(suffices, "CUDA out of memory. Tried to allocate 20.00 GiB");
}
